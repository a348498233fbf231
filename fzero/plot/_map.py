"""Which rank holds which elements of which leaf: data, and its views as text, HTML, figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fzero.plot import _figure, _html
from fzero.plot._held import Held, held_by, ranks_of
from fzero.state import Layout, Setup, TrainState

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A group's place [start, stop) on the axis of all elements, padding included."""

    name: str
    start: int
    stop: int
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Elements [start, stop) that one rank holds of one leaf, or of a group's padding.

    `leaf` indexes `PartitionMap.leaves`, and the first element is the leaf's `offset`-th
    (row-major); for padding `leaf` is None and `offset` 0.
    """

    rank: int
    kind: str
    group: int
    leaf: int | None
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PartitionMap:
    """Every held element of a state, as segments. Plain data: equal states give equal maps.

    All groups lie end to end on one axis, each with its padding: [0, sum of W l). `kinds` has a
    (name, placement) for each row of a rank, placement "none" for what is not held.
    """

    stage: int
    world_size: int
    ranks: tuple[int, ...]
    leaves: tuple[str, ...]
    groups: tuple[Span, ...]
    kinds: tuple[tuple[str, str], ...]
    segments: tuple[Segment, ...]

    @property
    def total(self) -> int:
        """Elements of all groups with their padding: the length of the axis."""
        return self.groups[-1].stop if self.groups else 0

    def of(self, rank: int, kind: str) -> list[Segment]:
        """Return the segments of one row, from left to right."""
        return [s for s in self.segments if s.rank == rank and s.kind == kind]

    def label(self, segment: Segment) -> str:
        """Return what a segment is: `path[first:last+1]` of the flattened leaf, or `padding`."""
        length = segment.stop - segment.start
        if segment.leaf is None:
            return f"padding[{length}]"
        return f"{self.leaves[segment.leaf]}[{segment.offset}:{segment.offset + length}]"

    def to_dict(self) -> dict[str, Any]:
        """Return the map as dicts, lists, strings and numbers: what JSON can hold."""
        return _plain(dataclasses.asdict(self))

    def table(self) -> str:
        """Return the map as text: a line for each rank and kind of buffer."""
        return _html.text_table(
            ("rank", "buffer", "placement", "elements", "segments"),
            [
                (str(rank), kind, placement, f"{_numel(row):,}", " ".join(map(self.label, row)))
                for rank in self.ranks
                for kind, placement in self.kinds
                for row in [self.of(rank, kind)]
            ],
        )

    def draw(self, ax: Axes | None = None, *, legend: bool = True) -> Axes:
        """Draw the map on `ax` (default: a new figure) and return the axes.

        Raises `MissingExtraError` (an `ImportError`) where matplotlib is not installed.
        """
        return _figure.draw(self, ax, legend=legend)

    def __repr__(self) -> str:
        ranks = f"ranks {list(self.ranks)} of {self.world_size}"
        return f"PartitionMap(stage={self.stage}, {ranks}, {len(self.segments)} segments)"

    def _repr_html_(self) -> str:
        return _html.map_as_html(self)


def partition_map(state: TrainState) -> PartitionMap:
    """Return which rank holds which elements of which leaf, for every kind of buffer.

    Rows are all ranks for a state of `fzero.simulate` (every tensor stacked by rank), and the
    calling rank for any other. A sharded kind has every element, and every element of padding,
    once over the ranks (of each replica, on a mesh of two dims, unless it is sharded over all);
    a replicated or partial one has all of them on each rank. Gradients and
    optimizer cover the trainable groups. Sizes come from the layout; no tensor is read.

    Raises `LayoutError` for what is no `TrainState`, `DonatedError` for one that was used up.

    Example:
        >>> import torch, fzero
        >>> step = fzero.shard(lambda state: (state, None), stage=3)
        >>> step = fzero.simulate(step, world_size=2)
        >>> state = step.init({"w": torch.ones(7)}, fzero.optim.sgd(0.1))
        >>> print(partition_map(state).table())
        rank  buffer      placement  elements  segments
        0     parameters  sharded    4         w[0:4]
        0     gradients   none       0
        0     optimizer   none       0
        1     parameters  sharded    4         w[4:7] padding[1]
        1     gradients   none       0
        1     optimizer   none       0
    """
    kinds = held_by(state)
    layout = state.setup.layout
    ranks = ranks_of(state)
    groups = _spans(layout)
    return PartitionMap(
        stage=state.stage,
        world_size=state.setup.axis.size,
        ranks=ranks,
        leaves=tuple(leaf.path for leaf in layout.leaves),
        groups=groups,
        kinds=tuple((k.kind, k.placement.value if k.placement else "none") for k in kinds),
        segments=tuple(
            segment
            for rank in ranks
            for held in kinds
            if held.placement
            for segment in _segments(state.setup, groups, held, rank)
        ),
    )


def _spans(layout: Layout) -> tuple[Span, ...]:
    sizes = [layout.full_numel(i) for i in range(len(layout.groups))]
    return tuple(
        Span(name=group.name, start=stop - size, stop=stop, trainable=group.trainable)
        for group, size, stop in zip(layout.groups, sizes, accumulate(sizes), strict=True)
    )


def _segments(setup: Setup, groups: tuple[Span, ...], held: Held, rank: int) -> Iterator[Segment]:
    """Cut the leaves and the padding of each group down to the part that `rank` holds."""
    layout = setup.layout
    for index in held.groups:
        assert held.placement is not None
        numel = setup.numel(index, held.placement)
        low = setup.part(held.placement, rank).index * numel
        high = low + numel
        first = groups[index].start
        for leaf, start, stop in _contents(layout, index):
            begin, end = max(start, low), min(stop, high)
            if begin < end:
                yield Segment(
                    rank=rank,
                    kind=held.kind,
                    group=index,
                    leaf=leaf,
                    start=first + begin,
                    stop=first + end,
                    offset=0 if leaf is None else begin - start,
                )


def _contents(layout: Layout, index: int) -> Iterator[tuple[int | None, int, int]]:
    """Yield (leaf, start, stop) along a group's flat buffer; leaf None is padding."""
    group, end = layout.groups[index], 0
    for leaf, offset in zip(group.leaves, group.offsets, strict=True):
        yield None, end, offset
        end = offset + layout.leaves[leaf].numel
        yield leaf, offset, end
    yield None, end, layout.full_numel(index)


def _numel(row: list[Segment]) -> int:
    return sum(segment.stop - segment.start for segment in row)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
