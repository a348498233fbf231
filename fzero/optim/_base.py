"""`Base`: the defaults of every optimizer of a train state."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from fzero.machine.rows import Blocks
from fzero.optim._precision import Precision
from fzero.state.layout import Leaf


class Base:
    """An optimizer with one elementwise rule for all parameters, unless it says otherwise."""

    __slots__ = ()

    counts_by_leaf: bool = False
    """Whether each leaf has counters of its own, which `counted` and `recounted` know."""

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
        """The optimizers of torch.optim that it steps, as they are bound."""
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

    def codec_of(self, leaf: Leaf, slot: str) -> Blocks | None:
        """Return what a slot of a leaf is encoded by; None where it is kept in numbers."""
        return None

    def bind(self, params: Any) -> Self:
        """Return the optimizer of these parameters, {path: tensor}."""
        return self

    def slots(self, state: Any) -> Mapping[str, Sequence[Tensor]]:
        """Return {name: flats} of the slots, masters too; {} for a foreign (init, update) pair.

        Names are torch.optim's. A flat without this slot has an empty tensor in its place.
        """
        return {}

    @property
    def odd_slots(self) -> frozenset[str]:
        """The slots that have another shape than their parameters: the row means of Adafactor."""
        return frozenset()

    def owned(self, state: Any) -> Mapping[str, Sequence[Tensor]]:
        """Return {name: [of each parameter with an owner]}: empty where this rank is not its owner.

        Of its elements, or in any shape.
        """
        return {}

    def with_owned(self, state: Any, owned: Mapping[str, Sequence[Tensor]]) -> Any:
        """Return the state with other tensors in the form in which `owned` returns them."""
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

    def counted(self, state: Any, paths: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return the counters {name: {path: value}} of a state, by torch.optim's names.

        Only leaves at `paths` that this optimizer steps. The tensors are the state's own.
        """
        return {}

    def counters(self, state: Any, path: str) -> dict[str, Tensor]:
        """Return the counters {name: value} of the leaf at `path`."""
        return {name: some[path] for name, some in self.counted(state, [path]).items()}

    def shares(self, path: str, name: str) -> bool:
        """Whether counter `name` of the leaf at `path` is shared by its whole param group."""
        return False

    def recounted(
        self,
        state: Any,
        paths: Sequence[str],
        counters: Mapping[str, Mapping[str, Tensor]],
        *,
        count: int | None = None,
        unstepped: Collection[str] = (),
    ) -> Any:
        """Return the state with `counters`, in the form in which `counted` returns them.

        count: the number of updates; None: unchanged. unstepped: leaves that took no step yet.
        """
        return state

    def unstepped(self, state: Any) -> Sequence[str]:
        """Return the paths of the leaves that took no step yet, where that makes a difference."""
        return ()

    def anew(self, state: Any, fresh: Any) -> Any:
        """Return `fresh`, a new state, with the parts of `state` that a reset keeps: here none."""
        return fresh

    def restarted(self, state: Any, fresh: Any) -> Any:
        """Return the state with what owners keep, and all that goes with it, as in a new state."""
        return state

    def begun(self, state: Any, paths: Sequence[str], path: str) -> Any:
        """Return the state in which the leaf at `path` counts as stepped."""
        return state

    def skips(self, params: Sequence[Tensor], state: Any) -> bool:
        """Whether `advance` takes `found_inf` and `grad_scale`, so that it can skip an update."""
        return False


class OfPrecision(Base):
    """An optimizer with a precision, which may encode what it keeps."""

    __slots__ = ()

    precision: Precision

    @property
    def block(self) -> int:
        """Of how many elements leaves and shards consist, for what it keeps."""
        return self.precision.block

    def kind_of(self, path: str, numel: int) -> Hashable:
        """Return what leaves of one flat have in common: all slots of it are kept alike."""
        return self.group_of(path), self.precision.encodes(numel)
