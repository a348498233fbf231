"""Which rank holds which elements of which leaf: a record, shown as text, HTML and figure."""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fzero.errors import LayoutError
from fzero.tools.plot import _figure
from fzero.tools.plot._entries import entries_of
from fzero.tools.plot._html import Table
from fzero.tools.plot._palette import ABSENT, EDGE, colour, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHORT = {"parameters": "params", "gradients": "grads", "optimizer": "optim"}
GAP = 0.9  # between ranks, in bars
MOST_NAMES = 21  # groups with names above their bars, and with lines between them
MOST_INCHES = 20.0  # of the bars of all ranks: the bars of many are lower
BAR_INCHES = 0.26
NAMED_INCHES = 0.17  # from which height a bar has a name, and what is in it
WORDS = 60  # letters of the segments in a row of the table
FONT_POINTS = 7.0  # inside the bars
HATCH: dict[str, Any] = {"hatch": "//////", "facecolor": "white"}
Places = dict[tuple[int, str], float]  # (rank, kind) -> y of its bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The range [start, stop) of a group on the axis of all elements, padding included."""

    name: str
    start: int
    stop: int
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Elements [start, stop) that one rank holds of one leaf, or of a group's padding.

    `leaf` indexes `PartitionMap.leaves`, and the first element is the leaf's `offset`-th
    (row-major); for padding `leaf` is None and `offset` 0. An encoded leaf has bytes instead.
    """

    rank: int
    kind: str
    group: int
    leaf: int | None
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PartitionMap(Table):
    """Every held element of a state, as segments. Plain data: equal states give equal maps.

    All groups lie end to end on one axis, each with its padding: [0, sum of W l). `kinds` has a
    (name, placement) for each row of a rank, placement "none" for what is not held.
    """

    stage: int
    world_size: int
    ranks: tuple[int, ...]
    leaves: tuple[str, ...]
    encoded: tuple[int, ...]  # the numbers of those whose elements here are bytes
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
        unit = " bytes" if segment.leaf in self.encoded else ""
        return f"{self.leaves[segment.leaf]}[{segment.offset}:{segment.offset + length}{unit}]"

    def to_dict(self) -> dict[str, Any]:
        """Return the map as dicts, lists, strings and numbers: what JSON can hold."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def _cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each rank and kind of buffer."""
        rows = []
        for rank in self.ranks:
            for kind, placement in self.kinds:
                held = self.of(rank, kind)
                of_bytes = [segment.leaf in self.encoded for segment in held]
                sizes = [segment.stop - segment.start for segment in held]
                nbytes = sum(n for n, encoded in zip(sizes, of_bytes, strict=True) if encoded)
                size = f"{sum(sizes) - nbytes:,}" + (f" + {nbytes:,} bytes" if nbytes else "")
                words = _some([self.label(segment) for segment in held])
                rows.append((str(rank), kind, placement, size, words))
        return ("rank", "buffer", "placement", "elements", "segments"), rows

    def draw(self, ax: Axes | None = None) -> Axes:
        """Draw the map on `ax` (default: a new figure) and return the axes.

        A band for each rank, and a bar in it for each kind of buffer. Every leaf is in the legend:
        of more leaves than colours, those of a module, or of several blocks, have one.

        Raises `MissingExtraError` (an `ImportError`) where matplotlib is not installed.
        """
        if ax is None:
            return side_by_side([self]).axes[0]
        _draw_bars(ax, self)
        _figure.legend_below(ax, _legend([self]))
        return ax


