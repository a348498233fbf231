"""`StatefulUpdate`: what a training state calls on the optimizer that steps it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fzero.state.layout import Leaf

Place = Callable[[Tensor], Tensor]
"""Moves a new tensor of an optimizer to the device on which it is stored between updates."""

OptimizerTree = Any
"""The optimizer's own state, a pytree with tensors as leaves: only the optimizer knows its type."""

Counters = Mapping[str, Mapping[str, Tensor]]
"""{name of a counter: {path of a leaf: its value}}, by torch.optim's names."""


class Piece(NamedTuple):
    """Elements `start` to `stop` of flat `index` belong to `leaf`, beginning at its `first`."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    leaf: Leaf
    start: int
    stop: int
    first: int = 0  # the element of the leaf that is at `start`


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedNames:
    """The names of an update rule and of the parts of its state in a checkpoint.

    Rules that keep the same numbers share torch.optim's names, whatever their records are, so
    training can go on with another of them.
    """

    rule: str  # without options, which may change from run to run
    # {"moments[0]": "exp_avg"}; a part that is not in it has its own name.
    parts: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroups:
    """The param group of each leaf, and the options of each group under torch.optim's names."""

    of_leaf: tuple[int, ...]  # the param group of each leaf; -1: the leaf is not stepped
    options: tuple[Mapping[str, Any], ...]  # of each group, as they are now
    instance: Any = None  # the torch.optim optimizer that has them; None: they are fixed by code


