"""Shared by all pictures: figures without pyplot, legends, and sizes of texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fzero.errors import FzeroError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEGEND_POINTS = 8.5
WIDE_POINTS = 4.0
"""From which width on a bar has a white edge."""


class MissingExtraError(FzeroError, ImportError):
    """matplotlib, an optional dependency, is not installed. The tables work without it."""


def new_figure(inches: tuple[float, float]) -> Figure:
    """Return a figure without pyplot: it needs no display, and nobody has to close it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "a figure needs matplotlib, which is not installed.",
            cause="fzero was installed without its extra for plots.",
            fix="pip install 'fzero[plots]'; .table() and the HTML view need no matplotlib.",
        ) from error
    return Figure(figsize=inches, layout="constrained")


def legend_below(ax: Axes, handles: Sequence[Any], *, title: str = "") -> None:
    """Put a legend below the axes, in as many columns as there is room for."""
    from matplotlib.transforms import ScaledTranslation

    below_inches = 0.55  # the ticks and the name of the x axis
    below = ScaledTranslation(0, -below_inches, ax.figure.dpi_scale_trans)
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + below,
        ncols=legend_columns(handles, points_wide(ax)),
        frameon=False,
        fontsize=LEGEND_POINTS,
        title=title or None,
        title_fontsize=LEGEND_POINTS,
        alignment="left",
    )


def legend_columns(handles: Sequence[Any], room: float) -> int:
    """Return how many columns of a legend fit into so many points."""
    longest = max(text_points(handle.get_label(), LEGEND_POINTS) for handle in handles)
    patch_and_gaps = 5 * LEGEND_POINTS
    return max(1, min(len(handles), int(room / (longest + patch_and_gaps))))


def points_wide(ax: Axes) -> float:
    """Return the width of the axes in points."""
    return ax.get_window_extent().width * 72 / ax.figure.dpi


def edge_of(fill: str, points: float) -> dict[str, Any]:
    """Return the edge of a bar: white between wide bars; a narrow one has its own colour.

    A white edge takes a part of the bar, and all of one that is narrower than the edge.

    Args:
        fill: the colour of the bar.
        points: its width.

    Example:
        >>> edge_of("#112233", 20.0), edge_of("#112233", 0.1)
        ({'edgecolor': 'white', 'linewidth': 0.3}, {'edgecolor': '#112233', 'linewidth': 0.6})
    """
    if points >= WIDE_POINTS:
        return {"edgecolor": "white", "linewidth": 0.3}
    return {"edgecolor": fill, "linewidth": 0.6}


@functools.cache
def text_points(text: str, size: float) -> float:
    """Return the width of a text in points, at a font size in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def fitting(names: Sequence[str], size: float, room: float) -> str:
    """Return the first name that fits into `room` points with a margin; "" if none does."""
    return next((name for name in names if text_points(name, size) + 4.0 <= room), "")


def verbatim(name: str) -> str:
    """Return a name that matplotlib shows as it is, also with `$` or a leading `_`."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def ends_of(name: str, least: int = 1) -> list[str]:
    """Return a path and its ends of at least `least` parts: "a.b.c", "b.c", "c"."""
    parts = name.split(".")
    return [name, *(".".join(parts[i:]) for i in range(1, len(parts) - least + 1))]


def stretches(values: Sequence[Any]) -> list[tuple[int, int, Any]]:
    """Return (start, stop, value) of each stretch of one value.

    Example:
        >>> stretches(["a", "a", "b"])
        [(0, 2, 'a'), (2, 3, 'b')]
    """
    found, end = [], 0
    for value, run in groupby(values):
        start, end = end, end + len(list(run))
        found.append((start, end, value))
    return found
