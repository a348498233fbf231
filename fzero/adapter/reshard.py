"""An engine gets another state, other ranks or another stage, and gives its module back.

engine.state = state    the values of another state, in the buffers of the engine's own
reshard                 new buffers for the same module, on other ranks or at another stage
close                   module and optimizer are ordinary ones again, group by group; masters in
                        fp32 stay with the parameters, for the next engine of the module
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero.adapter import param_access
from fzero.adapter.driver import Driver
from fzero.adapter.module import ModuleParameters, on_own_group
from fzero.adapter.writes import own_part
from fzero.checkpoint.collective import Ranks
from fzero.checkpoint.engine_state import buffers_of, options_of, set_options
from fzero.checkpoint.mesh_transition import (
    MeshTransition,
    first_on_old,
    global_ranks,
    held_here,
    mesh_transition,
    moved,
    structure_of,
)
from fzero.collectives import (
    assert_same_everywhere,
    broadcast,
    gather_many,
    performer_of,
    reduce_many,
)
from fzero.context.modes import for_training
from fzero.errors import AxisError, LayoutError
from fzero.machine.module_buffers import is_own
from fzero.machine.offload import to_device, write_back
from fzero.machine.packing import cut, leaf_ranges, pack, unpack
from fzero.machine.partition import require_classes
from fzero.optim import TorchOptimizer
from fzero.optim.precision import masters_of
from fzero.ranks.mesh import MeshLike
from fzero.state import Local, Placement, Setup, TrainState
from fzero.state.scale import ScalePolicy, carried, with_slot
from fzero.state.train_state import require_not_donated
from fzero.transforms.backward_pass import reduce_agreed
from fzero.transforms.donation import empty
from fzero.transforms.init import COMPARED, facts, filled_state
from fzero.transforms.loss_scale import with_policy
from fzero.transforms.points import begun_slots


@torch.no_grad()
def adopt(driver: Driver, state: TrainState) -> None:
    """Write the values of another state into the buffers of this one."""
    driver.require_not("engine.state = ...", "forward")
    require_not_donated(state)
    own = driver.state
    if _form(state) != _form(own):
        raise LayoutError(
            f"engine.state was set to a state of {_named(state)}; the engine has {_named(own)}.",
            cause="a state of another model, stage, number of ranks or mesh.",
            fix="load it into the engine's form: "
            "engine.state = fzero.checkpoint.load(path, engine.state).",
        )
    for mine, theirs in zip(own.params.flats, state.params.flats, strict=True):
        if mine is not theirs:
            mine.copy_(theirs)
    driver.stand_ins.drop()
    scale = carried(own.scale, state.scale)
    slots = with_slot(state.slots, scale)
    new = state.replace(params=own.params, setup=own.setup, slots=slots)
    driver.put(begun_slots(new))  # those that the other state has not
    driver.writes.agree(driver.params.all_objects)
    driver.published()


def _form(state: TrainState) -> tuple[Any, ...]:
    """What two states must have in common to have buffers of the same sizes on each rank."""
    setup, outer = state.setup, state.outer
    held = setup.stage, setup.layout, setup.replicas, setup.optimizer_state
    return *held, None if outer is None else outer.local


def _named(state: TrainState) -> str:
    setup, outer = state.setup, state.outer
    groups = f"stage {setup.stage} with {len(setup.layout.groups)} groups on {setup.axis}"
    apart = "" if outer is None else f", with {outer.local}"
    return f"{groups}, its optimizer {setup.optimizer_state.value}{apart}"


# An engine goes on at another stage, or on other ranks: new buffers for the same module.


@torch.no_grad()
def reshard(driver: Driver, stage: int | None, mesh: MeshLike) -> Driver:
    """Return the driver that goes on with the module of another; a closed one where none does.

    A collective of the old mesh and the new one.
    """
    return for_training(_resharded, driver, stage, mesh)


def _resharded(driver: Driver, stage: int | None, mesh: MeshLike) -> Driver:
    driver.require_not("reshard()", "loop", "backward", "forward", "window", "own buffers")
    driver.drop_what_user_dropped()
    if (driver.state.stage if stage is None else stage) == 3 and not (
        mesh is None and driver.axis.size == 1
    ):
        require_classes(dict(driver.module.named_parameters()), keeps=False)
    where = mesh_transition(driver.state.mesh, mesh)
    state = first_on_old(where, driver.state.mesh, lambda: _settled(driver))
    meshes = Ranks(axis=where.axis).tell(global_ranks(state.mesh))
    source_ranks = _source_ranks(meshes)
    held, comes = held_here(state), global_ranks(state.mesh) != source_ranks
    like = structure_of(held) if comes else None
    new = moved(None if comes else held, where, stage, like)
    size = 0 if new is None else new.mesh.size
    if max(Ranks(axis=where.axis).tell(size)) != len(source_ranks):
        _share_buffers(driver, where, meshes.index(source_ranks), changes=new is not None)
        if new is not None:  # a rank that comes has made its engine with options of its own
            assert_same_everywhere(facts(new.setup), new.setup.axis, what=COMPARED)
    return _leave(driver) if new is None else _installed(driver, new)


def _settled(driver: Driver) -> TrainState:
    """Return the state of an engine with what was written to it, and all gradients reduced."""
    agreed = driver.agreed("reshard()", updates=True)
    if agreed.written:
        driver.writes.compare(driver.state, driver.running.performer)
    driver.writes.follow(driver.state)
    if agreed.held:
        driver.put(reduce_agreed(driver.state, agreed, used=0))
    return driver.state


def _source_ranks(meshes: Sequence[list[int]]) -> list[int]:
    """Return the ranks that have the values, of the meshes of all engines that take part."""
    several = [ranks for ranks in meshes if len(ranks) > 1]
    others = [ranks for ranks in several if ranks != several[0]]
    if others:
        raise AxisError(
            f"engine.reshard: engines of the ranks {several[0]}, and of {others[0]}.",
            cause="engines that were made for other groups of ranks.",
            fix="close one of them; an engine of a rank that comes is made on this rank alone: "
            "Engine(module, ..., mesh=fzero.Axis(size=1)).",
        )
    return several[0] if several else meshes[0]


def _share_buffers(driver: Driver, where: MeshTransition, source: int, *, changes: bool) -> None:
    """Give ranks the buffers and options that one has, as a load on other ranks does."""
    buffers = buffers_of(driver.module)
    forms = [f"{path} {tuple(x.shape)} {x.dtype}" for path, x in buffers.items()]
    assert_same_everywhere(forms, where.axis, what="the buffers of the module")
    for path, buffer in buffers.items():
        (values,) = broadcast([buffer], where.axis, source)
        if changes and not is_own(path, driver.params.own):
            buffer.copy_(values)
    optimizer = driver.guard.optimizer
    options = Ranks(axis=where.axis).tell(options_of(optimizer))
    if changes:
        set_options(optimizer, options[source])


def _installed(driver: Driver, state: TrainState) -> Driver:
    """Return the driver of a module whose parameters have their values in a new state."""
    state = state.replace(setup=on_own_group(state.setup))
    setup = state.setup
    params = ModuleParameters(driver.module, setup.layout, driver.params.own)
    _remove_hooks(driver)
    for index, flat in enumerate(state.params.flats):
        params.follow(setup, index, flat)
    made = Driver(params, state)
    made.show_gradients()
    return made


def _leave(driver: Driver) -> Driver:
    """Close the engine of a rank that leaves; of stage 3 its parameters are NaN, without memory."""
    _remove_hooks(driver)
    params, setup = driver.params, driver.state.setup
    for index in filter(setup.is_read_lazily, range(len(setup.layout.groups))):
        leaves = [setup.layout.leaves[i] for i in setup.layout.groups[index].leaves]
        nothing = []
        for dtype, shape in ((leaf.dtype, leaf.shape) for leaf in leaves):
            value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            x = torch.full((), value, dtype=dtype, device=driver.state.device)
            nothing.append(x.expand(shape))
        params.place(index, nothing)
    return driver


def _remove_hooks(driver: Driver) -> None:
    """Take the hooks of an engine off its module and its optimizer."""
    # A graph from before would lose its gradients: autograd then says so.
    torch.autograd.graph.increment_version(driver.params.all_objects)
    driver.events.remove()
    driver.stand_ins.drop()
    driver.guard.remove()
    driver.running.changed()
    driver.end()


# fp32 masters between two engines of a module: each rank keeps its part with the parameters.
#
# An engine that is closed leaves 16-bit parameters, which are rounded masters. The next engine of
# the same objects, at any stage, with any optimizer, goes on from the masters. An element that was
# written in between goes on from what was written, as between two steps.

_NAME = "_fzero_master"

Span = tuple[int, int]
"""From which element of a parameter to which."""


class KeptMaster:
    """Elements `start` to `start + len(values)` of a parameter's master. It is in no pickle."""

    def __init__(self, start: int, values: Tensor) -> None:
        self.start, self.stop, self.values = start, start + values.numel(), values

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        """Leave nothing in a file, which torch.load(weights_only=True) then takes."""
        return OrderedDict, ()


