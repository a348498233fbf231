"""A live state to another stage, or to other ranks: as if it was saved and loaded, with no file.

    old state -> the pieces that a rank holds - copied, carried -> pieces of new memory
        |                                                                   ^
        +-> structure - blank_at, room_for -> new state -------------------+

Pieces, and the numbers beside them, are those of a checkpoint. What lives until the update, which
a checkpoint has no room for, goes the same way.

Between which ranks a live state moves: the old mesh, the new one, and the larger of both.

What all ranks must know of a live state before it moves, but for the elements of its tensors.

A manifest says it of leaves, slots and counters, as in a checkpoint. Rule, options and pytree are
records of this program: a rank without a state gets them from one that has it.

How far ranks are on their way to the next update: the numbers that ride beside tensors.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
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

from fzero.checkpoint._allocate import NewState, finished_room, on_ranks, room_for, warn_of
from fzero.checkpoint._pieces import TensorPiece, Texts, form_in, pieces_of_rank, place_of
from fzero.checkpoint._process_states import Held, facts_of_replicas, held_by, stack_of, texts_here
from fzero.checkpoint._redistribute import Spans, carry, copied, spans_of
from fzero.checkpoint.collective import Ranks, everywhere
from fzero.checkpoint.manifest import Manifest, facts_of_state, kept_facts, note_texts, require_fit
from fzero.collectives import disagreement
from fzero.context.here import current_ranks
from fzero.errors import AxisError, FzeroError, LayoutError
from fzero.machine.by_path import leaf_paths
from fzero.machine.offload import offloaded
from fzero.optim import TorchOptimizer
from fzero.optim.entries import slots_of
from fzero.ranks.mesh import Axis, MeshLike, Runtime, axis_of, refuse_part, world
from fzero.state import NAMESPACE, Buffers, Form, Placement, Progress, Setup, Slot, TrainState
from fzero.state.alive import require_not_donated
from fzero.state.entry import Entry, slot_with
from fzero.transforms.kept import (
    APART,
    entries_of,
    follows_setup,
    is_owner,
    require_facts,
    require_movable,
)
from fzero.transforms.pattern import Pattern, blank_at, pattern_of

T = TypeVar("T")

_HERE = "the state of before"


class Said(NamedTuple):
    """What every rank of a move says of itself."""

    way: UnderWay | None  # None: it has no state
    is_in: bool  # whether it is in the new mesh
    knows: bool  # what the state is
    asked: str  # the new stage and mesh
    told: KeptHere | None  # what it keeps


def first_on_old(where: Between, old: Axis | None, do: Callable[[], T]) -> T:
    """Return `do()`, a call of all ranks of the old mesh; ranks that come hear of its error."""
    if old is not None and old.size == where.axis.size:
        return do()
    return on_all(where.axis, do)


def held_here(state: TrainState) -> Held:
    """Return the state of this rank, of a process or a virtual one, as what it holds."""
    if current_ranks() is None:
        return held_by("reshard", state, apart=True)
    require_not_donated(state)
    axis = state.mesh
    return Held(processes=Ranks(axis=axis), ranks=(axis.rank,), states=(state,))


@torch.no_grad()
def moved(
    held: Held | None, where: Between, stage: int | None, like: Structure | None = None
) -> TrainState | None:
    """Return the state at a stage on the new mesh; None on a rank outside of it. A collective.

    held: what this process has, with gradients that are all reduced; None: no state.
    like: of a rank without a state, what that is but for its numbers; None: it is told.
    """
    ranks = Ranks(axis=where.axis)

    def begin() -> tuple[Structure | None, Said]:
        asked = f"stage {stage} on {where.asked}"
        if held is None:
            return like, Said(None, where.is_in, like is not None, asked, None)
        way = under_way(held.states[0])
        return structure_of(held), Said(way, where.is_in, True, asked, told_of(held))

    known, own = on_all(ranks.axis, begin)
    said = ranks.tell(own)
    if len({one.asked for one in said}) > 1:
        raise disagreement([[one.asked] for one in said], what="reshard")
    told = [one.told for one in said if one.told is not None]
    structure = with_told(_told(ranks, known, said), told)
    has = [] if held is None else _pieces(held.states[0], held.ranks[0])
    spans = ranks.tell(spans_of(has))
    way = next_way([(one.way, one.is_in) for one in said], ranks.axis.rank)

    def prepare() -> list[NewState]:
        if not where.is_in:
            return []
        blank = _blank(structure, stage, where.mesh)
        return [_target(structure, blank, blank.mesh.rank, spans, way)]

    targets = on_all(ranks.axis, prepare)
    warn_of(targets, structure.manifest, _HERE, "reshard")
    wants = [piece for target in targets for piece in target.pieces]
    holds = [] if held is None else _pieces(held.states[0], held.ranks[0], shared=True)
    lacks = ranks.tell(copied(holds, wants))
    stocks = [stock._replace(has=some) for stock, some in zip(lacks, spans, strict=True)]
    carry(has, wants, stocks, ranks.axis, structure.device, batch_bytes=structure.batch_bytes)
    return finished_room(targets[0]) if targets else None


def _told(ranks: Ranks, known: Structure | None, said: Sequence[Said]) -> Structure:
    """Return the structure of the state, on ranks that have none, too. A collective."""
    members = [rank for rank, one in enumerate(said) if one.way is not None]
    if not members:
        raise AxisError(
            f"reshard: none of the {len(said)} ranks has a state.",
            cause="None on every rank of the mesh, or a mesh without the ranks of the state.",
            fix="give the state on the ranks that have it; all of those call it.",
        )
    if len(members) == len(said):
        assert known is not None
        return known
    first = ranks.axis.rank == members[0]
    if all(one.knows for one in said):
        assert known is not None
        saved = ranks.tell(known.manifest if first else None)[members[0]]
        on_all(ranks.axis, lambda: require_fit(saved, known.manifest, _HERE))
        return replace(known, manifest=saved)

    def send() -> bytes:
        return as_sent(known) if first and known is not None else b""

    sent = ranks.tell(on_all(ranks.axis, send))[members[0]]
    return on_all(ranks.axis, lambda: as_received(sent) if known is None else known)


def moved_stack(held: Held, stage: int | None, mesh: MeshLike, size: int) -> TrainState:
    """`moved` of the stacked state of all virtual ranks, to `size` of them."""
    states: list[Any] = _moved_states(held, stage, mesh, size)
    treespec = optree.tree_structure(states[0], namespace=NAMESPACE)
    columns = [*zip(*(optree.tree_leaves(x, namespace=NAMESPACE) for x in states), strict=True)]
    states.clear()
    made: list[Any] = []
    while columns:  # what a rank has of a tensor is let go when it is in the stack
        made.append(stack_of(columns.pop(0)))
    found: Any = optree.tree_unflatten(treespec, made)
    return found


@torch.no_grad()
def _moved_states(held: Held, stage: int | None, mesh: MeshLike, size: int) -> list[TrainState]:
    structure = with_told(structure_of(held), [told_of(held)])
    pairs = [*zip(held.states, held.ranks, strict=True)]
    both = max(len(pairs), size)
    ways = [under_way(state) for state in held.states]
    said = [(way, rank < size) for rank, way in enumerate(ways)]
    said += [(None, True)] * (both - len(ways))
    has = [_pieces(*pair) for pair in pairs] + [[] for _ in range(both - len(pairs))]
    holds = [_pieces(*pair, shared=True) for pair in pairs]
    spans = [spans_of(some) for some in has]
    blanks = on_ranks(size, lambda _: _blank(structure, stage, mesh))
    targets = [
        _target(structure, blank, rank, spans, next_way(said, rank))
        for rank, blank in enumerate(blanks)
    ]
    warn_of(targets, structure.manifest, _HERE, "reshard")
    wants = [target.pieces for target in targets] + [[] for _ in range(both - size)]
    holds += [[] for _ in range(both - len(holds))]
    stocks = [
        copied(*some)._replace(has=own) for *some, own in zip(holds, wants, spans, strict=True)
    ]
    axis = Axis(size=both, runtime=Runtime.VIRTUAL if both > 1 else Runtime.LOCAL)

    def body(rank: int) -> None:
        batch_bytes = structure.batch_bytes
        carry(has[rank], wants[rank], stocks, axis, structure.device, batch_bytes=batch_bytes)

    on_ranks(both, body)
    return on_ranks(size, lambda rank: finished_room(targets[rank]))


# One rank.


def _pieces(state: TrainState, rank: int, *, shared: bool = False) -> list[TensorPiece]:
    """Return a rank's own part of all that a state has; or all that it holds, if `shared`."""
    return pieces_of_rank(state, rank, shared=shared, live=True)


