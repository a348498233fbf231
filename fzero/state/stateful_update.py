"""The protocol of optimizers: what a training state calls on the optimizer that steps it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

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


class StatefulUpdate(Protocol):
    """An optimizer on the list of this rank's flat shards `[l]`. Every method is pure.

    `pieces` says which elements of which shard belong to which leaf.
    """

    def init(
        self, params: Sequence[Tensor], pieces: Sequence[Piece] = ..., /, *, place: Place = ...
    ) -> OptimizerTree:
        """Return the state before the first update; `place` moves each tensor where it is stored.

        Without `place`, the state stays on the device of the parameters.
        """
        ...

    def advance(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: OptimizerTree,
        pieces: Sequence[Piece],
        /,
        *,
        differentiable: bool = ...,
        owned: bool = ...,
        device: torch.device | None = ...,
        unused: frozenset[str] = ...,
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
        ...

    def describe(self, leaves: Sequence[Leaf], step: Any = ...) -> list[str]:
        """Return the options as lines of text that must be equal on every rank."""
        ...

    def skips(self, params: Sequence[Tensor], state: OptimizerTree) -> bool:
        """Whether `advance` takes `found_inf=` and `grad_scale=`."""
        ...

    def slots(self, state: OptimizerTree) -> Mapping[str, Sequence[Tensor]]:
        """Return {name: flats} of what the state has for each element, masters too."""
        ...

    @property
    def odd_slots(self) -> frozenset[str]:
        """The slots whose shape is not that of their parameters."""
        ...

    def codec_of(self, leaf: Leaf, slot: str) -> Any:
        """Return the `Blocks` that encode a slot of a leaf; None where it is kept in numbers."""
        ...

    def owned(self, state: OptimizerTree) -> Mapping[str, Sequence[Tensor]]:
        """Return {name: [of each parameter with an owner]}, empty but on its owner."""
        ...

    def with_owned(
        self, state: OptimizerTree, owned: Mapping[str, Sequence[Tensor]]
    ) -> OptimizerTree:
        """Return the state with other tensors in the place of those that `owned` returns."""
        ...

    def kept_of(self, leaf: Leaf) -> Collection[str]:
        """Return the names in `owned` that have an element for each of a leaf with an owner."""
        ...

    def made_by_steps(self, leaf: Leaf) -> Collection[str]:
        """Return the names in `owned` that the first step of a leaf makes, in any shape."""
        ...

    @property
    def of_torch(self) -> Sequence[Any]:
        """The optimizers of torch.optim that an update steps, whose hooks run around it."""
        ...

    @property
    def by_owners(self) -> bool:
        """Whether parameters that may not be cut are updated by the ranks that own them."""
        ...

    def batch_dims_of(self, path: str) -> tuple[str, int | None] | None:
        """Return (the rule of the leaf, its `batch_dims`); None if it has no matrices."""
        ...

    def needs_whole(self, path: str) -> bool:
        """Whether the update of an element looks at the whole parameter at `path`."""
        ...

    @property
    def counts_by_leaf(self) -> bool:
        """Whether each leaf has counters of its own, which `counted` and `recounted` know."""
        ...

    def counted(self, state: OptimizerTree, paths: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return the counters of the leaves at `paths`: {name: {path: value}}."""
        ...

    def shares(self, path: str, name: str) -> bool:
        """Whether counter `name` of the leaf at `path` is one of its whole param group."""
        ...

    def recounted(
        self,
        state: OptimizerTree,
        paths: Sequence[str],
        counters: Counters,
        *,
        count: int | None = ...,
        unstepped: Collection[str] = ...,
    ) -> OptimizerTree:
        """Return the state with other counters.

        count: the number of updates; None: unchanged. unstepped: leaves without a step so far.
        """
        ...

    def anew(self, state: OptimizerTree, fresh: OptimizerTree) -> OptimizerTree:
        """Return `fresh`, a new state, with the parts of `state` that a reset keeps."""
        ...

    def unstepped(self, state: OptimizerTree) -> Sequence[str]:
        """Return the paths of the leaves that took no step yet."""
        ...

    def saved_names(self, state: OptimizerTree, leaves: Sequence[Leaf]) -> SavedNames:
        """Return the names of the rule and of the parts of its state in a checkpoint."""
        ...

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return the param groups, with their options after `step` updates."""
        ...
