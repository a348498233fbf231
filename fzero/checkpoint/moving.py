"""A live state to another stage, or to other ranks: as if it was saved and loaded, with no file.

    old state -> the pieces that a rank holds - copied, carried -> pieces of new memory
        |                                                                   ^
        +-> structure - blank_at, room_for -> new state -------------------+

Pieces, and the numbers beside them, are those of a checkpoint. What lives until the update, which
a checkpoint has no room for, goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from fzero.checkpoint._between import Between as Between
from fzero.checkpoint._between import between as between
from fzero.checkpoint._between import global_ranks as global_ranks
from fzero.checkpoint._between import on_all as on_all
from fzero.checkpoint._carry import carry, copied
from fzero.checkpoint._complete import on_ranks
from fzero.checkpoint._held import Held, held_by, stack_of
from fzero.checkpoint._kept import pieces_of_rank, place_of
from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint._room import NewState, finished_room, room_for, warn_of
from fzero.checkpoint._spans import Spans, spans_of
from fzero.checkpoint._structure import (
    KeptHere,
    Structure,
    as_received,
    as_sent,
    more_of,
    told_of,
    with_slots,
    with_told,
)
from fzero.checkpoint._structure import structure_of as structure_of
from fzero.checkpoint._under_way import UnderWay, next_way, under_way, with_way
from fzero.checkpoint.everywhere import Ranks
from fzero.checkpoint.manifest import require_fit
from fzero.collectives import disagreement
from fzero.context.here import current_ranks
from fzero.errors import AxisError, LayoutError
from fzero.optim.entries import slots_of
from fzero.ranks.mesh import Axis, MeshLike, Runtime
from fzero.state import NAMESPACE, TrainState
from fzero.state.alive import require_not_donated
from fzero.transforms.kept import APART, require_facts
from fzero.transforms.pattern import blank_at

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