def side_by_side(maps: Sequence[PartitionMap]) -> Figure:
    """Return a figure of several maps in one row with one legend, such as the four stages.

    The maps must be of one model: the legend has the leaves of the first.

    Raises `LayoutError` for no map or maps of different leaves, `MissingExtraError` (an
    `ImportError`) where matplotlib is not installed.

    Example:
        >>> import torch, fzero
        >>> states = [fzero.init([torch.ones(2)], fzero.optim.sgd(1.0), stage=s) for s in range(4)]
        >>> from fzero.plot import partition_map
        >>> len(side_by_side([partition_map(state) for state in states]).axes)
        4
    """
    if not maps or any(partition.leaves != maps[0].leaves for partition in maps):
        raise LayoutError(
            f"side_by_side: {len(maps)} maps with {[len(m.leaves) for m in maps]} leaves.",
            cause="no map, or maps of different models: one legend cannot serve them.",
            fix="give maps of one model, or call .draw(ax) for each.",
        )
    width = max(7.5, 1.2 + 3.0 * len(maps))
    height = 1.2 + max(_bar_inches(partition) * _height(_places(partition)) for partition in maps)
    figure = _figure.new_figure((width, height))
    for i, partition in enumerate(maps):
        ax = figure.add_subplot(1, len(maps), i + 1)
        _draw_bars(ax, partition)
        if i and _row_names(partition) == _row_names(maps[0]):
            ax.tick_params(labelleft=False)
    handles = _legend(maps)
    columns = _figure.legend_columns(handles, 72 * width)
    figure.set_figheight(height + 0.22 * -(-len(handles) // columns))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=_figure.LEGEND_POINTS,
    )
    return figure


def _places(partition: PartitionMap) -> Places:
    band = len(partition.kinds) + GAP
    return {
        (rank, kind): row * band + i
        for row, rank in enumerate(partition.ranks)
        for i, (kind, _) in enumerate(partition.kinds)
    }


def _height(places: Places) -> float:
    return max(places.values(), default=0.0) + 1


def _bar_inches(partition: PartitionMap) -> float:
    return min(BAR_INCHES, MOST_INCHES / _height(_places(partition)))


def _some(words: Sequence[str]) -> str:
    """Return as many words as fit into a row, and the number of the others."""
    ends = [*accumulate(len(word) + 1 for word in words)]
    shown = max(bisect_right(ends, WORDS), 1)
    return " ".join([*words[:shown], *([f"+{len(words) - shown}"] if shown < len(words) else [])])


def _row_names(partition: PartitionMap) -> list[str]:
    """Return the name of each bar; the first of a rank says which rank it is."""
    first = partition.kinds[0][0]
    names = [(rank, kind, SHORT.get(kind, kind)) for rank, kind in _places(partition)]
    if _bar_inches(partition) < NAMED_INCHES:
        return [f"rank {rank}" if kind == first else "" for rank, kind, _ in names]
    return [
        rf"$\bf{{rank\ {rank}}}$   {name}" if kind == first else name for rank, kind, name in names
    ]


def _draw_bars(ax: Axes, partition: PartitionMap) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    places = _places(partition)
    ax.set_xlim(0, max(partition.total, 1))
    partial = {kind for kind, placement in partition.kinds if placement == "partial"}
    for (rank, kind), y in places.items():
        for span in partition.groups:
            ax.barh(y, span.stop - span.start, left=span.start, height=0.86, color=ABSENT)
        for segment in partition.of(rank, kind):
            _draw_segment(ax, partition, segment, y, pale=kind in partial)
    for span in partition.groups[1:] if len(partition.groups) <= MOST_NAMES else ():
        ax.axvline(span.start, color=EDGE, linewidth=0.8, linestyle=(0, (2, 2)))
    if 1 < len(partition.groups) <= MOST_NAMES:
        _name_groups(ax, partition)
    ax.set_yticks(list(places.values()), _row_names(partition))
    ax.tick_params(axis="y", length=0, labelsize="small")
    ax.tick_params(axis="x", labelsize="small")
    ax.set_ylim(_height(places) - 0.4, -0.7)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    ax.set_title(f"stage {partition.stage}", loc="left", fontweight="bold", pad=20)
    ax.set_xlabel(_about(partition), fontsize="small")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _about(partition: PartitionMap) -> str:
    words = "element, all groups end to end" + "; of encoded leaves bytes" * bool(partition.encoded)
    if _bar_inches(partition) < NAMED_INCHES:
        kinds = ", ".join(kind for kind, _ in partition.kinds)
        return f"{words}; of each rank from above: {kinds}"
    return words


def _name_groups(ax: Axes, partition: PartitionMap) -> None:
    """Write each group's name above its bars, where there is room for it."""
    for span in partition.groups:
        names = [f"group {span.name}", *_figure.ends_of(span.name)]
        _write(ax, names, span.start, span.stop, y=-0.62, va="bottom")


def _write(ax: Axes, names: Sequence[str], start: int, stop: int, **look: Any) -> None:
    """Write the first name that fits between elements `start` and `stop`, if any does."""
    room = (stop - start) / ax.get_xlim()[1] * _figure.points_wide(ax)
    if name := _figure.fitting(names, FONT_POINTS, room):
        words = {"s": _figure.verbatim(name), "ha": "center", "fontsize": FONT_POINTS}
        ax.text(x=(start + stop) / 2, **words, **look)


def _draw_segment(
    ax: Axes, partition: PartitionMap, segment: Segment, y: float, *, pale: bool
) -> None:
    length = segment.stop - segment.start
    place: dict[str, Any] = {"left": segment.start, "height": 0.86, "linewidth": 0.6}
    if segment.leaf is None:
        ax.barh(y, length, **place, edgecolor=EDGE, **HATCH)
        return
    fill = colour(entries_of(partition.leaves).of_leaf[segment.leaf])
    points = length / ax.get_xlim()[1] * _figure.points_wide(ax)
    place |= _figure.edge_of(fill, points)
    # Narrow bars lie above the edges of their neighbours.
    order = 1.5 if points < _figure.WIDE_POINTS else 1.0
    ax.barh(y, length, **place, color=fill, alpha=0.45 if pale else 1.0, zorder=order)
    if _bar_inches(partition) < NAMED_INCHES:
        return
    names = _figure.ends_of(partition.leaves[segment.leaf], 2)
    look = {"va": "center_baseline", "color": "#000000" if pale else ink(fill)}
    _write(ax, names, segment.start, segment.stop, y=y, **look)


def _legend(maps: Sequence[PartitionMap]) -> list[Any]:
    """Return the handles of the legend."""
    from matplotlib.patches import Patch

    handles = [
        Patch(color=colour(i), label=_figure.verbatim(name))
        for i, name in enumerate(entries_of(maps[0].leaves).labels)
    ]
    if any(segment.leaf is None for partition in maps for segment in partition.segments):
        handles.append(Patch(label="padding", edgecolor=EDGE, linewidth=0.6, **HATCH))
    if any(placement == "partial" for partition in maps for _, placement in partition.kinds):
        handles.append(Patch(color=EDGE, alpha=0.45, label="paler: not reduced yet"))
    handles.append(Patch(color=ABSENT, label="not held"))
    return handles
