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

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.collectives.encoded import WireForm, decoded, encoded, sum_of, wide
from fzero.errors import LayoutError
from fzero.machine.codecs import int8
from fzero.machine.packing import without_padding
from fzero.state import Buffers, Part, Placement, Setup, TrainState
from fzero.state.codec import Codec

_BLOCKS = int8(memory=False)  # of a memory in 8 bits
_TRIED = 1000  # elements that a codec is tried with

Lent = tuple[Sequence[Tensor], Tensor | float]
"""What each memory of a state holds, and how many times that gradients are."""


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


def residual_of(state: TrainState) -> Buffers:
    """Return what encoding has lost of gradients: zeros if there is nothing yet."""
    setup, memories = state.setup, memories_of(state.setup)
    if state.window.residual.held or not memories:
        return state.window.residual
    flats = []
    for group, _, numel in memories:
        dtype = setup.memory_dtype(group)
        size = _BLOCKS.wire_bytes(numel) if dtype is torch.int8 else numel
        flats.append(torch.zeros(size, dtype=dtype, device=state.device))
    return Buffers(flats=tuple(flats), placement=Placement.PARTIAL)


def unpacked(memory: MemorySlot, flat: Tensor) -> Tensor:
    """Return what a memory holds, [numel] in fp32 or wider: itself if it is kept so."""
    if flat.dtype is not torch.int8:
        return flat.to(wide(flat.dtype))
    blocks = -(-memory.numel // _BLOCKS.block)
    form = WireForm(((torch.float32, blocks), (torch.int8, memory.numel)), memory.numel)
    if not memory.numel:
        return flat.new_empty(0, dtype=torch.float32)
    return decoded(_BLOCKS, flat.view(1, -1), form, torch.float32).reshape(-1)


def packed(setup: Setup, residual: Buffers) -> Buffers:
    """Return a residual as the codec says that it is kept: a checkpoint brings it unpacked."""
    pairs = zip(memories_of(setup), residual.flats, strict=True)
    flats = [_packed(flat, setup.memory_dtype(memory.group)) for memory, flat in pairs]
    return Buffers(flats=tuple(flats), placement=residual.placement)


def _packed(flat: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is not torch.int8 or flat.dtype is dtype:
        return flat.to(dtype)
    return encoded(_BLOCKS, flat.view(1, -1))[0].reshape(-1).view(torch.int8)


def require_codec(name: str, codec: Codec) -> None:
    """Raise `LayoutError` for a codec that does not what it says: tried on a few numbers."""
    x = torch.linspace(-3.0, 2.0, 2 * _TRIED).view(2, _TRIED) ** 3
    parts = codec.encode(x)
    wrong = ""
    if not isinstance(parts, tuple) or not all(
        isinstance(part, Tensor) and part.shape[:-1] == x.shape[:-1] for part in parts
    ):
        wrong = "encode gave no tuple of tensors [2, m] for a tensor [2, n]"
    elif codec.linear and (len(parts) != 1 or not parts[0].is_floating_point()):
        wrong = "it is linear, and encode gave other than one tensor of floats"
    else:
        sent = encoded(codec, x)[0]
        size, said = sent[0].numel() * sent.itemsize, codec.wire_bytes(_TRIED)
        if abs(size - said) > said / 100:
            wrong = f"{_TRIED} elements are {size} bytes, and wire_bytes says {said}"
        received = codec.decode(parts, _TRIED, x.dtype)
        if received.shape != x.shape or received.dtype is not x.dtype:
            wrong = f"decode gave {[*received.shape]} of {received.dtype} for [2, n] of {x.dtype}"
        elif not bool(((received - x).abs() <= codec.bound(x)).all()):
            wrong = "decode(encode(x)) is farther from x than bound(x) says"
    if wrong:
        raise LayoutError(
            f"{name}={codec}: {wrong}.",
            cause="a codec that encodes along other than the last dim, or says a wrong size.",
            fix="see fzero.codecs.Codec: each row [n] of x [.., n] is encoded by itself, and its "
            "size is a function of n.",
        )


def coarseness(codec: Codec) -> float:
    """Return how far apart, of numbers of up to 1, are those that a codec can tell apart.

    Example:
        >>> from fzero.machine.codecs import int8
        >>> round(1 / coarseness(int8()))
        127
    """
    x = torch.linspace(-1.0, 1.0, _TRIED)
    return 2 * float(codec.bound(x).max())


class Encoder:
    """Encodes the gradients of one state, and adds to each what was lost of those before."""

    def __init__(self, setup: Setup) -> None:
        assert setup.codec is not None
        self._setup, self.codec = setup, setup.codec
        self._memories = memories_of(setup)
        self._slot = {(m.group, m.back): n for n, m in enumerate(self._memories)}
        self._forms: dict[tuple[int, bool], WireForm] = {}
        self._lent: Callable[[], Lent] | None = None
        self._held: list[Tensor] = []  # as lent, and changed since then
        self._factor: Tensor | float = 1.0
        self._changed: dict[int, Tensor] = {}

    def remembers_by(self, lent: Callable[[], Lent]) -> None:
        """Take the function that gives what the memories of the state hold now."""
        self._lent = lent

    def changed(self) -> dict[int, Tensor]:
        """Return, and forget, what each memory that was used holds now: it goes into the state."""
        changed, self._changed, self._held = self._changed, {}, []
        return changed

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
        if slot is not None and not self._held:
            assert self._lent is not None
            lent, self._factor = self._lent()
            self._held = list(lent)
        total = values.to(wide(values.dtype))
        if slot is not None:
            held = unpacked(self._memories[slot], self._held[slot])
            total = total + held.to(total.dtype) * self._factor
        rows = total.view(1, -1) if back else self._in_rows(total)
        buffer, form = encoded(self.codec, rows)
        self._forms[index, back] = form
        if slot is not None:
            rows = rows - decoded(self.codec, buffer, form, rows.dtype)
            left = (rows.reshape(-1) if back else self._in_order(rows)).div_(self._factor)
            left = self._cleared(index, torch.where(left.isfinite(), left, held), back=back)
            kept = _packed(left, self._setup.memory_dtype(index))
            self._held[slot] = self._changed[slot] = kept
        return buffer.reshape(-1)

    def _cleared(self, index: int, left: Tensor, *, back: bool) -> Tensor:
        """Return what a memory keeps: nothing of padding, which is in no checkpoint."""
        setup = self._setup
        _, part = held_part(setup, setup.axis.rank, back=back)
        return without_padding(setup.layout, index, part, left)

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
