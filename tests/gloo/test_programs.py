"""Any interleaving on real ranks equals the list of gradients, and the virtual ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.behaviours.draws import programs, settings_of
from tests.behaviours.models import RANKS, RICH, trees, uses_of
from tests.behaviours.programs import (
    Case,
    Setting,
    check,
    expected,
    play,
)
from tests.behaviours.test_interleavings import EVERYTHING, NAMED
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

Job = tuple[Setting, Case]
FEW = settings(max_examples=max(5, settings().max_examples // 3))


def play_all(rank: int, world_size: int, jobs: list[Job]) -> list[Any]:
    """What this rank sees after each step of each program."""
    return [play(setting, case, rank=rank) for setting, case in jobs]


def check_all(jobs: list[Job], ranks: int) -> None:
    by_rank = run_ranks(play_all, ranks, jobs)
    for number, (setting, case) in enumerate(jobs):
        steps = [[rows[0] for rows in found[number] if rows] for found in by_rank]
        assert len({len(rows) for rows in steps}) == 1, "the ranks did not end at the same step"
        got = [list(rows) for rows in zip(*steps, strict=True)]
        got += [[]] * (len(by_rank[0][number]) - len(got))
        check(got, expected(setting, case))


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_the_named_programs(ranks: int) -> None:
    places = [(0, True), (1, True), (2, True), (3, True), (3, False), (3, "window")]
    jobs = [
        (
            Setting(ranks, stage, reshard, bucket_bytes=100, donate=bool((i + stage) % 2)),
            Case(RICH, EVERYTHING, program),
        )
        for i, program in enumerate(NAMED.values())
        for stage, reshard in places[(i + ranks) % 3 :: 3]  # the others with another world size
    ]
    check_all(jobs, ranks)


@pytest.mark.parametrize("ranks", RANKS)
@FEW
@given(data=st.data())
def test_any_program(ranks: int, data: st.DataObject) -> None:
    """Three at a time: what one leaves behind must not reach the next."""
    jobs = []
    for _ in range(3):
        tree = data.draw(trees())
        case = Case(tree, data.draw(uses_of(tree)), data.draw(programs()))
        jobs.append((data.draw(settings_of(ranks)), case))
    check_all(jobs, ranks)