def _blank(structure: Structure, stage: int | None, mesh: MeshLike) -> TrainState:
    """Return a state of zeros at a stage, on a mesh that this rank is in."""
    stage = structure.setup.stage if stage is None else stage
    try:
        state = blank_at(structure.pattern, stage=stage, mesh=mesh)
    except LayoutError as error:
        error.add_note(
            "(A state keeps its options where it is resharded. To go on with others, use "
            "fzero.checkpoint.save, and load into a state that was made with those.)"
        )
        raise
    for slot in slots_of(state):  # some rules begin with other values; padding is zero
        slot.flat.zero_() if slot.codec is None else slot.codec.fill(slot.flat)
    return state


def _target(
    structure: Structure, blank: TrainState, rank: int, has: Sequence[Spans], way: UnderWay
) -> NewState:
    """Return the new state of a rank of the new mesh, and what of it is to be filled.

    has: what every rank has of the old one.
    """
    tensors: dict[str, Any] = {}
    for spans in has:
        for name, some in spans.items():
            chunks = tensors.setdefault(name, {"chunks": []})["chunks"]
            chunks += [[start, stop - start] for start, stop in some]
    saved = replace(structure.manifest, tensors=tensors)
    if (facts := saved.origin.get(APART)) is not None:
        require_facts(blank, facts, _HERE, "reshard")
    own = place_of(blank, rank)[1]
    like, more = with_slots(structure, blank, own), more_of(structure, blank, own)
    room = room_for(like, saved, rank, Tensor.zero_, shared=True, live=True, more=more)
    return replace(room, state=with_way(room.state, way))


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

    return everywhere(Ranks(axis=axis), run, what="reshard")


