"""Placement tags: what a buffer means rides with it, and what would be wrong is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.errors import PhaseError
from fzero.state import Buffers, Placement
from fzero.state.buffers import add
from tests.strategies import integers, same, seeds, stages, worlds

placements = st.sampled_from(list(Placement))
TAGS = {
    0: (Placement.REPLICATED, Placement.REPLICATED, Placement.REPLICATED),
    1: (Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
    2: (Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
    3: (Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
}


@given(one=placements, other=placements, seed=seeds)
def test_buffers_of_one_placement_add_up_and_those_of_two_do_not(
    one: Placement, other: Placement, seed: int
) -> None:
    a = Buffers(flats=(integers((3,), seed),), placement=one)
    b = Buffers(flats=(integers((3,), seed + 1),), placement=other)
    if one is other:
        total = add(a, b)
        assert total.placement is one
        same(total.flats[0], integers((3,), seed) + integers((3,), seed + 1))
    else:
        seen = f"a {other.value} gradient met a {one.value} one"
        with pytest.raises(PhaseError, match=rf"{seen}[\s\S]*Fix: reduce first"):
            add(a, b)
    assert add(Buffers(placement=one), b) is b
    same(a.flats[0], integers((3,), seed))


@given(stage=stages, ranks=worlds)
def test_an_update_from_unreduced_gradients_is_refused(stage: int, ranks: int) -> None:
    """Somebody moves the pending sum of a window to the gradients by hand."""

    def step_fn(state: Any) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p: p.sum(), state)()
        assert state.window.pending.placement is Placement.PARTIAL
        closed = dataclasses.replace(state.window, pending=Buffers(), is_open=False)
        unreduced = state.replace(gradients=state.window.pending, window=closed)
        return fzero.apply_gradients(unreduced), None

    step = fzero.shard(fzero.coalesce(step_fn), stage=stage)
    run = fzero.simulate(step, world_size=ranks)
    state = run.init(torch.ones(3), fzero.optim.sgd(1.0))
    with pytest.raises(PhaseError, match=r"partial[\s\S]*Fix: let fzero.apply_gradients"):
        run(state)
    held = fzero.simulate(fzero.full_params, world_size=ranks)(state)
    assert held.tolist() == [[1.0] * 3] * ranks


@given(stage=stages, ranks=worlds)
def test_every_buffer_of_a_state_has_the_placement_of_its_stage(stage: int, ranks: int) -> None:
    def step_fn(state: Any) -> Any:
        return fzero.grad_and_reduce(lambda p: p.sum(), state)()

    run = fzero.simulate(fzero.shard(step_fn, stage=stage), world_size=ranks)
    state, _ = run(run.init(torch.ones(12), fzero.optim.adam(1.0)))
    setup = state.setup
    params, gradients, optimizer = TAGS[stage]
    assert (setup.params, setup.gradients, setup.optimizer_state) == TAGS[stage]
    assert (state.params.placement, state.gradients.placement) == (params, gradients)

    shard = {1: 12, 2: 8, 3: 4, 4: 4}[ranks]  # 12 / W, rounded up to 16 bytes
    numel = {Placement.SHARDED: shard, Placement.REPLICATED: shard * ranks}
    assert state.params.flats[0].shape == (ranks, numel[params])
    assert state.gradients.flats[0].shape == (ranks, numel[gradients])
    assert state.optimizer.moments[0][0].shape == (ranks, numel[optimizer])
