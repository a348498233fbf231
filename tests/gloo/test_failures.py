"""Errors, deaths and bad states on real ranks: every rank is told soon, none waits for ever.

And the old state is still good: the next step gives what it gives without the error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from tests.behaviours.networks import PLACES, STAGES
from tests.failing import fails_in_backward
from tests.rank_process import LOOPBACK, ROOT
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

PARAMS = {"layers": [{"w": torch.ones(5)}, {"w": torch.ones(2, 3)}]}
PLACES_IN_A_LOSS = ("before a parameter", "after one", "after all", "in backward")


def loss(params: Any, x: Tensor, fails: str = "") -> Tensor:
    if fails == "before a parameter":
        raise ArithmeticError(fails)
    total = (params["layers"][0]["w"] ** 2).sum()
    if fails == "after one":
        raise ArithmeticError(fails)
    total = total + (params["layers"][1]["w"] ** 2).sum() * x
    if fails == "after all":
        raise ArithmeticError(fails)
    return fails_in_backward(total, ArithmeticError(fails)) if fails == "in backward" else total


def step(state: Any, x: Tensor, fails: str = "") -> Any:
    state, _ = fzero.grad_and_reduce(loss, state)(x, fails)
    return fzero.apply_gradients(state), None


def values(state: Any) -> list[Tensor]:
    return [layer["w"] for layer in fzero.full_params(state)["layers"]]


def raise_somewhere(
    rank: int, world_size: int, stage: int, reshard: Any
) -> list[tuple[str, str, float]]:
    """How each of many steps ends here when one rank, or all of them, raise somewhere in it."""
    state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage, reshard_after_forward=reshard)
    mine, found = torch.tensor(float(rank + 1)), []
    for recorded in (False, True):
        if recorded:  # what follows replays what this step records
            state, _ = step(state, mine)
        want = values(step(state, mine)[0])
        for raisers in [*([raiser] for raiser in range(world_size)), [*range(world_size)]]:
            for where in PLACES_IN_A_LOSS:
                start = time.monotonic()
                with pytest.raises((ArithmeticError, fzero.AxisError)) as caught:
                    step(state, mine, where if rank in raisers else "")
                seconds = time.monotonic() - start
                found.append((caught.typename, str(caught.value), seconds))
                assert all(map(torch.equal, values(step(state, mine)[0]), want)), where
    return found


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_error_on_one_rank_is_raised_by_all_in_the_same_step(
    ranks: int, stage: int, reshard: Any
) -> None:
    for rank, found in enumerate(run_ranks(raise_somewhere, ranks, stage, reshard)):
        assert len(found) == 2 * (ranks + 1) * len(PLACES_IN_A_LOSS)
        for i, (kind, message, seconds) in enumerate(found):
            raiser = i // len(PLACES_IN_A_LOSS) % (ranks + 1)
            assert seconds < 5
            if raiser == rank:
                assert kind == "ArithmeticError"
            elif raiser < ranks:  # else all raised, and some were told before they did
                assert kind == "PeerFailedError"
                for part in (f"raised on rank [{raiser}]", f"rank {rank}", "Fix: "):
                    assert part in message, message


class Fails(nn.Module):
    """The identity, unless it is told to raise."""

    now = False

    def forward(self, x: Tensor) -> Tensor:
        if self.now:
            raise ArithmeticError("in the middle of a forward")
        return x


def raise_under_autocast(rank: int, world_size: int) -> list[str]:
    """A rank that raises gathers what is left of the plan as the others do: in bfloat16."""
    fails = Fails()
    apply, params = fzero.functionalize(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), fails, nn.Linear(8, 8), nn.Linear(8, 8))
    )

    @fzero.shard(stage=3)
    @fzero.autocast(dtype=torch.bfloat16)
    def step(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p, x: apply(p, x).square().mean(), state)(x)
        return fzero.apply_gradients(state), None

    state, x, found = step.init(params, fzero.optim.sgd(0.5)), torch.ones(2, 8) * (rank + 1), []
    for at in range(4):  # the first step records what the others replay
        Fails.now = at % 2 == 1 and rank == 1
        try:
            state, _ = step(state, x)
            found.append("stepped")
        except (ArithmeticError, fzero.AxisError) as error:
            found.append(type(error).__name__)
    return found


def test_an_error_under_autocast_is_raised_by_all_in_the_same_step() -> None:
    found = run_ranks(raise_under_autocast, 2)
    assert found[0] == ["stepped", "PeerFailedError"] * 2
    assert found[1] == ["stepped", "ArithmeticError"] * 2


def use_up(rank: int, world_size: int) -> None:
    """A donated state, a state of another world: refused on every rank, before any collective."""
    for stage in STAGES:
        donating = fzero.shard(step, stage=stage, donate=True)
        used = donating.init(PARAMS, fzero.optim.adam(0.5))
        new, _ = donating(used, torch.ones(()))
        local = fzero.init(PARAMS, fzero.optim.adam(0.5), stage=stage, mesh=fzero.Axis(size=1))
        with fzero.count_collectives() as log:
            with pytest.raises(fzero.DonatedError, match="Fix: "):
                donating(used, torch.ones(()))
            with pytest.raises(fzero.DonatedError, match="Fix: "):
                fzero.full_params(used)
            with pytest.raises(fzero.AxisError, match="1 ranks"):
                donating(local, torch.ones(()))
            with pytest.raises(fzero.LayoutError, match="a state of stage"):
                fzero.shard(step, stage=(stage + 1) % 4)(new, torch.ones(()))
        assert not log.events
        assert donating(new, torch.ones(()))[0].step.item() == 2


def test_a_state_that_cannot_be_used_is_refused_before_anything_hangs() -> None:
    run_ranks(use_up, 2)


def group_that_is_gone(rank: int, world_size: int) -> list[str]:
    group: Any = dist.new_group([0, 1])
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pair",))
    states = [fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage, mesh=mesh) for stage in (1, 3)]
    assert all(torch.equal(values(state)[0], torch.ones(5)) for state in states)
    dist.destroy_process_group(group)
    messages = []
    for state in states:
        with pytest.raises(fzero.AxisError) as caught:
            step(state, torch.ones(()))
        messages.append(str(caught.value))
    with pytest.raises(fzero.AxisError, match=r"mesh is a[\s\S]*DeviceMesh"):
        fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=1, mesh=group)
    return messages


def test_a_process_group_that_is_gone() -> None:
    for messages in run_ranks(group_that_is_gone, 2):
        for message in messages:
            for part in ("does not exist", "Usual cause: ", "Fix: ", "torchrun"):
                assert part in message


LONELY = """
import datetime, os, sys, time
import torch, torch.distributed as dist, fzero
rank, store, stage, ends, timeout_s = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=float(timeout_s)),
)
params = {"layers": [{"w": torch.ones(5)}, {"w": torch.ones(6)}]}
state = fzero.init(params, fzero.optim.sgd(0.5), stage=int(stage))

