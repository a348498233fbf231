"""Which rank holds which elements of which leaf: data, table and picture."""

from __future__ import annotations

import functools
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

from fzero.checkpoint.elements import state_of_rank
from fzero.errors import LayoutError
from fzero.machine.named_shards import leaf_paths
from fzero.optim.entries import rule_entries
from fzero.state import Buffers, Layout, Placement, TrainState
from fzero.state.train_state import require_not_donated, require_state
from fzero.tools.columns import ShownAsText, columns
from fzero.tools.plot import figure
from fzero.tools.plot.figure import BASE, EDGE
from fzero.tools.trees import tensors_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    require_state("fzero.plot", state)
    require_not_donated(state)
    setup, layout = state.setup, state.setup.layout
    is_stacked = state.step.ndim == 1
    ranks = tuple(range(setup.axis.size)) if is_stacked else (setup.axis.rank,)
    sizes = [layout.full_numel(i) for i in range(len(layout.groups))]
    groups = tuple(
        Span(name=group.name, start=stop - size, stop=stop, trainable=group.trainable)
        for group, size, stop in zip(layout.groups, sizes, accumulate(sizes), strict=True)
    )
    kinds = _kinds(state, is_stacked=is_stacked)
    whole = _kept_whole(state, ranks, is_stacked=is_stacked)
    segments = []
    for rank in ranks:
        for kind, placement, indices in kinds:
            if placement is None:
                continue
            for index in indices:
                numel = setup.numel(index, placement)
                low = setup.part(placement, rank).index * numel
                first = groups[index].start
                owned = kind == "optimizer" and not whole.keys().isdisjoint(
                    layout.groups[index].leaves
                )
                for leaf, start, stop in _contents(layout, index):
                    begin, end = max(start, low), min(stop, low + numel)
                    if owned:  # no padding, then
                        begin, end = (start, stop) if rank in whole.get(leaf, ()) else (0, 0)
                    if begin < end:
                        segments.append(
                            Segment(
                                rank=rank,
                                kind=kind,
                                group=index,
                                leaf=leaf,
                                start=first + begin,
                                stop=first + end,
                                offset=0 if leaf is None else begin - start,
                            )
                        )
    return PartitionMap(
        stage=state.stage,
        world_size=setup.axis.size,
        ranks=ranks,
        leaves=tuple(leaf.path for leaf in layout.leaves),
        encoded=tuple(i for i, leaf in enumerate(layout.leaves) if leaf.codec is not None),
        groups=groups,
        kinds=tuple(
            (kind, placement.value if placement else "none") for kind, placement, _ in kinds
        ),
        segments=tuple(segments),
    )


def _kinds(
    state: TrainState, *, is_stacked: bool
) -> list[tuple[str, Placement | None, Sequence[int]]]:
    """Return (name, placement, groups) of each kind of buffer; placement None: there is none.

    Parameters, gradients and optimizer always; others if the state has them.
    """
    layout, window = state.setup.layout, state.window
    every, learning = range(len(layout.groups)), layout.trainable
    found: list[tuple[str, Buffers, Sequence[int]]] = [
        ("parameters", state.params, every),
        ("gathered", Buffers(flats=window.gathered, placement=Placement.REPLICATED), every),
        ("window", window.pending, learning),
    ]
    for name, slot in state.slots.items():
        if isinstance(slot.value, Buffers):
            found.append((name, slot.value, every if slot.form.leaves == "all" else learning))
    found.append(("gradients", state.gradients, learning))
    # The optimizer keeps something by element: no counters, nothing empty.
    scalar = 1 if is_stacked else 0
    keeps = any(x.ndim > scalar and x.numel() for x in tensors_in(state.optimizer))
    return [
        *(
            (kind, buffers.placement if buffers.held else None, groups)
            for kind, buffers, groups in found
            if buffers.held or kind in ("parameters", "gradients")
        ),
        ("optimizer", state.setup.optimizer_state if keeps else None, learning),
    ]


