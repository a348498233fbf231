"""Ranks that do not do the same: each difference is named, before anything hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.collectives import assert_same_everywhere
from fzero.errors import AxisError, LayoutError
from tests.strategies import everywhere, integers, seeds, stages

TWO = {"w": torch.ones(2), "v": torch.ones(3)}


@given(ranks=st.integers(2, 4), odd=st.integers(1, 3), at=st.integers(0, 3), seed=seeds)
def test_the_first_rank_and_line_that_differ_are_named(
    ranks: int, odd: int, at: int, seed: int
) -> None:
    odd = odd % (ranks - 1) + 1

    def body() -> None:
        mine = [f"line {i} of seed {seed}" for i in range(4)]
        if fzero.axis_index() >= odd:
            mine[at] = "another"
        assert_same_everywhere(mine, fzero.world(), what="the weather")

    with pytest.raises(AxisError) as caught:
        fzero.simulate(body, world_size=ranks)()
    assert (
        f"about the weather: rank 0 has line {at} of seed {seed}, rank {odd} has another"
    ) in str(caught.value)
    assert f"Fix: build the same on every rank; compare ranks 0 and {odd} first" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("params", "options", "seen"),
    [
        ({"w": torch.ones(2), "v": torch.ones(4)}, {}, r"v \(3,\) .*, rank 1 has v \(4,\)"),
        (TWO | {"v": torch.ones(3).double()}, {}, "float32 .*, rank 1 has .*float64"),
        (TWO | {"v": TWO["w"]}, {}, "rank 1 has"),
        (TWO, {"trainable": lambda path: path == "w"}, "trainable, rank 1 has v .* frozen"),
        (TWO, {"bucket_bytes": 1}, "group bucket 0"),
        (TWO, {"ordered": True}, "ordered=False, .*rank 1 has .*ordered=True"),
        (TWO, {"stage": 1}, "rank 0 has stage 2.* rank 1 has stage 1"),
    ],
)
def test_a_layout_that_differs_on_a_rank_is_refused_at_init(
    params: Any, options: dict[str, Any], seen: str
) -> None:
    def body() -> Any:
        common: dict[str, Any] = {"stage": 2}
        if fzero.axis_index() == 1:
            return fzero.init(params, fzero.optim.sgd(0.1), **(common | options))
        return fzero.init(TWO, fzero.optim.sgd(0.1), **common)

    with pytest.raises(AxisError, match=rf"disagree about the layout[\s\S]*{seen}[\s\S]*Fix: "):
        fzero.simulate(body, world_size=2)()


@pytest.mark.parametrize(
    "wrong", [{"stage": 4}, {"bucket_bytes": 0}, {"ordered": 1}, {"reshard_after_forward": "unit"}]
)
def test_an_option_that_is_wrong_on_one_rank_is_told_to_the_others(wrong: dict[str, Any]) -> None:
    def body() -> Any:
        given: dict[str, Any] = {"stage": 2} | (wrong if fzero.axis_index() == 1 else {})
        with pytest.raises(LayoutError if fzero.axis_index() else AxisError, match=seen):
            fzero.init(TWO, fzero.optim.sgd(0.1), **given)
        return fzero.full_params(fzero.init(TWO, fzero.optim.sgd(0.1), stage=2))

    ((name, value),) = wrong.items()
    seen = re.escape(f"{name}={value!r}")
    fzero.simulate(body, world_size=2)()


@given(ranks=st.integers(1, 4), stage=stages, seed=seeds)
def test_the_values_of_rank_0_are_the_ones_that_count(ranks: int, stage: int, seed: int) -> None:
    values = {"w": integers((ranks, 5), seed), "empty": torch.zeros(ranks, 0)}

    def body(own: Any) -> Any:
        state = fzero.init(own, fzero.optim.sgd(0.1), stage=stage)
        return fzero.full_params(state)

    got = fzero.simulate(body, world_size=ranks)(values)
    everywhere(got, {key: value[0] for key, value in values.items()}, ranks)


X, LONGER, DOUBLE = torch.ones(2), torch.ones(3), torch.ones(2).double()


@pytest.mark.parametrize(
    ("odd", "seen"),
    [
        (
            lambda: fzero.all_gather(X),
            r"rank 0: all_reduce\[.*\]; rank 1: all_gather\[.*\]; rank 2: all_reduce",
        ),
        (lambda: fzero.psum(LONGER), r"rank 0: all_reduce\[\(2,\) .*; rank 1: all_reduce\[\(3,\)"),
        (lambda: fzero.psum(DOUBLE), r"rank 0: .*float32\]; rank 1: .*float64\]"),
    ],
)
def test_different_collectives_at_one_time_name_every_rank(
    odd: Callable[[], Any], seen: str
) -> None:
    message = rf"different collectives: {seen}[\s\S]*Fix: call the same collectives"
    with pytest.raises(AxisError, match=message):
        fzero.simulate(lambda: odd() if fzero.axis_index() == 1 else fzero.psum(X), world_size=3)()


@pytest.mark.parametrize(("early", "plural"), [({0}, ""), ({2}, ""), ({0, 1}, "s")])
def test_a_rank_that_finishes_early_is_named(early: set[int], plural: str) -> None:
    def body() -> None:
        if fzero.axis_index() not in early:
            fzero.psum(torch.ones(1))

    seen = rf"waits in all_reduce.*, but rank{plural} \[{', '.join(map(str, sorted(early)))}\] "
    with pytest.raises(AxisError, match=rf"{seen}finished without it[\s\S]*Fix: call the same"):
        fzero.simulate(body, world_size=3)()
