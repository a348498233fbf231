"""Machines that die and come back: the run has the bits of the one to which nothing happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.train.killed import RANKS, Killed
from tests.train.runs import saved_losses, saved_tensors, small
from train.train import train


def assert_the_whole_run(run: Killed, whole: Path) -> None:
    """Compare the last checkpoint with that of a run on one rank that nobody killed."""
    assert run.process.returncode == 0, run.told()
    train(small(whole, steps=run.steps, logical_ranks=RANKS))
    assert saved_losses(run.out) == saved_losses(whole)
    pairs = list(zip(saved_tensors(run.out), saved_tensors(whole), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len(pairs) > 10


@pytest.mark.slow
@pytest.mark.timeout(
    900
)  # twelve starts of a rank: a minute, and many times that on a busy machine
@pytest.mark.xdist_group("gloo")
def test_a_run_loses_a_machine_and_goes_on_without_it_and_then_with_it_again(
    tmp_path: Path,
) -> None:
    with Killed(tmp_path / "run", steps=400, restarts=3) as run:
        assert run.wait_for(lambda: run.step() >= 30, 300), run.told()
        run.kill(run.ranks()[2])
        assert run.wait_for(lambda: "on 3 rank(s)" in run.told(), 300), run.told()
        assert run.wait_for(lambda: run.told().count("on 4 rank(s)") == 2, 300), run.told()
        run.process.wait(400)
    told = run.told()
    assert told.index("machine 2 is gone") < told.index("on 3 rank(s)")
    assert told.index("on 3 rank(s)") < told.index("machine 2 is back")
    between = told[told.index("machine 2 is gone") : told.index("machine 2 is back")]
    assert "restored step " in between and "resumed" not in between
    assert told.count("last loss") == 1
    assert_the_whole_run(run, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("seed", range(4))
def test_kills_at_random_moments_change_no_bit(seed: int, tmp_path: Path) -> None:
    which, kills = random.Random(seed), 5
    with Killed(tmp_path / "run", steps=800, restarts=kills) as run:
        for _ in range(kills):
            run.wait_for(lambda: len(run.ranks()) == RANKS, 300)
            run.wait_for(lambda: False, which.uniform(0, 40))
            if ranks := run.ranks():
                run.kill(which.choice(ranks))
            run.wait_for(lambda: False, 2)
        run.process.wait(900)
    assert run.done
    assert_the_whole_run(run, tmp_path / "whole")
