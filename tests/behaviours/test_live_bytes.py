"""What is alive at once, counted in bytes of tensors, in both drivers.

For P bytes of parameters in L equal layers of B bytes, each a bucket and a unit, and AdamW's two
moments, over W ranks:

    stage   between steps       a backward adds, beside activations
    1, 2    P + 2 P / W         P / W + 2 B: the gradient that is made, and one on the wire
    3       3 P / W             P / W + 2 B, and 2 B: the unit in use, and the next one; the
                                shards of two gradients, 2 B / W, come when these have gone

A gradient that is held already is P / W more. An update adds nothing, and clipping neither. The
first backwards of stage 3, which record the schedule, may hold a unit more.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
import fzero.machine.reduce
from fzero.adapter import Engine
from fzero.checkpoint import save
from fzero.state import TrainState
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks

RANKS, LAYERS, WIDTH = 2, 6, 48
BUCKET = 4 * WIDTH**2
P = LAYERS * BUCKET
SLACK = BUCKET / 2  # activations of one row, counters, the norm
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def resident(stage: int) -> float:
    """Bytes between two steps."""
    return (P if stage < 3 else P / RANKS) + 2 * P / RANKS


def backward(stage: int) -> float:
    """What a first backward adds: the sharded gradients, and what the schedule allows."""
    return P / RANKS + (2 if stage < 3 else 4 - 2 / RANKS) * BUCKET


def layers(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


Allow = Callable[[float, str], Any]


class ByEngine:
    """A step with `loss.backward()` and `engine.step()`."""

    def __init__(self, stage: int, **options: Any) -> None:
        self.engine = Engine(layers(), ADAMW, stage=stage, bucket_bytes=BUCKET, **options)

    @property
    def state(self) -> TrainState:
        return self.engine.state

    def backward(self, x: Tensor) -> None:
        self.engine(x).square().mean().backward()

    def update(self) -> None:
        self.engine.step()


class BySteps:
    """The calls of a step one by one, in a state that donates, as `shard(donate=True)` has it."""

    def __init__(self, stage: int, max_norm: float | None = None) -> None:
        self.apply, params = fzero.functionalize(layers("meta"))
        step: Any = fzero.shard(
            fzero.clip(self._step, max_norm=max_norm),
            stage=stage,
            bucket_bytes=BUCKET,
            donate=True,
        )
        self.step = step
        self.state = fzero.init(
            params,
            fzero.optim.from_torch(ADAMW),
            stage=stage,
            bucket_bytes=BUCKET,
            initializer=lambda path, leaf: torch.ones(leaf.shape),
        )

    def _step(self, state: TrainState, x: Tensor, backwards: int, allow: Allow) -> Any:
        for number in range(backwards):
            with allow(*promised(state, number)):
                grad = fzero.grad_and_reduce(lambda p, x: self.apply(p, x).square().mean(), state)
                state, _ = grad(x)
        with allow(*promised(state, None)):
            state = fzero.apply_gradients(state)
        return state, None


def promised(state: TrainState, number: int | None) -> tuple[float, str]:
    """The bound of the n-th backward of a step, or of its update."""
    stage = state.stage
    if number is None:
        return resident(stage) + P / RANKS + SLACK, f"stage {stage}, the update"
    more = (P / RANKS if number else 0) + (BUCKET if stage == 3 and not int(state.step) else 0)
    return resident(stage) + more + backward(stage) + SLACK, f"stage {stage}, backward {number}"


def train(driver: Any, x: Tensor, backwards: int, live: LiveBytes) -> None:
    """One step, each part of it within its bound."""
    if isinstance(driver, BySteps):
        driver.state, _ = driver.step(driver.state, x, backwards, live.at_most)
        return
    for number in range(backwards):
        with live.at_most(*promised(driver.state, number)):
            driver.backward(x)
    with live.at_most(*promised(driver.state, None)):
        driver.update()


def steps_of(
    rank: int, size: int, kind: type, stage: int, max_norm: float | None, in_flight: int = 1
) -> None:
    x = torch.ones(1, WIDTH) * (rank + 1)
    with pytest.MonkeyPatch.context() as patch, LiveBytes() as live:
        patch.setattr(fzero.machine.reduce, "IN_FLIGHT", in_flight)
        with live.at_most(max(resident(stage), P) + BUCKET + SLACK, f"stage {stage}, made"):
            driver = kind(stage, max_norm=max_norm)
        for _ in range(2):  # the first one records the schedule
            train(driver, x, 2, live)
        gc.collect()
        held = live.settled(resident(stage) + SLACK)
        assert resident(stage) <= held <= resident(stage) + SLACK, held


def window_of(rank: int, size: int) -> None:
    """One bucket of all layers, whose copies would be P each."""
    apply, params = fzero.functionalize(layers())
    with LiveBytes() as live:

        @fzero.shard(stage=0, bucket_bytes=P, donate=True)
        @fzero.coalesce
        def step(state: TrainState, x: Tensor) -> Any:
            for number in range(3):
                with live.at_most(2 * P + P + 2 * P + SLACK, f"backward {number} of a window"):
                    loss = fzero.grad_and_reduce(lambda p, x: apply(p, x).square().mean(), state)
                    state, _ = loss(x)
            with live.at_most(2 * P + P + P + SLACK, "the update"):
                return fzero.apply_gradients(state), None

        state = step.init(params, fzero.optim.adamw(1e-3))
        for _ in range(2):
            state, _ = step(state, torch.ones(1, WIDTH) * (rank + 1))


def save_of(rank: int, size: int, stage: int, folder: Path) -> None:
    with LiveBytes() as live:
        driver = BySteps(stage)
        with live.at_most(resident(stage) + BUCKET + SLACK, f"stage {stage}, save"):
            save(folder, driver.state)


def close_of(rank: int, size: int, stage: int) -> None:
    with LiveBytes() as live:
        driver = ByEngine(stage)
        driver.backward(torch.ones(1, WIDTH))
        driver.update()
        with live.at_most(3 * P + 5 * BUCKET + SLACK, f"stage {stage}, close"):
            driver.engine.close()
        gc.collect()
        held = live.settled(3 * P + SLACK)
        assert 3 * P <= held <= 3 * P + SLACK, held


QUICK = ((ByEngine, 2, None), (BySteps, 3, 0.1))
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product((ByEngine, BySteps), (1, 2, 3), (None, 0.1))
]


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("kind", "stage", "max_norm"), CASES)
def test_a_step_holds_what_its_stage_and_its_schedule_promise(
    kind: type, stage: int, max_norm: float | None
) -> None:
    """Making the state, two backwards that are reduced each, and the update."""
    run_ranks(steps_of, RANKS, kind, stage, max_norm)


def impatient(*args: Any) -> None:
    """`steps_of` that takes a first look for the truth: what is too much there stays so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.live_bytes.PATIENCE_S", 0.2)
        steps_of(*args)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("kind", [ByEngine, BySteps])
def test_one_bucket_more_on_the_wire_is_seen(kind: type) -> None:
    """The bound is tight: it is broken where two reductions run at once, not one."""
    for _, text in run_ranks(impatient, RANKS, kind, 2, None, 2, raises=True):
        assert "bytes, at most" in text


@pytest.mark.smoke
@pytest.mark.xdist_group("gloo")
def test_a_window_adds_and_reduces_gradients_where_they_wait() -> None:
    run_ranks(window_of, RANKS)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_is_saved_with_one_bucket_more_at_most(stage: int, tmp_path: Path) -> None:
    run_ranks(save_of, RANKS, stage, tmp_path)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_closing_holds_what_it_gives_back_and_copies_of_one_bucket(stage: int) -> None:
    """A whole model with its optimizer is 3 P; the shards of a group go when it is given back."""
    run_ranks(close_of, RANKS, stage)
