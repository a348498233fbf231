"""New states that are filled from pieces: where each entry comes from, by its form.

cut     the elements that this rank has
sum     on as many ranks its own summand; else its part of the sum, and zeros
own     its own, or its replica's, on as many of them; else it begins
anew    its own on the same ranks at the same stage; else it begins, with a warning

The gathers that complete what each rank has read; and states whose leaves are read whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint._partial import Partial
from fzero.checkpoint._pieces import (
    OwnShard,
    TensorPiece,
    cut_shards,
    form_in,
    held_part,
    learning,
    named_entries,
    numel_of,
    pieces_of,
    place_of,
    put_common,
    whole_pieces,
)
from fzero.checkpoint._process_states import Held
from fzero.checkpoint.manifest import Manifest
from fzero.errors import LayoutError, explain
from fzero.machine.offload import empty_where
from fzero.machine.packing import leaf_ranges, part_of, shard_of
from fzero.machine.parts import gather_parts_in_place
from fzero.optim.entries import RULE, require_kept
from fzero.ranks.mesh import axis_index
from fzero.state import Part, Placement, Setup, TrainState
from fzero.state.entry import Entry
from fzero.transforms.kept import (
    APART,
    PARAMS,
    are_as_many,
    begun,
    begun_apart,
    entries_of,
    is_slot,
    numbered,
    shared_of,
    trains_apart,
    with_entries,
    with_facts,
    with_shared,
    without_shared,
)
from fzero.transforms.simulate import simulate

Sums = list[tuple[Tensor, Tensor]]
"""What is read is added to the first of each two."""

Key = tuple[str, str]  # of an entry
Zero = Callable[[Tensor], Tensor]
"""A tensor of the state that is given -> zeros of the new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewState:
    """A new state of one rank, to be filled."""

    like: TrainState  # what it was made like
    state: TrainState
    own: int  # the rank, in its replica
    pieces: list[TensorPiece] = field(default_factory=list)  # views of it, and of `sums`
    sums: Sums = field(default_factory=list)
    puts: list[Callable[[], None]] = field(default_factory=list)  # what was read, to be placed
    begins: set[Key] = field(default_factory=set)  # entries that have no saved value
    notes: list[str] = field(default_factory=list)  # which of them, in words


def zeros_where(x: Tensor) -> Tensor:
    """Return zeros like `x` that live where `x` does."""
    return empty_where(x).zero_()


def room_for(
    like: TrainState,
    saved: Manifest,
    rank: int,
    zero: Zero = zeros_where,
    *,
    frozen: bool = True,
    shared: bool = False,
    live: bool = False,
    more: Sequence[Entry] = (),
    partial: Partial | None = None,
) -> NewState:
    """Return a new state like one that is given, with the saved numbers, and room for the values.

    rank: of the mesh. shared: it reads all that it holds, and not only its own part of it.
    frozen: False: parameters that do not learn are not read, and are copies of the state's.
    live: it has what lives until the update, too: slots of `like`, and `more` entries of zeros.
    partial: what has a place in it; else all has.
    """
    setup, (replica, own), facts = like.setup, place_of(like, rank), saved.origin.get(APART)
    apart = trains_apart(like) and facts is not None
    same = apart and facts is not None and are_as_many(like, facts)
    numbers = saved.counters
    if same and facts is not None:
        numbers = facts["replicas"][replica]["counters"]
    found = NewState(like=like, state=like, own=own)
    others = trains_apart(like) and not same
    reader = _Reader(found, saved, shared=shared, apart=others, partial=partial)
    named = {one.key: (one, prefix if same else "") for one, prefix in named_entries(like, rank)}
    made = [
        _room_of(setup, one, reader.texts(prefix + one.name), _filled_by(setup, one, own, zero))
        if partial is None
        else partial.room(setup, one, own, reader.texts(one.name))
        for one, prefix in named.values()
    ]
    state = with_entries(like, made)
    if not frozen and partial is None:
        for i in {*range(len(setup.layout.groups))} - {*setup.layout.trainable}:
            state.params.flats[i].copy_(like.params.flats[i])
    state = numbered(without_shared(state), numbers)
    if live:  # its setup says what gradients are that it holds
        state = state.replace(setup=setup, slots={**without_shared(like).slots, **state.slots})
        state = with_entries(state, more)
    for one in entries_of(state, own, live=True):  # as the state has them: they are filled there
        prefix = named[one.key][1] if one.key in named else ""
        if same and one.name == PARAMS:
            reader.read(_others(setup, learning(setup, one, frozen)), "")
            one = learning(setup, one, frozen=False)
        reader.read(learning(setup, one, frozen), prefix)
    require_kept(state, own)
    if apart and facts is not None:
        state = with_facts(state, like, facts, replica if same else -1)
        some = [
            _room_of(setup, one, reader.texts(one.name), lambda _, x: zero(x))
            for one in shared_of(state, own)
        ]
        state = with_shared(state, some)
        for one in shared_of(state, own):
            reader.read(one, "", core=True)
    return replace(found, state=state)