def _kept_whole(
    state: TrainState, ranks: Sequence[int], *, is_stacked: bool
) -> Mapping[Any, set[int]]:
    """Return {number of a leaf: its ranks} of what the optimizer keeps whole, or nowhere."""
    layout, found = state.setup.layout, dict[int, set[int]]()
    numbers = {name: i for i, name in enumerate(leaf_paths(layout))}
    for rank in ranks:
        try:
            own = state_of_rank(state, rank) if is_stacked else state
            entries = rule_entries(own, rank)
        except LayoutError:  # an optimizer whose state goes with no leaf
            return {}
        flats = {group for one in entries if one.per_leaf for group in one.values}
        cut = {leaf for group in flats for leaf in layout.groups[group].leaves}
        for one in (one for one in entries if not one.per_leaf):
            for name in one.values:
                if (leaf := numbers[name]) not in cut:
                    found.setdefault(leaf, set()).update({rank} if name in one.owned else ())
    return found


def _contents(layout: Layout, index: int) -> Iterator[tuple[int | None, int, int]]:
    """Yield (leaf, start, stop) along a group's flat buffer; leaf None is padding."""
    group, end = layout.groups[index], 0
    for leaf, offset in zip(group.leaves, group.offsets, strict=True):
        yield None, end, offset
        end = offset + layout.leaves[leaf].numel
        yield leaf, offset, end
    yield None, end, layout.full_numel(index)