class Between(NamedTuple):
    """What a rank knows of a move."""

    axis: Axis  # all ranks that take part
    mesh: MeshLike  # the new one
    is_in: bool  # whether this rank is in it
    asked: str  # which ranks it has, as all ranks must have it in common


def between(old: Axis | None, mesh: MeshLike) -> Between:
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
        return Between(replace(old, dims=None), old, True, f"{old}")
    if current_ranks() is not None:
        return _between_virtual(old, mesh)
    ours = global_ranks(old)
    theirs = _ranks_of_mesh(mesh)
    mine = dist.get_rank() if theirs is not None and dist.is_initialized() else 0
    if theirs is None or theirs == [mine] == ours:  # one rank without a process group
        new = axis_of(mesh)
        return Between(replace(new, dims=None), mesh, True, f"{new}")
    is_in, asked = mine in theirs, f"the ranks {theirs}"
    if is_in and (old is None or set(ours) <= set(theirs)):
        return Between(replace(axis_of(mesh), dims=None), mesh, True, asked)
    if old is not None and set(theirs) < set(ours):
        return Between(replace(old, dims=None), mesh, is_in, asked)

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


def _between_virtual(old: Axis | None, mesh: MeshLike) -> Between:
    """Inside `fzero.simulate` all ranks have a state before, and after."""
    new, here = axis_of(mesh), world()
    if old is None or not new.size == old.size == here.size:
        before = "no state" if old is None else f"a state of {old.size} ranks"
        raise AxisError(
            f"reshard inside of {here.size} virtual ranks: of {before}, to {new.size} ranks.",
            cause="virtual ranks that come and go inside of fzero.simulate, whose tensors have "
            "one row for each rank.",
            fix="call it outside, with the stacked state: fzero.reshard(state, mesh=(1, W)) for W "
            "ranks in one dim, which gives a state for fzero.simulate(..., world_size=W).",
        )
    return Between(replace(new, dims=None), new, True, f"{new}")


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

    pattern: Pattern
    manifest: Manifest
    slots: dict[str, Form] = field(default_factory=dict)
    more: dict[str, Form] = field(default_factory=dict)  # no slot, and does not live for the run

    @property
    def setup(self) -> Setup:
        """Of the state."""
        return self.pattern.setup

    @property
    def device(self) -> torch.device:
        """Where the state computes."""
        return self.pattern.device

    @property
    def batch_bytes(self) -> int:
        """Bytes of the largest unit, which is the most that crosses ranks at once."""
        layout = self.setup.layout
        sizes: dict[str, int] = {}
        for leaf, unit in zip(layout.leaves, layout.options.units, strict=True):
            sizes[unit] = sizes.get(unit, 0) + prod(leaf.shape) * leaf.dtype.itemsize
        return max(sizes.values(), default=0)


