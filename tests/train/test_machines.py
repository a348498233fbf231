"""Machines that die and come back: the run has the bits of the one to which nothing happened."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.train.killed import RANKS, Killed
from tests.train.runs import saved_losses, saved_tensors, small
from train import machines as module
from train.claim import launch_of
from train.machines import LAUNCH, Machine, end, make_machines, memory_of, run
from train.train import train

TIER_INPUTS = ("examples/train",)  # tests/tiers.py: a push that changes them runs these tests


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
    with Killed(tmp_path / "run", steps=2000, restarts=3) as run:
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
    assert len(set(re.findall("last loss .*", told))) == 1
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


AGENT = """
import pathlib, subprocess, sys, time
folder, number = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
while not (folder / "stop").exists():
    if number == "0" and (folder / "again").exists():  # as an agent that meets the others anew
        (folder / "again").unlink()
        rank.kill(); rank.wait()
        rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(0.02)
rank.kill()
sys.exit(3)
"""


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_killed_rank_takes_its_machine_with_it_and_it_comes_back_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "BACK_S", 0.1)
    some = [
        Machine(
            number=number,
            command=[sys.executable, "-c", AGENT, str(tmp_path), str(number)],
            environ=dict(os.environ),
            memory=tmp_path / f"memory-{number}",
        )
        for number in range(2)
    ]
    some[1].memory.mkdir()
    told: list[str] = []

    def disturb() -> None:
        _until(lambda: all(machine.ranks for machine in some))
        first, agent = some[1].ranks[0].pid, some[1].agent
        os.kill(first, signal.SIGKILL)
        _until(lambda: some[1].agent is None)
        assert agent is not None and agent.poll() == -signal.SIGKILL
        assert not some[1].memory.exists()
        told.append("gone")
        time.sleep(0.5)
        assert some[1].agent is None  # the other one has not gone on yet
        (tmp_path / "again").touch()
        _until(lambda: bool(some[1].ranks))
        told.append("back")
        os.kill(some[0].ranks[0].pid, signal.SIGKILL)  # machine 0 stays
        time.sleep(0.5)
        (tmp_path / "stop").touch()

    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(disturb)
        try:
            assert run(some) == 3
        finally:
            (tmp_path / "stop").touch()
            end(some)
        disturbed.result()
    assert told == ["gone", "back"]
    assert capsys.readouterr().err.splitlines() == ["machine 1 is gone", "machine 1 is back"]


def test_agents_share_a_store_and_a_name_and_each_is_a_host() -> None:
    some = make_machines(3, 2, ["--steps", "5"])
    assert len({machine.environ["TRAIN_LAUNCH"] for machine in some}) == 1
    assert [machine.environ["FZERO_HOST"] for machine in some] == [
        f"machine-{number}" for number in range(3)
    ]
    for machine in some:
        words = machine.command
        assert {"--nnodes=1:3", "--nproc-per-node=1", "--rdzv-backend=c10d"} <= set(words)
        assert words[-2:] == ["--steps", "5"] and "--max-restarts=4" in words
        (conf,) = (word for word in words if word.startswith("--rdzv-conf"))
        assert f"is_host={int(machine.number == 0)}" in conf
    assert some[1].memory.parent == memory_of(some[0].environ)
    assert launch_of(some[0].environ) == launch_of(some[2].environ) == some[0].environ[LAUNCH]
    other = make_machines(3, 2, [])
    assert launch_of(other[0].environ) != launch_of(some[0].environ)
