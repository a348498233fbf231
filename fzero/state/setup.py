"""The static facts of a training run: they ride in the treespec of every state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fzero.errors import LayoutError
from fzero.errors.check import is_positive, require
from fzero.ranks.mesh import Axis, Runtime
from fzero.state.buffers import SIXTEEN_BIT, Placement
from fzero.state.codec import Codec, Over, cast
from fzero.state.layout import Layout, Part, class_name, learns
from fzero.state.logical import Logical, carried
from fzero.state.points import (
    COMPARED,
    DTYPE,
    FLAG,
    NUMEL,
    ZERO,
    Builtin,
    Points,
    ValueCheck,
    one_of,
    option,
)
from fzero.state.schedule import Limits
from fzero.state.stateful_update import ParamGroups as ParamGroups
from fzero.state.stateful_update import SavedNames as SavedNames
from fzero.state.stateful_update import StatefulUpdate as StatefulUpdate

# How gradients cross ranks, and how stage 3 gathers parameters: options that ride in a setup.

Reshard = bool | Literal["window"]
"""Whether stage 3 frees a unit after its use: True; False: after the backward; or "window"."""

ReduceOp = Literal["mean", "sum"]
"""How the gradients of the ranks are combined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """How stage 3 gets full parameters."""

    reshard_after_forward: Reshard = option(
        True,
        "True: the full values of a unit are freed when another unit is used, and gathered again "
        'in backward. False: they are kept until the backward is over. "window": over a window '
        "(`coalesce`, `no_sync`).",
        check=one_of(
            *(True, False, "window"),
            wanted='True (gather again in backward), False (keep until then) or "window"',
        ),
        stages=(3,),
        deepspeed=ZERO + "stage3_max_live_parameters",
    )
    prefetch_numel: int = option(
        1,
        "elements gathered early: the next unit, and more that fit; 0: none.",
        check=NUMEL,
        stages=(3,),
        deepspeed=ZERO + "stage3_prefetch_bucket_size",
    )
    persistence_threshold_numel: int = option(
        0,
        "parameters of at most so many elements are in units of their own, which are gathered "
        "once: an engine keeps them whole until its next update, a functional step until its "
        "gradient is made.",
        check=NUMEL,
        stages=(3,),
        deepspeed=ZERO + "stage3_param_persistence_threshold",
    )
    # Units that stay whole from one update to the next: known when the state is planned.
    persistent: tuple[int, ...] = ()

    @property
    def limits(self) -> Limits:
        """What the schedule is planned by."""
        return Limits(
            prefetch_numel=self.prefetch_numel, keeps=self.reshard_after_forward is not True
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How gradients cross ranks."""

    ordered: bool = option(
        False,
        "each reduction sums in rank order, on every backend: bits then do not depend on the "
        "bucketing. (At stage 3 a rank that uses units in another order than all expect may bring "
        "a part of a gradient by itself, which is added to the sum of the others.)",
        check=FLAG,
    )
    overlap: bool = option(
        True, "reduce beside the backward.", check=FLAG, deepspeed=ZERO + "overlap_comm"
    )
    contiguous_gradients: bool = option(
        False,
        "copy each gradient into its bucket as it comes.",
        check=FLAG,
        deepspeed=ZERO + "contiguous_gradients",
    )
    accumulate_dtype: torch.dtype | None = option(
        None,
        "dtype in which gradients are accumulated and stored; default fp32 for 16-bit parameters, "
        "else their own.",
        check=DTYPE,
        deepspeed="data_types.grad_accum_dtype",
    )
    reduce_op: ReduceOp = option(
        "mean",
        '"mean" or "sum": how the gradients of the ranks are combined.',
        check=one_of("mean", "sum"),
        deepspeed="gradient_allreduce_op",
        axis="reductions",
    )
    gradient_predivide_factor: float = option(
        1.0,
        'f: each rank sends g / f, and the sum is multiplied by f / W (by f for "sum"). With f = W '
        "the sum of W gradients overflows no sooner than one of them.",
        check=ValueCheck(is_positive, "a positive number"),
        deepspeed="gradient_predivide_factor",
        axis="wires",
    )
    # How they are encoded, and for which ranks; None: in the dtype of the parameters.
    codec: Codec | None = None
    over: Over = "all"
    # Gradients since the last update are sums of w g, which the update divides by the sum of w.
    weighted: bool = False

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype in which gradients add up on the wire, if a codec says nothing but that."""
        codec = self.codec
        return codec.dtype if isinstance(codec, cast) and self.over == "all" else None


# Where the buffers of a state live between their uses: on the device, in host memory, on disk.

Home = Literal["cpu", "disk"] | None
"""None: on the device, where computations are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What of a state lives in host memory ("cpu"), or in files ("disk"), instead of the device.

    Values are copied to the device for as long as a computation needs them, unit by unit.

    Attributes:
        optimizer: the optimizer's states and fp32 masters.
        gradients: reduced gradients, and what waits in a window.
        params: the shards of parameters; stage 3 only.
        device: where to compute, if parameters live elsewhere; set when a state is made.
        folder: for "disk", where the files are made. They have no name there once they are open,
            so that nothing is left behind when the process ends, however it ends. It may differ by
            rank.

    Raises `LayoutError` for another place, and for "disk" without a folder that exists.
    """

    optimizer: Home = None
    gradients: Home = None
    params: Home = None
    folder: str | Path | None = field(default=None, compare=False, repr=False)
    device: torch.device | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check it."""
        for name, home in self.homes.items():
            require(
                f"offload: {name}",
                home,
                lambda x: x in (None, "cpu", "disk"),
                '"cpu", "disk", or None for the device',
                cause="another word for a place (DeepSpeed's are none, cpu and nvme).",
            )
        is_there = self.folder is not None and Path(self.folder).is_dir()
        if "disk" in self.homes.values() and not is_there:
            raise LayoutError(
                f"offload to disk with folder={self.folder!r}, which is no folder here.",
                cause="the folder was left out, or is not there yet on this machine.",
                fix="make a folder on a fast disk of each machine, and give its path: "
                'folder="/local/scratch".',
            )

    @property
    def homes(self) -> dict[str, Home]:
        """The home of each kind of buffer."""
        return {"optimizer": self.optimizer, "gradients": self.gradients, "params": self.params}

    @property
    def neutral(self) -> bool:
        """Whether everything is on the device."""
        return not any(self.homes.values())


def is_on_disk(x: Tensor) -> bool:
    """Return whether the memory of a tensor is a file that is mapped."""
    return x.device.type == "cpu" and x.untyped_storage().filename is not None


def as_offload(given: Any, stage: int, device: torch.device) -> Offload:
    """Return the record of `Engine(offload=...)` for a model; None is everything on the device.

    device: where the model computes, if its parameters are to live elsewhere.

    Raises `LayoutError` for what is no such record, and for parameters below stage 3.
    """
    if given is None:
        return Offload()
    require(
        "offload",
        given,
        lambda x: isinstance(x, Offload),
        'fzero.Offload(optimizer="cpu"), or other fields of it',
        cause="a place without saying what is to live there.",
    )
    if given.params is not None and stage != 3:
        raise LayoutError(
            f"offload: params={given.params!r} at stage {stage}.",
            cause="below stage 3 every rank computes with whole parameters of its own.",
            fix="use stage=3, or leave params out.",
        )
    return given if given.params is None else replace(given, device=device)


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


# Which parameters are computed with, and cross ranks, in a lower precision under autocast.

SafeModules = Sequence[type[nn.Module] | str] | Callable[[str], bool]
"""Classes of modules, also by qualified name; or path of a parameter -> whether it is safe."""

SAFE_CLASSES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose operators torch.autocast runs in the lower precision, weights and all."""

Owners = Sequence[tuple[str, ...]]
"""Of each module that owns a parameter: the names of its class and of those above it."""

_OWNERS = "fzero_owners"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Autocast:
    """Operators follow torch.autocast; what only safe modules use crosses ranks in `dtype`.

    Attributes:
        dtype: torch.bfloat16, torch.float16, or torch.float32 for no autocast.
        lower_precision_safe_modules: classes of modules (also by qualified name, "torch.nn.Linear"
            or "torch.nn.modules.linear.Linear"), subclasses included; or path -> whether the
            parameter is safe. None: Linear, Conv1d, Conv2d and Conv3d.

    Raises `LayoutError` for another dtype, or what names no modules.
    """

    dtype: torch.dtype = torch.bfloat16
    lower_precision_safe_modules: SafeModules | None = None

    def __post_init__(self) -> None:
        """Check it."""
        require(
            "autocast: dtype",
            self.dtype,
            lambda x: x in (*SIXTEEN_BIT, torch.float32),
            "torch.bfloat16 or torch.float16; torch.float32 switches it off",
            cause="a dtype that torch.autocast has no policy for, or its name.",
        )
        require(
            "autocast: lower_precision_safe_modules",
            self.lower_precision_safe_modules,
            _names_modules,
            "classes, [nn.Linear, 'my.package.Projection'], or a function of a parameter's path",
            cause="one class instead of a list of them, or modules instead of classes.",
        )

    @property
    def computes(self) -> torch.dtype | None:
        """The lower dtype in which losses are computed; None if autocast is switched off."""
        return None if self.dtype is torch.float32 else self.dtype

    def communication_dtype(self, path: str, p: Tensor, owners: Owners) -> torch.dtype | None:
        """Return `dtype` for a parameter that only safe modules own; None for its own dtype.

        Raises `LayoutError` for a 16-bit parameter that learns.
        """
        if self.computes is None:
            return None
        if p.dtype in SIXTEEN_BIT and learns(p):
            raise sixteen_bit_error(path, p.dtype)
        safe = self.lower_precision_safe_modules
        if callable(safe):
            chosen = safe(path)
        else:
            names = {_qualified(one) for one in (SAFE_CLASSES if safe is None else safe)}
            chosen = bool(owners) and all(names.intersection(classes) for classes in owners)
        return self.dtype if chosen and p.dtype is torch.float32 else None

    def __repr__(self) -> str:
        """As ranks compare it: no address of a function."""
        safe = self.lower_precision_safe_modules
        if callable(safe):
            shown = getattr(safe, "__qualname__", type(safe).__name__)
        else:
            shown = "default" if safe is None else sorted(map(_qualified, safe))
        return f"autocast({self.dtype}, {shown})"


def sixteen_bit_error(path: str, dtype: torch.dtype) -> LayoutError:
    """Return the error for a parameter in 16 bits that learns under autocast."""
    return LayoutError(
        f"{path} is {dtype}, and autocast wants fp32 parameters.",
        cause="a model in 16 bits (module.half(), module.bfloat16()) under autocast.",
        fix="leave one of them out: keep the model in fp32, or leave out autocast.",
    )


def as_autocast(given: Any) -> Autocast | None:
    """Return the record of a dtype or a record; None for None."""
    if given is None or isinstance(given, Autocast):
        return given
    return Autocast(dtype=given)


def owners_in(module: nn.Module) -> dict[str, Owners]:
    """Return who owns each parameter of a module, by every path that it has.

    Example:
        >>> [one[0] for one in owners_in(nn.Sequential(nn.Linear(1, 1)))["0.bias"]]
        ['torch.nn.modules.linear.Linear']
    """
    found: dict[int, list[tuple[str, ...]]] = {}
    for part in module.modules():
        classes = tuple(name for cls in type(part).__mro__ for name in _names(cls))
        for p in part.parameters(recurse=False):
            found.setdefault(id(p), []).append(classes)
    named = module.named_parameters(remove_duplicate=False)
    return {path: tuple(found[id(p)]) for path, p in named}


def remember_owners(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Note on each of `tensors`, which stand for parameters of `module`, who owns it."""
    owners = owners_in(module)
    for path, tensor in tensors.items():
        note_owners(tensor, owners[path])


def note_owners(tensor: Tensor, owners: Owners) -> None:
    """Note on a tensor who owns the parameter that it stands for."""
    vars(tensor)[_OWNERS] = owners


def noted_owners(tensor: Tensor) -> Owners:
    """Return what `note_owners` has noted; nothing of any other tensor."""
    return vars(tensor).get(_OWNERS, ())


def _names(cls: type) -> tuple[str, ...]:
    """Its qualified name; of torch's own classes also the public one."""
    name = class_name(cls)
    public = (f"torch.nn.{cls.__name__}",) if name.startswith("torch.nn.modules.") else ()
    return (name, *public)


def _qualified(one: type | str) -> str:
    return one if isinstance(one, str) else class_name(one)


def _names_modules(safe: Any) -> bool:
    if isinstance(safe, list | tuple):
        several: list[Any] = [*safe]
        classes = [one for one in several if not isinstance(one, str)]
        return all(isinstance(one, type) and issubclass(one, nn.Module) for one in classes)
    return safe is None or (callable(safe) and not isinstance(safe, type))
