"""Gradients of one state -> what is sent of them -> their sum, and what encoding has lost.

    linear          x [r, n] -> encode [r, m] -> reduced as it is -> decode
    not linear      x [r, n] -> encode [r, m] -> all-to-all -> decode, sum [n]    the way there
                    sum [n]  -> encode [m]    -> all-gather -> decode [r n]       the way back

The way back is where ranks keep more of a sum than they have made of it: at stage 0, and on the
replicas of a mesh of two dims. Each way has a memory, e' = (g + e) - received(g + e), which
is added to the next g. So what all reductions have sent is the sum of all g, but for the last e,
which does not grow: it is what one encoding loses.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv 1901.09847, algorithm 2; Tang et
al., "DoubleSqueeze", arXiv 1905.05957, algorithm 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.machine.codecs import int8
from fzero.machine.elementwise import Values, looks_beyond, sampled
from fzero.machine.named_shards import leaf_paths
from fzero.machine.packing import part_of, without_padding
from fzero.machine.powersgd import Matrix, matrices_of, powersgd
from fzero.state import Buffers, Form, Part, Placement, Setup, Slot, TrainState
from fzero.state.codec import (
    Codec,
    Compress,
    WireForm,
    decoded,
    decoded_row,
    encoded,
    is_by_rows,
    sum_of,
    wide,
)
from fzero.state.slots import changed as with_value

# What encoding has lost of gradients so far: the memories of a state, and the starts of factors.
#
#     slots["residual"]         e of each group, of gradients on their way to their sum
#     slots["residual/back"]    e of this rank's part of the sums, on their way back
#     slots["start"]            {leaf: where its factors start from, Q [n k]}
#
# A memory is a rank's own. A start is the same on all ranks, for it is made of sums.

_BLOCKS = int8(memory=False)  # of a memory in 8 bits


class Lent(NamedTuple):
    """What a state lends of its memories, and in which units its gradients come.

    One rule for all ways: what is encoded, crosses ranks and is remembered are gradients as an
    update adds them up, so each is multiplied by its share before it is encoded. The loss scale, of
    which the next one may be another, is in what crosses, and not in what is remembered.
    """

    state: TrainState
    share: float = 1.0  # of an update, which they do not have yet: 1 / micro-batches of accumulate


class MemorySlot(NamedTuple):
    """One memory of a state: of which group, on which way, and its elements on a rank."""

    group: int
    back: bool
    numel: int


def memories_of(setup: Setup) -> list[MemorySlot]:
    """Return the memories of a state, in their order: of all groups there, then of those back."""
    if not setup.remembers:
        return []
    layout = setup.layout
    whole = setup.reduction.over == "all"
    there = [
        MemorySlot(i, False, layout.full_numel(i) if whole else layout.groups[i].shard_numel)
        for i in layout.trainable
    ]
    if not goes_back(setup):
        return there
    ranks = setup.axis.size
    return [*there, *(MemorySlot(i, True, layout.full_numel(i) // ranks) for i in layout.trainable)]


def held_part(setup: Setup, rank: int, *, back: bool) -> tuple[str, Part]:
    """Return whose memory a rank has (a rank's, a replica's, the sum's), and which part of it."""
    if back and setup.gradients is Placement.REPLICATED:
        return "back", Part(setup.axis.size, rank)
    if back:
        return "back", setup.part(Placement.OVER_ALL, rank)
    if setup.reduction.over == "all":
        return str(rank), Part(1, 0)
    replica, shard = divmod(rank, setup.layout.ranks)
    return str(replica), Part(setup.layout.ranks, shard)


def goes_back(setup: Setup) -> bool:
    """Whether ranks keep more of a sum than the part that each of them decodes and adds up."""
    codec = setup.codec
    if codec is None or codec.linear:
        return False
    if setup.gradients is Placement.SHARDED:
        return setup.replicas > 1
    return setup.gradients is Placement.REPLICATED


def start_slots(state: TrainState) -> Iterator[tuple[int, Tensor]]:
    """Yield (leaf, the Q that it starts from, [n k]) of all matrices; nothing if it has none."""
    names = {path: leaf for leaf, path in enumerate(leaf_paths(state.setup.layout))}
    if START in state.slots:
        yield from ((names[path], q) for path, q in state.slots[START].value.items())


def starts_of(setup: Setup) -> dict[int, list[Matrix]]:
    """Return {group: its matrices that cross ranks as factors}, of the groups that have some."""
    codec = setup.codec
    if not isinstance(codec, powersgd):
        return {}
    found = {i: matrices_of(codec, setup.layout, i) for i in setup.layout.trainable}
    return {i: some for i, some in found.items() if some}


def _by_leaf(matrices: Sequence[Matrix]) -> dict[int, list[Matrix]]:
    """Return the matrices of each leaf, in their order."""
    found: dict[int, list[Matrix]] = {}
    for one in matrices:
        found.setdefault(one.leaf, []).append(one)
    return found


RESIDUAL, BACK, START = "residual", "residual/back", "start"


def memory_slots(setup: Setup, device: torch.device) -> dict[str, Slot]:
    """Return the slots of a new state that remembers: nothing was lost. {} if it does not."""
    found: dict[str, list[Tensor]] = {}
    for group, back, numel in memories_of(setup):
        dtype = setup.memory_dtype(group)
        size = _BLOCKS.wire_bytes(numel) if dtype is torch.int8 else numel
        flat = torch.zeros(size, dtype=dtype, device=device)
        found.setdefault(BACK if back else RESIDUAL, []).append(flat)
    by_rank = setup.gradients is Placement.REPLICATED
    parts = Placement.BY_RANK if by_rank else Placement.OVER_ALL
    coded = _BLOCKS if setup.codec is not None and setup.codec.memory is torch.int8 else None
    forms = {
        RESIDUAL: Form(
            placement=Placement.PARTIAL, elsewhere="sum", codec=coded, optional=True, kind="window"
        ),
        BACK: Form(placement=parts, codec=coded, optional=True, kind="window"),
    }
    made = {
        name: Slot(
            value=Buffers(flats=tuple(flats), placement=forms[name].placed(parts)),
            form=forms[name],
        )
        for name, flats in found.items()
    }
    paths, starts = leaf_paths(setup.layout), dict[str, Tensor]()
    for group, matrices in starts_of(setup).items():
        kept = wide(setup.accumulate_dtype(group))
        for leaf, own in _by_leaf(matrices).items():
            first = [powersgd.start(one.columns, one.rank, device).reshape(-1) for one in own]
            starts[paths[leaf]] = torch.cat(first).to(kept)
    if starts:
        form = Form(leaves="named", placement=Placement.REPLICATED, optional=True, kind="window")
        made[START] = Slot(value=starts, form=form)
    return made


def remembering(state: TrainState) -> TrainState:
    """Return the state with the slots of its memories, new ones if it has none."""
    if RESIDUAL in state.slots or not memories_of(state.setup):
        return state
    return state.replace(slots={**state.slots, **memory_slots(state.setup, state.device)})


def memory_flats(state: TrainState) -> list[Tensor]:
    """Return the memories, as `memories_of` orders them, then the starts of each of `starts_of`."""
    slots, setup = remembering(state).slots, state.setup
    lost = [x for name in (RESIDUAL, BACK) if name in slots for x in slots[name].value.flats]
    paths = leaf_paths(setup.layout)
    return [
        *lost,
        *(
            torch.cat([slots[START].value[paths[leaf]] for leaf in _by_leaf(matrices)], -1)
            for matrices in starts_of(setup).values()
        ),
    ]


def with_memories(state: TrainState, changed: Mapping[int, Tensor]) -> TrainState:
    """Return the state after a reduction. changed: {number in `memory_flats`: what it is now}."""
    if not changed:
        return state
    setup, slots, paths = state.setup, remembering(state).slots, leaf_paths(state.setup.layout)
    memories, made = memories_of(setup), dict(slots)
    for name in (RESIDUAL, BACK):
        numbers = [k for k, one in enumerate(memories) if one.back == (name == BACK)]
        if numbers:
            old = slots[name].value.flats
            flats = (
                changed.get(k, _packed(x, setup.memory_dtype(memories[k].group)))
                for k, x in zip(numbers, old, strict=True)
            )
            made[name] = with_value(slots[name], replace(slots[name].value, flats=tuple(flats)))
    starts = dict(slots[START].value) if START in slots else {}
    for number, matrices in enumerate(starts_of(setup).values(), start=len(memories)):
        if number in changed:
            each = _by_leaf(matrices)
            sizes = [sum(one.start_numel for one in own) for own in each.values()]
            pieces = changed[number].split(sizes)
            starts |= {paths[leaf]: x for leaf, x in zip(each, pieces, strict=True)}
    if starts:
        made[START] = with_value(slots[START], starts)
    return state.replace(slots=made)


def unpacked(memory: MemorySlot, flat: Tensor) -> Tensor:
    """Return what a memory holds, [numel] in fp32 or wider: itself if it is kept so."""
    if flat.dtype is not torch.int8:
        return flat.to(wide(flat.dtype))
    return decoded_row(_BLOCKS, flat, memory.numel)


def _packed(flat: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is not torch.int8 or flat.dtype is dtype:
        return flat.to(dtype)
    return encoded(_BLOCKS, flat.view(1, -1))[0].reshape(-1).view(torch.int8)


class Memories:
    """What a state lends of its residual to what encodes its gradients, and what becomes of it."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._memories = setup, memories_of(setup)
        self._slot = {(m.group, m.back): n for n, m in enumerate(self._memories)}
        self._lent: Callable[[], Lent] | None = None
        self._held: list[Tensor] = []  # as lent, and changed since then
        self._scale: Tensor | float = 1.0
        self._changed: dict[int, Tensor] = {}

    def remembers_by(self, lent: Callable[[], Lent]) -> None:
        """Take the function that gives what the memories of the state hold now."""
        self._lent = lent

    def changed(self) -> dict[int, Tensor]:
        """Return, and forget, what each memory that was used holds now: it goes into the state."""
        changed, self._changed, self._held = self._changed, {}, []
        return changed

    def discard(self) -> None:
        """Forget what memories hold now: the state keeps what it has lent."""
        self.changed()

    def borrowed(self, number: int) -> Tensor:
        """Return a flat of the residual, as it is kept."""
        if not self._held:
            assert self._lent is not None
            lent = self._lent()
            held = lent.state.scale
            self._held, self._scale = memory_flats(lent.state), 1.0 if held is None else held.scale
        return self._held[number]

    def shared(self, values: Tensor, slot: int | None) -> Tensor:
        """Return gradients in the units of an update, with what a memory holds, if there is one."""
        assert self._lent is not None
        share = self._lent().share
        if slot is None:
            return values if share == 1.0 else values * share
        before = self.remembered(slot).to(values.dtype) * self._scale
        return values + before if share == 1.0 else before.add_(values, alpha=share)

    def remembered(self, slot: int) -> Tensor:
        """Return what a memory holds, in fp32 or wider, without the loss scale."""
        return unpacked(self._memories[slot], self.borrowed(slot))

    def keep(self, number: int, flat: Tensor) -> None:
        """Put another flat in its place."""
        self._held[number] = self._changed[number] = flat

    def remember(self, slot: int, left: Tensor) -> None:
        """Keep what was lost of a gradient, [numel]: where it is finite, and no leaf's padding."""
        memory, setup = self._memories[slot], self._setup
        left = left.div_(self._scale)
        left = torch.where(left.isfinite(), left, self.remembered(slot))
        _, part = held_part(setup, setup.axis.rank, back=memory.back)
        left = without_padding(setup.layout, memory.group, part, left)
        self.keep(slot, _packed(left, setup.memory_dtype(memory.group)))


_TRIED = 1000  # elements that a codec is tried with


def codecs_asked(options: Any) -> Compress:
    """Return what crosses ranks encoded, by the option or by a transform."""
    wires = [Compress(gradients=one.wire) for one in options.transforms if one.wire is not None]
    return options.compress or (wires[0] if wires else Compress())


def require_codec(name: str, codec: Codec, of: str = "gradients") -> None:
    """Raise `LayoutError` for a codec that does not what it says: tried on a few numbers.

    of: what it encodes. "gradients" may be encoded as factors of matrices; of "parameters" it sees
        shards; of "frozen" leaves it has to give the same bytes on each rank, and each time.
    """
    if of != "gradients" and isinstance(codec, powersgd):
        raise LayoutError(
            f"{name}={codec}.",
            cause="parameters are gathered from shards, which cut matrices, and are of full rank.",
            fix="give it as gradients=, and here a codec of elements: fzero.codecs.int8().",
        )
    if wrong := _wrong_with(codec) or (_unlike(codec) if of == "frozen" else ""):
        raise LayoutError(
            f"{name}={codec}: {wrong}.",
            cause="a codec that encodes along other than the last dim, says a wrong size, is not "
            "as linear as it says, looks beyond single elements and has block=1, draws random "
            "numbers, or lacks one of its functions.",
            fix="see fzero.codecs.Codec: each row [n] of x [.., n] is encoded by itself, and its "
            "size is a function of n; a codec whose encoded forms do not add up has linear=False.",
        )


def _wrong_with(codec: Codec) -> str:
    """Return what a codec does on a few numbers that it does not say; "" if nothing."""
    x = _numbers()
    try:
        wrong = _wrong_in(codec, x) or (_wrong_sum(codec, x) if codec.linear else "")
        return wrong or _beyond_elements(codec, x)
    except _Raised as found:
        return str(found)


def _numbers() -> Tensor:
    return torch.linspace(-3.0, 2.0, 2 * _TRIED).view(2, _TRIED) ** 3


def _unlike(codec: Codec) -> str:
    if is_by_rows(codec, _numbers()):
        return ""
    return "a row is encoded to other bytes by itself, or the next time; or decoded to other values"


def _beyond_elements(codec: Codec, x: Tensor) -> str:
    """Try whether single elements are encoded by themselves, where a codec says so."""
    if getattr(codec, "block", None) != 1:
        return ""

    def received(values: Values) -> Values:
        row = values["x", "a row"].view(1, -1)
        parts = codec.encode(row)
        return {("x", "a row"): codec.decode(parts, row.shape[-1], x.dtype).view(-1)}

    if looks_beyond(received, {("x", "a row"): sampled(x)}) is None:
        return ""
    return "it says block=1, and what it makes of an element changes with others, or by its place"


class _Raised(Exception):
    """A function of a codec has raised."""


def _called(codec: Codec, name: str, *args: Any) -> Any:
    try:
        return getattr(codec, name)(*args)
    except NotImplementedError as error:
        raise _Raised(f"it has no function {name}") from error
    except Exception as error:
        text = " ".join(str(error).split())
        raise _Raised(f"{name} raised {type(error).__name__}: {text}") from error


def _wrong_in(codec: Codec, x: Tensor) -> str:
    parts = _called(codec, "encode", x)
    if not isinstance(parts, tuple) or not all(
        isinstance(part, Tensor) and part.shape[:-1] == x.shape[:-1] for part in parts
    ):
        return "encode gave no tuple of tensors [2, m] for a tensor [2, n]"
    if codec.linear and (len(parts) != 1 or not parts[0].is_floating_point()):
        return "it is linear, and encode gave other than one tensor of floats"
    sent = encoded(codec, x)[0]
    size, said = sent[0].numel() * sent.itemsize, _called(codec, "wire_bytes", _TRIED)
    if not isinstance(said, int | float) or abs(size - said) > said / 100:
        return f"{_TRIED} elements are {size} bytes, and wire_bytes says {said}"
    received = _called(codec, "decode", parts, _TRIED, x.dtype)
    if not isinstance(received, Tensor):
        return f"decode gave a {type(received).__name__} for [2, n] of {x.dtype}"
    if received.shape != x.shape or received.dtype is not x.dtype:
        return f"decode gave {[*received.shape]} of {received.dtype} for [2, n] of {x.dtype}"
    bound = _called(codec, "bound", x)
    if not isinstance(bound, Tensor) or not _fits(bound, x):
        shown = [*bound.shape] if isinstance(bound, Tensor) else f"a {type(bound).__name__}"
        return f"bound gave {shown} for [2, n]"
    if not bool(((received - x).abs() <= bound).all()):
        return "decode(encode(x)) is farther from x than bound(x) says"
    return ""


def _fits(bound: Tensor, x: Tensor) -> bool:
    try:
        return bound.expand_as(x).shape == x.shape
    except RuntimeError:
        return False


def _wrong_sum(codec: Codec, x: Tensor) -> str:
    """Try whether encoded forms add up: to within the bounds of both, and what adding rounds."""
    y = 0.37 * x.flip(-1) + 0.1
    (one,), (two,) = codec.encode(x), codec.encode(y)
    received = _called(codec, "decode", (one + two,), _TRIED, x.dtype)
    rounds = torch.finfo(one.dtype).eps * (x.abs() + y.abs()).amax(-1, keepdim=True)
    allowed = sum((codec.bound(some) for some in (x, y, x + y)), rounds)
    apart = (received - (x + y)).abs()
    if bool((apart <= allowed).all()):
        return ""
    return (
        f"it is linear, and decode(encode(x) + encode(y)) is {float(apart.max()):.3g} away from "
        "x + y, more than the bounds of x, y and x + y together"
    )


def coarseness(codec: Codec) -> float:
    """Return how far apart, of numbers of up to 1, are those that a codec can tell apart.

    Example:
        >>> from fzero.machine.codecs import int8
        >>> round(1 / coarseness(int8()))
        127
    """
    if isinstance(codec, powersgd):
        return 2.0  # all of a matrix may wait for the next update
    x = torch.linspace(-1.0, 1.0, _TRIED)
    return 2 * float(codec.bound(x).max())


class Encoder(Memories):
    """Encodes the gradients of one state, and adds to each what was lost of those before."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert setup.codec is not None
        self.codec = setup.codec
        self._forms: dict[tuple[int, bool], WireForm] = {}

    def sent(self, index: int, gradient: Tensor, *, mine: bool = True) -> Tensor:
        """Return what is sent of a group's gradient [n]. Not `mine`: the memory stays as it is."""
        return self._encoded(index, gradient, back=False, remembers=mine)

    def sent_back(self, index: int, received: Tensor) -> Tensor:
        """Return what is sent of the part of the sum that this rank has received."""
        return self._encoded(index, self.summed(index, received), back=True, remembers=True)

    def summed(self, index: int, received: Tensor) -> Tensor:
        """Return what this rank has received of a sum over ranks, added up."""
        form, dtype = self._forms[index, False], self._dtype(index)
        rows = form.rows_of(received)
        if self.codec.linear:
            return decoded(self.codec, rows, form, dtype).reshape(-1)
        return sum_of(self.codec, rows, form, dtype)

    def result(self, index: int, received: Tensor) -> Tensor:
        """Return this rank's part of the sum: what the last collective brought, without padding."""
        if goes_back(self._setup):
            total = self.gathered(index, received)
        else:
            total = self.summed(index, received)
        part = self._setup.part(self._setup.gradients, self._setup.axis.rank)
        return without_padding(self._setup.layout, index, part, total)

    def gathered(self, index: int, received: Tensor) -> Tensor:
        """Return the parts of the sum that the ranks have sent back, end to end."""
        form = self._forms[index, True]
        return decoded(self.codec, form.rows_of(received), form, self._dtype(index)).reshape(-1)

    def _encoded(self, index: int, values: Tensor, *, back: bool, remembers: bool) -> Tensor:
        """Encode values and what the memory holds; keep what that loses, where it is finite."""
        slot = self._slot.get((index, back)) if remembers else None
        total = values.to(wide(values.dtype))
        total = total if back else self.shared(total, slot)
        if back and slot is not None:
            total = total + self.remembered(slot).to(total.dtype) * self._scale
        rows = total.view(1, -1) if back else self._in_rows(total)
        buffer, form = encoded(self.codec, rows)
        self._forms[index, back] = form
        if slot is not None:
            rows = rows - decoded(self.codec, buffer, form, rows.dtype)
            self.remember(slot, rows.reshape(-1) if back else self._in_order(rows))
        return buffer.reshape(-1)

    def _dtype(self, index: int) -> torch.dtype:
        return wide(self._setup.accumulate_dtype(index))

    # Which elements are a row: what one rank decodes, in the order of the ranks.

    @property
    def _grid(self) -> tuple[int, int]:
        """Shards and replicas that rows are for; the flat has them in this order."""
        setup = self._setup
        shards = setup.layout.ranks if setup.reduction.over == "all" else 1
        if self.codec.linear:  # reduced first over the shards, then over the replicas
            if setup.gradients is Placement.REPLICATED:
                return 1, 1
            return shards, setup.replicas if setup.gradients is Placement.OVER_ALL else 1
        return shards, setup.replicas

    @property
    def _by_replica(self) -> bool:
        """Whether rows are ordered by replica, then shard, and the flat is the other way around."""
        moved = self._setup.gradients is not Placement.REPLICATED and not self.codec.linear
        return moved and min(self._grid) > 1

    def _in_rows(self, flat: Tensor) -> Tensor:
        shards, replicas = self._grid
        numel = flat.numel() // (shards * replicas)
        if not self._by_replica:
            return flat.view(shards * replicas, numel)
        return flat.view(shards, replicas, numel).transpose(0, 1).reshape(-1, numel)

    def _in_order(self, rows: Tensor) -> Tensor:
        """Undo `_in_rows`."""
        if not self._by_replica:
            return rows.reshape(-1)
        shards, replicas = self._grid
        return rows.view(replicas, shards, rows.shape[1]).transpose(0, 1).reshape(-1)


# Gradients of one state -> their factors -> the factors of their sum: what `powersgd` sends.
#
#     sent         M = g + e    [P of each matrix | what is no matrix]        all-reduce
#     sent_back    B of P       [Q' of each matrix]; e is known               all-reduce
#     result       B Q'^T, and what is no matrix, in the order of the flat; this rank's part of it
#
# All of a group's gradient is here before its reduction, at every stage: so its matrices are whole.


class FactorEncoder(Memories):
    """Makes factors of the gradients of one state; adds to each what was left of those before."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert isinstance(setup.codec, powersgd)
        self.codec = setup.codec
        self._matrices = starts_of(setup)
        first = len(self._memories)  # the starts follow, of groups that have matrices
        self._start = {i: first + n for n, i in enumerate(self._matrices)}
        # In the order of their reductions, of which one may begin before the last one is over:
        # gradients [n] with what was left, and whether what they lack is kept; then what is known
        # of a sum before its second factors have come, (bases, the sum of what is no matrix).
        learning = setup.layout.trainable
        self._there: dict[int, deque[tuple[Tensor, bool]]] = {i: deque() for i in learning}
        self._back: dict[int, deque[tuple[list[Tensor], Tensor]]] = {i: deque() for i in learning}

    def discard(self) -> None:
        """Forget what memories hold now, and what was on its way: nothing is any more."""
        super().discard()
        for waiting in (*self._there.values(), *self._back.values()):
            waiting.clear()

    def sent(self, index: int, gradient: Tensor, *, mine: bool = True) -> Tensor:
        """Return [P of each matrix | the rest] of a group's gradient [n], for an all-reduce.

        Not `mine`: zeros, and the memory stays as it is.
        """
        whole = gradient.to(wide(self._setup.accumulate_dtype(index)))
        whole = self.shared(whole, self._slot[index, False] if mine else None)
        self._there[index].append((whole, mine))
        starts, matrices = self._starts(index), self._matrices.get(index, [])
        pairs = zip(matrices, starts, strict=True)
        factors = [(one.of(whole) @ start).reshape(-1) for one, start in pairs]
        return torch.cat([*factors, *self._rest(index, whole)])

    def sent_back(self, index: int, received: Tensor) -> Tensor:
        """Return [Q' of each matrix], for an all-reduce; keep what this rank's own lacks."""
        whole, remembers = self._there[index].popleft()
        matrices = self._matrices.get(index, [])
        sizes = [one.rows * one.rank for one in matrices]
        *sums, rest = received.split([*sizes, received.numel() - sum(sizes)])
        pairs = zip(matrices, sums, strict=True)
        bases = [self.codec.basis(p.view(one.rows, one.rank)) for one, p in pairs]
        factors = [one.of(whole).T @ b for one, b in zip(matrices, bases, strict=True)]
        if remembers:
            left = torch.zeros_like(whole)
            for one, basis, q in zip(matrices, bases, factors, strict=True):
                torch.sub(one.of(whole), basis @ q.T, out=one.of(left))
            self.remember(self._slot[index, False], left)
        self._back[index].append((bases, rest))
        return torch.cat([q.reshape(-1) for q in factors]) if factors else whole.new_empty(0)

    def result(self, index: int, received: Tensor) -> Tensor:
        """Return this rank's part of the sum; keep where to start from next time."""
        setup, (bases, rest) = self._setup, self._back[index].popleft()
        matrices = self._matrices.get(index, [])
        total = rest.new_zeros(setup.layout.full_numel(index))
        factors = received.split([one.start_numel for one in matrices]) if matrices else ()
        new: list[Tensor] = []
        for one, basis, flat, start in zip(
            matrices, bases, factors, self._starts(index), strict=True
        ):
            q = flat.view(one.columns, one.rank)
            torch.matmul(basis, q.T, out=one.of(total))
            new.append(self.codec.next_start(q, start).reshape(-1))
        if new:
            self.keep(self._start[index], torch.cat(new))
        places = self._rest(index, total)
        for place, x in zip(places, rest.split([x.numel() for x in places]), strict=True):
            place.copy_(x)
        part = setup.part(setup.gradients, setup.axis.rank)
        return part_of(total, Part(1, 0), part).clone() if part.count > 1 else total

    def _starts(self, index: int) -> list[Tensor]:
        """Return Q of each matrix of a group."""
        matrices = self._matrices.get(index)
        if matrices is None:
            return []
        flat = self.borrowed(self._start[index])
        pieces = flat.split([one.start_numel for one in matrices])
        return [x.view(one.columns, one.rank) for one, x in zip(matrices, pieces, strict=True)]

    def _rest(self, index: int, flat: Tensor) -> list[Tensor]:
        """Return what lies between the matrices of a flat [n]: views; without padding."""
        layout, matrices = self._setup.layout, self._matrices.get(index, [])
        of, group = {one.leaf for one in matrices}, layout.groups[index]
        pairs = zip(group.leaves, group.offsets, strict=True)
        places = [(o, layout.leaves[n].numel) for n, o in pairs if n not in of]
        return [flat[offset : offset + numel] for offset, numel in places]


GradientEncoder = Encoder | FactorEncoder
