"""New states with room for saved values, and how they become whole. Nothing of a file is read here.

    NewState          a state like one that is given, with the saved numbers; and pieces: views of
                      it, to be filled. Where each entry comes from, its form says:
                          cut     the elements that this rank has
                          sum     on as many ranks its own summand; else its part of the sum, and 0
                          own     its own, or its replica's, on as many of them; else it begins
                          anew    its own on the same ranks at the same stage; else it begins, and
                                  a warning says so
    make_whole        each rank has read its own part of all: the rest comes from the others
    finalize          what has no saved value begins

The second half is for files of other formats, of which a rank reads one whole leaf at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint._partial import Partial
from fzero.checkpoint._pieces import (
    TensorPiece,
    blocks,
    cut_shards,
    form_in,
    held_part,
    learning,
    named_entries,
    numel_of,
    pieces_of,
    put_common,
)
from fzero.checkpoint._process_states import LocalStates
from fzero.checkpoint.manifest import Manifest
from fzero.errors import LayoutError, explain
from fzero.machine.offload import empty_where
from fzero.machine.packing import gather_parts_in_place, leaf_ranges, part_of, shard_of
from fzero.optim.entries import RULE, require_kept
from fzero.state import Placement, TrainState
from fzero.state.entry import Entry
from fzero.transforms.state_entries import (
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


class NewState:
    """A new state of one rank that is to be filled, and what of it comes from where."""

    def __init__(
        self,
        like: TrainState,
        saved: Manifest,
        rank: int,
        *,
        frozen: bool = True,
        partial: Partial | None = None,
        moves: Sequence[Entry] | None = None,
    ) -> None:
        """Make a state like one that is given, with the saved numbers, and room for the values.

        rank: of the mesh. frozen: False: parameters that do not learn are not read, and are copies
            of the state's. partial: what has a place in it; else all has.
        moves: of a state that moves to other ranks: `like` is blank, and becomes the new one; it
            reads all that it holds, not only its own part, and what lives until the update, too:
            slots of `like`, and these entries of zeros.
        """
        setup, facts = like.setup, saved.origin.get(APART) if trains_apart(like) else None
        replica, own = divmod(rank, setup.axis.size)
        same = facts is not None and are_as_many(like, facts)
        self.pieces: list[TensorPiece] = []  # views of the state, and of `_sums`
        self.begins: set[tuple[str, str]] = set()  # keys of entries that have no saved value
        self.notes: list[str] = []  # which of them, and what is left out, in words
        self._sums: list[tuple[Tensor, Tensor]] = []  # what is read is added to the first of each
        self._like, self._saved, self._partial, self._own = like, saved, partial, own
        self._moves = moves is not None
        self._other_replicas = trains_apart(like) and not same
        before = saved.origin["stage"], saved.origin["ranks"]
        self._other_ranks = (setup.stage, like.mesh.size) != before

        # Memory of its own, and the saved numbers.
        named = {x.key: (x, start if same else "") for x, start in named_entries(like, rank)}
        state = with_entries(like, [self._room(x, start + x.name) for x, start in named.values()])
        if not frozen and partial is None:
            for i in {*range(len(setup.layout.groups))} - {*setup.layout.trainable}:
                state.params.flats[i].copy_(like.params.flats[i])
        numbers = facts["replicas"][replica]["counters"] if same and facts else saved.counters
        state = numbered(without_shared(state) if trains_apart(like) else state, numbers)
        if moves is not None:  # its setup says what gradients are that it holds
            state = state.replace(setup=setup, slots={**without_shared(like).slots, **state.slots})
            state = with_entries(state, moves)

        # What is read into it.
        every = entries_of(state, own, live=True)  # as the state has them: they are filled
        for entry in every:
            start = named[entry.key][1] if entry.key in named else ""
            if is_slot(entry):
                self._read_slot(entry, start)
            elif entry.name != PARAMS:
                self._cut(entry, start)
            elif same:  # what does not learn, all replicas have in common
                learns = learning(setup, entry, frozen=False)
                others = {i: x for i, x in entry.values.items() if i not in learns.values}
                self._cut(learns, start)
                self._cut(replace(entry, values=others if frozen else {}), "")
            else:
                self._cut(entry if frozen else learning(setup, entry, frozen), start)
        if Placement.OWNER in {entry.placement for entry in every}:
            require_kept(state, own)
        if facts is not None:
            state = with_facts(state, like, facts, replica if same else -1)
            state = with_shared(state, [self._room(x, x.name) for x in shared_of(state, own)])
            every += (shared := shared_of(state, own))
            for entry in shared:
                self._cut(entry, "")
        elif trains_apart(state):
            every += shared_of(state, own)
        known = {entry.name for entry in every}
        self.notes += [
            f"it has {name}, which the state does not keep: it is left out"
            for name, one in saved.kept.items()
            if name not in known and not one["optional"] and not name.startswith("replica/")
        ]
        self.state = state

    def _room(self, entry: Entry, name: str) -> Entry:
        """Return an entry with room for its values: what owners keep in the saved shapes."""
        setup, values = self._like.setup, dict[Any, Tensor]()
        texts = self._saved.kept.get(name, {"values": {}})["values"]
        if RULE in name:
            texts = self._saved.slots.get(name.replace(RULE, "", 1), {})
        if self._partial is not None:
            return self._partial.room(setup, entry, self._own, texts)
        zero = Tensor.zero_ if self._moves else lambda x: empty_where(x).zero_()
        all_read = not (self._moves or is_slot(entry)) and entry.per_leaf
        for key, x in entry.values.items():
            if entry.placement is Placement.OWNER:
                form = form_in(f"{entry.name}/{key}", texts[key]) if key in texts else None
                shape, dtype = form or (tuple(x.shape), x.dtype)
                shape = shape if key in entry.owned else (0,)
                values[key] = torch.zeros(shape, dtype=dtype, device=x.device)
            elif key in entry.codecs:
                values[key] = entry.codecs[key].fill(zero(x))
            elif entry.per_leaf and entry.form.codec is not None and not x.is_floating_point():
                values[key] = x.new_zeros(numel_of(setup, entry, key, x), dtype=torch.float32)
            elif all_read:  # zero in the padding alone
                room, end = empty_where(x), 0
                ranges = leaf_ranges(setup.layout, key, setup.part(entry.placement, self._own))
                for part in sorted(ranges, key=lambda part: part.at):
                    room[end : part.at].zero_()
                    end = part.at + part.stop - part.start
                room[end:].zero_()
                values[key] = room
            else:
                values[key] = zero(x)
        return replace(entry, values=values)

    def _read_slot(self, entry: Entry, start: str) -> None:
        """Let what a transform keeps be read, or begin. start: what is before its name."""
        name, form, tensors = start + entry.name, entry.form, self._saved.tensors
        known = name in self._saved.kept or name in tensors
        known = known or any(x.startswith(f"{name}/") for x in tensors)
        if not known or not self._fits(entry, name):
            self.begins.add(entry.key)
            if known:
                self.notes.append(f"{entry.name} has other shapes there than here")
            elif form.lifetime == "run" and not form.optional:
                self.notes.append(f"it has no {entry.name}, which the state keeps")
        elif form.elsewhere == "anew" and self._other_ranks:
            self.begins.add(entry.key)
            self.notes.append(f"{entry.name} is not kept on other ranks or stages: {form.why}")
        elif entry.placement is Placement.PARTIAL:
            self._read_summand(entry, start)
        elif form.elsewhere == "own" and self._other_replicas:
            self.begins.add(entry.key)
        else:
            self._cut(entry, start)

    def _fits(self, entry: Entry, name: str) -> bool:
        """Whether what was saved has the shapes that are wanted, where others may be."""
        partial, summands = self._partial, entry.placement is Placement.PARTIAL
        if partial is not None and (entry.per_leaf or summands):
            return not summands and partial.covers(self._like.setup, entry)
        if entry.form.leaves != "named" or not (entry.form.optional or partial):
            return True
        for key, x in entry.values.items():
            known = self._saved.tensors.get(f"{name}/{key}", {"chunks": []})
            numel = sum(chunk[1] for chunk in known["chunks"])
            if (numel, known.get("dtype", str(x.dtype))) != (x.numel(), str(x.dtype)):
                return False
        return True

    def _cut(self, entry: Entry, start: str) -> None:
        shared, partial = self._moves or not entry.per_leaf, self._partial
        found = pieces_of(self._like.setup, entry, self._own, start, shared=shared)
        self.pieces += [x for x in found if partial is None or partial.reads(entry, x.name)]

    def _read_summand(self, entry: Entry, start: str) -> None:
        """Let a rank read its own summand, or its part of the sum of all of them."""
        setup, layout, own = self._like.setup, self._like.setup.layout, self._own
        name, known = start + entry.name, {x.name for x in entries_of(self._like, own)}
        some = [x.removeprefix(f"{name}/") for x in self._saved.tensors if x.startswith(f"{name}/")]
        parts = {x.split("/")[0] for x in some}
        numbers = {x for x in parts if x.isdigit()}
        added = {x for x in parts - numbers if f"{entry.name}/{x}" not in known}
        cut = entry.per_leaf and any(
            numel_of(setup, entry, i, x) != layout.full_numel(i) for i, x in entry.values.items()
        )

        def read(pieces: Iterable[TensorPiece], *, adds: bool) -> None:
            """Read in the dtype that was saved: into what is there, or to be added."""
            for piece in pieces:
                here = piece.values.dtype
                text = self._saved.tensors.get(piece.name, {}).get("dtype", str(here))
                dtype = getattr(torch, text.removeprefix("torch."), here)
                if not adds and dtype is here:
                    self.pieces.append(piece)
                elif isinstance(dtype, torch.dtype):
                    there = torch.zeros_like(piece.values, dtype=dtype)
                    self.pieces.append(replace(piece, values=there))
                    self._sums.append((piece.values, there))

        if numbers == {*map(str, range(setup.replicas if cut else setup.axis.size))}:
            read(pieces_of(setup, entry, own, start), adds=False)
        elif entry.form.elsewhere == "sum":
            added |= numbers
        else:
            self.begins.add(entry.key)
            if entry.form.elsewhere == "anew":
                self.notes.append(f"{entry.name} is not kept here: {entry.form.why}")
        part = setup.part(Placement.OVER_ALL, own)
        for word in sorted(added) if entry.form.elsewhere == "sum" else ():
            for key, x in entry.values.items():
                if entry.per_leaf:
                    held = held_part(setup, entry, key, x, own)[1]
                    values = part_of(x, held, part)
                    read(cut_shards(layout, f"{name}/{word}", key, part, values), adds=True)
                elif not own:  # of what has no parts, all is on the first rank
                    there = "/".join(filter(None, (f"{name}/{word}", key)))
                    read(blocks(there, x.reshape(-1)), adds=True)

    def warn(self, where: object, call: str) -> None:
        """Warn, once for each, of what begins anew, and of what is left out.

        where: what is saved is.
        """
        for seen in self.notes:
            text = explain(
                f"{call}: of {where}, {seen}.",
                cause="a transform that was added, or left out, since then; or other ranks.",
                fix="nothing, if that is meant: what has no saved value begins as in a new state.",
            )
            warnings.warn(text, UserWarning, stacklevel=2)

    def finalize(self) -> TrainState:
        """Return the state, whose elements are all there.

        A collective of the ranks of its replica, where something begins anew.
        """
        for total, part in self._sums:
            total += part
        state = self.state
        if trains_apart(self._like):
            state = begun_apart(state, self._like)
        return begin_entries(state, self._like, self._own, self.begins) if self.begins else state


def begin_entries(
    state: TrainState, like: TrainState, rank: int, keys: set[tuple[str, str]]
) -> TrainState:
    """Return a state in which entries begin, with memory of their own. A collective."""
    made = begun(state, like, [name for name, _ in keys])
    copies = [
        replace(entry, values={k: x.clone() for k, x in entry.values.items()})
        for entry in entries_of(made, rank, live=True)
        if entry.key in keys
    ]
    return with_entries(state, copies)


Choice = Callable[[Entry], bool]


def make_whole(held: LocalStates, states: Sequence[TrainState], reads: Choice) -> None:
    """Fill in what other ranks have read, one flat at a time: of each replica by itself.

    states: one for each of `held.ranks`, each with its own part of every flat. reads: which entries
    were read. A collective.
    """
    setup = states[0].setup
    size = setup.axis.size if held.is_stack else 1
    for first in range(0, len(states), size):
        columns: list[list[Entry]] = []
        for rank, state in enumerate(states[first : first + size]):
            every = entries_of(state, rank)
            every += shared_of(state, rank) if trains_apart(state) else []
            columns.append(
                [x for x in every if x.per_leaf and x.placement is not Placement.PARTIAL]
            )
        for entries in zip(*columns, strict=True):
            placement = entries[0].placement
            count = setup.part(placement, 0).count
            if count == setup.part(Placement.OVER_ALL, 0).count or not reads(entries[0]):
                continue  # ranks have read all that they hold
            for index in entries[0].values:
                flats = [entry.values[index] for entry in entries]
                if not held.is_stack:
                    gather_parts_in_place(setup, flats, Placement.OVER_ALL, placement)
                    continue
                full = flats[0].new_empty(flats[0].numel() * count)
                for rank, flat in enumerate(flats):
                    own = setup.part(Placement.OVER_ALL, rank)
                    shard_of(full, *own).copy_(part_of(flat, setup.part(placement, rank), own))
                for rank, flat in enumerate(flats):
                    flat.copy_(shard_of(full, *setup.part(placement, rank)))


# Files of other formats: leaf by leaf.


def with_room(state: TrainState, rank: int, reads: Choice, *, copies: bool = False) -> TrainState:
    """Return a state like `state` with zeros, or copies, of the entries that are read."""

    def room(entry: Entry, i: Any, x: Tensor) -> Tensor:
        if copies:
            return empty_where(x).copy_(x)
        zeros = empty_where(x).zero_()  # padding stays zero
        return entry.codecs[i].fill(zeros) if i in entry.codecs else zeros

    some = [entry for entry in entries_of(state, rank) if entry.per_leaf and reads(entry)]
    made = [replace(e, values={i: room(e, i, x) for i, x in e.values.items()}) for e in some]
    return with_entries(state, made)


def read_leaves(
    held: LocalStates,
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


def begun_slots(held: LocalStates, states: Sequence[TrainState], where: str) -> list[TrainState]:
    """Return states in which all begins anew that files of another format have no place for.

    A collective, where there is such a thing. where: the call and what was read, for a warning.
    """
    warn_of_left_out(states[0], held.ranks[0], where)

    def one(k: int) -> TrainState:
        keys = {x.key for x in entries_of(states[k], held.ranks[k]) if is_slot(x)}
        like, own = held.states[k], held.ranks[k]
        return begin_entries(states[k], like, own, keys) if keys else states[k]

    return held.each(one)


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