def keep(params: ModuleParameters, state: TrainState, index: int) -> None:
    """Leave this rank's part of the masters of a group with its parameters; no collective."""
    setup = state.setup
    if index not in setup.layout.trainable or not masters_of(state):
        return
    master = masters_of(state)[setup.layout.trainable.index(index)]
    if not master.numel():
        return
    part = setup.part(setup.optimizer_state, setup.axis.rank)
    for one in leaf_ranges(setup.layout, index, part):
        kept = KeptMaster(one.start, to_device(one.of(master), state.device).clone())
        for p in params.objects(one.leaf):
            vars(p)[_NAME] = kept


@torch.no_grad()
def begun_state(
    params: ModuleParameters, setup: Setup, local: Local | None, scale: ScalePolicy | None
) -> TrainState:
    """Return the state of a module's values, with the masters that an engine before has left.

    A collective: all ranks, or those of a replica, get the values of rank 0, group by group. Each
    parameter has the memory of the new buffers then; where they are sharded, none, until a
    placeholder is in its place. The engines of an axis share one group: their order is one.

    Of an element of which several ranks kept a master, that of the first one counts. Replicas that
    train apart begin at their anchors, which are the 16-bit values.
    """
    setup = on_own_group(setup)
    for path, buffer in params.module.named_buffers():
        if not is_own(path, params.own):
            buffer.copy_(broadcast([buffer], setup.axis, 0)[0])
    made = filled_state(setup, params.values, partial(params.follow, setup), local=local)
    state = with_policy(made, scale)
    if local is not None:
        state = state.replace(setup=on_own_group(state.setup))
    layout, masters = state.setup.layout, masters_of(state)
    if not masters or state.outer is not None:
        return state
    groups = zip(layout.trainable, masters, strict=True)
    mine = _take_masters_of(params, [i for index, _ in groups for i in layout.groups[index].leaves])
    performer = performer_of(state.mesh)
    spans = {leaf: (kept.start, kept.stop) for leaf, kept in mine.items()}
    spans_of: list[dict[int, Span]] = [spans] if performer is None else performer.tell(spans)
    known = {leaf for one in spans_of for leaf in one}
    for index, master in zip(layout.trainable, masters, strict=True):
        leaves = layout.groups[index].leaves
        if known.isdisjoint(leaves):
            continue
        bits = [_own_bits(layout.leaves[i].numel, i, spans_of, state, mine.get(i)) for i in leaves]
        flat, has = (pack(layout, index, some) for some in zip(*bits, strict=True))
        flat = reduce_many([flat], state.mesh)[0]
        if master.numel():  # where the 16-bit values are still what it rounds to
            whole, part = Placement.REPLICATED, setup.optimizer_state
            own, held = (cut(setup, x, whole, part) for x in (flat, has))
            kept, now = own.view(torch.float32), to_device(master, own.device)
            values = to_device(own_part(state, state.params.flats[index]), own.device)
            same = held & (kept.to(values.dtype) == values)
            write_back(master, torch.where(same, kept, now))
    return state


