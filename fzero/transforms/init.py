"""`init`: full parameters and an optimizer -> a train state, each rank keeping only its part.

options                          each in its range, and those that go together
parameters, optimizer, options   -> the setup of the state, compared by all ranks
setup                            -> a state of rank 0's values, group by group; what the optimizer
keeps, anew or of a run that it made before
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import lcm, prod
from typing import Any, TypeVar, Unpack, overload

import optree
import torch
from torch import Tensor
from torch.nn import Parameter

from fzero.collectives import assert_same_everywhere, broadcast, told_everywhere
from fzero.context.current_rank import is_abstract
from fzero.context.modes import in_transform, require_autograd
from fzero.errors import LayoutError
from fzero.machine.compress import remembering, require_codec
from fzero.machine.module_buffers import difference, noted_lines
from fzero.machine.offload import offloaded, require_folder, write_back
from fzero.machine.owners import owners_of
from fzero.machine.packing import cut, pack
from fzero.machine.partition import (
    HeldTensor,
    assemble,
    leaves_of,
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
    NoOptimizer,
    Optimizer,
    ShardOptimizer,
    TorchOptimizer,
    as_optimizer,
    require_leafwise,
    require_precision,
    require_real_views,
)
from fzero.optim.entries import codec_in
from fzero.options import (
    BUCKET_BYTES,
    OPTIONS,
    Initializer,
    InitOptions,
    SharedOptions,
    Stages,
    check_values,
    grouped,
    takes,
)
from fzero.ranks.mesh import Axis, MeshLike, Runtime, refuse_part
from fzero.state import (
    NAMESPACE,
    Buffers,
    Layout,
    Leaf,
    Local,
    Placement,
    Progress,
    Reduction,
    Setup,
    TrainState,
)
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.codec import Codec, Compress
from fzero.state.layout import BLOCK
from fzero.state.logical import Logical
from fzero.state.progress import CLOSED
from fzero.state.setup import (
    Autocast,
    Owners,
    as_autocast,
    as_offload,
    note_owners,
    noted_owners,
)
from fzero.transforms.closure import watch
from fzero.transforms.donation import returned
from fzero.transforms.local import begun, bound_outer, mesh_for, on_replica, require_local
from fzero.transforms.models import ParamsT, leaves_of_meshes, models_of, require_params
from fzero.transforms.points import begun_slots, rule_state, transforms_apart
from fzero.transforms.recipe import BUILTINS
from fzero.transforms.together import Requested, require_together

OneOptimizer = (
    Optimizer | TorchOptimizer | NoOptimizer | tuple[Callable[..., Any], Callable[..., Any]]
)


@overload
def init(
    params: ParamsT,
    optimizer: OneOptimizer,
    *,
    stage: int,
    **options: Unpack[InitOptions],
) -> TrainState[ParamsT]: ...
@overload
def init(
    params: Any,
    optimizer: Any,
    *,
    stage: Stages,
    **options: Unpack[InitOptions],
) -> Any: ...
@takes("init", "init(params, optimizer, stage=2)")
def init(  # noqa: D417 {options}
    params: Any,
    optimizer: Any,
    *,
    stage: Stages,
    **options: Unpack[InitOptions],
) -> Any:
    """Return a train state for `params`, partitioned as `stage` says.

    (Stage 1 is stage 2: a gradient that is reduce-scattered costs less on the wire than one that is
    kept whole, and less memory.) Elements that a rank holds, for P parameters and K optimizer
    slots, over W ranks:

        stage   parameters   gradients   optimizer
        0       P            P           K P
        1       P            P / W       K P / W
        2       P            P / W       K P / W
        3       P / W        P / W       K P / W

    On a mesh of two dims, R replicas of S ranks, the S ranks of each replica share all that is
    sharded, and W is S in the table; with `optimizer_over="all"`, W is R S but for the parameters.
    A gradient is reduce-scattered over the shards, and the result reduced over the replicas.

    The values are rank 0's on every rank, as when DDP is built; `params` is copied, not kept.
    (Inside a torch.func transform they stay each rank's own, and differentiable by `params`.)

    Several models: let `stage`, `optimizer` or `mesh`, or several of them, be a pytree, {"g": 2,
    "d": 3}. There is one state for each of its leaves, made of what `params` has under that key;
    the states come back in the same structure. All other options hold for each model, and paths
    begin inside of it. With meshes {"dense": mesh, "experts": mesh["data"]} each place along the
    other axes has experts of its own: the values are those of its first rank.

    Args:
        params: a pytree of tensors, of any shapes, the same on every rank.
        optimizer: from `fzero.optim`, or any (init, update) pair; `fzero.optim.no_optimizer()` for
            a model that is only read; or a pytree of them.
        {options}

    Returns:
        A `TrainState`, or a pytree of them. A collective: every rank must call it.

    Raises:
        LayoutError: for bad options, for parameters that are no tensors or have elements in common
            without being the same view (by path), and for trees of stages, optimizers and
            parameters that do not fit each other (by key).
        AxisError: when the ranks disagree about the layout (the first rank and line that differ).

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.

    Example:
        >>> import torch, fzero
        >>> state = init({"w": torch.ones(4)}, fzero.optim.sgd(0.1), stage=2)
        >>> state.stage, fzero.full_params(state)["w"]
        (2, tensor([1., 1., 1., 1.]))
        >>> params = {"g": torch.ones(2), "d": torch.zeros(3)}
        >>> states = init(params, fzero.optim.sgd(0.1), stage={"g": 0, "d": 3})
        >>> {name: state.stage for name, state in states.items()}
        {'g': 0, 'd': 3}
    """
    local = options.get("local")
    mesh = options.get("mesh")
    meshes = leaves_of_meshes(mesh)
    axes = {id(one): mesh_for(one, local) for one in meshes}
    first = axes[id(meshes[0])]
    with told_everywhere(first.mesh or first, what=COMPARED):  # the next that all ranks compare
        require_autograd("init")
        require_params(params)
        chosen = check_shared(grouped(SharedOptions, options))
        require_local(chosen.local)
        models, treespec = models_of(params, optimizer, check_stages("init", stage), mesh)

    def one(params: Any, optimizer: Any, stage: int, mesh: MeshLike) -> TrainState:
        axis = axes[id(mesh)]
        if axis.mesh is not None:  # before the ranks of a part, by itself, wait for each other
            assert_same_everywhere([f"a state on {axis}"], axis.mesh, what="the mesh of a state")
        if chosen.logical_ranks is not None:
            refuse_part(axis, "logical_ranks=")
        frozen = isinstance(optimizer, NoOptimizer)
        asked = replace(chosen, trainable=lambda _: False) if frozen else chosen
        setup = plan_setup(params, optimizer, stage=stage, axis=axis, options=asked)
        return _filled(setup, params, options.get("initializer"), local)

    made = [one(*model) for model in models]
    returned(made)
    return optree.tree_unflatten(treespec, made)


# Which values of options a state may have, and which of them go together.

OptionsT = TypeVar("OptionsT", bound=SharedOptions)


def check_shared(options: OptionsT) -> OptionsT:
    """Return the options; raise `LayoutError`, naming the option, for a value out of range.

    A transform with a codec at `wire` says `compress`.
    """
    check_values(options)
    require_together(BUILTINS, "options", options)
    wires = [one for one in options.transforms if one.wire is not None]
    if wires:
        options = replace(options, compress=Compress(gradients=wires[0].wire))
    compress = options.compress or Compress()
    for name, codec in (("gradients", compress.gradients), ("parameters", compress.parameters)):
        if codec is not None:
            require_codec(f"compress: {name}", codec, name)
    return options


def check_stage(stage: Any, name: str = "Engine") -> int:
    """Return `stage` if it is 0, 1, 2 or 3; raise `LayoutError`, of the call `name`, otherwise."""
    OPTIONS["stage"].require(stage, f"{name}: ")
    return stage


def check_stages(name: str, stage: Any) -> Any:
    """Return `stage` if it is a stage or a pytree of them; raise `LayoutError` otherwise."""
    if optree.tree_is_leaf(stage, none_is_leaf=True, namespace=NAMESPACE) or not stage:
        return check_stage(stage, name)
    return optree.tree_map(
        lambda one: check_stage(one, name), stage, none_is_leaf=True, namespace=NAMESPACE
    )


def encodes(frozen: Any) -> Callable[[str, Tensor], Codec | None] | None:
    """Return (path, leaf) -> the codec of a frozen leaf, of an option `frozen`; None for none.

    Raises `LayoutError`, in a call, for what is no codec, or does not what it says.
    """
    if frozen is None:
        return None
    tried: list[Codec] = []

    def codec_of(path: str, leaf: Tensor) -> Codec | None:
        if isinstance(frozen, Codec):
            found = frozen if leaf.ndim > 1 else None
        else:
            found: Any = frozen(path, leaf)
        if found is not None and found not in tried:
            OPTIONS["frozen"].require(found if isinstance(found, Codec) else object(), f"{path}: ")
            require_codec("frozen", found, "frozen")
            tried.append(found)
        # What a gradient has lost would be remembered; what is stored once is not added to.
        return found and (replace(found, memory=False) if found.memory else found)

    return codec_of


# From parameters, an optimizer and options to the setup of a state: compared by all ranks.

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
        # At stage 3 parameters have no memory between steps, and placeholders stand for them.
        alone = axis.shards.runtime is Runtime.LOCAL and not getattr(options.offload, "params", 0)
        require_classes(named, keeps=owners is not None and (stage < 3 or alone))
        require_apart([HeldTensor(path, x) for path, x in named.items()])
        chosen = as_optimizer(optimizer).bind(named)
        require_real_views(chosen, named)
        if stage > 0 and axis.size > 1 and not chosen.elementwise:  # a rank has parts of a leaf
            require_leafwise(chosen)
        require_together(BUILTINS, "rule", (chosen, options))
        owners = owners or {path: noted_owners(p) for path, p in named.items()}
        outer = bound_outer(options.local, named)
        frozen = encodes(options.frozen)

        def lowered(path: str) -> torch.dtype | None:
            """Return the lower dtype in which a leaf crosses ranks, if it does."""
            found = autocast and autocast.communication_dtype(path, named[path], owners[path])
            return found or None

        def make(**groups: Any) -> Layout:
            layout = plan_layout(
                params, trainable=options.trainable, lowered=lowered, frozen=frozen, **groups
            )
            names = tuple(tuple(owners[leaf.path]) for leaf in layout.leaves)
            return replace(layout, options=replace(layout.options, owners=names))

        sizes = {path: x.numel() for path, x in named.items()}
        # Where the model computes: where its parameters are, before any of them is offloaded.
        real = (p.device for p in named.values() if is_abstract() or not p.is_meta)
        device = next(real, torch.get_default_device())
        place: Any = {"stage": stage, "axis": axis, "device": device}
        units, block = options.units or unit_of, 1 if options.logical_ranks is None else BLOCK
        place |= {"given": options, "block": lcm(block, chosen.block)}
        setup = _planned(make, sizes, units, (chosen, outer), **place)
        if any(p.ndim > 2 for p in named.values()):  # what is a matrix, may be a stack of them
            codec = setup.reduction.codec
            for rule in (chosen, *([] if outer is None else [outer])):
                require_matrices(named, owners, rule.batch_dims_of)
            if isinstance(codec, powersgd):
                require_matrices(named, owners, lambda _: ("powersgd", codec.batch_dims))
        compared = [*facts(setup, autocast), f"local updates: {options.local}", *beside]
        compared += [] if outer is None else outer.describe(setup.layout.leaves)
        compared += noted_lines(named.values()) if axis.runtime is not Runtime.LOCAL else ()
    assert_same_everywhere(compared, axis, what=COMPARED, explains=difference)
    return setup


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
    most = given.gathering.persistence_threshold_numel
    gathers = stage == 3 and axis.shards.size > 1 and most > 0
    small = {path for path, numel in sizes.items() if numel <= most} if gathers else set[str]()
    # Parameters that cross ranks, or come from elsewhere, travel in groups.
    travels = axis.runtime is not Runtime.LOCAL or getattr(given.offload, "params", None)
    bucket = BUCKET_BYTES.get(stage)  # none at stage 3, where leaves cross ranks unit by unit
    if given.local is not None and given.local.fragments > 1:
        bucket = None  # a fragment has whole units
    layout = make(
        ranks=axis.shards.size,
        replicas=axis.replicas.size,
        # A rule that needs all leaves whole on each rank wants a group for each.
        grouped=bool(travels) and (chosen.by_owners or chosen.elementwise),
        bucket_bytes=bucket and (given.bucket_bytes or bucket),
        unit=lambda path: f"{units(path)} (small)" if path in small else units(path),
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
    persistent = tuple(
        number
        for number, unit in enumerate(layout.units)
        if all(layout.leaves[i].path in small for g in unit for i in layout.groups[g].leaves)
    )
    names = ("autocast", "compress", "local", "offload")
    like_transforms = [name for name in names if getattr(given, name) is not None]
    setup = Setup(
        stage=stage,
        axis=axis,
        layout=replace(_encoded(layout, given.compress), options=asked),
        optimizer=chosen,
        optimizer_over=given.optimizer_over,
        reduction=compressed(axis, given),
        gathering=replace(given.gathering, persistent=persistent),
        offload=as_offload(given.offload, stage, device),
        transforms=transforms_apart(given.transforms, like_transforms),
        logical=None
        if given.logical_ranks is None
        else Logical(ranks=given.logical_ranks, seed=given.seed),
    )
    require_folder(setup.offload)
    require_precision(chosen, layout.leaves, setup.reduction)
    wanted = setup.reduction.accumulate_dtype
    for leaf in layout.leaves if wanted in SIXTEEN_BIT else ():
        if leaf.dtype.is_complex and leaf.trainable:
            raise LayoutError(
                f"accumulate_dtype={wanted} with the complex parameter {leaf.path}.",
                cause="an option for a model of 16 bits; there are no complex numbers of 16 bits.",
                fix="leave accumulate_dtype out: gradients add up in the parameter's precision.",
            )
    return setup


def compressed(axis: Axis, options: SharedOptions) -> Reduction:
    """Return how gradients are reduced, with their codec."""
    compress = options.compress or Compress()
    over = compress.over
    if options.local is None and axis.shards.size == 1:  # replicas are all there is
        over = "all"
    return replace(options.reduction, codec=compress.gradients, over=over)


def _kept(rule: Any, layout: Layout) -> tuple[int, ...]:
    """Return what the owner of each leaf keeps of it; () for a rule without owners."""
    if not rule.by_owners:
        return ()
    return tuple(rule.kept_numel(leaf) if leaf.trainable else 0 for leaf in layout.leaves)


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


# From a setup to a state.


def _filled(
    setup: Setup, params: Any, initializer: Initializer | None, local: Local | None
) -> TrainState:
    layout, tensors = setup.layout, leaves_of(setup.layout, params)
    if not layout.leaves:
        raise LayoutError(
            "there is no parameter.",
            cause="None or an empty container was passed as the parameters, or a module "
            "without any.",
            fix="pass the params that functionalize returned, or any pytree of tensors.",
        )
    for leaf, tensor in zip(layout.leaves, tensors, strict=True):
        if leaf.trainable and not in_transform():
            watch(leaf.title, tensor)

    def make(index: int) -> Iterator[Tensor]:
        ids = layout.groups[index].leaves
        return (made_by(layout.leaves[i], tensors[i], initializer) for i in ids)

    return filled_state(setup, make, local=local)


def made_by(leaf: Leaf, given: Tensor, initializer: Initializer | None) -> Tensor:
    """The full values of one leaf: from `params`, or from the initializer."""
    if initializer is None:
        if given.is_meta:
            raise LayoutError(
                f"{leaf.title} is on the meta device: it has a shape and no values.",
                cause="a model that was built under torch.device('meta').",
                fix="give initializer=(path, leaf) -> values, which makes one leaf at a time.",
            )
        return given
    made = initializer(leaf.path, given)
    if not isinstance(made, Tensor) or tuple(made.shape) != leaf.shape or made.dtype != leaf.dtype:
        seen = f"{tuple(made.shape)} {made.dtype}" if isinstance(made, Tensor) else f"{made!r:.80}"
        raise LayoutError(
            f"the initializer made {seen} for {leaf.title}, which is {leaf.shape} {leaf.dtype}.",
            cause="an initializer that writes in place and returns nothing, or another dtype.",
            fix="return a tensor of the leaf's shape and dtype.",
        )
    return made.detach()


Make = Callable[[int], Iterable[Tensor]]
"""Group -> its full leaves; called once for each group, in order."""


def filled_state(
    setup: Setup,
    make: Make,
    done: Callable[[int, Tensor], None] | None = None,
    *,
    local: Local | None = None,
) -> TrainState:
    """Return the state of which `make` gives the values, group by group: rank 0's on every rank.

    No rank holds more than one group beyond its part; of a group that is encoded, one leaf.
    `done(group, flat)` is called as soon as the group's part is there. With `local` updates it is
    the state of a replica.
    """
    layout, mesh = setup.layout, setup.axis
    held = []
    for index in range(len(layout.groups)):
        flat = pack(layout, index, make(index))
        if not in_transform():  # inside one, the state goes on depending on `params`
            flat = broadcast([flat.detach()], mesh, 0)[0]
        flat = cut(setup, flat, Placement.REPLICATED, setup.params).clone()
        held.append(offloaded(setup.offload.params, flat, setup.offload))
        if done is not None:
            done(index, held[-1])
    setup = on_replica(setup, local)
    return begun_slots(begun(taken_over(_state_of(setup, held), mesh), local, mesh))


def blank_state(setup: Setup, device: torch.device, *, local: Local | None = None) -> TrainState:
    """Return a state of zeros of this rank's parts, to be filled; what the optimizer keeps, too.

    A collective at first, with `local` updates alone.
    """
    held = []
    mesh, setup = setup.axis, on_replica(setup, local)
    for index, group in enumerate(setup.layout.groups):
        numel = setup.numel(index, setup.params)
        flat = torch.zeros(numel, dtype=group.dtype, device=device)
        held.append(offloaded(setup.offload.params, flat, setup.offload))
    return begun_slots(begun(_state_of(setup, held), local, mesh))


def _state_of(setup: Setup, held: Sequence[Tensor]) -> TrainState:
    """Return the state before the first update of which a rank has these flats."""
    state = TrainState(
        params=Buffers(flats=tuple(held), placement=setup.params),
        gradients=Buffers(),
        optimizer=rule_state(setup, _shards(setup, held)),
        window=CLOSED,
        step=torch.zeros((), dtype=torch.int64),
        progress=Progress(),
        setup=setup,
    )
    return remembering(state)


def _shards(setup: Setup, held: Sequence[Tensor]) -> list[Tensor]:
    """What this rank steps of the flats that learn."""
    fulls = [held[i] for i in setup.layout.trainable]
    return [cut(setup, full, setup.params, setup.optimizer_state) for full in fulls]


def begun_anew(state: TrainState) -> TrainState:
    """Return the state with a fresh optimizer state; masters stay."""
    setup = state.setup
    fresh = rule_state(setup, _shards(setup, state.params.flats))
    return state.replace(optimizer=setup.optimizer.anew(state.optimizer, fresh))


# What a torch.optim optimizer has that made steps before: the new state goes on from it.


@torch.no_grad()
def taken_over(state: TrainState, mesh: Axis) -> TrainState:
    """Return the state that goes on from what its optimizer has; the optimizer lets go of it.

    Values are those of rank 0 of the mesh on every rank, as those of parameters are. A collective
    if there are any, of which all ranks have said the same.
    """
    rule, layout = state.setup.optimizer, state.setup.layout
    if not (isinstance(rule, TorchOptimizer) and rule.held):
        return state
    paths = [
        leaf.path for leaf in layout.leaves if leaf.trainable and rule.group_of(leaf.path) >= 0
    ]
    slots = {name: list(flats) for name, flats in state.optimizer.slots.items()}
    for number, index in enumerate(layout.trainable):
        leaves = [layout.leaves[i] for i in layout.groups[index].leaves]
        for name, flats in slots.items():
            if name in rule.odd_slots:
                own = rule.held.get(leaves[0].path, {}).get(name)
                flats[number] = (
                    flats[number] if own is None else _sent(state, torch.as_tensor(own), mesh)
                )
            elif flats[number].numel():
                codec = codec_in(state.setup, index, name)
                dtype = flats[number].dtype if codec is None else torch.float32
                values = [rule.begin(leaf, name, dtype, state.device) for leaf in leaves]
                whole = _sent(state, pack(layout, index, values), mesh)
                part = cut(state.setup, whole, Placement.REPLICATED, state.setup.optimizer_state)
                write_back(flats[number], part if codec is None else codec.row_of(part))
    kept = {name: tuple(flats) for name, flats in slots.items()}
    owned = _owned(state, rule, mesh)
    optimizer = rule.with_owned(replace(state.optimizer, slots=kept), owned)
    optimizer = _counted(rule, optimizer, paths)
    rule.let_go(paths)
    return state.replace(optimizer=optimizer)


def _owned(state: TrainState, rule: TorchOptimizer, mesh: Axis) -> dict[str, tuple[Tensor, ...]]:
    """Return what owners keep of whole parameters: what the optimizer has of them."""
    owned = {name: list(some) for name, some in rule.owned(state.optimizer).items()}
    owners = owners_of(state.setup)
    mine = set() if owners is None else set(owners.mine)
    for number, one in enumerate(() if owners is None else owners.leaves):
        has, kept = rule.held.get(one.leaf.path, {}), rule.kept_of(one.leaf)
        for name in (name for name in owned if name in has):
            sent = _sent(state, torch.as_tensor(has[name]), mesh)
            if number in mine:
                like = owned[name][number]
                owned[name][number] = sent.reshape(-1).to(like) if name in kept else sent
    return {name: tuple(some) for name, some in owned.items()}


def _sent(state: TrainState, value: Tensor, mesh: Axis) -> Tensor:
    return broadcast([value.detach().to(state.device)], mesh, 0)[0]


def _counted(rule: TorchOptimizer, optimizer: Any, paths: Sequence[str]) -> Any:
    """Return the optimizer state with the counters that each leaf has in a run."""
    counters = rule.counted(optimizer, paths)
    most = 1
    for name, some in counters.items():
        for path, like in some.items():
            if path in rule.held and not rule.shares(path, name):
                some[path] = torch.full_like(like, float(rule.held[path][name]))
                most = max(most, int(some[path])) if name == "step" else most
    fresh = [path for path in paths if path not in rule.held]
    return rule.recounted(optimizer, paths, counters, count=most, unstepped=fresh)
