"""`reshard`: a live state to another stage, or to other ranks, without a file."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from types import FunctionType
from typing import Any, NamedTuple, NoReturn, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fzero.checkpoint._allocate import NewState
from fzero.checkpoint._pieces import TensorPiece, Texts, form_in, pieces_of_rank
from fzero.checkpoint._process_states import LocalStates, facts_of_replicas, local_states, stack_of
from fzero.checkpoint.collective import Ranks, on_ranks, run_on_all_ranks
from fzero.checkpoint.manifest import (
    Manifest,
    facts_of_state,
    kept_facts,
    named_texts,
    note_texts,
    require_fit,
)
from fzero.collectives import disagreement, start_uneven_all_to_all
from fzero.context.current_rank import current_ranks
from fzero.context.device import current_device
from fzero.context.modes import for_training, in_transform, is_recorded, wants_graph
from fzero.errors import AxisError, FzeroError, LayoutError, PhaseError
from fzero.machine.named_shards import leaf_paths
from fzero.machine.offload import offloaded, to_device, wait_for_copies
from fzero.optim import TorchOptimizer
from fzero.optim.entries import slots_of
from fzero.ranks.mesh import Axis, Mesh, MeshLike, Runtime, axis_of, refuse_part, world
from fzero.state import NAMESPACE, Buffers, Form, Placement, Progress, Slot, TrainState
from fzero.state.entry import Entry, slot_with
from fzero.state.progress import CLOSED, Window, pop
from fzero.state.train_state import require_not_donated
from fzero.transforms import simulate, state_entries
from fzero.transforms.backward_pass import agree, reduce_agreed
from fzero.transforms.donation import returned, took
from fzero.transforms.init import check_stage


def reshard(
    state: TrainState | None, stage: int | None = None, mesh: MeshLike = None
) -> TrainState | None:
    """Return the same state at another stage, or on other ranks. A collective of both meshes.

    reshard(s) = load(save(s)), bit for bit, and no file is written: parameters, what the optimizer
    keeps, fp32 masters, counters, the loss scale, what a codec has lost (the residual), anchors of
    local updates. Reduced gradients stay, and those that wait in a window are reduced first, so it
    may be called between two gradients. The schedule of stage 3 is recorded anew. `state` stays as
    it is. A step from `fzero.shard` is made anew for another stage or mesh.

    All ranks of the larger mesh call it: one of the two has all ranks of the other. A rank outside
    of the old mesh passes None, and learns from a member what the state is; a rank outside of the
    new one gets None. A rank takes from itself what it has, and gets the rest in all-to-alls, each
    of one unit at most, the largest: beside the old parts and the new ones it holds what it
    sends and what it gets in one of them.

    Args:
        state: of this rank; None where the old mesh does not have it. With virtual ranks the stack
            of all of them, outside of `fzero.simulate`; or inside, where their number stays.
        stage: 0 to 3; None: as it is.
        mesh: as for `init`; None: as it is. Of virtual ranks, the sizes (replicas, shards), or
            names and sizes, of any number of ranks.

    Returns:
        The new state, or None.

    Raises:
        LayoutError: for options that the stage, or the mesh, cannot have; for a state that cannot
            be described to a rank without one, as its options have functions without a name.
        AxisError: if no mesh has all ranks of the other, or no rank has a state; if ranks ask for
            other stages or meshes.
        PhaseError: inside a transform of torch.func; between the gradient and the update of a
            step whose codec has a memory.
        DonatedError: for a used-up state.

    Example:
        >>> import torch, fzero
        >>> step = fzero.shard(lambda state: (state, None), stage=1)
        >>> init = fzero.simulate(step, world_size=2).init
        >>> state = init({"w": torch.arange(6.0)}, fzero.optim.adam(0.1))
        >>> whole = fzero.reshard(state, stage=3, mesh=(1, 3))
        >>> whole.stage, whole.params.flats[0].shape
        (3, torch.Size([3, 4]))
    """
    if state is not None and not isinstance(state, TrainState):
        raise LayoutError(
            f"reshard: expected a TrainState or None, got a {type(state).__name__}.",
            cause="an engine, parameters, or a pytree of states.",
            fix="call engine.reshard(...) of an engine, and reshard each state of a pytree.",
        )
    took([] if state is None else [state])
    refuse_part(None if state is None else state.mesh, "reshard")
    is_stack = state is not None and tuple(state.step.shape) == (state.mesh.size,)
    new = for_training(_of_stack if is_stack else _of_process, state, stage, mesh)
    if new is not None:
        returned([new])
    return new


def _of_process(state: TrainState | None, stage: int | None, mesh: MeshLike) -> TrainState | None:
    old = None if state is None else state.mesh
    where = mesh_transition(old, mesh)
    on_all(where.axis, lambda: _require(state, stage))
    state = first_on_old(where, old, lambda: None if state is None else _reduced(state))
    return moved(None if state is None else held_here(state), where, stage)


def _of_stack(state: Any, stage: int | None, mesh: MeshLike) -> TrainState:
    _require(state, stage)
    refuse_part(mesh, "reshard")
    held = local_states("reshard", state, apart=True)
    if any(one.window.pending.held for one in held.states):
        return _of_stack(simulate(_reduced, world_size=state.mesh.size)(state), stage, mesh)
    mesh = state.mesh if mesh is None else mesh
    size, pairs = _size_of(state.mesh, mesh), held.pairs
    facts = [facts_of_rank(one, rank, rank < size, "") for one, rank in pairs]
    both = max(len(pairs), size)
    facts += [RankFacts(is_in=True, knows=True, asked="")] * (both - len(pairs))
    axis = Axis(size=both, runtime=Runtime.VIRTUAL if both > 1 else Runtime.LOCAL)
    here = RanksHere(axis, pairs, size, True)
    states: list[Any] = _moved(here, structure_of(held), facts, stage, mesh)
    treespec = optree.tree_structure(states[0], namespace=NAMESPACE)
    columns = [*zip(*(optree.tree_leaves(x, namespace=NAMESPACE) for x in states), strict=True)]
    states.clear()
    made: list[Any] = []
    while columns:  # what a rank has of a tensor is let go when it is in the stack
        made.append(stack_of(columns.pop(0)))
    found: Any = optree.tree_unflatten(treespec, made)
    return found


def _require(state: TrainState | None, stage: Any) -> None:
    """Raise for what is no stage, and for a state whose graph would be lost."""
    if stage is not None:
        check_stage(stage, "reshard")
    if state is None:
        return
    require_not_donated(state)
    flats = state.params.flats
    if in_transform() or is_recorded(flats) or wants_graph(flats):
        raise PhaseError(
            "reshard of a state that is differentiated, mapped or traced.",
            cause="a transform of torch.func, or a trace, around it; or updates that keep a graph.",
            fix="call it outside, between two steps.",
        )


def _reduced(state: TrainState) -> TrainState:
    """Return the state with all gradients of its ranks reduced, if any rank has some."""
    (agreed,) = agree("reshard()", [state])
    return reduce_agreed(state, agreed) if agreed.held else state


def _size_of(old: Axis, mesh: Any) -> int:
    """Return how many virtual ranks a mesh means."""
    if isinstance(mesh, Axis) and (mesh.runtime is Runtime.VIRTUAL or mesh.size == 1):
        return mesh.size
    if isinstance(mesh, Mapping | Mesh):
        named = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
        mesh = mesh if named.device_mesh is not None else (1, prod(n for _, n in named.axes))
    sizes = mesh if isinstance(mesh, tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise AxisError(
            f"reshard of the stacked state of {old.size} virtual ranks: mesh={mesh!r}.",
            cause="a mesh of processes, or a number of ranks.",
            fix="give its sizes, (replicas, shards): (1, 4) for 4 ranks in one dim; or names and "
            'sizes, {"data": 2, "seq": 2}.',
        )
    return prod(sizes)


# A live state to another stage, or to other ranks: as if it was saved and loaded, with no file.
#
#     old state -> the pieces that a rank holds - copied, redistributed -> pieces of new memory
#         |                                                                        ^
#         +-> structure - blank_at, NewState -> new state ------------------------+
#
# Pieces, and the numbers beside them, are those of a checkpoint. What lives until the update, which
# a checkpoint has no room for, goes the same way. Rule, options and pytree are records of this
# program: a rank without a state gets them from one that has it.

T = TypeVar("T")

_HERE = "the state of before"


def first_on_old(where: MeshTransition, old: Axis | None, do: Callable[[], T]) -> T:
    """Return `do()`, a call of all ranks of the old mesh; ranks that come hear of its error."""
    if old is not None and old.size == where.axis.size:
        return do()
    return on_all(where.axis, do)


def held_here(state: TrainState) -> LocalStates:
    """Return the state of this rank, of a process or a virtual one, as what it holds."""
    if current_ranks() is None:
        return local_states("reshard", state, apart=True)
    require_not_donated(state)
    axis = state.mesh
    return LocalStates(processes=Ranks(axis=axis), ranks=(axis.rank,), states=(state,))


def moved(
    held: LocalStates | None,
    where: MeshTransition,
    stage: int | None,
    like: Structure | None = None,
) -> TrainState | None:
    """Return the state at a stage on the new mesh; None on a rank outside of it. A collective.

    held: what this process has, with gradients that are all reduced; None: no state.
    like: of a rank without a state, what that is but for its numbers; None: it hears it.
    """
    ranks, asked = Ranks(axis=where.axis), f"stage {stage} on {where.asked}"

    def begin() -> tuple[Structure | None, RankFacts]:
        if held is None:
            return like, RankFacts(is_in=where.is_in, knows=like is not None, asked=asked)
        facts = facts_of_rank(held.states[0], held.ranks[0], where.is_in, asked)
        return structure_of(held), facts

    structure, own = on_all(ranks.axis, begin)
    facts = ranks.tell(own)
    if len({one.asked for one in facts}) > 1:
        raise disagreement([[one.asked] for one in facts], what="reshard")
    members = [rank for rank, one in enumerate(facts) if one.progress is not None]
    if not members:
        raise AxisError(
            f"reshard: none of the {len(facts)} ranks has a state.",
            cause="None on every rank of the mesh, or a mesh without the ranks of the state.",
            fix="give the state on the ranks that have it; all of those call it.",
        )
    is_first = ranks.axis.rank == members[0]
    if len(members) < len(facts) and all(one.knows for one in facts):
        assert structure is not None
        known = structure.manifest
        saved = ranks.tell(known if is_first else None)[members[0]]
        on_all(ranks.axis, lambda: require_fit(saved, known, _HERE))
        structure = replace(structure, manifest=saved)
    elif len(members) < len(facts):  # a rank that comes hears from a member what the state is
        mine = structure
        send = on_all(ranks.axis, lambda: as_sent(mine) if is_first and mine is not None else b"")
        sent = ranks.tell(send)[members[0]]
        structure = on_all(ranks.axis, lambda: as_received(sent) if mine is None else mine)
    assert structure is not None
    states = [] if held is None else held.pairs
    here = RanksHere(ranks.axis, states, int(where.is_in), False)
    made = _moved(here, structure, facts, stage, where.mesh)
    return made[0] if made else None


class RanksHere(NamedTuple):
    """The ranks of a move that are here: that of a process, or all virtual ones."""

    axis: Axis  # all that take part
    states: list[tuple[TrainState, int]]  # the old ones, each with its rank in its mesh
    new: int  # how many of them are in the new mesh
    is_stack: bool

    def tell(self, values: list[Any]) -> list[Any]:
        """Return what all ranks have, from what each one here has. A collective."""
        return values if self.is_stack else Ranks(axis=self.axis).tell(values[0])

    def run(self, count: int, do: Callable[[int], T]) -> list[T]:
        """Return what `do(number)` returns on so many of the ranks here."""
        return on_ranks(count, do) if self.is_stack else [do(0) for _ in range(count)]


@torch.no_grad()
def _moved(
    here: RanksHere,
    structure: Structure,
    facts: Sequence[RankFacts],
    stage: int | None,
    mesh: MeshLike,
) -> list[TrainState]:
    """Return the new states of the ranks here. facts: of all ranks."""
    manifest: Manifest = deepcopy(structure.manifest)  # with what all ranks keep
    slots, more = dict[str, Form](), dict[str, Form]()  # those that do not live for the run
    for one in facts:
        for name, kept in one.kept.items():
            manifest.kept.setdefault(name, deepcopy(kept))
        slots |= one.slots
        more |= one.more
    note_texts(manifest, (one.texts for one in facts))
    first, size = (0, here.axis.size) if here.is_stack else (here.axis.rank, 1)
    left: list[list[TensorPiece]] = [[]] * (size - len(here.states))
    has = [pieces_of_rank(*pair, live=True) for pair in here.states] + left
    holds = [pieces_of_rank(*pair, shared=True, live=True) for pair in here.states] + left
    spans = here.tell([spans_of(some) for some in has])

    def target(_: int) -> NewState:
        """Return zeros in the place of a state, and what of it comes from where."""
        pattern, tensors = structure.pattern, dict[str, Any]()
        wanted = pattern.setup.stage if stage is None else stage
        try:
            state = state_entries.blank_at(pattern, stage=wanted, mesh=mesh)
        except LayoutError as error:
            error.add_note(
                "(A state keeps its options where it is resharded. To go on with others, use "
                "fzero.checkpoint.save, and load into a state that was made with those.)"
            )
            raise
        rank = state.mesh.rank
        own = rank % state.setup.axis.size
        for name, some in (pair for rank_has in spans for pair in rank_has.items()):
            chunks = tensors.setdefault(name, {"chunks": []})["chunks"]
            chunks += [[start, stop - start] for start, stop in some]
        saved = replace(manifest, tensors=tensors)
        if (apart := saved.origin.get(state_entries.APART)) is not None:
            state_entries.require_facts(state, apart, _HERE, "reshard")
        made = dict(state.slots)  # and those that nobody makes anew
        for name, form in slots.items():
            if name not in made:
                entry = _blank_entry(manifest, state, name, form, own)
                empty = Slot(value=Buffers(placement=entry.placement), form=form)
                made[name] = slot_with(state.setup, empty, entry.values)
        moves = [
            _blank_entry(manifest, state, name, form, own)
            for name, form in more.items()
            if name not in slots
        ]
        state = state.replace(slots=made)
        there: Any = [state, [entry.values for entry in moves]]
        wait_for_copies(optree.tree_leaves(there, namespace=NAMESPACE))  # the host writes to it
        for slot in slots_of(state):  # some rules begin with other values; padding is zero
            slot.flat.zero_() if slot.codec is None else slot.codec.fill(slot.flat)
        return NewState(state, saved, rank, moves=moves)

    if here.is_stack:
        targets = here.run(here.new, target)
    else:
        targets = on_all(here.axis, lambda: here.run(here.new, target))
    if targets:
        targets[0].warn(_HERE, "reshard")
    wants = [room.pieces for room in targets] + [[]] * (size - len(targets))
    lacks = here.tell([copied(*some) for some in zip(holds, wants, strict=True)])
    stocks = [stock._replace(has=own) for stock, own in zip(lacks, spans, strict=True)]
    setup, device = structure.pattern.setup, structure.pattern.device
    units = dict[str, int]()  # the largest is the most that crosses ranks at once
    for leaf, unit in zip(setup.layout.leaves, setup.layout.options.units, strict=True):
        units[unit] = units.get(unit, 0) + prod(leaf.shape) * leaf.dtype.itemsize
    batch = max(units.values(), default=0)

    def exchange(k: int) -> None:
        redistribute(has[k], wants[k], stocks, here.axis, device, batch_bytes=batch)

    def finish(k: int) -> TrainState:
        progress, window = next_progress(facts, first + k)
        return targets[k].finalize().replace(window=window, progress=progress)

    here.run(size, exchange)
    return here.run(here.new, finish)


# Between which ranks.


def on_all(axis: Axis, do: Callable[[], T]) -> T:
    """Return `do()` once it has succeeded on every rank; raise an error of one on all of them."""

    def run() -> T:
        try:
            return do()
        except FzeroError:
            raise
        except Exception as error:
            text = next(iter(str(error).splitlines()), "")
            raise LayoutError(
                f"reshard: {type(error).__name__}: {text}",
                cause="a rank without memory for its new part, which is there beside the old one.",
                fix="free memory before the call, or go by fzero.checkpoint.save and load. The "
                "state is as it was.",
            ) from error

    return run_on_all_ranks(Ranks(axis=axis), run, what="reshard")


class MeshTransition(NamedTuple):
    """What a rank knows of a move."""

    axis: Axis  # all ranks that take part
    mesh: MeshLike  # the new one
    is_in: bool  # whether this rank is in it
    asked: str  # which ranks it has, as all ranks must have it in common


def mesh_transition(old: Axis | None, mesh: MeshLike) -> MeshTransition:
    """Return between which ranks a state moves that is on the mesh `old` now.

    old: None on a rank that has no state.

    Raises `AxisError` unless one mesh has all ranks of the other; on all ranks of the new one.
    """
    refuse_part(mesh, "reshard")
    if mesh is None:
        if old is None:
            raise LayoutError(
                "reshard(None): a rank without a state, and no mesh.",
                cause="mesh= was left out; a state says on which mesh it is, None does not.",
                fix="give the new mesh on every rank: mesh=fzero.world() for all ranks.",
            )
        return MeshTransition(replace(old, dims=None), old, True, f"{old}")
    if current_ranks() is not None:  # virtual ranks, each with a state before and after
        new, here = axis_of(mesh), world()
        if old is None or not new.size == old.size == here.size:
            before = "no state" if old is None else f"a state of {old.size} ranks"
            raise AxisError(
                f"reshard inside of {here.size} virtual ranks: of {before}, to {new.size} ranks.",
                cause="virtual ranks that come and go inside of fzero.simulate, whose tensors have "
                "one row for each rank.",
                fix="call it outside, with the stacked state: fzero.reshard(state, mesh=(1, W)) "
                "for W ranks in one dim gives a state for fzero.simulate(..., world_size=W).",
            )
        return MeshTransition(replace(new, dims=None), new, True, f"{new}")
    ours = global_ranks(old)
    theirs = _ranks_of_mesh(mesh)
    mine = dist.get_rank() if theirs is not None and dist.is_initialized() else 0
    if theirs is None or theirs == [mine] == ours:  # one rank without a process group
        new = axis_of(mesh)
        return MeshTransition(replace(new, dims=None), mesh, True, f"{new}")
    is_in, asked = mine in theirs, f"the ranks {theirs}"
    if is_in and (old is None or set(ours) <= set(theirs)):
        return MeshTransition(replace(axis_of(mesh), dims=None), mesh, True, asked)
    if old is not None and set(theirs) < set(ours):
        return MeshTransition(replace(old, dims=None), mesh, is_in, asked)

    def refuse() -> NoReturn:
        raise AxisError(
            f"reshard from the ranks {ours} to the ranks {theirs}, called on rank {mine}.",
            cause="two meshes of which neither has all ranks of the other, or a call on a rank "
            "that is in none of them.",
            fix="go by a mesh that has all of them: reshard to that, then to the ranks that stay. "
            "All ranks of the larger mesh call it, and no other.",
        )

    if is_in:
        on_all(axis_of(mesh), refuse)  # the others of the new mesh wait for this one
    refuse()


def global_ranks(axis: Axis | None) -> list[int]:
    """Return the ranks of an axis among all of the program; none for None."""
    if axis is None:
        return []
    if axis.runtime is Runtime.VIRTUAL:
        return [*range(axis.size)]
    if axis.runtime is Runtime.PROCESSES:
        return dist.get_process_group_ranks(axis.group())
    return [dist.get_rank() if dist.is_initialized() else 0]


def _ranks_of_mesh(mesh: Any) -> list[int] | None:
    """Return the global ranks that a mesh means; None where there is one process."""
    if isinstance(mesh, DeviceMesh):
        return mesh.mesh.flatten().tolist()
    axis = axis_of(mesh)
    if axis.runtime is Runtime.VIRTUAL:
        raise AxisError(
            f"reshard to {axis}: the state is one of processes.",
            cause="a mesh of virtual ranks, which stacked states have.",
            fix="give a DeviceMesh, or fzero.world().",
        )
    if axis.runtime is Runtime.LOCAL and world().size > 1:
        raise AxisError(
            f"reshard to {axis}, which is another rank on each of {world().size} processes.",
            cause="an Axis(size=1), made by hand.",
            fix='say which rank it is: DeviceMesh("cpu", [0]).',
        )
    return global_ranks(axis) if dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What a state is, on whatever ranks."""

    pattern: state_entries.Pattern
    manifest: Manifest