def _take_masters_of(params: ModuleParameters, leaves: Sequence[int]) -> dict[int, KeptMaster]:
    """Return what this rank has of each of these leaves; nobody else will find it."""
    found: dict[int, KeptMaster] = {}
    for leaf in leaves:
        for p in params.objects(leaf):
            kept: Any = vars(p).pop(_NAME, None)
            if isinstance(kept, KeptMaster) and kept.stop <= params.layout.leaves[leaf].numel:
                found[leaf] = kept
    return found


def _own_bits(
    numel: int,
    leaf: int,
    spans_of: Sequence[dict[int, Span]],
    state: TrainState,
    kept: KeptMaster | None,
) -> tuple[Tensor, Tensor]:
    """Return the bits of a master that this rank is the first to have, else 0; and who has any.

    Bits are added up as integers: in floats a zero would lose its sign.
    """
    bits = torch.zeros(numel, dtype=torch.int32, device=state.device)
    has = torch.zeros(numel, dtype=torch.bool, device=state.device)
    for rank, spans in enumerate(spans_of):
        start, stop = spans.get(leaf, (0, 0))
        if rank == state.mesh.rank and kept is not None:
            values = to_device(kept.values, state.device).view(torch.int32)
            bits[start:stop] = torch.where(has[start:stop], 0, values)
        has[start:stop] = True
    return bits, has


