"""The partition map as a matplotlib figure, and what all pictures share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fzero.errors import LayoutError, explain
from fzero.plot._extra import missing_matplotlib
from fzero.plot._palette import ABSENT, EDGE, colour, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fzero.plot._map import PartitionMap, Segment

SHORT = {"parameters": "params", "gradients": "grads", "optimizer": "optim"}
GAP = 0.9  # between ranks, in bars
MOST_NAMES = 21  # leaves in a legend, as many as have a colour of their own; groups with names
FONT_POINTS = 7.0  # inside the bars
LEGEND_POINTS = 8.5
WIDE = 0.62  # of a character, in units of its font size
HATCH: dict[str, Any] = {"hatch": "//////", "facecolor": "white"}
Places = dict[tuple[int, str], float]  # (rank, kind) -> y of its bar


def draw(partition: PartitionMap, ax: Axes | None, *, legend: bool) -> Axes:
    """Draw one map: a band for each rank, a bar in it for each kind of buffer."""
    if ax is None:
        return _compose([partition], legend=legend).axes[0]
    _draw_bars(ax, partition)
    if legend:
        legend_below(ax, _legend([partition]))
    return ax


def legend_below(ax: Axes, handles: Sequence[Any], *, title: str = "") -> None:
    """Put a legend below the axes, in as many columns as there is room for."""
    below_inches = 0.55  # the ticks and the name of the x axis
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, -below_inches * ax.figure.dpi / ax.get_window_extent().height),
        ncols=_columns(handles, ax.get_window_extent().width / ax.figure.dpi),
        frameon=False,
        fontsize=LEGEND_POINTS,
        title=title or None,
        title_fontsize=LEGEND_POINTS,
        alignment="left",
    )


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
            explain(
                f"side_by_side: {len(maps)} maps with {[len(m.leaves) for m in maps]} leaves.",
                cause="no map, or maps of different models: one legend cannot serve them.",
                fix="give maps of one model, or call .draw(ax) for each.",
            )
        )
    return _compose(maps, legend=True)


def _compose(maps: Sequence[PartitionMap], *, legend: bool) -> Figure:
    width = max(7.5, 1.2 + 3.0 * len(maps))
    height = 1.2 + 0.26 * max(_height(_places(partition)) for partition in maps)
    figure = new_figure((width, height))
    for i, partition in enumerate(maps):
        ax = figure.add_subplot(1, len(maps), i + 1)
        _draw_bars(ax, partition)
        if i and _row_names(partition) == _row_names(maps[0]):
            ax.tick_params(labelleft=False)
    if legend:
        handles = _legend(maps)
        columns = _columns(handles, width)
        figure.set_figheight(height + 0.22 * -(-len(handles) // columns))
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=LEGEND_POINTS,
        )
    return figure


def new_figure(inches: tuple[float, float]) -> Figure:
    """Return a figure without pyplot: it needs no display, and nobody has to close it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_matplotlib() from error
    return Figure(figsize=inches, layout="constrained")


def _places(partition: PartitionMap) -> Places:
    band = len(partition.kinds) + GAP
    return {
        (rank, kind): row * band + i
        for row, rank in enumerate(partition.ranks)
        for i, (kind, _) in enumerate(partition.kinds)
    }


def _height(places: Places) -> float:
    return max(places.values(), default=0.0) + 1


def _row_names(partition: PartitionMap) -> list[str]:
    """Return the name of each bar; the first of a rank says which rank it is."""
    first = partition.kinds[0][0]
    names = [(rank, kind, SHORT.get(kind, kind)) for rank, kind in _places(partition)]
    return [
        rf"$\bf{{rank\ {rank}}}$   {name}" if kind == first else name for rank, kind, name in names
    ]


