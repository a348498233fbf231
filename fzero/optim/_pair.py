"""Optimizers from elsewhere: an (init, update) pair shaped as optax's and TorchOpt's are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fzero.errors import LayoutError, explain
from fzero.optim._optimizer import Optimizer, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A foreign pair, called on the list of this rank's flat shards.

    Right for elementwise rules. One that looks at whole matrices or at global norms sees only
    this rank's flat slices; clip with `fzero.clip` instead.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]
    keywords: tuple[tuple[str, Any], ...]

    def __repr__(self) -> str:
        return f"pair({getattr(self.update, '__qualname__', type(self.update).__name__)})"

    def advance(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: Any,
        pieces: Sequence[Piece],
        *,
        differentiable: bool = False,
        owned: bool = False,
    ) -> tuple[list[Tensor], Any]:
        """Return (params + updates, state'); with `owned`, the parameters are overwritten."""
        keywords = dict(self.keywords)
        if "params" in keywords:
            keywords["params"] = list(params)
            updates, state = self.update(list(grads), state, **keywords)
        else:
            updates, state = self.update(list(grads), state, list(params), **keywords)
        if owned:
            for p, u in zip(params, updates, strict=True):
                p.add_(u)
            return list(params), state
        return [p + u for p, u in zip(params, updates, strict=True)], state


def as_optimizer(optimizer: Any) -> Optimizer | Pair:
    """Return `optimizer` if it is fzero's, or wrap an (init, update) pair.

    Raises `LayoutError` for anything else, a `torch.optim.Optimizer` among it.
    """
    if isinstance(optimizer, Optimizer | Pair):
        return optimizer
    init, update = _pair_of(optimizer)
    if not (callable(init) and callable(update)):
        raise LayoutError(
            explain(
                f"the optimizer is a {type(optimizer).__name__}.",
                cause="a torch.optim class or instance was passed.",
                fix="use fzero.optim.adamw(lr) and its like, or any (init, update) pair.",
            )
        )
    names = inspect.signature(update).parameters
    keywords: dict[str, Any] = {}
    if "params" in names and names["params"].kind is inspect.Parameter.KEYWORD_ONLY:
        keywords["params"] = None
    if "inplace" in names:  # TorchOpt updates gradients in place unless told otherwise
        keywords["inplace"] = False
    return Pair(init=init, update=update, keywords=tuple(keywords.items()))


def _pair_of(optimizer: Any) -> tuple[Any, Any]:
    if isinstance(optimizer, tuple) and len(optimizer) == 2:
        return optimizer[0], optimizer[1]
    return getattr(optimizer, "init", None), getattr(optimizer, "update", None)