def structure_of(held: LocalStates) -> Structure:
    """Return what the held state is. With replicas that train apart, a collective of its ranks."""
    state = held.states[0]
    manifest = facts_of_state(state)
    facts, counters = facts_of_replicas(held), manifest.counters
    if facts:  # those of replica 0, as in a checkpoint
        counters = facts[state_entries.APART]["replicas"][0]["counters"]
    origin = {**manifest.origin, **facts}
    manifest = replace(manifest, origin=origin, counters=counters)
    return Structure(pattern=state_entries.pattern_of(state), manifest=manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What every rank of a move says of itself, and of what it keeps, which others may not have."""

    is_in: bool  # whether it is in the new mesh
    knows: bool  # what the state is
    asked: str  # the new stage and mesh
    progress: Progress | None = None  # on its way to the next update; None: it has no state
    window: Window = CLOSED
    texts: Texts = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # as a manifest has it
    slots: dict[str, Form] = field(default_factory=dict)
    more: dict[str, Form] = field(default_factory=dict)  # of no slot, and not for the run


def facts_of_rank(state: TrainState, rank: int, is_in: bool, asked: str) -> RankFacts:
    """Return them, of a rank that has a state. Raises `PhaseError` where it cannot move."""
    state_entries.require_movable(state)
    own, slots = rank % state.setup.axis.size, state.slots.items()
    entries = state_entries.entries_of(state, own, live=True)
    return RankFacts(
        is_in=is_in,
        knows=True,
        asked=asked,
        progress=state.progress,
        window=pop(state.window)[0],  # its gradients are all reduced
        texts=named_texts(state, rank),
        kept=kept_facts(state, own, live=True),
        slots={k: slot.form for k, slot in slots if not state_entries.follows_setup(k)},
        more={x.name: x.form for x in entries if x.form.lifetime != "run"},
    )


def next_progress(facts: Sequence[RankFacts], rank: int) -> tuple[Progress, Window]:
    """Return how far a rank is after a move: as before, and as ranks that leave."""
    known = {rank: one.progress for rank, one in enumerate(facts) if one.progress is not None}
    first = next(iter(known))
    own = rank if rank in known else first
    progress, used = known[own], 0
    for other in known.values():  # what any rank has used is stepped
        used |= other.used
    bad = [progress.nonfinite] if own == rank else []
    if rank == next(r for r, one in enumerate(facts) if one.is_in):  # one rank has theirs
        bad += [other.nonfinite for r, other in known.items() if not facts[r].is_in]
    nonfinite = next((x for x in bad if x is not None), None)
    return replace(progress, used=used, nonfinite=nonfinite), facts[own].window


def _blank_entry(manifest: Manifest, state: TrainState, name: str, form: Form, rank: int) -> Entry:
    """Return zeros for what is kept under a name, as the manifest says its dtypes and shapes."""
    setup, layout, device, values = state.setup, state.setup.layout, state.device, {}
    texts, names = manifest.kept[name]["values"], leaf_paths(layout)
    if form.leaves in ("number", "named"):
        placement = form.placed(setup.optimizer_state)
        for key, text in texts.items():
            shape, dtype = form_in(f"{name}/{key}", text) or ((), torch.float32)
            if placement is Placement.OWNER and not state_entries.is_owner(setup, key, rank):
                shape = (0,)
            values[key] = torch.zeros(shape, dtype=dtype, device=device)
        return Entry(name=name, form=replace(form, placement=placement), values=values)
    runs = form.lifetime == "run"
    placement = (form.placement if runs else None) or setup.optimizer_state
    home = setup.offload.optimizer if runs else setup.offload.gradients
    for i in layout.trainable if form.leaves == "learning" else range(len(layout.groups)):
        own = (texts[names[k]] for k in layout.groups[i].leaves if names[k] in texts)
        text = next(own, next(iter(texts.values()), "torch.float32"))  # a group may have no element
        dtype = getattr(torch, text.removeprefix("torch."))
        flat = torch.zeros(setup.numel(i, placement), dtype=dtype, device=device)
        values[i] = offloaded(home, flat, setup.offload)
    return Entry(name=name, form=replace(form, placement=placement), values=values)


def as_sent(structure: Structure) -> bytes:
    """Return a structure for ranks that have none. It has no elements of parameters.

    Raises `LayoutError` for one that only the process that made it can hold.
    """
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(structure)
    except LayoutError:
        raise
    except Exception as error:  # an object of the user's may raise anything
        raise _not_described(
            f"{type(error).__name__}: {error}",
            cause="an object among the options or in the optimizer that cannot be pickled.",
            fix="use objects of classes that can be, with functions that have a name in a module",
        ) from error
    return stream.getvalue()


def _not_described(seen: str, cause: str, fix: str) -> LayoutError:
    return LayoutError(
        f"reshard: the state cannot be described to a rank that has none: {seen}.",
        cause=cause,
        fix=f"{fix}; or go by fzero.checkpoint.save, and load it into a state that each rank has "
        "made. Nothing was changed.",
    )


def as_received(sent: bytes) -> Structure:
    """Return what another rank of this program has sent, for the device of this process.

    Raises `LayoutError` for functions or classes that this process has not.
    """
    try:
        found: Structure = pickle.loads(sent)
    except Exception as error:
        raise LayoutError(
            f"reshard: what the state is cannot be read on this rank: "
            f"{type(error).__name__}: {error}.",
            cause="a function or a class among the options that this process does not have: "
            "another script or version, or one that only some ranks define.",
            fix="run the same script on every rank, and define it before the call on all of them.",
        ) from error
    if found.pattern.device.type == "cpu":
        return found
    here = current_device(found.pattern.device.type)
    return replace(found, pattern=replace(found.pattern, device=here))


class _Pickler(pickle.Pickler):
    """Refuses what has the parameters of a process, and functions that have no name for others."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TorchOptimizer) and obj.instance is obj.source:
            raise _not_described(
                f"{obj!r} is one object with its parameters",
                cause="an optimizer of torch that was made of this process's parameters.",
                fix="use a rule of fzero.optim, or fzero.optim.from_torch(class)",
            )
        if isinstance(obj, FunctionType):
            name, code = obj.__qualname__, obj.__code__
            known = getattr(sys.modules.get(obj.__module__), name, None)  # as pickle looks it up
            if known is obj or ("<" not in name and "." in name):  # of a class
                return NotImplemented
            raise _not_described(
                f"it has the function {name} ({code.co_filename}:{code.co_firstlineno})",
                cause="a lambda, or a function that was defined inside of another one, as a "
                "learning rate, a mask, a label or another option.",
                fix="use a function with a name in its module (`def`, not inside of another "
                "function), or functools.partial of one",
            )
        if isinstance(obj, Tensor) and obj.device.type != "cpu":
            return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


# From the pieces that ranks hold to those that they are to hold: all-to-alls, batch by batch.
#
#     has     this rank's own part of all that there is: what it gives to others
#     holds   what it can copy for itself; `has`, and what other ranks hold, too
#     wants   pieces of new memory, to be filled
#
# Every rank says what it has for the others, and what it lacks. From that each of them knows all
# batches, and what goes from any rank to any other in each of them.


def copied(holds: Sequence[TensorPiece], wants: Sequence[TensorPiece]) -> Stock:
    """Fill what this rank wants and holds itself; return what it lacks then."""
    sources, own = by_name(holds), spans_of(holds)
    for want in wants:
        start, stop = want.start, want.start + want.values.numel()
        for held in sources.get(want.name, ()):
            low, high = max(start, held.start), min(stop, held.start + held.values.numel())
            if low < high:
                here = held.values[low - held.start : high - held.start]
                want.values[low - start : high - start].copy_(here, non_blocking=True)
    left = {name: without(spans, own.get(name, ())) for name, spans in spans_of(wants).items()}
    lacks = {name: spans for name, spans in left.items() if spans}
    itemsizes = {want.name: want.values.dtype.itemsize for want in wants if want.name in lacks}
    return Stock({}, lacks, itemsizes)


def redistribute(
    has: Sequence[TensorPiece],
    wants: Sequence[TensorPiece],
    stocks: Sequence[Stock],
    axis: Axis,
    device: torch.device,
    *,
    batch_bytes: int,
) -> None:
    """Fill what ranks lack from what others have: one all-to-all for each batch. A collective.

    stocks: of every rank of the axis. device: where this rank communicates from.
    batch_bytes: what a rank sends at once, and what it receives at once, is no more.
    """
    sources, targets, rank = by_name(has), by_name(wants), axis.rank

    def nbytes(crossing: Crossing) -> int:
        itemsize = targets[crossing.name][0].values.dtype.itemsize
        return (crossing.stop - crossing.start) * itemsize

    def exchange(batch: Mapping[str, Span]) -> None:
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        packed: dict[tuple[Crossing, ...], Tensor] = {(): nothing}
        sent, arriving = list[Tensor](), list[list[Crossing]]()
        for r, other in enumerate(stocks):
            away = r != rank
            going = tuple(crossings(other.lacks, stocks[rank].has, batch)) if away else ()
            if going not in packed:  # what several ranks lack is packed once; one range is not
                views = [x for one in going for _, x in _bytes_in(sources[one.name], one)]
                parts = [to_device(x, device) for x in views]
                packed[going] = parts[0] if len(parts) == 1 else torch.cat(parts)
            sent.append(packed[going])
            arriving.append([*crossings(stocks[rank].lacks, other.has, batch)] if away else [])
        sizes = [sum(map(nbytes, some)) for some in arriving]
        total = sum(stop - start for start, stop in batch.values())
        flight = start_uneven_all_to_all(sent, sizes, axis, total=total)
        for some, received in zip(arriving, flight.wait(), strict=True):
            at = 0
            for one in some:
                for begin, own in _bytes_in(targets[one.name], one):
                    own.copy_(received[at + begin :][: own.numel()], non_blocking=True)
                at += nbytes(one)

    for batch in batches_of(stocks, batch_bytes):
        exchange(batch)  # nothing of a batch outlives it


def by_name(pieces: Sequence[TensorPiece]) -> dict[str, list[TensorPiece]]:
    """Return the pieces of each logical tensor."""
    found = dict[str, list[TensorPiece]]()
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    return found


def _bytes_in(pieces: Sequence[TensorPiece], one: Crossing) -> Iterator[tuple[int, Tensor]]:
    """Yield (where it begins, in bytes of all that crosses; the bytes: a view) of what pieces have.

    In the order of the elements that cross.
    """
    for piece in sorted(pieces, key=lambda piece: piece.start):
        low = max(piece.start, one.start)
        high = min(piece.start + piece.values.numel(), one.stop)
        if low < high:
            x = piece.values[low - piece.start : high - piece.start]
            real = torch.view_as_real(x) if x.is_complex() else x
            yield (low - one.start) * x.dtype.itemsize, real.reshape(-1).view(torch.uint8)


Span = tuple[int, int]
"""The first of some elements, and the one behind the last."""
Spans = dict[str, list[Span]]
"""{logical tensor: its elements}, in ascending order."""


class Stock(NamedTuple):
    """What one rank has, and lacks."""

    has: Spans  # for others: of all ranks together, each element once
    lacks: Spans  # of what it is to hold
    itemsizes: dict[str, int]  # bytes of an element of what it lacks


class Crossing(NamedTuple):
    """Elements `start` to `stop` of the logical tensor `name`, which go to another rank."""

    name: str
    start: int
    stop: int


def spans_of(pieces: Iterable[TensorPiece]) -> Spans:
    """Return which elements the pieces hold."""
    found: Spans = {}
    for piece in pieces:
        if numel := piece.values.numel():
            found.setdefault(piece.name, []).append((piece.start, piece.start + numel))
    return {name: sorted(some) for name, some in found.items()}


def without(some: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """Return the elements that are in `some` and not in `taken`.

    Example:
        >>> without([(0, 9)], [(2, 4), (6, 7)])
        [(0, 2), (4, 6), (7, 9)]
    """
    left = list(some)
    for start, stop in taken:
        cut = ((low, min(high, start), max(low, stop), high) for low, high in left)
        both = [span for a, b, c, d in cut for span in ((a, b), (c, d))]
        left = [(low, high) for low, high in both if low < high]
    return left


def batches_of(stocks: Sequence[Stock], batch_bytes: int) -> Iterator[dict[str, Span]]:
    """Yield the elements of each batch: of all that any rank lacks, at most so many bytes.

    Example:
        >>> lacking = Stock({}, {"w": [(0, 5)], "b": [(0, 2)]}, {"w": 4, "b": 4})
        >>> list(batches_of([lacking], 16))
        [{'w': (0, 4)}, {'w': (4, 5), 'b': (0, 2)}]
    """
    batch: dict[str, Span] = {}
    left = batch_bytes
    for name in dict.fromkeys(name for stock in stocks for name in stock.lacks):
        itemsize = next(stock.itemsizes[name] for stock in stocks if name in stock.lacks)
        for start, stop in _union(span for stock in stocks for span in stock.lacks.get(name, ())):
            while start < stop:
                if left < itemsize:
                    yield batch
                    batch, left = {}, batch_bytes
                end = min(stop, start + max(left, itemsize) // itemsize)
                batch[name] = batch.get(name, (start, end))[0], end
                left -= (end - start) * itemsize
                start = end
    if batch:
        yield batch


def crossings(
    lacks: Mapping[str, Sequence[Span]],
    has: Mapping[str, Sequence[Span]],
    batch: Mapping[str, Span],
) -> Iterator[Crossing]:
    """Yield what goes in a batch from a rank that has these elements to one that lacks those."""
    for name, (first, last) in batch.items():
        for low, high in lacks.get(name, ()):
            for start, stop in has.get(name, ()):
                start, stop = max(start, low, first), min(stop, high, last)
                if start < stop:
                    yield Crossing(name, start, stop)


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return the elements that are in any of the spans, in ascending order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found