def _filled_by(
    setup: Setup, entry: Entry, rank: int, zero: Zero
) -> Callable[[Any, Tensor], Tensor]:
    """Return (group, its flat) -> room for it: of what is read whole, zero in its padding alone."""
    if is_slot(entry) or not entry.per_leaf or zero is not zeros_where:
        return lambda _, x: zero(x)

    def room(index: Any, x: Tensor) -> Tensor:
        found, end = empty_where(x), 0
        ranges = leaf_ranges(setup.layout, index, setup.part(entry.placement, rank))
        for own in sorted(ranges, key=lambda one: one.at):
            found[end : own.at].zero_()
            end = own.at + own.stop - own.start
        found[end:].zero_()
        return found

    return room


def _others(setup: Setup, entry: Entry) -> Entry:
    """Return parameters without those that learn."""
    values = {i: x for i, x in entry.values.items() if i not in setup.layout.trainable}
    return replace(entry, values=values)


def _room_of(
    setup: Setup, entry: Entry, texts: Mapping[str, str], room: Callable[[Any, Tensor], Tensor]
) -> Entry:
    """Return an entry with room: what owners keep in the shapes that were saved.

    room: (group or name, a tensor of the state) -> that of the new one.
    """
    values: dict[Any, Tensor] = {}
    for key, x in entry.values.items():
        values[key] = x
        if entry.placement is Placement.OWNER:
            form = form_in(f"{entry.name}/{key}", texts[key]) if key in texts else None
            shape, dtype = form or (tuple(x.shape), x.dtype)
            shape = shape if key in entry.owned else (0,)
            values[key] = torch.zeros(shape, dtype=dtype, device=x.device)
        elif key in entry.codecs:
            values[key] = entry.codecs[key].fill(room(key, x))
        elif entry.per_leaf and entry.form.codec is not None and not x.is_floating_point():
            values[key] = x.new_zeros(numel_of(setup, entry, key, x), dtype=torch.float32)
        else:
            values[key] = room(key, x)
    return replace(entry, values=values)


