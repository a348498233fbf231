"""Every rank's shards, gradients, optimizer tensors and counters, by value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fzero.state import Layout, TrainState
from fzero.tools.plot._held import BufferKind, buffers_held, optimizer_tensors, rank_view, ranks_of
from fzero.tools.plot._html import Table

HEADER = ("rank", "buffer", "group", "placement", "numel", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """One tensor as one rank holds it, or its counters; `values` shows the first few elements."""

    rank: int
    buffer: str
    group: str
    placement: str
    numel: int
    values: str

    def cells(self) -> tuple[str, ...]:
        """Return the row as it is printed."""
        numel = f"{self.numel:,}" if self.numel else ""
        return (str(self.rank), self.buffer, self.group, self.placement, numel, self.values)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ShardTable(Table):
    """The rows of a state, rank by rank; prints as text, and as HTML in a notebook."""

    title: str
    rows: tuple[ShardRow, ...]

    def only(self, *ranks: int) -> ShardTable:
        """Return the table of some of the ranks."""
        rows = tuple(row for row in self.rows if row.rank in ranks)
        return ShardTable(title=self.title, rows=rows)

    def _heading(self) -> list[str]:
        return [self.title]

    def _cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        return HEADER, [row.cells() for row in self.rows]


def shard_table(state: TrainState, *, show: int = 6) -> ShardTable:
    """Return what each rank holds, by value: counters, then every buffer of every kind.

    Rows are all ranks for a state of `fzero.simulate`, the calling rank for any other. `show` is
    the number of elements printed of a tensor; padding prints as `_` in parameters and
    gradients. A window's gradients are "partial": each rank's own, the sum not taken yet. The
    optimizer's tensors are named by their path in its state, as `moments[0][1]`: moment 0 of the
    second trainable group.

    Raises `LayoutError` for what is no `TrainState`, `DonatedError` for one that was used up.

    Example:
        >>> import torch, fzero
        >>> step = fzero.shard(lambda state: (state, None), stage=3)
        >>> step = fzero.simulate(step, world_size=2)
        >>> state = step.init({"w": torch.ones(7)}, fzero.optim.sgd(0.1))
        >>> print(shard_table(state))
        stage 3, phase: idle
        rank  buffer      group  placement  numel  values
        0     counters                             step 0, 0 backwards, 0 reductions, window closed
        0     parameters  w      sharded    4      1 1 1 1
        1     counters                             step 0, 0 backwards, 0 reductions, window closed
        1     parameters  w      sharded    4      1 1 1 _
    """
    held = buffers_held(state)  # also refuses what cannot be shown
    return ShardTable(
        title=f"stage {state.stage}, phase: {state.phase.value}",
        rows=tuple(row for rank in ranks_of(state) for row in _rank_rows(state, held, rank, show)),
    )


def _rank_rows(
    state: TrainState, kinds: Sequence[BufferKind], rank: int, show: int
) -> Iterator[ShardRow]:
    yield _counters(state, rank)
    for held in kinds:
        for flat, index in zip(held.flats, held.groups if held.flats else (), strict=True):
            mine = rank_view(state, flat, rank)
            assert held.placement is not None
            first = state.setup.part(held.placement, rank).index * mine.numel()
            yield ShardRow(
                rank=rank,
                buffer=held.kind,
                group=state.setup.layout.groups[index].name,
                placement=held.placement.value if held.placement else "none",
                numel=mine.numel(),
                values=_shown(mine, show, _padding(state.setup.layout, index, first, show)),
            )
    for path, tensor in optimizer_tensors(state):
        mine = rank_view(state, tensor, rank).reshape(-1)
        yield ShardRow(
            rank=rank,
            buffer="optimizer",
            group=path,
            placement=state.setup.optimizer_state.value,
            numel=mine.numel(),
            values=_shown(mine, show),
        )


def _counters(state: TrainState, rank: int) -> ShardRow:
    step, seen = int(rank_view(state, state.step, rank)), state.progress
    window = "open" if state.window.is_open else "closed"
    words = (
        f"step {step}, {seen.backwards} backwards, {seen.reductions} reductions, window {window}"
    )
    return ShardRow(rank=rank, buffer="counters", group="", placement="", numel=0, values=words)


def _padding(layout: Layout, index: int, first: int, show: int) -> set[int]:
    """Return which of the `show` elements from `first` on in a group's buffer no leaf covers."""
    group = layout.groups[index]
    covered = [
        range(offset, offset + layout.leaves[leaf].numel)
        for leaf, offset in zip(group.leaves, group.offsets, strict=True)
    ]
    return {i for i in range(show) if not any(first + i in span for span in covered)}


def _shown(values: Tensor, show: int, padding: Collection[int] = ()) -> str:
    numbers = values[:show].tolist()
    words = ["_" if i in padding else f"{x:.3g}" for i, x in enumerate(numbers)]
    return " ".join([*words, "..."] if len(values) > show else words)
