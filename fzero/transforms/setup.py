"""From parameters, an optimizer and options to the setup of a state: compared by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fzero.collectives import assert_same_everywhere, told_everywhere
from fzero.context.current_rank import is_abstract
from fzero.errors import LayoutError
from fzero.machine.module_buffers import difference, noted_lines
from fzero.machine.offload import require_folder
from fzero.machine.partition import (
    HeldTensor,
    assemble,
    named_leaves,
    plan_layout,
    regrouped,
    require_apart,
    require_classes,
    unit_of,
)
from fzero.machine.powersgd import powersgd
from fzero.machine.stacks import require_matrices
from fzero.optim import (
    ShardOptimizer,
    as_optimizer,
    require_leafwise,
    require_precision,
    require_real_views,
)
from fzero.options import SharedOptions
from fzero.ranks.mesh import Axis, Runtime
from fzero.state import Layout, Local, Setup
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.codec import Compress
from fzero.state.layout import BLOCK
from fzero.state.setup import (
    Autocast,
    Offload,
    Owners,
    as_autocast,
    as_offload,
    note_owners,
    owners_of,
)
from fzero.transforms.builtins import BUILTINS
from fzero.transforms.outer_rule import bound_outer
from fzero.transforms.points import transforms_apart
from fzero.transforms.state_options import bucket_at, compressed, encodes, logical_of
from fzero.transforms.together import Requested, require_together

COMPARED = "the layout of the parameters"
"""What ranks compare before a state is made, and what an error before that is told as."""


def plan_setup(
    params: Any,
    optimizer: Any,
    *,
    stage: int,
    axis: Axis,
    options: SharedOptions,
    owners: Mapping[str, Owners] | None = None,
    beside: Sequence[str] = (),
) -> Setup:
    """Return the setup of a state of `params`, checked to be equal on every rank. Reads no values.

    `beside`: lines of the tensors of an engine's module that are no parameters (`lines_of`), which
    must be equal, too; of other parameters those that `functionalize` has noted on them.
    `owners`: of each path, for autocast; None: as `functionalize` has noted it on the tensors.
    Leaves of at most `persistence_threshold_numel` elements are in units of their own, which stay
    whole from one update to the next (stage 3).

    Raises `AxisError` on every rank if the ranks differ, or if one of them raised.
    """
    with told_everywhere(axis, what=COMPARED):
        autocast = as_autocast(options.autocast)
        named = dict(zip(*named_leaves(params)[:2], strict=True))
        apart = lies_apart(stage, axis, options.offload)
        require_classes(named, keeps=owners is not None and not apart)
        require_apart([HeldTensor(path, x) for path, x in named.items()])
        parts = stage > 0 and axis.size > 1
        chosen = _bound(optimizer, named, parts=parts)
        require_together(BUILTINS, "rule", (chosen, options))
        owners = owners or {path: owners_of(p) for path, p in named.items()}
        outer = bound_outer(options.local, named)
        lowered = None if autocast is None else _lowered(autocast, named, owners)
        make = partial(
            _layout_of,
            owners,
            params,
            trainable=options.trainable,
            lowered=lowered,
            frozen=encodes(options.frozen),
        )
        sizes = {path: x.numel() for path, x in named.items()}
        place: Any = {"stage": stage, "axis": axis, "device": _device(named)}
        units = options.units or unit_of
        place |= {"given": options, "block": lcm(block_of(options), chosen.block)}
        setup = _planned(make, sizes, units, (chosen, outer), **place)
        if any(p.ndim > 2 for p in named.values()):
            _require_matrices(setup, named, owners)
        said = [*facts(setup, autocast), f"local updates: {options.local}", *beside]
        said += [] if outer is None else outer.describe(setup.layout.leaves)
        said += noted_lines(named.values()) if axis.runtime is not Runtime.LOCAL else ()
    assert_same_everywhere(said, axis, what=COMPARED, explains=difference)
    return setup


def _require_matrices(
    setup: Setup, named: Mapping[str, Tensor], owners: Mapping[str, Owners]
) -> None:
    """Raise `LayoutError` for what is taken for a matrix, and may be a stack of them."""
    codec, outer = setup.reduction.codec, setup.layout.options.outer
    for rule in (setup.optimizer, *([] if outer is None else [outer])):
        require_matrices(named, owners, rule.batch_dims_of)
    if isinstance(codec, powersgd):
        require_matrices(named, owners, lambda _: ("powersgd", codec.batch_dims))


def lies_apart(stage: int, axis: Axis, offload: Offload | None) -> bool:
    """Whether parameters have no memory between steps, and placeholders stand for them."""
    alone = axis.shards.runtime is Runtime.LOCAL and getattr(offload, "params", None) is None
    return stage == 3 and not alone


def setup_at(
    old: Setup, *, stage: int, axis: Axis, device: torch.device, local: Local | None = None
) -> Setup:
    """Return the setup of the same parameters, rule and options at another stage or on other ranks.

    It is the one that `plan_setup` makes of them. No collective.

    axis: all ranks; with `local` updates in two dims. device: where the model computes.

    Raises `LayoutError` for an option that does not go with the stage or with the ranks.
    """
    asked, layout = old.layout.options, old.layout
    chosen: Any = old.optimizer
    given = SharedOptions(
        optimizer_over=old.optimizer_over,
        logical_ranks=None if old.logical is None else old.logical.ranks,
        seed=0 if old.logical is None else old.logical.seed,
        bucket_bytes=asked.bucket_bytes,
        offload=old.offload,
        local=local,
        compress=asked.compress,
        transforms=old.transforms,
        reduction=old.reduction,
        gathering=replace(old.gathering, persistent=()),
    )
    if stage > 0 and axis.size > 1 and not chosen.elementwise:
        require_leafwise(chosen)
    units = {leaf.path: unit for leaf, unit in zip(layout.leaves, asked.units, strict=True)}
    lower = {
        layout.leaves[i].path: group.communication_dtype
        for group in layout.groups
        for i in group.leaves
    }
    sizes = {leaf.path: prod(leaf.shape) for leaf in layout.leaves}
    make = partial(regrouped, layout, lowered=lower.get)
    place: Any = {"stage": stage, "axis": axis, "device": device}
    outer = None if local is None else asked.outer
    place |= {"given": given, "block": asked.block}
    made = _planned(make, sizes, units.__getitem__, (chosen, outer), **place)
    return replace(made, policy=old.policy)


def _planned(
    make: Callable[..., Layout],
    sizes: Mapping[str, int],
    units: Callable[[str], str],
    rules: tuple[ShardOptimizer, Any],
    *,
    stage: int,
    axis: Axis,
    device: torch.device,
    given: SharedOptions,
    block: int,
) -> Setup:
    """Return the checked setup of parameters of these sizes, whose leaves `make` groups.

    rules: the optimizer, and of local updates the outer rule: a flat has leaves that are alike to
    both. block: of how many elements leaves and shards consist.
    """
    chosen, outer = rules
    require_together(BUILTINS, "ranks", Requested(stage, axis, given))
    small = _small(sizes, given.gathering.persistence_threshold_numel, stage, axis)
    layout = make(
        ranks=axis.shards.size,
        replicas=axis.replicas.size,
        # A rule that needs all leaves whole on each rank wants a group for each.
        grouped=_travels(axis, given.offload) and (chosen.by_owners or chosen.elementwise),
        bucket_bytes=_bucket(stage, given),
        unit=_apart(units, small) if small else units,
        kind=lambda path: (
            chosen.kind_of(path, sizes[path]),
            None if outer is None else outer.group_of(path),
        ),
        block=block,
    )
    asked = replace(
        layout.options,
        bucket_bytes=given.bucket_bytes,
        compress=given.compress,
        units=tuple(units(leaf.path) for leaf in layout.leaves),
        kept=_kept(chosen, layout),
        outer_kept=() if outer is None else _kept(outer, layout),
        outer=outer,
    )
    setup = Setup(
        stage=stage,
        axis=axis,
        layout=replace(_encoded(layout, given.compress), options=asked),
        optimizer=chosen,
        optimizer_over=given.optimizer_over,
        reduction=compressed(axis, given),
        gathering=replace(given.gathering, persistent=_units_of(layout, small)),
        offload=as_offload(given.offload, stage, device),
        transforms=transforms_apart(given.transforms, _options_there(given)),
        logical=logical_of(given),
    )
    return _checked(setup)


def block_of(given: SharedOptions) -> int:
    """Return of how many elements leaves and shards consist: a `BLOCK` with logical ranks."""
    return 1 if given.logical_ranks is None else BLOCK


def _options_there(given: SharedOptions) -> list[str]:
    """Return the names of options that are like transforms, where they are given."""
    names = ("autocast", "compress", "local", "offload")
    return [name for name in names if getattr(given, name) is not None]


def _kept(rule: Any, layout: Layout) -> tuple[int, ...]:
    """Return what the owner of each leaf keeps of it; () for a rule without owners."""
    if not rule.by_owners:
        return ()
    return tuple(rule.kept_numel(leaf) if leaf.trainable else 0 for leaf in layout.leaves)


def _checked(setup: Setup) -> Setup:
    require_folder(setup.offload)
    require_precision(setup.optimizer, setup.layout.leaves, setup.reduction)
    for leaf in setup.layout.leaves:
        wanted = setup.reduction.accumulate_dtype
        if leaf.dtype.is_complex and leaf.trainable and wanted in SIXTEEN_BIT:
            raise LayoutError(
                f"accumulate_dtype={wanted} with the complex parameter {leaf.path}.",
                cause="an option for a model of 16 bits; there are no complex numbers of 16 bits.",
                fix="leave accumulate_dtype out: gradients add up in the parameter's precision.",
            )
    return setup


def _device(named: Mapping[str, Tensor]) -> torch.device:
    """Where the model computes: where its parameters are, before any of them is offloaded."""
    real = (p.device for p in named.values() if is_abstract() or not p.is_meta)
    return next(real, torch.get_default_device())


def _small(sizes: Mapping[str, int], most: int, stage: int, axis: Axis) -> set[str]:
    """The leaves that stay whole between updates, where they are gathered at all."""
    gathers = stage == 3 and axis.shards.size > 1 and most > 0
    return {path for path, numel in sizes.items() if numel <= most} if gathers else set()


def _travels(axis: Axis, offload: Offload | None) -> bool:
    """Whether parameters cross ranks, or come from elsewhere: then they travel in groups."""
    offloaded = getattr(offload, "params", None) is not None
    return axis.runtime is not Runtime.LOCAL or offloaded


def _bound(optimizer: Any, named: Mapping[str, Tensor], *, parts: bool) -> ShardOptimizer:
    """Return the optimizer bound to the parameters `named`, checked to work on their shards.

    parts: whether a rank has parts of a leaf.
    """
    chosen = as_optimizer(optimizer).bind(named)
    require_real_views(chosen, named)
    if parts and not chosen.elementwise:
        require_leafwise(chosen)
    return chosen


def _bucket(stage: int, options: SharedOptions) -> int | None:
    if options.local is not None and options.local.fragments > 1:
        return None  # a fragment has whole units
    return bucket_at(stage, options.bucket_bytes)


def facts(setup: Setup, autocast: Autocast | None = None) -> list[str]:
    """Return the facts that must be equal on every rank, one line each."""
    codecs = {str(group.codec) for group in setup.layout.groups}
    options = f"{setup.reduction}, {setup.gathering}, {autocast}, {setup.offload.homes}, {codecs}"
    mesh = f"{setup.axis}, optimizer over {setup.optimizer_over!r}, logical {setup.logical}"
    leaves = setup.layout.leaves
    return [
        f"stage {setup.stage}, {options}",
        mesh,
        *setup.optimizer.describe(leaves),
        *setup.layout.describe(),
        f"kept by owners: {setup.layout.options.kept}, {setup.layout.options.outer_kept}",
        *(f"transform {one}, {one.slots}" for one in setup.transforms),
    ]


def blank_params(layout: Layout) -> Any:
    """Return parameters of a layout, whose values do not matter.

    All else that a plan asks of them is as it was: what learns, which are tied, who owns them.
    """
    owners = layout.options.owners or [()] * len(layout.leaves)
    by_leaf = {}
    for number, leaf in enumerate(layout.leaves):
        by_leaf[number] = Parameter(torch.zeros(leaf.shape, dtype=leaf.dtype), leaf.trainable)
        note_owners(by_leaf[number], owners[number])
    return assemble(layout, by_leaf)


def _layout_of(owners: Mapping[str, Owners], params: Any, **options: Any) -> Layout:
    """Return the layout of parameters, which knows who owns them."""
    layout = plan_layout(params, **options)
    names = tuple(tuple(owners[leaf.path]) for leaf in layout.leaves)
    return replace(layout, options=replace(layout.options, owners=names))


def _lowered(
    autocast: Autocast, named: Mapping[str, Tensor], owners: Mapping[str, Owners]
) -> Callable[[str], torch.dtype | None]:
    """path -> the lower dtype in which it crosses ranks, if it does."""
    return lambda path: autocast.communication_dtype(path, named[path], owners[path])


def _apart(units: Callable[[str], str], small: Collection[str]) -> Callable[[str], str]:
    """The units, with those leaves in units of their own."""
    return lambda path: f"{units(path)} (small)" if path in small else units(path)


def _units_of(layout: Layout, paths: Collection[str]) -> tuple[int, ...]:
    """The units that hold nothing but those leaves."""
    return tuple(
        number
        for number, unit in enumerate(layout.units)
        if all(layout.leaves[i].path in paths for g in unit for i in layout.groups[g].leaves)
    )


def _encoded(layout: Layout, compress: Compress | None) -> Layout:
    """The layout whose floating groups that learn stage 3 gathers encoded; on one rank as it is.

    What does not learn keeps its bits: an encoding would lose those of packed values for good.
    """
    if compress is None or compress.parameters is None or layout.ranks == 1:
        return layout
    codec = compress.parameters
    groups = [
        replace(group, codec=codec) if group.trainable and group.dtype.is_floating_point else group
        for group in layout.groups
    ]
    return replace(layout, groups=tuple(groups))
