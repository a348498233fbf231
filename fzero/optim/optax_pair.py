"""Optimizers from elsewhere: an (init, update) pair shaped as optax's and TorchOpt's are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn.functional import pad

from fzero.errors import FzeroError, LayoutError
from fzero.machine.offload import to_device, write_back
from fzero.machine.tree_sum import one_thread
from fzero.optim._partition import Partition
from fzero.optim.optimizer import NoOptimizer, Optimizer
from fzero.optim.precision import Place, stay
from fzero.optim.torch_optim import TorchOptimizer
from fzero.optim.torch_probe import beyond_elements, small_shape
from fzero.state import NAMESPACE
from fzero.state.layout import Leaf
from fzero.state.setup import ParamGroups, SavedNames
from fzero.state.stateful_update import Piece, StatefulUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(StatefulUpdate):
    """A foreign pair, called on a list of tensors: flat shards, or whole leaves.

    An elementwise rule has this rank's flats. Any other, which may look at matrices or at norms,
    has all leaves in their own shapes, and is refused where a rank has parts of them. What it
    keeps is stored as flats all the same.
    """

    first: Callable[..., Any]
    update: Callable[..., Any]
    keywords: tuple[tuple[str, Any], ...]
    takes_params: bool = True
    elementwise: bool = False  # whether it may update a part of a leaf

    def init(
        self, params: Sequence[Tensor], pieces: Sequence[Piece] = (), *, place: Place = stay
    ) -> Any:
        """Return the state that the foreign `init` returns for the list of flats.

        Raises `LayoutError` for another `place` than the device: a pair cannot be streamed.
        """
        if place is not stay:
            raise LayoutError(
                f"offload of the states of {self!r}.",
                cause="a foreign optimizer steps everything at once, on the device.",
                fix="use a rule of fzero.optim, or fzero.optim.from_torch(...) of one of "
                "torch.optim; or leave Offload(optimizer=...) out.",
            )
        if self.elementwise:
            return self.first(list(params))
        return as_flats(self.first(leaves_in(params, pieces)), params, pieces)

    def bind(self, params: Mapping[str, Tensor]) -> Pair:
        """Return the pair that knows whether it is elementwise for {path: tensor}."""
        return self.tried({small_shape(p.shape) for p in params.values()})

    def tried(self, shapes: Collection[tuple[int, ...]]) -> Pair:
        """Return the pair that knows whether it is elementwise; one that fails the trial is not."""
        here = torch.device("cpu")
        try:
            beyond = any(beyond_elements(self._changes, here, x) for x in shapes)
            return replace(self, elementwise=not beyond)
        except FzeroError:
            raise
        except Exception:  # made for the shapes of one model
            return replace(self, elementwise=False)

    def _changes(
        self, params: list[Tensor], grads: list[list[Tensor]]
    ) -> tuple[list[Tensor], list[float]]:
        state, sums = self.first(params), [torch.zeros_like(p) for p in params]
        for gs in grads:
            given, state = self._call(gs, state, params)
            updates = self._fitting(given, params)
            sums = [s + u for s, u in zip(sums, updates, strict=True)]
            params = [p + u for p, u in zip(params, updates, strict=True)]
        return [s.detach() for s in sums], []

    def __repr__(self) -> str:
        return f"pair({getattr(self.update, '__qualname__', type(self.update).__name__)})"

    def describe(self, leaves: Sequence[Leaf], step: Any = None) -> list[str]:
        """Return the line that ranks compare: the name, for a pair does not show its options."""
        return [f"optimizer {self!r}"]

    def saved_names(self, state: Any, leaves: Sequence[Leaf]) -> SavedNames:
        """Return the name "pair"; the parts of its state are named by their places in its tree."""
        return SavedNames(rule="pair")

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return one group of all that learns: a foreign pair shows no options."""
        return ParamGroups(of_leaf=tuple(leaf.trainable - 1 for leaf in leaves), options=({},))

    def advance(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: Any,
        pieces: Sequence[Piece],
        *,
        differentiable: bool = False,
        owned: bool = False,
        device: torch.device | None = None,
        unused: frozenset[str] = frozenset(),
        apart: bool = False,
    ) -> tuple[list[Tensor], Any]:
        """Return (params + updates, state'); with `owned`, the parameters are overwritten.

        It is computed on `device`, by default where the parameters are. `unused`: paths of leaves
        that stay as they are, with what the state has for their elements; what it counts for all
        leaves together goes on. `apart`: an elementwise rule runs on one thread.
        """
        if device is not None:
            homes, params = params, [to_device(p, device) for p in params]
            grads = [to_device(g, device) for g in grads]
            given: Any = {"owned": owned, "unused": unused, "apart": apart}
            new, state = self.advance(params, grads, state, pieces, **given)
            for home, p in zip(homes, new, strict=True):
                if owned:
                    write_back(home, p)
            return (list(homes) if owned else new), state
        arguments: Any = (list(params), state)
        leaves = optree.tree_leaves(arguments, namespace=NAMESPACE)
        held = [x for x in leaves if isinstance(x, Tensor) and not x.is_inference()]
        before = [x._version for x in held]
        left, shapes = [p for p in pieces if p.leaf.path in unused], [(p.numel(),) for p in params]
        old = mapped(lambda node: [x.clone() for x in node], shapes, state) if left else state
        with one_thread(apart and self.elementwise):
            if self.elementwise:
                given, state = self._call(list(grads), state, list(params))
                updates = self._fitting(given, params)
            else:
                leaves = leaves_in(params, pieces)
                shaped = as_leaves(state, params, pieces)
                given, shaped = self._call(leaves_in(grads, pieces), shaped, leaves)
                updates = as_flats(self._fitting(given, leaves), params, pieces)
                state = as_flats(shaped, params, pieces)
        if not owned and before != [x._version for x in held]:
            raise self._wrong("it wrote to the parameters or the state that it was given", "pure")
        if left:  # p + -0.0 is p, also where p is -0.0
            updates = with_values(updates, left, [torch.tensor(-0.0)] * len(left))

            def kept(now: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
                values = [before[index].view(-1)[start:stop] for index, _, start, stop, _ in left]
                return with_values(now, left, values)

            try:
                state = mapped(kept, shapes, state, old)
            except (ValueError, TypeError, IndexError) as error:
                raise LayoutError(
                    f"the foreign optimizer {self!r} keeps another structure after an update, "
                    "which leaves parameters out that no rank used, than before it.",
                    cause="a rule that makes its state in its first update.",
                    fix="let it make its state in init; or use every parameter in the first step.",
                ) from error
        if owned:
            for p, u in zip(params, updates, strict=True):
                p.add_(u)
            return list(params), state
        return [p + u for p, u in zip(params, updates, strict=True)], state

    def _call(self, grads: list[Tensor], state: Any, params: list[Tensor]) -> tuple[Any, Any]:
        keywords = dict(self.keywords)
        if not self.takes_params:
            return self.update(grads, state, **keywords)
        if "params" in keywords:
            return self.update(grads, state, **keywords | {"params": params})
        return self.update(grads, state, params, **keywords)

    def _fitting(self, updates: Any, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the updates in the dtypes of `params`, as optax does, checked to fit them."""
        if not isinstance(updates, list | tuple) or len(updates) != len(params):
            raise self._wrong(f"it gave a {type(updates).__name__}", "a list of updates")
        for u, p in zip(updates, params, strict=True):
            if not isinstance(u, Tensor) or u.shape != p.shape:
                seen = tuple(u.shape) if isinstance(u, Tensor) else type(u).__name__
                raise self._wrong(f"an update is {seen}", f"a tensor of shape {tuple(p.shape)}")
        return [u.to(p.dtype) for u, p in zip(updates, params, strict=True)]

    def _wrong(self, seen: str, wanted: str) -> LayoutError:
        return LayoutError(
            f"the foreign optimizer {self!r}: {seen}; it must be {wanted}.",
            cause="an update that expects another structure than a list of tensors.",
            fix="give a pure (init, update) pair, shaped as optax's.",
        )


ShardOptimizer = Optimizer | Pair | TorchOptimizer | NoOptimizer | Partition
"""What `as_optimizer` returns: each is a `StatefulUpdate` that can be bound to parameters."""


def as_optimizer(optimizer: Any) -> ShardOptimizer:
    """Return `optimizer` if it is fzero's, or wrap an (init, update) pair.

    Raises `LayoutError` for anything else, a `torch.optim.Optimizer` among it.
    """
    if isinstance(optimizer, ShardOptimizer):
        return optimizer
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(kind, torch.optim.Optimizer):
        raise LayoutError(
            f"the optimizer is torch.optim's {kind.__name__}.",
            cause="torch.optim steps parameters of a module; a state has shards.",
            fix="use fzero.optim.from_torch(...) of it, or fzero.optim.adamw(lr) and its like.",
        )
    init, update = getattr(optimizer, "init", None), getattr(optimizer, "update", None)
    if isinstance(optimizer, tuple) and len(optimizer) == 2:
        init, update = optimizer
    if not (callable(init) and callable(update)):
        raise LayoutError(
            f"the optimizer is a {type(optimizer).__name__}.",
            cause="the name of an optimizer, or a function that makes one.",
            fix="use fzero.optim.adamw(lr) and its like, fzero.optim.from_torch(...) of a "
            "class, factory or instance of torch.optim, or any (init, update) pair.",
        )
    names = inspect.signature(update).parameters
    keywords: dict[str, Any] = {}
    if "params" in names and names["params"].kind is inspect.Parameter.KEYWORD_ONLY:
        keywords["params"] = None
    if "inplace" in names:  # TorchOpt updates gradients in place unless told otherwise
        keywords["inplace"] = False
    kinds = [one.kind for one in names.values()]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes = "params" in keywords or inspect.Parameter.VAR_POSITIONAL in kinds
    takes = takes or sum(kind in by_position for kind in kinds) > 2
    kept = tuple(keywords.items())
    return Pair(first=init, update=update, keywords=kept, takes_params=takes).tried({(4, 6)})


def leaves_in(flats: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """Return each leaf as a view of its flat, in its own shape.

    Example:
        >>> import torch
        >>> from fzero.state.layout import Leaf
        >>> leaf = Leaf(path="w", shape=(2, 2), dtype=torch.float32, trainable=True)
        >>> leaves_in([torch.arange(8)], [Piece(0, leaf, 0, 8)])  # with padding behind it
        [tensor([[0, 1],
                [2, 3]])]
    """
    own = ((flats[index].view(-1)[start:], leaf) for index, leaf, start, *_ in pieces)
    return [flat[: leaf.numel].view(leaf.shape) for flat, leaf in own]


def as_flats(tree: Any, flats: Sequence[Tensor], pieces: Sequence[Piece]) -> Any:
    """Return the tree with each list of tensors shaped as the leaves flattened, padded by zeros.

    Every flat has one leaf. flats: those of the parameters, of which only the sizes are read.
    """

    def padded(node: Any) -> list[Tensor]:
        pairs = zip(node, flats, strict=True)
        return [pad(x.reshape(-1), (0, flat.numel() - x.numel())) for x, flat in pairs]

    return mapped(padded, [piece.leaf.shape for piece in pieces], tree)


def as_leaves(tree: Any, flats: Sequence[Tensor], pieces: Sequence[Piece]) -> Any:
    """Return the tree with each list of flats as leaves in their own shapes: undo `as_flats`."""
    return mapped(lambda node: leaves_in(node, pieces), [(x.numel(),) for x in flats], tree)


def mapped(
    change: Callable[..., list[Tensor]], shapes: Sequence[Sequence[int]], tree: Any, *others: Any
) -> Any:
    """Return the tree with each list, or plain tuple, of tensors of these shapes changed.

    others: trees of the same structure; `change` gets what they have in the place of the list.

    Example:
        >>> import torch
        >>> tree = {"mu": [torch.ones(2)], "count": torch.tensor(3)}
        >>> mapped(lambda node: [2 * node[0]], [(2,)], tree)
        {'mu': [tensor([2., 2.])], 'count': tensor(3)}
    """

    def fits(node: Any) -> bool:
        if type(node) not in (list, tuple) or len(node) != len(shapes):
            return False
        pairs = zip(node, shapes, strict=True)
        return all(isinstance(x, Tensor) and x.shape == tuple(shape) for x, shape in pairs)

    def of(node: Any, *same: Any) -> Any:
        return type(node)(change(node, *same)) if fits(node) else node

    return optree.tree_map(of, tree, *others, is_leaf=fits, namespace=NAMESPACE)


def with_values(
    flats: Sequence[Tensor], pieces: Sequence[Piece], values: Sequence[Tensor]
) -> list[Tensor]:
    """Return the flats with the elements of each piece from `values`; others are the same."""
    touched = {piece.index for piece in pieces}
    made = [x.clone() if i in touched else x for i, x in enumerate(flats)]
    for (index, _, start, stop, _), x in zip(pieces, values, strict=True):
        made[index].view(-1)[start:stop].copy_(x)
    return made
