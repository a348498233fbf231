"""Traces for the plots: of real steps, and made by hand; and what holds for every picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import fx, nn

import fzero
from fzero.collectives import CollectiveLog
from fzero.tools.trace import Op, Trace, Value
from tests.descends import descends

F32 = torch.float32


def traced(stage: int, world_size: int = 2, *, layers: int = 2, **options: Any) -> Trace:
    """The step of rank 0 on Linears of 16, with a batch of 4 for each rank, under AdamW."""
    linears = [nn.Linear(16, 16) for _ in range(layers)]
    apply, params = fzero.functionalize(nn.Sequential(*linears))

    step_fn = descends(lambda p, x: apply(p, x).pow(2).mean())
    step = fzero.simulate(fzero.shard(step_fn, stage=stage, **options), world_size=world_size)
    state = step.init(params, fzero.optim.adamw(1e-3))
    return fzero.trace(step)(state, torch.zeros(world_size, 4, 16))


def by_hand(ops: Sequence[Op], inputs: Sequence[Value] = ()) -> Trace:
    """A trace of some ops; what it gives is what the last one gives."""
    return Trace(
        title="by hand",
        rank=0,
        inputs=tuple(inputs),
        ops=tuple(ops),
        outputs=ops[-1].gives if ops else (),
        log=CollectiveLog(),
        graph=fx.GraphModule(nn.Module(), fx.Graph()),
    )


def value(name: str, numel: int) -> Value:
    return Value(name=name, shape=(numel,), dtype=F32)


def texts_of(figure: Any) -> list[Any]:
    """All that is written in a figure, but ticks beyond its axes."""
    found = []
    for ax in figure.axes:
        left, right = ax.get_xlim()
        bottom, top = sorted(ax.get_ylim())
        found += [*ax.texts, *(t for t in ax.findobj(type(ax.title)) if t.get_text() == _title(ax))]
        if ax.get_legend():
            found += ax.get_legend().get_texts()
        if ax.axison:
            ticks = zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
            found += [label for x, label in ticks if left <= x <= right]
            ticks = zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)
            found += [label for y, label in ticks if bottom <= y <= top]
    return [text for text in found if text.get_text()]


def _title(ax: Any) -> str:
    return ax.get_title(loc="left")


def assert_legible(figure: Any) -> None:
    """No text leaves the figure, and no two are on each other."""
    FigureCanvasAgg(figure).draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts_of(figure)]
    assert boxes
    for name, box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1, name
        assert box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, name
    for (one, a), (two, b) in combinations(boxes, 2):
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        high = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 1 or high <= 1, (one, two)