class _Reader:
    """Finds where the entries of a new state come from, and puts that into its room."""

    def __init__(
        self,
        room: NewState,
        saved: Manifest,
        *,
        shared: bool,
        apart: bool,
        partial: Partial | None = None,
    ) -> None:
        self._room, self._saved, self._shared = room, saved, shared
        self._setup, self._own = room.like.setup, room.own
        self._apart = apart  # of other replicas than were saved
        place = (self._setup.stage, room.like.mesh.size)
        self._moved = place != (saved.origin["stage"], saved.origin["ranks"])
        self._partial = partial

    def texts(self, name: str) -> Mapping[str, str]:
        """Return what the manifest says of the tensors of an entry."""
        if RULE in name:
            return self._saved.slots.get(name.replace(RULE, "", 1), {})
        return self._saved.kept.get(name, {"values": {}})["values"]

    def read(self, entry: Entry, prefix: str, *, core: bool = False) -> None:
        """Let an entry be read, or begin. core: it is there, for the manifest was checked."""
        name, form, room = prefix + entry.name, entry.form, self._room
        if core or not is_slot(entry):
            self._cut(entry, prefix)
        elif not self._has(name) or not self._may(entry, name):
            self._begin(entry)
            if self._has(name):
                room.notes.append(f"{entry.name} has other shapes there than here")
            elif form.lifetime == "run" and not form.optional:
                room.notes.append(f"it has no {entry.name}, which the state keeps")
        elif form.elsewhere == "anew" and self._moved:
            self._begin(entry)
            room.notes.append(f"{entry.name} is not kept on other ranks or stages: {form.why}")
        elif entry.placement is Placement.PARTIAL:
            self._summand(entry, prefix)
        elif form.elsewhere == "own" and self._apart:
            self._begin(entry)
        else:
            self._cut(entry, prefix)

    def _begin(self, entry: Entry) -> None:
        self._room.begins.add(entry.key)

    def _has(self, name: str) -> bool:
        tensors = self._saved.tensors
        known = name in self._saved.kept or name in tensors
        return known or any(x.startswith(f"{name}/") for x in tensors)

    def _may(self, entry: Entry, name: str) -> bool:
        """Whether an entry that was saved has the shapes that are wanted, where others may be."""
        if self._partial is not None and (entry.per_leaf or entry.placement is Placement.PARTIAL):
            covers = self._partial.covers(self._setup, entry)
            return covers and entry.placement is not Placement.PARTIAL
        return not (entry.form.optional or self._partial) or self._fits(entry, name)

    def _fits(self, entry: Entry, name: str) -> bool:
        """Whether named tensors have the sizes and dtypes that were saved."""
        for key, x in entry.values.items() if entry.form.leaves == "named" else ():
            known = self._saved.tensors.get(f"{name}/{key}", {"chunks": []})
            numel = sum(chunk[1] for chunk in known["chunks"])
            if (numel, known.get("dtype", str(x.dtype))) != (x.numel(), str(x.dtype)):
                return False
        return True

    def _cut(self, entry: Entry, prefix: str) -> None:
        shared = self._shared or not entry.per_leaf
        pieces = pieces_of(self._setup, entry, self._own, prefix, shared=shared)
        if self._partial is None:
            self._room.pieces.extend(pieces)
            return
        for piece, put in self._partial.read(self._setup, entry, pieces, self._own):
            self._room.pieces.append(piece)
            self._room.puts.extend([] if put is None else [put])

    def _summand(self, entry: Entry, prefix: str) -> None:
        """Let a rank read its own summand, or its part of the sum of all of them."""
        name, known = prefix + entry.name, {x.name for x in entries_of(self._room.like, self._own)}
        some = (x.removeprefix(f"{name}/") for x in self._saved.tensors if x.startswith(f"{name}/"))
        parts = {x.split("/")[0] for x in some}
        numbers = {x for x in parts if x.isdigit()}
        added = {x for x in parts - numbers if f"{entry.name}/{x}" not in known}
        if numbers == {*map(str, range(self._count(entry)))}:
            self._read(pieces_of(self._setup, entry, self._own, prefix), adds=False)
        elif entry.form.elsewhere == "sum":
            added |= numbers
        else:
            self._begin(entry)
            if entry.form.elsewhere == "anew":
                self._room.notes.append(f"{entry.name} is not kept here: {entry.form.why}")
        for word in sorted(added) if entry.form.elsewhere == "sum" else ():
            self._read(self._parts_of_sum(entry, f"{name}/{word}"), adds=True)

    def _count(self, entry: Entry) -> int:
        """Return how many summands there are of an entry on these ranks."""
        setup, layout = self._setup, self._setup.layout
        for index, flat in entry.values.items() if entry.per_leaf else ():
            if numel_of(setup, entry, index, flat) != layout.full_numel(index):
                return setup.replicas
        return setup.axis.size

    def _parts_of_sum(self, entry: Entry, name: str) -> Iterator[TensorPiece]:
        """Yield this rank's part of a sum: of what has no parts all on the first rank."""
        setup, own = self._setup, self._own
        for key, x in entry.values.items():
            if entry.per_leaf:
                held, part = held_part(setup, entry, key, x, own)[1], self._part
                shard = OwnShard(name, key, part, part_of(x, held, part))
                yield from cut_shards(setup.layout, [shard])
            elif not own:
                yield from whole_pieces("/".join(filter(None, (name, key))), x)

    @property
    def _part(self) -> Part:
        return self._setup.part(Placement.OVER_ALL, self._own)

    def _read(self, pieces: Iterable[TensorPiece], *, adds: bool) -> None:
        """Let pieces be read in the dtype that was saved: into what is there, or to be added."""
        for piece in pieces:
            here = piece.values.dtype
            name = self._saved.tensors.get(piece.name, {}).get("dtype", str(here))
            dtype = getattr(torch, name.removeprefix("torch."), here)
            if not adds and dtype is here:
                self._room.pieces.append(piece)
            elif isinstance(dtype, torch.dtype):
                read = torch.zeros_like(piece.values, dtype=dtype)
                self._room.pieces.append(replace(piece, values=read))
                self._room.sums.append((piece.values, read))


