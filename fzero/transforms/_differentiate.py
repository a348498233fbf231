"""The gradient of a pure loss by flat buffers, on the fast path and on the general one.

A `Source` is what one state contributes: `seats`, the tensors to differentiate by, and `build`,
which turns seats into the pytree that the loss is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.errors import LayoutError, explain
from fzero.placeholder import LazyParam
from fzero.state import NAMESPACE
from fzero.transforms._graph import foreign_functions, gradients_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One state's part in a gradient call."""

    seats: tuple[Tensor, ...]
    build: Callable[[Sequence[Tensor]], Any]  # seats -> params


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """grads[i][j] is the gradient by seat j of source i; value and aux are detached."""

    grads: tuple[tuple[Tensor, ...], ...]
    value: Tensor
    aux: Any


_BY_NOTHING = explain(
    "the loss requires grad, and by no parameter of the state: its gradient is zero.",
    cause="a loss that calls the module itself, model(x), in the place of apply(params, x).",
    fix="use the `params` that the loss is given.",
)

LossOf = Callable[[list[Any]], Any]  # [params of each source] -> what the user's fn returned


def by_autograd(
    loss_of: LossOf,
    sources: Sequence[Source],
    *,
    has_aux: bool,
    into: Callable[[], Sequence[Tensor | None]],
) -> Result:
    """Differentiate with torch.autograd on detached seats: no transform is around this call.

    `into` is asked between forward and backward for a buffer for each seat: backward then adds
    to it while the new gradient is still in the cache, and the sum is the result. None: the
    gradient alone.
    """
    counts = [len(source.seats) for source in sources]
    with torch.enable_grad():
        seats = [s.detach().requires_grad_() for source in sources for s in source.seats]
        params = [
            source.build(part) for source, part in zip(sources, _cut(seats, counts), strict=True)
        ]
        loss, aux = _loss_and_aux(loss_of(params), has_aux=has_aux)
    for seat, buffer in zip(seats, into(), strict=True):
        seat.grad = buffer
    if loss.requires_grad and seats:
        _backward(loss, seats)
        if all(seat.grad is None for seat in seats):
            warnings.warn(_BY_NOTHING, UserWarning, stacklevel=6)
    grads = [torch.zeros_like(seat) if seat.grad is None else seat.grad for seat in seats]
    aux = optree.tree_map(_detached, aux, namespace=NAMESPACE)
    parts = tuple(tuple(part) for part in _cut(grads, counts))
    return Result(grads=parts, value=_detached(loss), aux=aux)


def _backward(loss: Tensor, seats: Sequence[Tensor]) -> None:
    if not foreign_functions(loss):
        torch.autograd.backward(loss, inputs=seats)
        return
    # With `inputs`, a function that no edge leads from to a seat would not be run.
    with gradients_kept(loss, seats):
        torch.autograd.backward(loss)


def by_func(loss_of: LossOf, sources: Sequence[Source], *, has_aux: bool) -> Result:
    """Differentiate with torch.func: the result can be differentiated, mapped, traced again."""
    counts = [len(source.seats) for source in sources]
    seats = tuple(s for source in sources for s in source.seats)
    kept: dict[str, Any] = {}  # the parts of aux that are no tensors: torch.func refuses them

    def scalar(seats: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        parts = _cut(seats, counts)
        params = [source.build(part) for source, part in zip(sources, parts, strict=True)]
        loss, aux = _loss_and_aux(loss_of(params), has_aux=has_aux)
        leaves, kept["treespec"] = optree.tree_flatten(aux, namespace=NAMESPACE)
        kept["others"] = [None if isinstance(x, Tensor) else x for x in leaves]
        return loss, tuple(x for x in leaves if isinstance(x, Tensor))

    if seats:
        grads, (value, tensors) = torch.func.grad_and_value(scalar, has_aux=True)(seats)
    else:
        (value, tensors), grads = scalar(()), ()
    rest = iter(tensors)
    leaves = [next(rest) if x is None else x for x in kept["others"]]
    aux = optree.tree_unflatten(kept["treespec"], leaves)
    return Result(grads=tuple(tuple(p) for p in _cut(grads, counts)), value=value, aux=aux)


def _loss_and_aux(returned: Any, *, has_aux: bool) -> tuple[Tensor, Any]:
    if has_aux:
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise _bad_loss(
                f"has_aux=True, and the loss returned a {type(returned).__name__}",
                "return (loss, aux)",
            )
        loss, aux = returned
    else:
        loss, aux = returned, None
    if isinstance(loss, tuple) and not has_aux:
        raise _bad_loss(f"the loss is a tuple of {len(loss)}", "pass has_aux=True for (loss, aux)")
    if not isinstance(loss, Tensor):
        raise _bad_loss(f"the loss is a {type(loss).__name__}", "return a scalar tensor")
    if loss.ndim:
        raise _bad_loss(f"the loss has shape {tuple(loss.shape)}", "return loss.mean() or .sum()")
    if not loss.is_floating_point():
        raise _bad_loss(f"the loss has dtype {loss.dtype}", "return a floating tensor")
    return loss, aux


def _bad_loss(seen: str, fix: str) -> LayoutError:
    return LayoutError(
        explain(
            f"grad_and_reduce: {seen}; it must be one number.",
            cause="per-sample losses, or outputs returned beside the loss.",
            fix=f"{fix}.",
        )
    )


def _cut(flat: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    parts, start = [], 0
    for count in counts:
        parts.append(flat[start : start + count])
        start += count
    return parts


def _detached(x: Any) -> Any:
    if isinstance(x, LazyParam):  # outside of this call nobody could gather it any more
        return x.full().detach().clone()
    return x.detach() if isinstance(x, Tensor) else x