def loss(p, x):
    first = (p["layers"][0]["w"] ** 2).sum()
    if rank == 1:
        os._exit(3) if ends == "dies" else time.sleep(30)
    return first + (p["layers"][1]["w"] ** 2).sum()

start = time.monotonic()
try:
    fzero.grad_and_reduce(loss, state)(1.0)
except fzero.LostRankError as error:
    good = all(x in (0.0, 1.0) for flat in state.params.flats for x in flat.tolist())
    print(f"raised after {time.monotonic() - start:.1f} good {good}", flush=True)
    print(error.ranks, str(error).splitlines()[0][:80], flush=True)
    os._exit(0)
"""


ENDS = [(2, "dies"), pytest.param(3, "sleeps", marks=pytest.mark.slow)]
ENDS += [pytest.param(stage, "dies", marks=pytest.mark.slow) for stage in (0, 3)]


@pytest.mark.parametrize(("stage", "ends"), ENDS)
def test_a_rank_that_is_killed_or_hangs_ends_the_others_within_the_timeout(
    stage: int, ends: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LONELY)
    here = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK, "PYTHONPATH": str(ROOT)}
    timeout_s = 7  # the ranks must find each other within it, on a busy machine too
    arguments = [str(tmp_path / "store"), str(stage), ends, str(timeout_s)]
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), *arguments],
            env=os.environ | here,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, err = processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate()
    line, who = out.splitlines()
    assert line.startswith("raised after ") and line.endswith("good True"), (out, err)
    fate = {"dies": "is dead or stopped", "sleeps": "is alive and did not come"}[ends]
    assert who.startswith(f"(1,) rank 1 {fate}"), who
    # The other one would sleep for 30 s; the first call also starts groups and imports, which takes
    # seconds on a busy machine.
    assert float(line.split()[2]) < 3 * timeout_s
