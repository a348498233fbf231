"""An engine goes on at another stage, or on other ranks: new buffers for the same module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.adapter._module import ModuleParameters, on_own_group
from fzero.adapter.boundary import require_no_forward, require_outside
from fzero.adapter.driver import Driver
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
from fzero.collectives import assert_same_everywhere, broadcast
from fzero.context.modes import for_training
from fzero.errors import AxisError
from fzero.machine.module_buffers import is_own
from fzero.machine.partition import require_classes
from fzero.ranks.mesh import MeshLike
from fzero.state import Leaf, TrainState
from fzero.transforms.backward_pass import reduce_agreed
from fzero.transforms.init import COMPARED, facts


@torch.no_grad()
def reshard(driver: Driver, stage: int | None, mesh: MeshLike) -> Driver:
    """Return the driver that goes on with the module of another; a closed one where none does.

    A collective of the old mesh and the new one.
    """
    return for_training(_resharded, driver, stage, mesh)


def _resharded(driver: Driver, stage: int | None, mesh: MeshLike) -> Driver:
    require_outside(driver, "reshard()")
    require_no_forward(driver, "reshard()")
    driver.require_no_window("reshard()")
    driver.loops.require_settled("reshard()")
    driver.drop_what_user_dropped()
    if (driver.state.stage if stage is None else stage) == 3 and not (
        mesh is None and driver.axis.size == 1
    ):
        require_classes(dict(driver.module.named_parameters()), keeps=False)
    where = mesh_transition(driver.state.mesh, mesh)
    state = first_on_old(where, driver.state.mesh, lambda: _settled(driver))
    meshes = Ranks(axis=where.axis).tell(global_ranks(state.mesh))
    home = _home(meshes)
    held, comes = held_here(state), global_ranks(state.mesh) != home
    like = structure_of(held) if comes else None
    new = moved(None if comes else held, where, stage, like)
    size = 0 if new is None else new.mesh.size
    if max(Ranks(axis=where.axis).tell(size)) != len(home):
        _share(driver, where, meshes.index(home), changes=new is not None)
        if new is not None:  # a rank that comes has made its engine with options of its own
            assert_same_everywhere(facts(new.setup), new.setup.axis, what=COMPARED)
    return _gone(driver) if new is None else _installed(driver, new)


def _settled(driver: Driver) -> TrainState:
    """Return the state of an engine with what was written to it, and all gradients reduced."""
    said = driver.agreed("reshard()", updates=True)
    if said.written:
        driver.writes.compare(driver.running.performer)
    driver.writes.masters.follow(driver.state)
    if said.held:
        driver.put(reduce_agreed(driver.state, said, used=0))
    return driver.state


def _home(meshes: Sequence[list[int]]) -> list[int]:
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


def _share(driver: Driver, where: MeshTransition, source: int, *, changes: bool) -> None:
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
    _let_go(driver)
    for index, flat in enumerate(state.params.flats):
        params.follow(setup, index, flat)
    made = Driver(params, state)
    made.show_gradients()
    return made


def _gone(driver: Driver) -> Driver:
    """Close the engine of a rank that leaves; of stage 3 its parameters are NaN, without memory."""
    _let_go(driver)
    params, setup = driver.params, driver.state.setup
    for index in filter(setup.is_read_lazily, range(len(setup.layout.groups))):
        leaves = [setup.layout.leaves[i] for i in setup.layout.groups[index].leaves]
        params.place(index, [_nothing(leaf, driver.state.device) for leaf in leaves])
    return driver


def _nothing(leaf: Leaf, device: torch.device) -> Tensor:
    has_nan = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    value = float("nan") if has_nan else 0
    return torch.full((), value, dtype=leaf.dtype, device=device).expand(leaf.shape)


def _let_go(driver: Driver) -> None:
    """Take the hooks of an engine off its module and its optimizer."""
    # A graph from before would lose its gradients: autograd then says so.
    torch.autograd.graph.increment_version(driver.params.all_objects)
    driver.events.remove()
    driver.stand_ins.drop()
    driver.guard.remove()
    driver.running.changed()
    driver.end()