class StatefulUpdate:
    """An optimizer on the list of this rank's flat shards `[l]`. Every method is pure.

    `pieces` says which elements of which shard belong to which leaf. Where a method is not
    overridden, it is that of one elementwise rule for all parameters, which counts nothing.
    """

    __slots__ = ()

    counts_by_leaf: bool = False
    """Whether each leaf has counters of its own, which `counted` and `recounted` know."""

    # To parameters

    def bind(self, params: Any) -> Self:
        """Return the optimizer of these parameters, {path: tensor}."""
        return self

    @property
    def elementwise(self) -> bool:
        """Whether a part of a leaf may be updated alone."""
        return True

    @property
    def leafwise(self) -> bool:
        """Whether a leaf may be updated without the others."""
        return self.elementwise

    @property
    def by_owners(self) -> bool:
        """Whether leaves that may not be cut are updated whole, each by the rank that owns it."""
        return not self.elementwise and self.leafwise

    def needs_whole(self, path: str) -> bool:
        """Whether a part of the leaf at `path` may not be updated alone."""
        return not self.elementwise

    def batch_dims_of(self, path: str) -> tuple[str, int | None] | None:
        """Return (the rule of the leaf at `path`, its `batch_dims`); None if it has no matrices."""
        return None

    @property
    def of_torch(self) -> Sequence[Any]:
        """The optimizers of torch.optim that an update steps, whose hooks run around it."""
        return ()

    def group_of(self, path: str) -> int:
        """Return the leaf's param group; -1: not stepped. A flat has leaves of one group only."""
        return 0

    @property
    def block(self) -> int:
        """Of how many elements leaves and shards consist, for what it keeps."""
        return 1

    def kind_of(self, path: str, numel: int) -> Hashable:
        """Return what leaves of one flat have in common: of a leaf of so many elements."""
        return self.group_of(path)

    # Its update

    def init(
        self, params: Sequence[Tensor], pieces: Sequence[Piece] = (), /, *, place: Place
    ) -> OptimizerTree:
        """Return the state before the first update; `place` moves each tensor where it is stored.

        Without `place`, the state stays on the device of the parameters.
        """
        raise NotImplementedError

    def advance(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: OptimizerTree,
        pieces: Sequence[Piece],
        /,
        *,
        differentiable: bool = False,
        owned: bool = False,
        device: torch.device | None = None,
        unused: frozenset[str] = frozenset(),
    ) -> tuple[list[Tensor], OptimizerTree]:
        """Return the parameters and the state after one update.

        Args:
            params: this rank's shards.
            grads: their gradients, parallel to `params`.
            state: what `init` or the last `advance` returned.
            pieces: which elements belong to which leaf.
            differentiable: whether autograd or torch.func differentiates the update.
            owned: whether params and state may be overwritten; else they stay as they are.
            device: where to compute if anything is stored elsewhere.
            unused: paths of leaves that stay as they are, and their slots with them.

        Where `skips` is true it also takes `found_inf=` and `grad_scale=`, tensors: it divides
        the gradients by `grad_scale`, and changes nothing if `found_inf` is 1, without a host
        read. In a layout of blocks it takes `apart=True`: the new elements of a block, or of a
        whole leaf, are then a function of the old ones alone, and not of what else a rank has.
        """
        raise NotImplementedError

    def skips(self, params: Sequence[Tensor], state: OptimizerTree) -> bool:
        """Whether `advance` takes `found_inf` and `grad_scale`, so that it can skip an update."""
        return False

    # What it keeps

    def slots(self, state: OptimizerTree) -> Mapping[str, Sequence[Tensor]]:
        """Return {name: flats} of what the state has for each element, masters too.

        {} for a foreign (init, update) pair. Names are torch.optim's. A flat without this slot has
        an empty tensor in its place.
        """
        return {}

    @property
    def odd_slots(self) -> frozenset[str]:
        """The slots that have another shape than their parameters: the row means of Adafactor."""
        return frozenset()

    def codec_of(self, leaf: Leaf, slot: str) -> Any:
        """Return the `Blocks` that encode a slot of a leaf; None where it is kept in numbers."""
        return None

    def owned(self, state: OptimizerTree) -> Mapping[str, Sequence[Tensor]]:
        """Return {name: [of each parameter with an owner]}: empty where this rank is not its owner.

        Of its elements, or in any shape.
        """
        return {}

    def with_owned(
        self, state: OptimizerTree, owned: Mapping[str, Sequence[Tensor]]
    ) -> OptimizerTree:
        """Return the state with other tensors in the place of those that `owned` returns."""
        return state

    def kept_of(self, leaf: Leaf) -> Collection[str]:
        """Return the names in `owned` that have an element for each of a leaf with an owner."""
        return ()

    def made_by_steps(self, leaf: Leaf) -> Collection[str]:
        """Return the names in `owned` that the first step of a leaf makes, in any shape."""
        return ()

    def kept_numel(self, leaf: Leaf) -> int:
        """Return about how many elements the owner of a leaf keeps of it: owners share them."""
        return 0

    # What it counts

    def counted(self, state: OptimizerTree, paths: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return the counters {name: {path: value}} of a state, by torch.optim's names.

        Only leaves at `paths` that this optimizer steps. The tensors are the state's own.
        """
        return {}

    def counters(self, state: OptimizerTree, path: str) -> dict[str, Tensor]:
        """Return the counters {name: value} of the leaf at `path`."""
        return {name: some[path] for name, some in self.counted(state, [path]).items()}

    def shares(self, path: str, name: str) -> bool:
        """Whether counter `name` of the leaf at `path` is shared by its whole param group."""
        return False

    def recounted(
        self,
        state: OptimizerTree,
        paths: Sequence[str],
        counters: Counters,
        *,
        count: int | None = None,
        unstepped: Collection[str] = (),
    ) -> OptimizerTree:
        """Return the state with `counters`, in the form in which `counted` returns them.

        count: the number of updates; None: unchanged. unstepped: leaves that took no step yet.
        """
        return state

    def unstepped(self, state: OptimizerTree) -> Sequence[str]:
        """Return the paths of the leaves that took no step yet, where that makes a difference."""
        return ()

    def anew(self, state: OptimizerTree, fresh: OptimizerTree) -> OptimizerTree:
        """Return `fresh`, a new state, with the parts of `state` that a reset keeps: here none."""
        return fresh

    def restarted(self, state: OptimizerTree, fresh: OptimizerTree) -> OptimizerTree:
        """Return the state with what owners keep, and all that goes with it, as in a new state."""
        return state

    def begun(self, state: OptimizerTree, paths: Sequence[str], path: str) -> OptimizerTree:
        """Return the state in which the leaf at `path` counts as stepped."""
        return state

    # What is said of it

    def describe(self, leaves: Sequence[Leaf], step: Any = None) -> list[str]:
        """Return the options as lines of text that must be equal on every rank."""
        raise NotImplementedError

    def saved_names(self, state: OptimizerTree, leaves: Sequence[Leaf]) -> SavedNames:
        """Return the names of the rule and of the parts of its state in a checkpoint."""
        raise NotImplementedError

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return the param groups, with their options after `step` updates."""
        raise NotImplementedError
