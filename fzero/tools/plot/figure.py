"""What the pictures share: figures without pyplot, colours, legends, and texts that fit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fzero.errors import FzeroError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design" (2008), without black: colour-blind readers tell them
# apart.
BASE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#F0E442", "#D55E00")
EDGE = "#6B6B6B"
LEGEND_POINTS = 8.5


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
            fix="pip install 'fzero[plots]'; .table() needs no matplotlib.",
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