def _draw_bars(ax: Axes, partition: PartitionMap) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    places = _places(partition)
    partial = {kind for kind, placement in partition.kinds if placement == "partial"}
    for (rank, kind), y in places.items():
        for span in partition.groups:
            ax.barh(y, span.stop - span.start, left=span.start, height=0.86, color=ABSENT)
        for segment in partition.of(rank, kind):
            _draw_segment(ax, partition, segment, y, pale=kind in partial)
    for span in partition.groups[1:]:
        ax.axvline(span.start, color=EDGE, linewidth=0.8, linestyle=(0, (2, 2)))
    if 1 < len(partition.groups) <= MOST_NAMES:
        _name_groups(ax, partition)
    ax.set_yticks(list(places.values()), _row_names(partition))
    ax.tick_params(axis="y", length=0, labelsize="small")
    ax.tick_params(axis="x", labelsize="small")
    ax.set_ylim(_height(places) - 0.4, -0.7)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    ax.set_xlim(0, max(partition.total, 1))
    ax.set_title(f"stage {partition.stage}", loc="left", fontweight="bold", pad=20)
    ax.set_xlabel("element, all groups end to end", fontsize="small")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _name_groups(ax: Axes, partition: PartitionMap) -> None:
    """Write each group's name above its bars, where there is room for it."""
    for span in partition.groups:
        length = span.stop - span.start
        name = _fitting([f"group {span.name}", *_shorter(span.name)], ax, partition, length)
        if name:
            x = span.start + length / 2
            ax.text(x, -0.62, verbatim(name), ha="center", va="bottom", fontsize=FONT_POINTS)


def points_wide(ax: Axes) -> float:
    """Return the width of the axes in points."""
    return ax.get_window_extent().width * 72 / ax.figure.dpi


@functools.cache
def text_points(text: str, size: float) -> float:
    """Return the width of a text in points, at a font size in points."""
    try:
        from matplotlib.font_manager import FontProperties
        from matplotlib.textpath import text_to_path
    except ImportError as error:
        raise missing_matplotlib() from error
    font = FontProperties(size=size)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def cut(text: str, size: float, room: float) -> str:
    """Return as much of a text as there is room for, in points; "..." stands for the rest."""
    while len(text) > 4 and text_points(text, size) > room:
        text = f"{text.removesuffix('...')[:-1]}..."
    return text


def _shorter(name: str, least: int = 1) -> list[str]:
    """Return a path, and the ends of it of at least so many parts: "a.b.c", "b.c", "c"."""
    parts = name.split(".")
    return [name, *(".".join(parts[i:]) for i in range(1, len(parts) - least + 1))]


def _fitting(names: Sequence[str], ax: Axes, partition: PartitionMap, length: int) -> str:
    """Return the first name that fits into `length` elements; "" if none does."""
    room = length / max(partition.total, 1) * points_wide(ax) / (WIDE * FONT_POINTS)
    return next((name for name in names if len(name) <= room), "")


def _draw_segment(
    ax: Axes, partition: PartitionMap, segment: Segment, y: float, *, pale: bool
) -> None:
    length = segment.stop - segment.start
    place: dict[str, Any] = {"left": segment.start, "height": 0.86, "linewidth": 0.6}
    if segment.leaf is None:
        ax.barh(y, length, **place, edgecolor=EDGE, **HATCH)
        return
    fill = colour(segment.leaf)
    ax.barh(y, length, **place, color=fill, edgecolor="white", alpha=0.45 if pale else 1.0)
    name = _fitting(_shorter(partition.leaves[segment.leaf], 2), ax, partition, length)
    if name:
        black_or_white = "#000000" if pale else ink(fill)
        ax.text(
            segment.start + length / 2,
            y,
            verbatim(name),
            ha="center",
            va="center_baseline",
            fontsize=FONT_POINTS,
            color=black_or_white,
        )


def _legend(maps: Sequence[PartitionMap]) -> list[Any]:
    """Return what the colours mean."""
    from matplotlib.patches import Patch

    leaves = maps[0].leaves
    handles = [
        Patch(color=colour(i), label=verbatim(name)) for i, name in enumerate(leaves[:MOST_NAMES])
    ]
    if len(leaves) > MOST_NAMES:
        handles.append(Patch(color="none", label=f"and {len(leaves) - MOST_NAMES} more"))
    if any(segment.leaf is None for partition in maps for segment in partition.segments):
        handles.append(Patch(label="padding", edgecolor=EDGE, linewidth=0.6, **HATCH))
    if any(placement == "partial" for partition in maps for _, placement in partition.kinds):
        handles.append(Patch(color=EDGE, alpha=0.45, label="paler: not reduced yet"))
    handles.append(Patch(color=ABSENT, label="not held"))
    return handles


def verbatim(name: str) -> str:
    """Keep matplotlib from reading `$` as mathematics, and `_` in front as "not in the legend"."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def _columns(handles: Sequence[Any], inches: float) -> int:
    """Return how many columns of a legend fit into that width; 6 characters are for the patch."""
    longest = max(len(handle.get_label()) for handle in handles) + 6
    return max(1, min(len(handles), int(inches * 72 / (longest * WIDE * LEGEND_POINTS))))
