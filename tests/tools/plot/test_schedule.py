"""The schedule diff: every collective of both is there once, in its order, and marked rightly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.tools.plot import ScheduleDiff, schedule_diff
from fzero.tools.trace import Op
from tests.tools.plot.traces import by_hand, traced, value

MARKS = {"a": ("same", "differs", "only a"), "b": ("same", "differs", "only b")}


def collective(kind: str, path: str, numel: int) -> Op:
    told: dict[str, Any] = {"kind": "collective", "wire_bytes": numel, "detail": f"dp: {path}"}
    return Op(name=kind, phase="backward", reads=(), gives=(value("x", numel),), **told)


COLLECTIVES = st.builds(
    collective,
    st.sampled_from(["all_gather", "reduce_scatter"]),
    st.sampled_from(["w", "v"]),
    st.sampled_from([4, 8]),
)
SCHEDULES = st.lists(COLLECTIVES, min_size=1, max_size=12)


@given(a=SCHEDULES, b=SCHEDULES)
def test_every_collective_is_there_once_in_its_order(a: list[Op], b: list[Op]) -> None:
    found = schedule_diff(by_hand(a), by_hand(b))
    assert [row.a for row in found.rows if row.a] == a
    assert [row.b for row in found.rows if row.b] == b
    assert found.equal == (a == b) == (not found)
    for row in found.rows:
        assert (row.mark in MARKS["a"], row.mark in MARKS["b"]) == (bool(row.a), bool(row.b))
        if row.a and row.b:
            assert (row.mark == "same") == (row.a == row.b) and row.a.name == row.b.name
    assert found.wire_bytes == (sum(op.wire_bytes for op in a), sum(op.wire_bytes for op in b))
    assert schedule_diff(by_hand(a), by_hand(a)).equal


@given(a=SCHEDULES, extra=COLLECTIVES, data=st.data())
def test_one_more_is_the_only_one_that_is_marked(a: list[Op], extra: Op, data: Any) -> None:
    at = data.draw(st.integers(0, len(a)))
    found = schedule_diff(by_hand(a), by_hand([*a[:at], extra, *a[at:]]))
    assert [row.b for row in found.rows if row.mark != "same"] == [extra]
    assert [row.mark for row in found.rows].count("only b") == 1


def test_two_stages_and_two_ranks() -> None:
    two, three = traced(2), traced(3)
    found = schedule_diff(two, three)
    phases = [(row.mark, row.phase) for row in found.rows if "gather" in str(row.cells())]
    assert phases == [("only b", "forward")] * 2 + [("only b", "backward"), ("only a", "update")]

    def step_fn(state: Any, x: torch.Tensor) -> Any:
        return state, fzero.pmean(x) if fzero.axis_index() == 1 else x

    step = fzero.simulate(fzero.shard(step_fn, stage=0), world_size=2)
    state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0))
    ranks = [fzero.trace(step, rank=r)(state, torch.ones(2, 3)) for r in range(2)]
    signs_and_words = [row.cells()[0::3] for row in schedule_diff(*ranks).rows]
    assert signs_and_words == [("+", "all_reduce <dp> -> f32[3]")]
    with pytest.raises(fzero.LayoutError, match=r"Fix: give what fzero.trace\(step\)"):
        schedule_diff(ranks[0], step)  # type: ignore[arg-type]


def test_the_views_say_the_same() -> None:
    long = [collective("all_gather", f"layer.{i}.weight", 4) for i in range(30)]
    path = ", ".join(f"block.{i}.a_long_name.weight_${{" for i in range(9))
    other = [collective("all_reduce", path, 4), *long[:20], *long[21:25], *long[26:], long[0]]
    found: ScheduleDiff = schedule_diff(by_hand(long), by_hand(other))
    assert [row.mark for row in found.rows].count("same") == 28
    lines = found.table().splitlines()
    assert len(lines) == len(found.rows) + 3 and "30 collectives, 120 bytes sent" in lines[0]
    assert [line[0] for line in lines[3:] if line[0] != " "] == ["+", "-", "-", "+"]
    assert "<dp: block.0.a_long_name.weight_${, block.1.a_lon..." in lines[3]
    assert max(map(len, lines)) <= 120
    rows = found.to_dict()["rows"]
    assert rows[0]["b"] == f"all_reduce <dp: {path}> -> f32[4]" and rows[0]["a"] is None