SHORT = {"parameters": "params", "gradients": "grads", "optimizer": "optim"}
GAP = 0.9  # between ranks, in bars
MOST_NAMES = 21  # groups with names above their bars, and with lines between them
MOST_INCHES = 20.0  # of the bars of all ranks: the bars of many are lower
BAR_INCHES = 0.26
NAMED_INCHES = 0.17  # from which height a bar has a name, and what is in it
WIDE_POINTS = 4.0  # from which width on a bar has a white edge
WORDS = 60  # letters of the segments in a row of the table
FONT_POINTS = 7.0  # inside the bars
HATCH: dict[str, Any] = {"hatch": "//////", "facecolor": "white"}
ABSENT = "#F1F1F1"  # a place whose elements this rank does not hold


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
class PartitionMap(ShownAsText):
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
        return json.loads(json.dumps(asdict(self)))

    def table(self) -> str:
        """Return it as text in columns: a row for each rank and kind of buffer.

        Of more segments than fit into a row it has the first ones, and the number of the others.
        """
        lines = [("rank", "buffer", "placement", "elements", "segments")]
        for rank in self.ranks:
            for kind, placement in self.kinds:
                held = self.of(rank, kind)
                sizes = [0, 0]  # of elements, and of bytes
                for segment in held:
                    sizes[segment.leaf in self.encoded] += segment.stop - segment.start
                size = f"{sizes[0]:,}" + (f" + {sizes[1]:,} bytes" if sizes[1] else "")
                words = list(map(self.label, held))
                ends = [*accumulate(len(word) + 1 for word in words)]
                shown = max(bisect_right(ends, WORDS), 1)
                more = [f"+{len(words) - shown}"] if shown < len(words) else []
                row = " ".join([*words[:shown], *more])
                lines.append((str(rank), kind, placement, size, row))
        return "\n".join(columns(lines))

    def draw(self, ax: Axes | None = None) -> Axes:
        """Draw the map on `ax` (default: a new figure) and return the axes.

        A band for each rank, and a bar in it for each kind of buffer. Every leaf is in the legend:
        of more leaves than colours, those of a module, or of several blocks, have one.

        Raises `MissingExtraError` (an `ImportError`) where matplotlib is not installed.
        """
        if ax is None:
            return side_by_side([self]).axes[0]
        _draw_bars(ax, self)
        figure.legend_below(ax, _legend([self]))
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
    height = 1.2 + max(_bar_inches(partition) * _height(partition) for partition in maps)
    drawn = figure.new_figure((width, height))
    for i, partition in enumerate(maps):
        ax = drawn.add_subplot(1, len(maps), i + 1)
        _draw_bars(ax, partition)
        if i and _row_names(partition) == _row_names(maps[0]):
            ax.tick_params(labelleft=False)
    handles = _legend(maps)
    columns = figure.legend_columns(handles, 72 * width)
    drawn.set_figheight(height + 0.22 * -(-len(handles) // columns))
    drawn.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=figure.LEGEND_POINTS,
    )
    return drawn


def _places(partition: PartitionMap) -> dict[tuple[int, str], float]:
    """Return {(rank, kind): y of its bar}."""
    band = len(partition.kinds) + GAP
    return {
        (rank, kind): row * band + i
        for row, rank in enumerate(partition.ranks)
        for i, (kind, _) in enumerate(partition.kinds)
    }


def _height(partition: PartitionMap) -> float:
    return max(_places(partition).values(), default=0.0) + 1


def _bar_inches(partition: PartitionMap) -> float:
    return min(BAR_INCHES, MOST_INCHES / _height(partition))


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
        for span in partition.groups:  # each with its name, where there is room for it
            names = [f"group {span.name}", *_ends_of(span.name)]
            _write(ax, names, span.start, span.stop, y=-0.62, va="bottom")
    ax.set_yticks(list(places.values()), _row_names(partition))
    ax.tick_params(axis="y", length=0, labelsize="small")
    ax.tick_params(axis="x", labelsize="small")
    ax.set_ylim(_height(partition) - 0.4, -0.7)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    ax.set_title(f"stage {partition.stage}", loc="left", fontweight="bold", pad=20)
    about = "element, all groups end to end" + "; of encoded leaves bytes" * bool(partition.encoded)
    if _bar_inches(partition) < NAMED_INCHES:
        about += f"; of each rank from above: {', '.join(kind for kind, _ in partition.kinds)}"
    ax.set_xlabel(about, fontsize="small")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _write(ax: Axes, names: Sequence[str], start: int, stop: int, **look: Any) -> None:
    """Write the first name that fits between elements `start` and `stop`, if any does."""
    room = (stop - start) / ax.get_xlim()[1] * figure.points_wide(ax)
    if name := figure.fitting(names, FONT_POINTS, room):
        words = {"s": figure.verbatim(name), "ha": "center", "fontsize": FONT_POINTS}
        ax.text(x=(start + stop) / 2, **words, **look)


def _draw_segment(
    ax: Axes, partition: PartitionMap, segment: Segment, y: float, *, pale: bool
) -> None:
    length = segment.stop - segment.start
    place: dict[str, Any] = {"left": segment.start, "height": 0.86, "linewidth": 0.6}
    if segment.leaf is None:
        ax.barh(y, length, **place, edgecolor=EDGE, **HATCH)
        return
    fill = colour(legend_entries(partition.leaves)[1][segment.leaf])
    points = length / ax.get_xlim()[1] * figure.points_wide(ax)
    # A white edge would take all of a narrow bar; those lie above the edges of their neighbours.
    look: dict[str, Any] = {"edgecolor": fill, "zorder": 1.5}
    if points >= WIDE_POINTS:
        look = {"edgecolor": "white", "linewidth": 0.3}
    ax.barh(y, length, **(place | look), color=fill, alpha=0.45 if pale else 1.0)
    if _bar_inches(partition) < NAMED_INCHES:
        return
    names = _ends_of(partition.leaves[segment.leaf], 2)
    look = {"va": "center_baseline", "color": "#000000" if pale else ink(fill)}
    _write(ax, names, segment.start, segment.stop, y=y, **look)


def _legend(maps: Sequence[PartitionMap]) -> list[Any]:
    """Return the handles of the legend."""
    from matplotlib.patches import Patch

    handles = [
        Patch(color=colour(i), label=figure.verbatim(name))
        for i, name in enumerate(legend_entries(maps[0].leaves)[0])
    ]
    if any(segment.leaf is None for partition in maps for segment in partition.segments):
        handles.append(Patch(label="padding", edgecolor=EDGE, linewidth=0.6, **HATCH))
    if any(placement == "partial" for partition in maps for _, placement in partition.kinds):
        handles.append(Patch(color=EDGE, alpha=0.45, label="paler: not reduced yet"))
    handles.append(Patch(color=ABSENT, label="not held"))
    return handles


def _ends_of(name: str, least: int = 1) -> list[str]:
    """Return a path and its ends of at least `least` parts: "a.b.c", "b.c", "c"."""
    parts = name.split(".")
    return [name, *(".".join(parts[i:]) for i in range(1, len(parts) - least + 1))]


# Colours, and what has one.

_TOWARDS = ((0.0, 255), (0.5, 255), (0.35, 0))  # as it is, then paler, then darker
COLOURS = len(BASE) * len(_TOWARDS)


def colour(number: int) -> str:
    """Return colour `number` of `COLOURS`, as #RRGGBB.

    Example:
        >>> colour(0), colour(7)
        ('#56B4E9', '#AADAF4')
    """
    amount, target = _TOWARDS[number // len(BASE)]
    mixed = (round(c + (target - c) * amount) for c in _rgb(BASE[number % len(BASE)]))
    return "#" + "".join(f"{c:02X}" for c in mixed)


def ink(background: str) -> str:
    """Return black or white: what is legible on `background` (Rec. 709 luma).

    Example:
        >>> ink("#F0E442"), ink("#0072B2")
        ('#000000', '#FFFFFF')
    """
    red, green, blue = _rgb(background)
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 120 else "#FFFFFF"


def _rgb(code: str) -> tuple[int, int, int]:
    return int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16)


@functools.lru_cache(maxsize=64)
def legend_entries(leaves: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the labels of a legend, one for each colour, and the number of each leaf's.

    With more leaves than colours, neighbours share one.

    Neighbours have paths that begin with the same parts, as many as the colours allow: the
    parameters of a module, of a block, or of several consecutive blocks.

    Example:
        >>> legend_entries(("embed.w", "head.w"))[0]
        ('embed.w', 'head.w')
        >>> blocks = [f"h.{i}.{name}" for i in range(40) for name in ("w", "b")]
        >>> legend_entries(("embed.w", *blocks, "head.w"))[0][:3]
        ('embed.w', 'h.0 to h.2 (6 leaves)', 'h.3 to h.5 (6 leaves)')
    """
    parts = [tuple(leaf.split(".")) for leaf in leaves]
    numbers = list(range(len(leaves)))
    if len(leaves) <= COLOURS:
        return leaves, tuple(numbers)
    depth = max(map(len, parts))
    while len(_runs(numbers, parts, depth)) > COLOURS:
        depth -= 1
    whole = {some[0]: some[-1] for some in _runs(numbers, parts, depth)}
    coarse = [_runs(some, parts, depth + 1) for some in _runs(numbers, parts, depth)]
    rest, more = COLOURS - len(coarse), sum(len(fine) - 1 for fine in coarse)
    bins: list[list[list[int]]] = []
    for fine in coarse:
        count = 1 + (rest * (len(fine) - 1) // more if more else 0)
        size = -(-len(fine) // count)
        bins += [fine[i : i + size] for i in range(0, len(fine), size)]
    of_leaf = [0] * len(leaves)
    for entry, some in enumerate(bins):
        for leaf in (leaf for run in some for leaf in run):
            of_leaf[leaf] = entry
    labels = [
        # All leaves that begin with the same parts are called by these.
        _label(some, leaves, parts, depth - (depth and whole.get(some[0][0]) == some[-1][-1]))
        for some in bins
    ]
    return tuple(labels), tuple(of_leaf)


def _runs(numbers: Sequence[int], parts: Sequence[tuple[str, ...]], depth: int) -> list[list[int]]:
    """Split leaves into consecutive ones whose paths begin with the same `depth` parts."""
    return [list(some) for _, some in groupby(numbers, key=lambda leaf: parts[leaf][:depth])]


def _label(
    runs: list[list[int]],
    leaves: Sequence[str],
    parts: Sequence[tuple[str, ...]],
    depth: int,
) -> str:
    """Return the label of the leaves of an entry."""
    first, last = runs[0][0], runs[-1][-1]
    if first == last:
        return leaves[first]
    head, tail = (".".join(parts[leaf][: depth + 1]) for leaf in (first, last))
    count = sum(map(len, runs))
    return f"{head} ({count} leaves)" if head == tail else f"{head} to {tail} ({count} leaves)"
