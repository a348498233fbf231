"""A rank dies, or raises, in the middle of a step: the others end with a clear error, and soon."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.errors import AxisError
from tests.ranks import Pool, spawn_script

pytestmark = pytest.mark.xdist_group("gloo")

SCRIPT = """
import sys
from tests.adapter import test_killed_rank
test_killed_rank.train(int(sys.argv[1]), sys.argv[2])
"""


class Death:
    """What happens to the last rank in its third step, and when."""

    def __init__(self, where: str, module: nn.Sequential) -> None:
        self.where, self.module = where, module

    def plant(self) -> None:
        if self.where in ("backward", "raise"):
            self.module[2].register_full_backward_hook(self)
        if self.where in ("forward", "stop"):
            self.module[2].register_forward_pre_hook(self)

    def before_step(self) -> None:
        if self.where in ("step", "between", "exit", "replica"):
            self()

    def __call__(self, *_: Any) -> None:
        sys.stdout.write(f"victim {time.time()}\n")
        sys.stdout.flush()
        if self.where == "raise":
            raise ZeroDivisionError("on purpose")
        if self.where == "between":
            raise ValueError("bad batch")
        if self.where == "exit":
            sys.exit(0)
        if self.where == "stop":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL)


def train(stage: int, where: str) -> None:
    """One rank: print how it ended, and end at once, as a program that is killed does."""
    # torchrun ends the others when a rank is gone; they are to end by themselves first.
    signal.signal(signal.SIGTERM, lambda *_: None)
    rank = fzero.axis_index()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 50), nn.Linear(50, 3))
    death = Death(where, module)
    local = fzero.Local(every=4) if where == "replica" else None
    engine = Engine(module, torch.optim.AdamW, stage=stage, bucket_bytes=1000, local=local)
    x, now = torch.randn(4, 50), False
    try:
        for step in range(4):
            if now := step == 2 and rank == fzero.axis_size() - 1:
                death.plant()
            engine.backward(engine(x).pow(2).sum())
            if now:
                death.before_step()
            engine.step()
        engine.full_parameters()
    except BaseException as error:
        if now and where in ("between", "exit"):
            raise
        kind, text = type(error).__name__, str(error).replace("\n", " | ")
        line = f"rank {rank} {time.time()} {isinstance(error, AxisError)} {kind}: {text}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        os._exit(3)
    sys.stdout.write(f"rank {rank} {time.time()} False went on\n")


def forked(rank: int, world_size: int, stage: int, where: str, folder: Path) -> None:
    """`train` in a process that has imported all, with its own output."""
    os.environ["FZERO_TIMEOUT_S"] = str(TIMEOUT_S)
    with (folder / f"{rank}").open("w") as sys.stdout:
        train(stage, where)


def survivors(
    tmp_path: Path, world_size: int, stage: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[float, bool, str]]:
    """How every other rank ended: seconds after the victim, whether by AxisError, its text.

    By torchrun where the end of a program is what is tried, or the timeout of a group that fzero
    begins: a forked process has neither.
    """
    if where in ("between", "exit", "stop"):
        monkeypatch.setenv("FZERO_TIMEOUT_S", str(TIMEOUT_S))
        script = tmp_path / "killed.py"
        script.write_text(SCRIPT)
        done = spawn_script(script, world_size, [str(stage), where], timeout_s=60.0)
        out, err = done.stdout, done.stderr
    else:
        pool = Pool(world_size)
        answers = pool.call(forked, (stage, where, tmp_path), 60.0, grace_s=2.0 * TIMEOUT_S + 5)
        pool.stop()
        out = "".join((tmp_path / f"{rank}").read_text() for rank in range(world_size))
        err = f"{answers}"
    at = re.search(r"^victim ([\d.]+)$", out, re.MULTILINE)
    assert at is not None, out + err
    lines = re.findall(r"^rank (\d) ([\d.]+) (True|False) (.*)$", out, re.MULTILINE)
    found = {
        int(rank): (float(time) - float(at[1]), axis == "True", text)
        for rank, time, axis, text in lines
    }
    assert set(found) - {world_size - 1} == set(range(world_size - 1)), out + err
    return [found[rank] for rank in range(world_size - 1)]


# gloo notices a closed connection at once, but for a transfer that starts while it is being closed:
# that one ends at the timeout (seen under load). A rank that hangs without dying is noticed by
# timeouts alone, and two gathers may wait one after the other.
TIMEOUT_S = 15

slow = pytest.mark.slow
CHOSEN = [
    (2, 0, "backward"),
    (2, 2, "between"),
    (2, 2, "replica"),  # that trains apart: the others hear of it where they meet
]
REST = [
    pytest.param(world_size, stage, where, marks=slow)
    for world_size, stage, where in itertools.product(
        (2, 3), (0, 2, 3), ("forward", "backward", "step")
    )
    if (world_size, stage, where) not in CHOSEN
]
REST += [pytest.param(3, 2, "between", marks=slow), pytest.param(2, 3, "exit", marks=slow)]
HANGS = [pytest.param(2, stage, "stop", marks=slow) for stage in (0, 3)]

FATES = {
    "between": "has ended its program, with ValueError: bad batch",
    "exit": "has ended its program, by sys.exit()",
    "stop": "is alive and did not come",
}


@pytest.mark.parametrize(("world_size", "stage", "where"), CHOSEN + REST + HANGS)
def test_when_a_rank_is_killed_or_hangs_in_a_step_the_others_end_with_an_axis_error(
    tmp_path: Path, world_size: int, stage: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, by_axis, text in survivors(tmp_path, world_size, stage, where, monkeypatch):
        assert by_axis, text
        assert "Usual cause: " in text and "Fix: " in text, text
        fate = FATES.get(where, "is dead or stopped")
        assert text.startswith(f"LostRankError: rank {world_size - 1} {fate}"), text
        timeouts = 2 if where == "stop" else 1
        assert seconds < timeouts * TIMEOUT_S + 5, f"after {seconds} s: {text}"


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=slow)])
def test_when_a_rank_of_stage_3_raises_the_others_are_told_which(
    tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, by_axis, text in survivors(tmp_path, world_size, 3, "raise", monkeypatch):
        assert by_axis and text.startswith("PeerFailedError: "), text
        assert f"raised on rank [{world_size - 1}]" in text, text
        assert seconds < 10, f"after {seconds} s: {text}"
