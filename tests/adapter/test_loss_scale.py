"""The loss scale of an engine: both drivers alike, and every overflow skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.adapter import DynamicScale, Engine
from tests.adapter.same_bits import same
from tests.adapter.scaled import OPTIMIZERS, Net, loss_of, rows
from tests.ranks import run_ranks
from tests.strategies import seeds, stages, worlds

SCALES: list[Any] = ["dynamic", 2.0**10, DynamicScale(init_scale=2.0, growth_interval=1)]


class Run(NamedTuple):
    stage: int
    optimizer: str
    scale: Any
    bad: tuple[int | None, ...]  # of each step: the rank whose loss overflows
    every: int = 1
    coalesced: bool = False
    max_norm: float | None = None
    bf16: bool = False


def engine_of(run: Run, scale: Any) -> Engine:
    net = Net(torch.bfloat16 if run.bf16 else torch.float32)
    return Engine(
        net,
        OPTIMIZERS[run.optimizer],
        stage=run.stage,
        loss_scale=scale,
        max_norm=run.max_norm,
        gradient_accumulation_steps=run.every,
        bucket_bytes=64,
    )


def by_engine(run: Run, rank: int, size: int, scale: Any, *, only_good: bool) -> Engine:
    """One update for each of `run.bad`; the bad ones left out if `only_good`."""
    engine = engine_of(run, scale)
    for number, bad in enumerate(run.bad):
        if bad is not None and only_good:
            continue
        for part in range(run.every):
            wrong = bad is not None and bad % size == rank and part == 0
            dtype = torch.bfloat16 if run.bf16 else torch.float32
            x = rows(rank, 10 * number + part, bad=wrong, dtype=dtype)
            if run.coalesced:
                with engine.coalesce():
                    engine.backward(loss_of(engine(x)))
            elif number % 2:
                engine.scale(loss_of(engine(x))).backward()
            else:
                engine.backward(loss_of(engine(x)))
            assert engine.step() is (part == run.every - 1)
        assert engine.step_was_skipped is (bad is not None and engine.needs_scaler())
    return engine


def check_skips(rank: int, size: int, run: Run) -> None:
    got = by_engine(run, rank, size, run.scale, only_good=False)
    want = by_engine(run, rank, size, 1.0, only_good=True)
    same(got.state, want.state)
    if not isinstance(run.scale, float):
        held = got.state.scale
        assert held is not None and held.scale.item() == got.loss_scale
    got.close()
    want.close()


bads = st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=4).map(tuple)
runs = st.builds(
    Run,
    stage=stages,
    optimizer=st.sampled_from([*OPTIMIZERS]),
    scale=st.sampled_from(SCALES),
    bad=bads,
    every=st.integers(1, 2),
    coalesced=st.booleans(),
    max_norm=st.sampled_from([None, 0.05]),
    bf16=st.booleans(),
)


def on_virtual(body: Callable[..., None], world_size: int, *args: Any) -> None:
    def each(x: Tensor) -> Tensor:
        body(fzero.axis_index(), world_size, *args)
        return x

    fzero.simulate(each, world_size=world_size)(torch.zeros(world_size, 1))


@given(runs, worlds)
def test_on_virtual_ranks_updates_with_an_overflow_leave_no_trace(run: Run, size: int) -> None:
    on_virtual(check_skips, size, run)


def check_drivers(rank: int, size: int, run: Run) -> None:
    """The engine and the functional step hold the same bits, the scale's among them."""
    engine = by_engine(run, rank, size, run.scale, only_good=False)
    apply, params = fzero.functionalize(Net(torch.bfloat16 if run.bf16 else torch.float32))

    def step_fn(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p, x: loss_of(apply(p, x)), state)(x)
        return fzero.apply_gradients(state), None

    step: Any = fzero.scale_loss(fzero.clip(step_fn, max_norm=run.max_norm), run.scale)
    step = fzero.shard(step, stage=run.stage, donate=True, bucket_bytes=64)
    state = step.init(params, fzero.optim.from_torch(OPTIMIZERS[run.optimizer]))
    for number, bad in enumerate(run.bad):
        wrong = bad is not None and bad % size == rank
        dtype = torch.bfloat16 if run.bf16 else torch.float32
        state, _ = step(state, rows(rank, 10 * number, bad=wrong, dtype=dtype))
    same(engine.state, state)
    held, theirs = engine.state.scale, state.scale
    assert held is not None and held.policy == theirs.policy
    for name in ("scale", "good_updates", "hysteresis_left", "overflowed"):
        assert torch.equal(getattr(held, name), getattr(theirs, name)), name
    engine.close()


@given(runs.map(lambda run: run._replace(every=1, coalesced=False)), worlds, seeds)
def test_both_drivers_hold_the_same_bits(run: Run, size: int, seed: int) -> None:
    on_virtual(check_drivers, size, run)


CHOSEN = (
    Run(0, "fused", "dynamic", (None, 1, 0, None), max_norm=0.05),
    Run(1, "not fused", 2.0**10, (2, None, None)),
    Run(2, "momentum", SCALES[2], (0, None, 1, None), every=2, coalesced=True),
    Run(3, "adamw", "dynamic", (None, 1, None), bf16=True),
)


def on_gloo(rank: int, size: int) -> None:
    for run in CHOSEN:
        check_skips(rank, size, run)
        check_drivers(rank, size, run._replace(every=1, coalesced=False))


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_on_gloo_ranks_too(world_size: int) -> None:
    run_ranks(on_gloo, world_size, timeout_s=240.0)  # several engines, on a busy machine
