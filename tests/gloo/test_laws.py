"""On real ranks: the same bits, the same counts, the same bytes as elsewhere.

That updates are the unsharded ones is in test_programs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.behaviours.costs import (
    LAYERS,
    P_BYTES,
    STAGE_2_COUNTS,
    chain_params,
    cost_of,
    counts,
    payload_bytes,
    probe_gathers,
    steps_of,
)
from tests.behaviours.models import RANKS
from tests.behaviours.networks import PLACES, Gpt, next_token_loss, tokens, virtual
from tests.behaviours.test_gather_and_release import unit_bytes
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

PASSES = (1, 2, 4)
two_or_three = pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=[pytest.mark.slow] * (n not in (2, 3))) for n in RANKS]
)


def count_everywhere(rank: int, world_size: int) -> dict[Any, Any]:
    """Counts and bytes of a coalesced step, by place and number of passes."""
    found = {}
    for stage, reshard in PLACES:
        for n in PASSES:
            sharded = fzero.shard(steps_of(n), stage=stage, reshard_after_forward=reshard)
            state = sharded.init(chain_params(), fzero.optim.sgd(2.0**-8))
            with fzero.count_collectives() as log:
                sharded(state, torch.ones((), dtype=torch.float64))
            found[stage, reshard, n] = (
                counts(log, rank),
                payload_bytes(log, rank),
                log.counts(rank),
                log.wire_bytes(rank),
            )
    return found


@two_or_three
def test_the_collectives_of_a_window_are_those_of_theory(ranks: int) -> None:
    """And those that virtual ranks count, agreements included."""
    one_way = P_BYTES * (ranks - 1) // ranks
    for rank, found in enumerate(run_ranks(count_everywhere, ranks)):
        for (stage, reshard, n), (seen, moved, every, wire) in found.items():
            where = f"rank {rank}, stage {stage}, reshard {reshard}, n {n}"
            gathers = {True: 2 * n, False: n, "window": 1}[reshard] if stage == 3 else 1
            assert moved == (gathers + 1) * one_way, where
            if ranks == 1:
                assert not every, where
                continue
            stage_3 = {"all_gather": gathers * LAYERS, "reduce_scatter": LAYERS}
            assert seen == {0: {"all_reduce": 1}, 3: stage_3}.get(stage, STAGE_2_COUNTS), where
            log = cost_of(steps_of(n), stage=stage, ranks=ranks, reshard_after_forward=reshard)
            assert log.counts(rank) == every, where
            assert log.wire_bytes(rank) == wire, where


def numbers_of(batch: Tensor, **options: Any) -> list[Tensor]:
    """Values, gradients and parameters of two steps of a small GPT in fp32: sums that round."""
    apply, params = fzero.functionalize(Gpt(depth=2))
    params, loss = {k: p.float() for k, p in params.items()}, next_token_loss(apply)
    state = fzero.init(
        params, fzero.optim.sgd(0.1, momentum=0.9), units=apply.units, ordered=True, **options
    )
    seen: list[Tensor] = []
    for _ in range(2):
        state, value = fzero.grad_and_reduce(loss, state)(batch)
        seen += [value, fzero.global_norm(state), *fzero.gradients(state).values()]
        state = fzero.apply_gradients(state)
    return [*seen, *fzero.full_params(state).values()]


OPTIONS = [
    {"stage": stage, "reshard_after_forward": reshard, "bucket_bytes": 600}
    for stage, reshard in PLACES
]


def numbers_everywhere(rank: int, world_size: int) -> list[list[Tensor]]:
    return [numbers_of(tokens(world_size)[rank], **options) for options in OPTIONS]


@two_or_three
def test_virtual_ranks_give_the_same_bits_as_processes(ranks: int) -> None:
    """With ordered sums; the default sum of gloo differs in the last bit from three ranks on."""
    by_rank = run_ranks(numbers_everywhere, ranks)
    for i, options in enumerate(OPTIONS):
        simulated = virtual(lambda b, o=options: numbers_of(b, **o), ranks, tokens(ranks))
        for rank, found in enumerate(by_rank):
            for got, want in zip(found[i], simulated, strict=True):
                assert torch.equal(got, want[rank]), (rank, options)


def peak_everywhere(rank: int, world_size: int) -> tuple[int, int]:
    """The most full parameters alive at once in a coalesced step of two passes, and after it."""
    apply, params = fzero.functionalize(Gpt(depth=5))
    loss = next_token_loss(apply)

    def step(state: Any, batch: Tensor) -> tuple[Any, None]:
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(loss, state)(batch)
        return fzero.apply_gradients(state), None

    sharded = fzero.shard(fzero.coalesce(step), stage=3, units=apply.units)
    state = sharded.init(params, fzero.optim.sgd(0.1))
    with probe_gathers() as probe:
        sharded(state, tokens(world_size)[rank])
    return probe.peak(rank), probe.alive(rank)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_more_than_two_units_are_whole_at_once(ranks: int) -> None:
    apply, params = fzero.functionalize(Gpt(depth=5))
    units = unit_bytes(params, apply.units, ranks)
    for peak, left in run_ranks(peak_everywhere, ranks):
        assert 0 < peak <= units[0] + units[1] < sum(units) / 2
        assert left == 0
