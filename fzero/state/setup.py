"""The static facts of a training run: they ride in the treespec of every state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fzero.ranks.mesh import Axis, Runtime
from fzero.state.buffers import SIXTEEN_BIT, Placement
from fzero.state.codec import Codec
from fzero.state.communication import Gathering as Gathering
from fzero.state.communication import Reduction as Reduction
from fzero.state.layout import Layout, Part
from fzero.state.logical import Logical, carried
from fzero.state.offload import Offload
from fzero.state.points import COMPARED, Builtin, Points
from fzero.state.stateful_update import ParamGroups as ParamGroups
from fzero.state.stateful_update import SavedNames as SavedNames
from fzero.state.stateful_update import StatefulUpdate as StatefulUpdate

OptimizerOver = Literal["shard", "all"]
"""Which ranks of a mesh of two dims share masters and optimizer states: one replica's, or all."""

MASTERS = "masters"
"""The slot of an optimizer that has the fp32 copies of 16-bit parameters."""


NO_OPTIONS = frozenset({"params", "param_names"})
"""What a param group of torch.optim has beside its options."""


Observer = Callable[[str, Any, Any], Any]
"""(what, state, value): is told what a step makes, beside it; see fzero/transforms/observe.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the transforms around the running step asked for; neutral between steps."""

    grad_scale: float = 1.0  # accumulate: 1 / micro-batches
    defer_update: bool = False  # accumulate: not the last micro-batch
    donate: bool = False  # shard: buffers may be overwritten
    averages: bool = False  # the update divides by the number of backwards
    autocast: torch.dtype | None = None  # autocast: in which losses are computed
    check_finite: bool = False  # check_finite: an update raises what is not finite
    points: tuple[Points | Builtin, ...] = ()  # transforms around the step, from the inside out
    observer: Observer | None = field(default=None, repr=False)  # not what ranks compare

    @property
    def options(self) -> list[str]:
        """What ranks must have in common to update together: each option as a line."""
        bounds = dict(pair for one in self.points for pair in getattr(one, "options", ()))
        lines = [f"{name}={bounds.get(name)}" for name in COMPARED]
        return [*lines, *(f"{x.name}={getattr(self, x.name)}" for x in fields(self) if x.repr)]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Stage, axis, layout, optimizer: what does not change from step to step.

    The axis has all ranks. Which of them hold which part of a flat is asked here: `over`, `part`.
    What follows from these facts alone is worked out once, and kept with them.
    """

    stage: int
    axis: Axis
    layout: Layout
    optimizer: StatefulUpdate
    optimizer_over: OptimizerOver = "shard"
    reduction: Reduction = field(default_factory=Reduction)
    gathering: Gathering = field(default_factory=Gathering)
    policy: Policy = field(default_factory=Policy)
    offload: Offload = field(default_factory=Offload)
    transforms: tuple[Points, ...] = ()  # that a state was made with: it has their slots
    logical: Logical | None = None  # the ranks whose sums and random numbers it has; None: its own

    @cached_property
    def gathers_by_unit(self) -> bool:
        """Whether parameters are gathered as the loss reads them, unit by unit."""
        alone = self.axis.shards.runtime is Runtime.LOCAL and self.offload.params is None
        return self.stage == 3 and not alone

    def is_read_lazily(self, index: int) -> bool:
        """Whether the loss has placeholders of group `index`: it is gathered, or decoded."""
        return self.gathers_by_unit or self.layout.groups[index].encoded

    @cached_property
    def is_offloaded(self) -> bool:
        """Whether anything of the state lives elsewhere than on the device."""
        return not self.offload.neutral

    @cached_property
    def streams(self) -> bool:
        """Whether units come and go one by one, on one rank too."""
        return self.gathers_by_unit or self.offload.gradients is not None

    def accumulate_dtype(self, index: int) -> torch.dtype:
        """The dtype in which gradients of group `index` add up."""
        dtype = self.layout.groups[index].dtype
        wide = torch.float32 if dtype in SIXTEEN_BIT else dtype
        return self.reduction.accumulate_dtype or wide

    def communication_dtype(self, index: int) -> torch.dtype:
        """The dtype in which gradients of group `index` cross ranks."""
        group = self.layout.groups[index]
        return group.communication_dtype or self.reduction.cast or group.dtype

    def sent(self, index: int, gradient: Tensor) -> Tensor:
        """What is summed over ranks in the place of this rank's gradient of group `index`."""
        if self.axis.size == 1 and self.logical is None:  # nothing crosses
            return gradient
        factor = self.reduction.gradient_predivide_factor
        divided = gradient if factor == 1.0 else gradient / factor
        return divided.to(self.communication_dtype(index))

    @cached_property
    def divisor(self) -> float:
        """The divisor of a sum over ranks of what they `sent`."""
        if self.axis.size == 1 and self.logical is None:
            return 1.0
        means = self.reduction.reduce_op == "mean" and not self.reduction.weighted
        ranks = self.ranks if means else 1
        return ranks / self.reduction.gradient_predivide_factor

    def divides_first(self, index: int) -> float:
        """What a gradient of group `index` is divided by before the sum, as it is copied.

        Where gradients are summed in place, they are copied anyway, and the division is free there.
        It gives the same bits as after the sum if it is by a power of two, but in fp16, where small
        gradients would be lost. Otherwise 1.0.
        """
        dtypes = self.layout.groups[index].dtype, self.communication_dtype(index)
        free = self.reduces_in_place and not self.encodes_gradients and self.logical is None
        exact = math.frexp(self.divisor)[0] == 0.5 and torch.float16 not in dtypes
        return self.divisor if free and exact else 1.0

    @cached_property
    def ranks(self) -> int:
        """Over how many ranks a mean is taken: all of them, or the logical ones."""
        return self.axis.size if self.logical is None else self.logical.ranks

    @cached_property
    def carries_several(self) -> bool:
        """Whether some rank carries several logical ranks: their gradients are rows of a window.

        One alone is treated as several: a plain process makes no reduction, which might round.
        """
        return self.logical is not None and self.axis.size < max(2, self.logical.ranks)

    def carried(self, rank: int) -> range:
        """Return the logical ranks that a rank carries; without logical ranks itself."""
        if self.logical is None:
            return range(rank, rank + 1)
        return carried(rank, self.axis.size, self.logical.ranks)

    @cached_property
    def gradient_share(self) -> float:
        """What the gradient of a micro-batch is multiplied by: 1.0 where its weight says that."""
        return 1.0 if self.reduction.weighted else self.policy.grad_scale

    @cached_property
    def share_of_mesh(self) -> float:
        """What a gradient is multiplied by, so that its mean over a part is one over the mesh."""
        means = self.reduction.reduce_op == "mean" and not self.reduction.weighted
        if self.axis.mesh is None or not means:
            return 1.0
        return self.axis.size / self.axis.mesh.size

    @cached_property
    def differentiates_as(self) -> str:
        """What ranks must have in common to reduce a gradient together."""
        low = "" if self.policy.autocast is None else f", autocast {self.policy.autocast}"
        return f"gradients x {self.gradient_share}{low}"

    @cached_property
    def recipes(self) -> dict[Any, Any]:
        """What acts on states of this setup, by the names of their slots: see transforms/recipe."""
        return {}

    @cached_property
    def _variants(self) -> list[Setup]:
        """The setups that `changed` has made of this one, and this one: they share the list."""
        return [self]

    def changed(self, **changes: Any) -> Setup:
        """Return the setup with other values of some fields: the same record for the same values.

        A transform changes the policy before each step, and back behind it.
        """
        new, variants = replace(self, **changes), self._variants
        for known in variants:
            if known == new and known.layout is new.layout:
                return known
        if new.policy.observer is None:  # an observer may hold whatever its user likes
            del variants[1:-8]  # options that are others at each step
            variants.append(new)
            new.__dict__["_variants"] = variants
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Copy, or pickle: the fields alone."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def with_weights(self, weighted: bool) -> Setup:
        """Return the setup of a state whose gradients have weights, or have none."""
        if weighted == self.reduction.weighted:
            return self
        return self.changed(reduction=replace(self.reduction, weighted=weighted))

    @cached_property
    def idle(self) -> Setup:
        """The setup of the state when it holds no gradients."""
        return self.with_weights(False)

    @cached_property
    def codec(self) -> Codec | None:
        """What encodes gradients where they cross ranks, but for a mere cast; None for nothing."""
        over_all = self.reduction.over == "all"
        crosses = (self.axis if over_all else self.axis.replicas).size > 1
        return self.reduction.codec if crosses and self.reduction.cast is None else None

    @cached_property
    def encodes_gradients(self) -> bool:
        """Whether gradients cross ranks encoded, in other forms than numbers in some dtype."""
        return self.codec is not None

    @property
    def remembers(self) -> bool:
        """Whether what encoding loses of gradients is kept for the next ones."""
        return self.codec is not None and self.codec.memory is not False

    def memory_dtype(self, index: int) -> torch.dtype:
        """The dtype in which what encoding loses of group `index` is kept."""
        kept = None if self.codec is None else self.codec.memory
        wide = torch.promote_types(self.accumulate_dtype(index), torch.float32)
        return kept if isinstance(kept, torch.dtype) else wide

    @cached_property
    def params(self) -> Placement:
        """Where parameters live between calls."""
        return self._sharded if self.stage == 3 else Placement.REPLICATED

    @cached_property
    def reduces_in_place(self) -> bool:
        """Whether gradients are summed in the memory that holds them: where ranks keep all."""
        return self.gradients is Placement.REPLICATED

    @cached_property
    def gradients(self) -> Placement:
        """Where reduced gradients live: where the optimizer needs them."""
        return self.optimizer_state

    @cached_property
    def optimizer_state(self) -> Placement:
        """Where the optimizer's state lives."""
        if self.stage == 0:
            return Placement.REPLICATED
        over_all = self.optimizer_over == "all" and self.replicas > 1
        return Placement.OVER_ALL if over_all else self._sharded

    @cached_property
    def _sharded(self) -> Placement:
        """SHARDED over the ranks of a replica; REPLICATED where a replica has one rank."""
        whole = self.layout.ranks == 1 < self.axis.size
        return Placement.REPLICATED if whole else Placement.SHARDED

    @cached_property
    def replicas(self) -> int:
        """How many ranks have the same shard: 1, but on a mesh of two dims."""
        return self.axis.size // self.layout.ranks

    def over(self, placement: Placement) -> Axis:
        """Return the ranks that have other elements than this one: over them parts are summed."""
        if placement is Placement.OVER_ALL:
            return self.axis
        return self.axis.shards if placement is Placement.SHARDED else Axis(size=1)

    def part(self, placement: Placement, rank: int) -> Part:
        """Return which part of a flat a rank has."""
        shards = self.layout.ranks
        replica, shard = divmod(rank, shards)
        if placement is Placement.OVER_ALL:
            return Part(shards * self.replicas, shard * self.replicas + replica)
        if placement is Placement.BY_RANK:
            return Part(self.axis.size, rank)
        return Part(shards, shard) if placement is Placement.SHARDED else Part(1, 0)

    def numel(self, index: int, placement: Placement) -> int:
        """Elements that each rank has of group `index`, with its padding."""
        return self.layout.full_numel(index) // self.part(placement, 0).count