class KeptHere(NamedTuple):
    """What a rank tells of what it keeps, which others may not have."""

    texts: list[Texts]
    kept: dict[str, Any]  # as a manifest has it
    slots: dict[str, Form]
    more: dict[str, Form]  # of what is no slot, and does not live for the run


def structure_of(held: Held) -> Structure:
    """Return what the held state is. With replicas that train apart, a collective of its ranks."""
    state = held.states[0]
    manifest = facts_of_state(state)
    facts, counters = facts_of_replicas(held), manifest.counters
    if facts:  # those of replica 0, as in a checkpoint
        counters = facts[APART]["replicas"][0]["counters"]
    origin = {**manifest.origin, **facts}
    manifest = replace(manifest, origin=origin, counters=counters)
    return Structure(pattern=pattern_of(state), manifest=manifest)


def told_of(held: Held) -> KeptHere:
    """Return what the ranks of this process tell."""
    found = KeptHere(texts_here(held), {}, {}, {})
    for state, rank in zip(held.states, held.ranks, strict=True):
        own = place_of(state, rank)[1]
        found.kept.update(kept_facts(state, own, live=True))
        slots = {k: slot for k, slot in state.slots.items() if not follows_setup(k)}
        found.slots.update({name: slot.form for name, slot in slots.items()})
        every = entries_of(state, own, live=True)
        found.more.update({x.name: x.form for x in every if x.form.lifetime != "run"})
    return found


def with_told(structure: Structure, told: Sequence[KeptHere]) -> Structure:
    """Return the structure with what all ranks have told."""
    manifest: Manifest = deepcopy(structure.manifest)
    slots, more = dict[str, Form](), dict[str, Form]()
    for one in told:
        manifest.kept.update(
            {k: deepcopy(x) for k, x in one.kept.items() if k not in manifest.kept}
        )
        slots |= one.slots
        more |= one.more
    note_texts(manifest, (texts for one in told for texts in one.texts))
    more = {name: form for name, form in more.items() if name not in slots}
    return replace(structure, manifest=manifest, slots=slots, more=more)


def with_slots(structure: Structure, blank: TrainState, rank: int) -> TrainState:
    """Return a state that was made anew with the slots that nobody makes anew, of zeros."""
    made: dict[str, Slot] = {}
    for name, form in structure.slots.items():
        if name not in blank.slots:
            entry = _blank_entry(structure, blank, name, form, rank)
            empty = Slot(value=Buffers(placement=entry.placement), form=form)
            made[name] = slot_with(blank.setup, empty, entry.values)
    return blank.replace(slots={**blank.slots, **made})


def more_of(structure: Structure, blank: TrainState, rank: int) -> list[Entry]:
    """Return what is no slot, and does not live for the run, of zeros."""
    return [_blank_entry(structure, blank, *one, rank) for one in structure.more.items()]


