"""What encoding has lost of gradients so far: the memories of a state, and the starts of factors.

    slots["residual"]         e of each group, of gradients on their way to their sum
    slots["residual/back"]    e of this rank's part of the sums, on their way back
    slots["start"]            {leaf: where its factors start from, Q [n k]}

A memory is a rank's own. A start is the same on all ranks, for it is made of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.machine.by_path import leaf_paths
from fzero.machine.codecs import int8
from fzero.machine.packing import without_padding
from fzero.machine.powersgd import Matrix, matrices_of, powersgd
from fzero.state import Buffers, Form, Part, Placement, Setup, Slot, TrainState
from fzero.state.codec import decoded_row, encoded, wide

_BLOCKS = int8(memory=False)  # of a memory in 8 bits


class Lent(NamedTuple):
    """What a state lends of its memories, and in which units its gradients come.

    One rule for all ways: what is encoded, crosses ranks and is remembered are gradients as an
    update adds them up, so each is multiplied by its share before it is encoded. The loss scale, of
    which the next one may be another, is in what crosses, and not in what is remembered.
    """

    state: TrainState
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
            made[name] = slots.changed(slots[name], replace(slots[name].value, flats=tuple(flats)))
    starts = dict(slots[START].value) if START in slots else {}
    for number, matrices in enumerate(starts_of(setup).values(), start=len(memories)):
        if number in changed:
            each = _by_leaf(matrices)
            sizes = [sum(one.start_numel for one in own) for own in each.values()]
            pieces = changed[number].split(sizes)
            starts |= {paths[leaf]: x for leaf, x in zip(each, pieces, strict=True)}
    if starts:
        made[START] = slots.changed(slots[START], starts)
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
            self._held, self._scale = memory_flats(lent.state), lent.scale
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
