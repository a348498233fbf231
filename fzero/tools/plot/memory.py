"""Live bytes of a trace over the step, by kind: data, table and picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fzero.errors import LayoutError
from fzero.tools.columns import ShownAsText, columns, in_bytes
from fzero.tools.plot import figure
from fzero.tools.plot.figure import BASE, EDGE
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
    if not trace.ops:
        raise LayoutError(
            "memory_timeline was given a trace without ops.",
            cause="a step that returns what it is given.",
            fix="trace a step that computes something.",
        )
    rows = (
        MemoryRow(number=i, name=op.name, phase=op.phase, alive=asdict(op.alive))
        for i, op in enumerate(trace.ops)
    )
    return MemoryTimeline(title=trace.title, rows=tuple(rows))


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
class MemoryTimeline(ShownAsText):
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

    def table(self) -> str:
        """Return the peak of each phase as text in columns, by kind."""
        lines = [("most in", "alive", "at", *self.kinds)]
        for phase in PHASES:
            some = [row for row in self.rows if row.phase == phase]
            if some:
                most = max(some, key=lambda row: row.total)
                mark = " (peak)" if most is self.peak else ""
                counts = (in_bytes(most.alive[kind]) for kind in self.kinds)
                where = f"op {most.number}, {most.name}"
                lines.append((phase, in_bytes(most.total) + mark, where, *counts))
        return "\n".join([self.title, *columns(lines)])

    def draw(self, ax: Axes | None = None) -> Axes:
        """Draw it on `ax` (default: a new figure) and return the axes: kinds stacked, ops along x.

        Raises `MissingExtraError` (an `ImportError`) where matplotlib is not installed.
        """
        if ax is None:
            ax = figure.new_figure((9.0, 4.2)).add_subplot()
        from matplotlib.ticker import MaxNLocator

        peak, count = self.peak, len(self.rows)
        edges = range(count + 1)  # op i is at [i, i + 1)
        below = [0] * len(edges)
        for kind in self.kinds:
            sizes = [row.alive[kind] for row in self.rows]
            above = [low + n for low, n in zip(below, [*sizes, sizes[-1]], strict=True)]
            name = f"{kind} {in_bytes(peak.alive[kind])}"
            ax.fill_between(edges, below, above, step="post", color=COLOURS[kind], label=name, lw=0)
            below = above
        ax.set_xlim(0, count)
        ax.set_ylim(0, 1.16 * max(peak.total, 1))
        x = peak.number + 0.5
        side = "left" if x < 0.25 * count else "right" if x > 0.75 * count else "center"
        ax.plot([x], [peak.total], "v", color="black", markersize=5, clip_on=False)
        words = f"peak {in_bytes(peak.total)}: op {peak.number}, {peak.name}"
        look: dict[str, Any] = {"textcoords": "offset points", "fontsize": FONT_POINTS}
        look |= {"va": "bottom"}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        ax.annotate(words, (x, peak.total), (0, 5), ha=side, bbox=box, **look)
        start = 0
        for phase, run in groupby(row.phase for row in self.rows):
            stop = start + len(list(run))
            if start:
                ax.axvline(start, color=EDGE, linewidth=0.8, linestyle=(0, (2, 2)))
            room = (stop - start) * figure.points_wide(ax) / count
            where = ((start + stop) / 2 / count, 1.0)
            # Its name is above its ops, vertically where it does not fit.
            turned = 0 if figure.fitting([phase], FONT_POINTS, room) else 90
            at: dict[str, Any] = {"xycoords": "axes fraction", "ha": "center", **look}
            ax.annotate(phase, where, (0, 3), rotation=turned, **at)
            start = stop
        ax.yaxis.set_major_formatter(lambda count, _: in_bytes(count))
        ax.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
        ax.set_xlabel("op of the trace", fontsize="small")
        ax.tick_params(labelsize="small")
        ax.set_title(figure.verbatim(self.title), loc="left", fontsize="medium", pad=38)
        for edge in ("top", "right"):
            ax.spines[edge].set_visible(False)
        handles = ax.get_legend_handles_labels()[0]
        figure.legend_below(ax, handles, title="bytes at the peak")
        return ax
