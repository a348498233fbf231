"""Plans equal what four gloo processes do: collectives, bytes sent, bytes held; and the peak."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch

import fzero
from fzero.collectives import CollectiveEvent
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks
from tests.tools.plan.models import Case

WORLD = 4
DONATES = {"donate": True}
CLIPS = {"micro_batches": 2, "max_norm": 1.0}
ENCODED_GRADIENTS = fzero.Compress(gradients=fzero.codecs.int8())
ENCODED = fzero.Compress(gradients=fzero.codecs.fp8(), parameters=fzero.codecs.int8())
AWAY = fzero.Offload(optimizer="cpu", params="cpu")
FIRST = [
    Case(stage=3),
    Case(model="decoder", stage=2, around={"micro_batches": 2, "coalesced": True}),
    Case(model="decoder", stage=3, torch_optimizer=True, around=CLIPS),
    Case(model="decoder", stage=3, around={"offload": AWAY}),
    Case(model="decoder", stage=2, mesh=(2, 2), shard={"optimizer_over": "all"}),
    Case(stage=3, around={"compress": ENCODED}),
]
MORE = [
    *(Case(stage=stage) for stage in (0, 1, 2)),
    Case(model="decoder", stage=3, shard=DONATES),
    Case(model="decoder", stage=3, mesh=(2, 2), shard={"reshard_after_forward": False}),
    Case(stage=0, around={"compress": ENCODED_GRADIENTS}),
    Case(model="decoder", stage=0, shard=DONATES),
    Case(model="remat", stage=3),
    Case(model="encoder", stage=2),
    Case(model="decoder", stage=3, dtype=torch.bfloat16),
    Case(model="decoder", stage=3, around={"autocast": torch.bfloat16}),
]


class Ran(NamedTuple):
    """What one rank did in a step, and held."""

    events: list[CollectiveEvent]
    held: dict[str, int]  # after the step
    gradients: int  # before the update
    peak: int


def run(case: Case) -> Ran:
    """Take two steps of a case; look at the second."""
    gradients = [0]

    def seen(state: Any) -> None:
        gradients.append(fzero.state_bytes(state)["gradients"])

    batch = case.batch()
    with LiveBytes() as live:
        step, params = case.step(seen)
        state = step.init(params, case.optimizer())
        del params
        state, _ = step(state, batch)
        gc.collect()
        live.begin()
        with fzero.count_collectives() as log:
            state, _ = step(state, batch)
    return Ran(log.events, fzero.state_bytes(state), max(gradients), live.peak)


def body(rank: int, world_size: int, cases: list[Case]) -> list[Ran]:
    return [run(case) for case in cases]


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("cases", [FIRST, pytest.param(MORE, marks=pytest.mark.slow)])
def test_a_plan_is_what_the_ranks_do(cases: list[Case]) -> None:
    ranks = run_ranks(body, WORLD, cases, timeout_s=240, fresh=True)
    for number, case in enumerate(cases):
        plan = case.plan(WORLD, rank=number % WORLD)  # whichever: all hold and send as much
        found = {(one.op, one.axis): (one.count, one.wire_bytes) for one in plan.traffic}
        for rank in range(WORLD):
            real = ranks[rank][number]
            by_kind: dict[tuple[str, str], tuple[int, int]] = {}
            for event in real.events:
                count, sent = by_kind.get((event.op, event.axis), (0, 0))
                by_kind[event.op, event.axis] = count + 1, sent + event.wire_bytes
            assert found == by_kind, case
            held = real.held
            assert plan.bytes["parameters"] == held["parameters"], case
            assert plan.bytes["optimizer"] + plan.bytes["masters"] == held["optimizer"], case
            assert plan.bytes["window"] == held["window"], case
            assert "coalesced" in case.around or plan.bytes["gradients"] == real.gradients, case
            assert plan.peak_bytes == pytest.approx(real.peak, rel=0.05), case
            if "offload" in case.around:
                # Gradients that wait for an update are in a plan, and gone after a step.
                assert plan.bytes["in host memory"] == held["in host memory"], case
