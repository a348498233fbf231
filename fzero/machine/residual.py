"""What encoding has lost of gradients so far: the memories of a state, and the starts of factors.

    window.residual.flats    one for each of `memories_of`: e of a group, on one of its ways;
                             then one for each of `starts_of`: Q of the matrices of a group

A memory is a rank's own. A start is the same on all ranks, for it is made of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.collectives.encoded import decoded_row, encoded, wide
from fzero.machine.by_path import leaf_paths
from fzero.machine.codecs import int8
from fzero.machine.packing import without_padding
from fzero.machine.powersgd import Matrix, matrices_of, powersgd
from fzero.state import Buffers, Form, Part, Placement, Setup, TrainState
from fzero.state.entry import Entry

_BLOCKS = int8(memory=False)  # of a memory in 8 bits


class Lent(NamedTuple):
    """What a state has of `window.residual`, and in which units its gradients come.

    One rule for all ways: what is encoded, crosses ranks and is remembered are gradients as an
    update adds them up, so each is multiplied by its share before it is encoded. The loss scale, of
    which the next one may be another, is in what crosses, and not in what is remembered.
    """

    flats: Sequence[Tensor]
    scale: Tensor | float = 1.0  # the loss scale, which the gradients have
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


def start_slots(state: TrainState, residual: Sequence[Tensor] = ()) -> Iterator[tuple[int, Tensor]]:
    """Yield (leaf, the Q that it starts from, [n k]) of all matrices: views of the residual.

    Nothing if the state has no residual yet.
    """
    flats = (residual or state.window.residual.flats)[len(memories_of(state.setup)) :]
    for matrices, flat in zip(starts_of(state.setup).values(), flats, strict=False):
        pieces = flat.split([one.start_numel for one in matrices])
        for one, piece in zip(matrices, pieces, strict=True):
            yield one.leaf, piece


def starts_of(setup: Setup) -> dict[int, list[Matrix]]:
    """Return {group: its matrices that cross ranks as factors}, of the groups that have some."""
    codec = setup.codec
    if not isinstance(codec, powersgd):
        return {}
    found = {i: matrices_of(codec, setup.layout, i) for i in setup.layout.trainable}
    return {i: some for i, some in found.items() if some}


def residual_of(state: TrainState) -> Buffers:
    """Return what encoding has lost of gradients, and starts: as of a new state if it has none."""
    setup, memories = state.setup, memories_of(state.setup)
    if state.window.residual.held or not memories:
        return state.window.residual
    flats = []
    for group, _, numel in memories:
        dtype = setup.memory_dtype(group)
        size = _BLOCKS.wire_bytes(numel) if dtype is torch.int8 else numel
        flats.append(torch.zeros(size, dtype=dtype, device=state.device))
    for group, matrices in starts_of(setup).items():
        first = [powersgd.start(one.columns, one.rank, state.device) for one in matrices]
        flat = torch.cat([x.reshape(-1) for x in first])
        flats.append(flat.to(wide(setup.accumulate_dtype(group))))
    return Buffers(flats=tuple(flats), placement=Placement.PARTIAL)


RESIDUAL, BACK, START = "residual", "residual/back", "start"


def residual_entries(state: TrainState) -> list[Entry]:
    """Return what encoding has lost, and starts, as entries: as of a new state if it has none."""
    setup, memories, flats = state.setup, memories_of(state.setup), residual_of(state).flats
    found: dict[str, dict[int, Tensor]] = {}
    for memory, flat in zip(memories, flats, strict=False):
        found.setdefault(BACK if memory.back else RESIDUAL, {})[memory.group] = flat
    lost = Form(placement=Placement.PARTIAL, elsewhere="sum", optional=True)
    by_rank = setup.gradients is Placement.REPLICATED
    parts = Placement.BY_RANK if by_rank else Placement.OVER_ALL
    forms = {RESIDUAL: lost, BACK: Form(placement=parts, optional=True)}
    coded = _BLOCKS if setup.codec is not None and setup.codec.memory is torch.int8 else None
    made = [Entry(name=k, form=replace(forms[k], codec=coded), values=x) for k, x in found.items()]
    if starts := dict(start_slots(state, flats)):
        names, form = leaf_paths(setup.layout), Form(leaves="named", optional=True)
        form = replace(form, placement=Placement.REPLICATED)
        made.append(Entry(name=START, form=form, values={names[k]: x for k, x in starts.items()}))
    return made


def with_residual_entries(state: TrainState, entries: Sequence[Entry]) -> TrainState:
    """Return the state in which those of its entries have their values."""
    setup, own = state.setup, {one.name: one.values for one in entries}
    flats = list(residual_of(state).flats)
    for number, memory in enumerate(memories_of(setup)):
        values = own.get(BACK if memory.back else RESIDUAL, {})
        flats[number] = values.get(memory.group, flats[number])
    first, names = len(memories_of(setup)), leaf_paths(setup.layout)
    for number, matrices in enumerate(starts_of(setup).values(), start=first):
        if START in own:
            flats[number] = torch.cat([own[START][names[one.leaf]].reshape(-1) for one in matrices])
    residual = Buffers(flats=tuple(flats), placement=Placement.PARTIAL)
    return state.replace(window=replace(state.window, residual=residual))


def unpacked(memory: MemorySlot, flat: Tensor) -> Tensor:
    """Return what a memory holds, [numel] in fp32 or wider: itself if it is kept so."""
    if flat.dtype is not torch.int8:
        return flat.to(wide(flat.dtype))
    return decoded_row(_BLOCKS, flat, memory.numel)


def packed(setup: Setup, residual: Buffers) -> Buffers:
    """Return a residual as the codec says that it is kept: a checkpoint brings it unpacked."""
    memories = memories_of(setup)
    pairs = zip(memories, residual.flats, strict=False)
    flats = [_packed(flat, setup.memory_dtype(memory.group)) for memory, flat in pairs]
    starts = residual.flats[len(memories) :]
    return Buffers(flats=(*flats, *starts), placement=residual.placement)


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
            self._held, self._scale = list(lent.flats), lent.scale
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
