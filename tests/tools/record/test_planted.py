"""Faults planted in long runs: each is found at its update, flips at their rank and leaf too.

What happened beside the step (a flipped bit, a stale value, a rate that was changed) shows when the
calls of the recording are made again; what was in the inputs of a call (a batch fed twice, that of
another rank, a factor) against the recording of a sound run.
"""

from __future__ import annotations

import contextlib
import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import MismatchError

RANKS = 2
FLIPPED = ("parameter", "exp_avg", "exp_avg_sq", "masters")
STALE = ("stale parameter", "stale exp_avg")
INPUTS = ("batch twice", "batch of another rank", "factor")
KINDS = (*FLIPPED, *STALE, *INPUTS, "rate")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def make_step(stage: int) -> tuple[Any, Any]:
    apply, params = fzero.functionalize(net().bfloat16())

    def step_fn(state: Any, x: Tensor, factor: float) -> Any:
        def loss_fn(params: Any) -> Tensor:
            out = apply(params, x.bfloat16()).float()
            return factor * (out - x[:, :2]).square().mean()

        state, loss = fzero.grad_and_reduce(loss_fn, state)()
        return fzero.apply_gradients(state), loss

    step = fzero.simulate(fzero.shard(step_fn, stage=stage), world_size=RANKS)
    return step, step.init(params, fzero.optim.adamw(1e-2))


def inputs_of(number: int) -> list[Any]:
    g = torch.Generator().manual_seed(number)
    return [torch.randn(RANKS, 8, 4, generator=g), 1.0]


def run(stage: int, calls: int, spoil: Any = None) -> fzero.tools.Recording:
    step, state = make_step(stage)
    step = fzero.record(step, every=calls // 5, keep=None)
    earlier = state
    with contextlib.suppress(MismatchError):  # of ranks that have parted; they are replayed below
        for number in range(calls):
            inputs, now = inputs_of(number), state
            if spoil is not None:
                spoil(number, earlier, state, inputs)
            state, _ = step(state, *inputs)
            earlier = now
    return step.recording


@functools.cache
def sound(stage: int, calls: int) -> fzero.tools.Recording:
    return run(stage, calls)


def flat_of(state: Any, what: str) -> Tensor:
    """What the ranks have of the parameters or of a slot, in one flat: [W, n]."""
    if what == "parameter":
        return state.params.flats[0]
    if what == "masters":
        return state.optimizer.masters[0]
    return state.optimizer.moments[("exp_avg", "exp_avg_sq").index(what)][0]


def spoiling(kind: str, when: int, rank: int, draw: random.Random) -> Any:
    def spoil(number: int, earlier: Any, state: Any, inputs: list[Any]) -> None:
        if number != when:
            return
        if kind in FLIPPED:
            flat = flat_of(state, kind)[rank]
            place = draw.choice(flat.nonzero().flatten().tolist())
            bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
            bits[place] ^= 1 << draw.randrange(14)
        elif kind in STALE:
            what = kind.removeprefix("stale ")
            flat_of(state, what)[rank].copy_(flat_of(earlier, what)[rank])
        elif kind == "batch twice":
            inputs[0] = inputs_of(number - 1)[0]
        elif kind == "batch of another rank":
            inputs[0][rank] = inputs[0][1 - rank]
        else:
            inputs[1] = 1.125

    return spoil


def train_step(engine: Engine, x: Tensor) -> None:
    engine.backward((engine(x) - x[:, :2]).square().mean())
    engine.step()


def engine_of() -> Engine:
    module = net()
    return Engine(module, torch.optim.AdamW(module.parameters(), 1e-2), stage=2)


def update_of_a_rate(calls: int, when: int) -> int:
    """Return where a run shows to have had another rate for the update after `when` calls."""
    engine, step = engine_of(), fzero.record(train_step, every=calls // 5, keep=None)
    groups = engine.optimizer.param_groups
    for number in range(calls):
        groups[0]["lr"] = 2e-2 if number == when else 1e-2
        step(engine, inputs_of(number)[0][0])
    found = fzero.bisect(step.recording, engine=engine_of)
    assert found is not None
    return found.update - 1


def check(kind: str, calls: int, draw: random.Random) -> None:
    when, rank, stage = draw.randrange(1, calls - 1), draw.randrange(RANKS), draw.randrange(4)
    if kind == "rate":
        assert update_of_a_rate(calls, when) == when
        return
    recording = run(stage, calls, spoiling(kind, when, rank, draw))
    found = fzero.bisect(recording, sound(stage, calls) if kind in INPUTS else None)
    assert found is not None, (kind, when, rank, stage)
    if kind in INPUTS:
        assert found.update == when + 1
        assert found.inputs == ((rank,) if "another rank" in kind else (0, 1))
        return
    assert (found.update, found.ranks) == (when, (rank,)), (kind, stage, found)
    what = kind.removeprefix("stale ")
    assert all(leaf.startswith(f"{what} ") for leaf in found.leaves)
    assert kind in STALE or len(found.leaves) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_found_where_it_happened(kind: str) -> None:
    check(kind, 20, random.Random(kind))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_fifty_faults_in_runs_of_a_thousand_updates(number: int) -> None:
    check(KINDS[number % len(KINDS)], 1000, random.Random(number))