def finished_room(room: NewState) -> TrainState:
    """Return the state of a rank, whose elements are all there.

    A collective of the ranks of its replica, where something begins anew.
    """
    for total, part in room.sums:
        total += part
    state = begun_apart(room.state, room.like)
    if not room.begins:
        return state
    made = begun(state, room.like, [name for name, _ in room.begins])
    fresh = entries_of(made, room.own, live=True)
    copies = [
        replace(one, values={k: x.clone() for k, x in one.values.items()})
        for one in fresh
        if one.key in room.begins
    ]
    return with_entries(state, copies)


def warn_of(rooms: Sequence[NewState], saved: Manifest, where: object, name: str) -> None:
    """Warn, once for each, of what begins anew, and of what is left out.

    where: what is saved is. name: of the call.
    """
    if not rooms:
        return
    room = rooms[0]
    known = {one.name for one in entries_of(room.state, room.own, live=True)}
    known |= (
        {one.name for one in shared_of(room.state, room.own)} if trains_apart(room.state) else set()
    )
    left = [
        f"it has {one}, which the state does not keep: it is left out"
        for one, facts in saved.kept.items()
        if one not in known and not facts["optional"] and not one.startswith("replica/")
    ]
    for seen in [*room.notes, *left]:
        text = explain(
            f"{name}: of {where}, {seen}.",
            cause="a transform that was added, or left out, since then; or other ranks.",
            fix="nothing, if that is meant: what has no saved value begins as in a new state.",
        )
        warnings.warn(text, UserWarning, stacklevel=2)


Choice = Callable[[Entry], bool]


def completed(held: Held, rooms: Sequence[NewState]) -> list[TrainState]:
    """Return the states that were read, made whole. A collective."""
    states = [room.state for room in rooms]
    begins = {key for room in rooms for key in room.begins}
    make_whole(held, states, lambda one: one.key not in begins)
    return (
        [finished_room(rooms[0])]
        if not held.is_stack
        else on_ranks(len(rooms), lambda rank: finished_room(rooms[rank]))
    )


def on_ranks(size: int, do: Callable[[int], Any]) -> list[Any]:
    """Return what `do(rank)` returns on each of so many virtual ranks."""
    found: list[Any] = [None] * size

    def body() -> None:
        found[axis_index()] = do(axis_index())

    simulate(body, world_size=size)()
    return found


def make_whole(held: Held, states: Sequence[TrainState], reads: Choice) -> None:
    """Fill in what other ranks have read, one flat at a time: of each replica by itself.

    states: one for each of `held.ranks`, each with its own part of every flat. reads: which entries
    were read. A collective.
    """
    setup = states[0].setup
    ranks = setup.axis.size if held.is_stack else 1
    for begin in range(0, len(states), ranks):
        some = states[begin : begin + ranks]
        for same in zip(*(_flats_of(one, rank) for rank, one in enumerate(some)), strict=True):
            if reads(same[0]):
                for index in same[0].values:
                    flats = [one.values[index] for one in same]
                    _make_flat_whole(held, setup, same[0].placement, flats)


def _flats_of(state: TrainState, rank: int) -> list[Entry]:
    every = entries_of(state, rank)
    every += shared_of(state, rank) if trains_apart(state) else []
    return [one for one in every if one.per_leaf and one.placement is not Placement.PARTIAL]


def _make_flat_whole(
    held: Held, setup: Setup, placement: Placement, flats: Sequence[Tensor]
) -> None:
    if setup.part(placement, 0).count == setup.part(Placement.OVER_ALL, 0).count:
        return  # ranks have read all that they hold
    if held.is_stack:
        _share(setup, placement, flats)
    else:
        gather_parts_in_place(setup, flats, Placement.OVER_ALL, placement)


