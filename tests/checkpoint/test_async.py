"""`save_async`: the step waits for one copy, and what is written is the state at the call."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import CheckpointError, _storage, load, read_extra, save, save_async
from fzero.checkpoint import _save as module
from fzero.errors import PhaseError
from tests.checkpoint.forge import full_disk
from tests.checkpoint.states import ADAM, blank, contents, make, mixed, snapshot, train
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks
from tests.strategies import same


class Gate:
    """Lets the thread that writes wait until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        real = module.write_draft

        def write(*given: Any) -> None:
            self.reached.set()
            assert self.open.wait(60)
            real(*given)

        monkeypatch.setattr(module, "write_draft", write)


def _donating(stage: int) -> Any:
    def step_fn(state: Any) -> Any:
        return train(state, 1), None

    return fzero.shard(step_fn, stage=stage, donate=True, bucket_bytes=64)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_donates_meanwhile_changes_nothing(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    state = train(make(mixed(), stage=stage, ranks=0), 1)
    wanted = snapshot(contents(state))
    saving = save_async(tmp_path, state, extra={"epoch": 1})
    assert gate.reached.wait(60) and not saving.done()
    after, _ = _donating(stage)(state)
    assert int(after.step) == 2 and not saving.done()
    gate.open.set()
    saving.result(60)
    assert saving.done() and read_extra(tmp_path) == {"epoch": 1}
    same(contents(load(tmp_path, make(blank(mixed()), stage=2, ranks=0))), wanted)


def test_an_engine_that_steps_meanwhile_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    engine = Engine(net, torch.optim.Adam, stage=2)
    wanted = {name: x.clone() for name, x in engine.full_state_dict().items()}
    saving = save_async(tmp_path, engine)
    engine(torch.randn(5, 3)).pow(2).sum().backward()
    engine.step()
    gate.open.set()
    saving.result(60)
    load(tmp_path, engine)
    for name, x in engine.full_state_dict().items():
        assert torch.equal(x, wanted[name]), name


def test_the_step_waits_for_one_copy_of_this_ranks_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel = 100_000
    state = fzero.init({"w": torch.zeros(numel)}, ADAM, stage=3)
    held = 3 * 4 * numel  # parameters and two moments
    gate = Gate(monkeypatch)
    live = LiveBytes()
    with live, live.at_most(1.1 * held, "save_async"):
        saving = save_async(tmp_path, state)
    assert live.alive() > 0.9 * held  # it is a copy, which the thread holds
    gate.open.set()
    saving.result(60)


def test_an_error_comes_at_result_or_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make(mixed(), stage=0, ranks=0)
    save(tmp_path, state, extra={"which": "old"})
    with monkeypatch.context() as patch:
        patch.setattr(_storage, "packed", full_disk)
        saving = save_async(tmp_path, state)
        with pytest.raises(CheckpointError, match="disk is full"):
            saving.result(60)
        save_async(tmp_path, state)
        with pytest.raises(CheckpointError, match="disk is full"):
            save(tmp_path, state)  # of the one before
        save_async(tmp_path, state)
        with pytest.raises(CheckpointError, match="disk is full"):
            save_async(tmp_path, state)
    assert read_extra(tmp_path) == {"which": "old"}
    save(tmp_path, state, extra={"which": "new"})
    assert read_extra(tmp_path) == {"which": "new"}


def test_a_wait_that_is_too_short_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saving = save_async(tmp_path, make(mixed(), stage=0, ranks=0))
    with pytest.raises(TimeoutError, match=r"is not over after 0.01 s.*\n.*\nFix: wait longer"):
        saving.result(0.01)
    assert "in flight" in repr(saving)
    gate.open.set()
    saving.result()
    assert "done" in repr(saving)


@pytest.mark.parametrize("then", [save, save_async])
def test_a_second_one_waits_for_the_first(
    then: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    states = [make(mixed(seed=seed), stage=0, ranks=0) for seed in (1, 2)]
    first = save_async(tmp_path, states[0])
    threading.Timer(0.3, gate.open.set).start()
    began = time.monotonic()
    second = then(tmp_path, states[1])
    assert first.done() and time.monotonic() - began > 0.2
    if second is not None:
        second.result(60)
    found = load(tmp_path, make(blank(mixed()), stage=0, ranks=0))
    same(contents(found), contents(states[1]))


def test_what_save_refuses_is_refused_at_once(tmp_path: Path) -> None:
    state, _ = fzero.grad_and_reduce(lambda p: p["w"].sum(), fzero.init(W, ADAM, stage=0))()
    with pytest.raises(PhaseError, match="between gradient and update"):
        save_async(tmp_path, state)
    save(tmp_path, fzero.apply_gradients(state))


W = {"w": torch.ones(3)}


def _train_on(rank: int, size: int, folder: Path, stage: int) -> None:
    """Steps and saves run at once, over groups of their own; each save is the state at its call."""
    state = make(mixed(), stage=stage, ranks=0)
    step = _donating(stage)
    wanted = []
    for number in range(4):
        wanted.append(snapshot(contents(state)))
        save_async(folder / str(number), state)
        state, _ = step(state)
        state, _ = step(state)
    save_async(folder / "last", state).result(60)
    for number, one in enumerate(wanted):
        same(contents(load(folder / str(number), make(blank(mixed()), stage=1, ranks=0))), one)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_ranks_train_while_they_save(stage: int, tmp_path: Path) -> None:
    run_ranks(_train_on, 2, tmp_path, stage, timeout_s=120)


def _one_rank_cannot(rank: int, size: int, folder: Path) -> list[str]:
    state = make(mixed(), stage=3, ranks=0)
    save(folder, state, extra={"which": "old"})
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(_storage, "packed", full_disk)
        saving = save_async(folder, state)
        with pytest.raises(CheckpointError, match="disk is full") as raised:
            saving.result(60)
    save_async(folder, state, extra={"which": "new"}).result(60)
    return [str(note) for note in raised.value.__notes__] + [read_extra(folder)["which"]]


@pytest.mark.xdist_group("gloo")
def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    for note, which in run_ranks(_one_rank_cannot, 2, tmp_path):
        assert note == "(raised on rank 1 of 2)" and which == "new"


ENDS = """
import sys, torch, fzero
from fzero.checkpoint import save_async
torch.set_num_threads(1)
state = fzero.init({"w": torch.ones(1000)}, fzero.optim.sgd(1.0), stage=0)
save_async(sys.argv[1], state, extra={"last": True})
"""


def test_a_program_that_ends_waits_for_a_save_in_flight(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], timeout=100, check=True)
    assert read_extra(tmp_path) == {"last": True}


FAILS = """
import os, sys, torch, fzero
from fzero.checkpoint import CheckpointError, save, save_async
torch.set_num_threads(1)
state = fzero.init({"w": torch.ones(1000)}, fzero.optim.sgd(1.0), stage=0)
real, reached = os.replace, []
def replace(*args):
    if sys.argv[2] == "full":
        raise OSError("disk is full")
    while not reached:  # until the child has ended
        pass
    real(*args)
os.replace = replace
os.chdir(sys.argv[1])
saving = save_async("here", state, extra={"last": True})
os.chdir("/")
if sys.argv[2] == "forks":
    child = os.fork()
    if not child:
        os.replace = real
        try:
            saving.result()
        except CheckpointError as error:
            assert "forked" in str(error) and saving.done(), error
            save(os.path.join(sys.argv[1], "of child"), state)
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    reached.append(1)
    saving.result()
sys.exit()
"""


@pytest.mark.parametrize(("how", "status"), [("full", 1), ("forks", 0)])
def test_a_save_in_flight_at_the_end_and_in_a_forked_process(
    how: str, status: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FAILS, str(tmp_path), how]
    ended = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr
    if how == "full":
        assert "disk is full" in ended.stderr and "nobody asked for its result" in ended.stderr
    else:  # in the folder that was the current one at the call
        assert read_extra(tmp_path / "here") == {"last": True}
