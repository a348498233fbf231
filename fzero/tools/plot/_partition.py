"""The partition map of a state: the leaves and the padding of each group, cut by rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from fzero.state import Layout, Setup, TrainState
from fzero.tools.plot._held import BufferKind, buffers_held, ranks_of
from fzero.tools.plot._map import PartitionMap, Segment, Span


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
    kinds = buffers_held(state)
    layout = state.setup.layout
    ranks = ranks_of(state)
    groups = _spans(layout)
    return PartitionMap(
        stage=state.stage,
        world_size=state.setup.axis.size,
        ranks=ranks,
        leaves=tuple(leaf.path for leaf in layout.leaves),
        encoded=tuple(i for i, leaf in enumerate(layout.leaves) if leaf.codec is not None),
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


def _segments(
    setup: Setup, groups: tuple[Span, ...], held: BufferKind, rank: int
) -> Iterator[Segment]:
    """Return the segments of leaves and padding in the part of each group that `rank` holds."""
    layout = setup.layout
    for index in held.groups:
        assert held.placement is not None
        numel = setup.numel(index, held.placement)
        low = setup.part(held.placement, rank).index * numel
        high = low + numel
        first = groups[index].start
        alone = not held.alone.keys().isdisjoint(layout.groups[index].leaves)
        for leaf, start, stop in _contents(layout, index):
            begin, end = max(start, low), min(stop, high)
            if alone:  # no padding, then
                begin, end = (start, stop) if rank in held.alone.get(leaf, ()) else (0, 0)
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