# An engine gives its module and its optimizer back, as ordinary ones, group by group.


@torch.no_grad()
def close(driver: Driver) -> None:
    """Take off every hook, and give module and optimizer back as ordinary ones. A collective.

    Gradients that were not used are lost. Parameters are gathered unit by unit. This rank's part of
    fp32 masters stays with them, for the next engine of the module. Closing twice is allowed.
    """
    if driver.closed:
        return
    driver.require_not("close()", "forward")
    driver.wait()
    driver.call("close()")
    _give_back(driver)


def _give_back(driver: Driver) -> None:
    """Make parameters and optimizer states whole, as if there had been no engine. A collective.

    What this rank holds of a group is let go as soon as the group was given back.
    """
    driver.events.remove()
    driver.stand_ins.drop()
    driver.guard.remove()
    driver.running.changed()
    state = driver.state
    rule = state.setup.optimizer
    stepped = rule if isinstance(rule, TorchOptimizer) and int(state.optimizer.count) else None
    if stepped is not None:
        stepped.give_numbers(state.optimizer)
    if isinstance(rule, TorchOptimizer):
        for path, own in rule.held.items():  # of parameters that were frozen meanwhile
            rule.instance.state[driver.params.at(path)] = own
    driver.writes.follow(state)
    for index in range(len(state.setup.layout.groups)):
        flat = to_device(state.params.flats[index], state.device)
        if state.setup.gathers_by_unit:
            flat = gather_many([flat], driver.axis.shards)[0]
        leaves = [x.clone() for x in unpack(state.setup.layout, index, flat)]
        lazy = state.setup.is_read_lazily(index)
        (driver.params.place if lazy else driver.params.have)(index, leaves)
        del flat, leaves
        keep(driver.params, state, index)
        if stepped is not None:
            _give_states(driver, stepped, index)
        held = [state.params.flats[index], *param_access.slots_of_group(state, index).values()]
        if driver.state.setup.gathers_by_unit:  # the gatherer has the shard by another tensor
            held.append(driver.running.gatherer.groups[index].shard)
        for flat in held:
            empty(flat, flat.new_empty(0))
    driver.end()


def _give_states(driver: Driver, rule: TorchOptimizer, index: int) -> None:
    """Give torch's optimizer its states of a group's parameters."""
    leaves = {leaf.path: leaf for leaf in driver.state.setup.layout.leaves}
    stepped = {id(p) for group in rule.instance.param_groups for p in group["params"]}
    unstepped = set(rule.unstepped(driver.state.optimizer))
    for path, slots in param_access.states_of_group(driver, index).items():
        p = driver.params.at(path)
        if id(p) in stepped and path not in unstepped:
            own = rule.own_state(leaves[path], slots)
            rule.instance.state[p] = {name: _laid_as(p, x) for name, x in own.items()}


def _laid_as(p: Tensor, x: Any) -> Any:
    """A state of `p` in the memory format of `p`, as the optimizer itself would make it."""
    if not isinstance(x, Tensor) or x.shape != p.shape:
        return x
    return torch.empty_like(p, dtype=x.dtype, requires_grad=False).copy_(x)
