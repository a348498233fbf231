"""Live bytes of a trace over the step, by kind: data, table and picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fzero.errors import LayoutError
from fzero.tools._units import in_bytes
from fzero.tools.plot import _figure
from fzero.tools.plot._html import Table
from fzero.tools.plot._palette import BASE, EDGE
from fzero.tools.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "parameters": BASE[4],
    "optimizer": BASE[3],
    "gradients": BASE[6],
    "gathered": BASE[0],
    "activations": BASE[2],
    "other": "#BDBDBD",
}
FONT_POINTS = 8.0
PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """The live bytes while op `number` of the trace runs, {kind: bytes}."""

    number: int
    name: str
    phase: str
    alive: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.alive.values())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryTimeline(Table):
    """Bytes alive at each op of a trace, by kind. Plain data; equal traces give equal ones.

    The kinds are those of `fzero.trace.Alive`; at each op they add up to `trace.live_bytes`.
    """

    title: str
    rows: tuple[MemoryRow, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds with any bytes, in drawing order."""
        return tuple(kind for kind in COLOURS if any(row.alive[kind] for row in self.rows))

    @property
    def peak(self) -> MemoryRow:
        """The first op with the most live bytes."""
        return max(self.rows, key=lambda row: row.total)

    def to_dict(self) -> dict[str, Any]:
        """Return it as dicts, lists, strings and numbers: what JSON can hold."""
        return {"title": self.title, "rows": [asdict(row) for row in self.rows]}

    def draw(self, ax: Axes | None = None) -> Axes:
        """Draw it on `ax` (default: a new figure) and return the axes: kinds stacked, ops along x.

        Raises `MissingExtraError` (an `ImportError`) where matplotlib is not installed.
        """
        return _draw(self, ax)

    def _heading(self) -> list[str]:
        return [self.title]

    def _cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return a row for the peak of each phase, by kind."""
        rows = []
        for phase in PHASES:
            some = [row for row in self.rows if row.phase == phase]
            if some:
                most = max(some, key=lambda row: row.total)
                mark = " (peak)" if most is self.peak else ""
                counts = (in_bytes(most.alive[kind]) for kind in self.kinds)
                where = f"op {most.number}, {most.name}"
                rows.append((phase, in_bytes(most.total) + mark, where, *counts))
        return ("most in", "alive", "at", *self.kinds), rows


def memory_timeline(trace: Trace) -> MemoryTimeline:
    """Return the live bytes at each op of a step, by kind.

    The sum over kinds at op i is `trace.live_bytes[i]`. The state that goes in is alive to the end,
    as is the batch: the step is pure. `shard(donate=True)` gives memory back that this counts.

    Args:
        trace: what `fzero.trace(step)(state, *args)` gives.

    Raises:
        LayoutError: for what is no trace, and for a trace without ops.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (x @ p["w"]).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.simulate(fzero.shard(step_fn, stage=3), world_size=4)
        >>> state = step.init({"w": torch.ones(64, 4)}, fzero.optim.sgd(0.5))
        >>> memory = memory_timeline(fzero.trace(step)(state, torch.ones(4, 2, 64)))
        >>> [row.alive["gathered"] for row in memory.rows if row.name == "mm"]
        [1024, 0]
        >>> memory.rows[0].alive["parameters"]  # a quarter of 1024 bytes
        256
    """
    if not isinstance(trace, Trace):
        raise LayoutError(
            f"memory_timeline was given a {type(trace).__name__}.",
            cause="the step, or its result, in the place of its trace.",
            fix="give what fzero.trace(step)(state, *args) returns.",
        )
    rows = [
        MemoryRow(number=i, name=op.name, phase=op.phase, alive=asdict(op.alive))
        for i, op in enumerate(trace.ops)
    ]
    if not rows:
        raise LayoutError(
            "memory_timeline was given a trace without ops.",
            cause="a step that returns what it is given.",
            fix="trace a step that computes something.",
        )
    return MemoryTimeline(title=trace.title, rows=tuple(rows))


# The picture. Op i is at [i, i + 1) of the x axis.


def _draw(memory: MemoryTimeline, ax: Axes | None) -> Axes:
    if ax is None:
        ax = _figure.new_figure((9.0, 4.2)).add_subplot()
    peak, rows = memory.peak, memory.rows
    edges = range(len(rows) + 1)
    below = [0] * len(edges)
    for kind in memory.kinds:
        counts = [row.alive[kind] for row in rows]
        above = [low + n for low, n in zip(below, [*counts, counts[-1]], strict=True)]
        name = f"{kind} {in_bytes(peak.alive[kind])}"
        ax.fill_between(edges, below, above, step="post", color=COLOURS[kind], label=name, lw=0)
        below = above
    ax.set_xlim(0, len(rows))
    ax.set_ylim(0, 1.16 * max(peak.total, 1))
    _name_peak(ax, memory)
    _name_phases(ax, memory)
    _name_axes(ax, memory.title)
    _figure.legend_below(ax, ax.get_legend_handles_labels()[0], title="bytes at the peak")
    return ax


def _name_peak(ax: Axes, memory: MemoryTimeline) -> None:
    peak = memory.peak
    x = peak.number + 0.5
    share = x / len(memory.rows)
    side = "left" if share < 0.25 else "right" if share > 0.75 else "center"
    ax.plot([x], [peak.total], "v", color="black", markersize=5, clip_on=False)
    words = f"peak {in_bytes(peak.total)}: op {peak.number}, {peak.name}"
    look: dict[str, Any] = {"ha": side, "va": "bottom", "fontsize": FONT_POINTS}
    look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    ax.annotate(words, (x, peak.total), (0, 5), textcoords="offset points", **look)


def _name_phases(ax: Axes, memory: MemoryTimeline) -> None:
    """Write the name of each phase above its ops, vertically where it does not fit."""
    points = _figure.points_wide(ax) / len(memory.rows)
    for start, stop, phase in _figure.stretches([row.phase for row in memory.rows]):
        if start:
            ax.axvline(start, color=EDGE, linewidth=0.8, linestyle=(0, (2, 2)))
        fits = _figure.fitting([phase], FONT_POINTS, (stop - start) * points)
        look: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": FONT_POINTS}
        look["rotation"] = 0 if fits else 90
        where = ((start + stop) / 2 / len(memory.rows), 1.0)
        place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        ax.annotate(phase, where, (0, 3), **place, **look)


def _name_axes(ax: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.yaxis.set_major_formatter(lambda count, _: in_bytes(count))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    ax.set_xlabel("op of the trace", fontsize="small")
    ax.tick_params(labelsize="small")
    ax.set_title(_figure.verbatim(title), loc="left", fontsize="medium", pad=38)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