def _blank_entry(
    structure: Structure, state: TrainState, name: str, form: Form, rank: int
) -> Entry:
    setup, device = state.setup, state.device
    texts, names = structure.manifest.kept[name]["values"], leaf_paths(setup.layout)
    if form.leaves in ("number", "named"):
        values: dict[Any, Tensor] = {}
        for key, text in texts.items():
            shape, dtype = form_in(f"{name}/{key}", text) or ((), torch.float32)
            values[key] = torch.zeros(shape, dtype=dtype, device=device)
        placement = form.placed(setup.optimizer_state)
        if placement is Placement.OWNER:
            values = {
                key: x if is_owner(setup, key, rank) else x.new_zeros((0,))
                for key, x in values.items()
            }
        return Entry(name=name, form=replace(form, placement=placement), values=values)
    layout = setup.layout
    placement = form.placement if form.lifetime == "run" else None
    home = setup.offload.optimizer if form.lifetime == "run" else setup.offload.gradients
    form = replace(form, placement=placement if placement else setup.optimizer_state)
    values = {}
    for i in layout.trainable if form.leaves == "learning" else range(len(layout.groups)):
        own = (texts[names[k]] for k in layout.groups[i].leaves if names[k] in texts)
        text = next(own, next(iter(texts.values()), "torch.float32"))  # a group may have no element
        dtype = getattr(torch, text.removeprefix("torch."))
        assert form.placement is not None
        flat = torch.zeros(setup.numel(i, form.placement), dtype=dtype, device=device)
        values[i] = offloaded(home, flat, setup.offload)
    return Entry(name=name, form=form, values=values)


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
    if found.device.type != "cuda":
        return found
    here = torch.device("cuda", torch.cuda.current_device())
    return replace(found, pattern=replace(found.pattern, device=here))


def _has_name(function: FunctionType) -> bool:
    """Whether its module has it under its name, as pickle looks it up."""
    module = sys.modules.get(function.__module__)
    return getattr(module, function.__qualname__, None) is function or (
        "<" not in function.__qualname__ and "." in function.__qualname__  # of a class
    )


class _Pickler(pickle.Pickler):
    """Refuses what has the parameters of a process, and functions that have no name for others."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TorchOptimizer) and obj.instance is obj.source:
            raise _not_described(
                f"{obj!r} is one object with its parameters",
                cause="an optimizer of torch that was made of this process's parameters.",
                fix="use a rule of fzero.optim, or fzero.optim.from_torch(class)",
            )
        if isinstance(obj, FunctionType) and not _has_name(obj):
            code = obj.__code__
            raise _not_described(
                f"it has the function {obj.__qualname__} ({code.co_filename}:"
                f"{code.co_firstlineno})",
                cause="a lambda, or a function that was defined inside of another one, as a "
                "learning rate, a mask, a label or another option.",
                fix="use a function with a name in its module (`def`, not inside of another "
                "function), or functools.partial of one",
            )
        if isinstance(obj, Tensor) and obj.device.type != "cpu":
            return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """How far one rank is on its way to the next update; its gradients are all reduced."""

    progress: Progress
    is_open: bool  # a coalescing window
    length: int
    is_settled: bool


def under_way(state: TrainState) -> UnderWay:
    """Return how far a rank is. Raises `PhaseError` where it cannot move."""
    require_movable(state)
    window = state.window
    return UnderWay(
        progress=state.progress,
        is_open=window.is_open,
        length=window.length,
        is_settled=window.is_settled,
    )


def next_way(said: Sequence[tuple[UnderWay | None, bool]], rank: int) -> UnderWay:
    """Return how far a rank is after a move: as before, and as ranks that leave.

    said: of every rank how far it was, None without a state; and whether it is in the new mesh.
    """
    known = [way for way, _ in said if way is not None]
    own = said[rank][0]
    if own is None:
        own = replace(known[0], progress=replace(known[0].progress, nonfinite=None))
    gone: list[UnderWay] = []
    if rank == next(r for r, (_, is_in) in enumerate(said) if is_in):  # one rank has theirs
        gone = [way for way, is_in in said if way is not None and not is_in]
    used = 0
    for way in known:  # what any rank has used is stepped
        used |= way.progress.used
    bad = [way.progress.nonfinite for way in (own, *gone) if way.progress.nonfinite is not None]
    return replace(own, progress=replace(own.progress, used=used, nonfinite=next(iter(bad), None)))


def with_way(state: TrainState, way: UnderWay) -> TrainState:
    """Return a state that is so far on its way."""
    window = replace(
        state.window, is_open=way.is_open, length=way.length, is_settled=way.is_settled
    )
    return state.replace(window=window, progress=way.progress)
