"""Ranks that are killed with SIGKILL at random moments: the run goes on, with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.mirror_runs import EVERY, Plan, results_of
from tests.checkpoint.trainings import Style

BACK_S = 5.0  # in which a state is back, on a machine that does nothing else


def require_undisturbed(
    plan: Plan, plain: dict[str, Any], killed: dict[str, Any], back_s: float
) -> int:
    """Assert all that a mirror promises; return how often a rank was killed."""
    (wanted,) = {tuple(sorted(one["digests"].items())) for one in plain["attempts"][0]["ranks"]}
    digests, done = dict(wanted), 0
    assert len(digests) == plan.updates
    for attempt in killed["attempts"]:
        for one in attempt["ranks"]:
            if one["restored"] is None:
                continue
            first, seconds = one["restored"]
            lost = 2 * EVERY if plan.wiped else EVERY  # what goes to other hosts may be on its way
            assert done - lost <= first <= done, (first, done)
            assert seconds < back_s
            assert one["digests"].items() <= digests.items()
        updates = [int(number) for one in attempt["ranks"] for number in one["digests"]]
        done = max([done, *updates])
    assert killed["attempts"][-1]["ends"] == [0] * len(killed["attempts"][-1]["ends"])
    assert done == plan.updates and plain["left"] == killed["left"] == []
    return sum(any(attempt["ends"]) for attempt in killed["attempts"])


def go(folder: Path, plan: Plan, back_s: float = BACK_S) -> int:
    plain = replace(plan, folder=f"{folder}/plain", kills=0, wiped=[])
    killed = replace(plan, folder=f"{folder}/killed")
    return require_undisturbed(plan, *results_of([plain, killed], timeout_s=280), back_s=back_s)


def test_a_killed_rank_costs_at_most_the_updates_since_the_last_copy(tmp_path: Path) -> None:
    plan = Plan(folder="", ranks=[2], style="steps", stage=3, kills=2, updates=10)
    assert go(tmp_path, plan, back_s=60.0)  # of CI


@pytest.mark.slow
@pytest.mark.parametrize("style", ["steps", "engine"])
def test_three_of_four_ranks_go_on_without_a_host(style: Style, tmp_path: Path) -> None:
    plan = Plan(folder="", ranks=[4, 3], style=style, stage=3, rule="sgd", hosts=2, kills=2)
    assert go(tmp_path, replace(plan, wiped=["host0"], updates=8))


@pytest.mark.slow
@pytest.mark.parametrize("style", ["steps", "engine"])
@pytest.mark.parametrize("stage", range(4))
def test_a_hundred_kills(style: Style, stage: int, tmp_path: Path) -> None:
    plan = Plan(folder="", ranks=[4], style=style, stage=stage, kills=13, hosts=2, updates=40)
    assert go(tmp_path, plan) == plan.kills