def _share(setup: Setup, placement: Placement, flats: Sequence[Tensor]) -> None:
    """Share between virtual ranks the parts of a flat that each has read."""
    parts = [setup.part(placement, rank) for rank in range(len(flats))]
    full = flats[0].new_empty(flats[0].numel() * parts[0].count)
    for rank, flat in enumerate(flats):
        own = setup.part(Placement.OVER_ALL, rank)
        shard_of(full, *own).copy_(part_of(flat, parts[rank], own))
    for part, flat in zip(parts, flats, strict=True):
        flat.copy_(shard_of(full, *part))


# Leaf by leaf.


def with_room(state: TrainState, rank: int, reads: Choice, *, copies: bool = False) -> TrainState:
    """Return a state like `state` with zeros, or copies, of the entries that are read."""
    some = [one for one in entries_of(state, rank) if one.per_leaf and reads(one)]
    return with_entries(
        state,
        [
            Entry(
                name=one.name,
                form=one.form,
                # Padding stays zero.
                values={
                    i: empty_where(x).copy_(x)
                    if copies
                    else one.codecs[i].fill(zeros_where(x))
                    if i in one.codecs
                    else zeros_where(x)
                    for i, x in one.values.items()
                },
            )
            for one in some
        ],
    )


def read_leaves(
    held: Held,
    states: Sequence[TrainState],
    reads: Choice,
    values: Callable[[int, str], Tensor | None],
) -> None:
    """Read what this process has to read of new states, one leaf at a time.

    values: (number of the leaf, name of the entry) -> the values of all its elements; of another
        shape with as many dims, of which what is in both is set; or None, and all stays.
    """
    for state, rank in zip(states, held.ranks, strict=True):
        setup = state.setup
        part = setup.part(Placement.OVER_ALL, rank)
        for one in entries_of(state, rank):
            for index, flat in one.values.items() if one.per_leaf and reads(one) else ():
                shard = part_of(flat, setup.part(one.placement, rank), part)
                codec = one.codecs.get(index)
                layout = setup.layout if codec is None else codec.layout(setup.layout)
                for own in leaf_ranges(layout, index, part):
                    leaf, found = setup.layout.leaves[own.leaf], values(own.leaf, one.name)
                    if found is None:
                        continue
                    other, target = tuple(found.shape), own.of(shard)
                    if len(other) == len(leaf.shape) and other != leaf.shape:
                        put_common(leaf, found, own, target, codec)
                        continue
                    whole = leaf.stored(found)
                    whole = whole if codec is None else codec.row_of(whole.float())
                    target.copy_(whole[own.start : own.stop])


def require_equal(where: object, names: Sequence[str], values: Callable[[str], Tensor]) -> None:
    """Raise `LayoutError` where files have several values for one tied parameter."""
    for name in names[1:]:
        if not torch.equal(values(names[0]), values(name)):
            raise LayoutError(
                f"{where} has one value for {names[0]} and another for {name}.",
                cause="a model that ties them, and a checkpoint of one that did not.",
                fix="load it into a model that does not tie them. Nothing was changed.",
            )


def are_alike(saved: torch.dtype, own: torch.dtype) -> bool:
    """Return whether values of a file may be converted: floating ones, or complex ones."""
    both = saved, own
    alike = all(x.is_floating_point for x in both) or all(x.is_complex for x in both)
    return alike or saved is own


def begun_slots(held: Held, states: Sequence[TrainState], where: str) -> list[TrainState]:
    """Return states in which all begins anew that files of another format have no place for.

    A collective, where there is such a thing. where: the call and what was read, for a warning.
    """
    warn_of_left_out(states[0], held.ranks[0], where)

    def one(k: int) -> TrainState:
        like, own = held.states[k], held.ranks[k]
        begins = {x.key for x in entries_of(states[k], own) if is_slot(x)}
        return finished_room(NewState(like=like, state=states[k], own=own, begins=begins))

    return on_ranks(len(states), one) if held.is_stack else [one(0)]


def warn_of_left_out(state: TrainState, rank: int, where: str = "save_universal: it") -> None:
    """Warn of what a state keeps beside parameters and what is of its optimizer."""
    lost = [one.name for one in entries_of(state, rank) if is_slot(one) and not one.form.optional]
    if lost:
        text = explain(
            f"{where} has no place for {', '.join(lost)}, which the state keeps.",
            cause="the format of another library, which has parameters and optimizers alone.",
            fix="nothing, if they may begin as in a new state; fzero.checkpoint.save has them.",
        )
        warnings.warn(text, UserWarning, stacklevel=3)
