"""What all pictures share: figures without pyplot, legends, texts and the room that they need."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fzero.plot._extra import missing_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEGEND_POINTS = 8.5
WIDE = 0.62  # of a character, in units of its font size


def new_figure(inches: tuple[float, float]) -> Figure:
    """Return a figure without pyplot: it needs no display, and nobody has to close it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_matplotlib() from error
    return Figure(figsize=inches, layout="constrained")


def legend_below(ax: Axes, handles: Sequence[Any], *, title: str = "") -> None:
    """Put a legend below the axes, in as many columns as there is room for."""
    below_inches = 0.55  # the ticks and the name of the x axis
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, -below_inches * ax.figure.dpi / ax.get_window_extent().height),
        ncols=columns(handles, ax.get_window_extent().width / ax.figure.dpi),
        frameon=False,
        fontsize=LEGEND_POINTS,
        title=title or None,
        title_fontsize=LEGEND_POINTS,
        alignment="left",
    )


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


def verbatim(name: str) -> str:
    """Keep matplotlib from reading `$` as mathematics, and `_` in front as "not in the legend"."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def columns(handles: Sequence[Any], inches: float) -> int:
    """Return how many columns of a legend fit into that width; 6 characters are for the patch."""
    longest = max(len(handle.get_label()) for handle in handles) + 6
    return max(1, min(len(handles), int(inches * 72 / (longest * WIDE * LEGEND_POINTS))))


def ends_of(name: str, least: int = 1) -> list[str]:
    """Return a path, and the ends of it of at least so many parts: "a.b.c", "b.c", "c"."""
    parts = name.split(".")
    return [name, *(".".join(parts[i:]) for i in range(1, len(parts) - least + 1))]
