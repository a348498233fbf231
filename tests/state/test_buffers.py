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
from fzero.state.buffers import add, require_reduced
from tests.strategies import integers, same, seeds, stages, worlds

placements = st.sampled_from(list(Placement))
TAGS = {
    0: (Placement.REPLICATED, Placement.REPLICATED, Placement.REPLICATED),
    1: (Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
    2: (Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
    3: (Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
}


@given(placement=placements, sizes=st.lists(st.integers(0, 3), max_size=3), seed=seeds)
def test_buffers_of_one_placement_add_up(placement: Placement, sizes: list[int], seed: int) -> None:
    a, b = (
        Buffers(flats=tuple(integers((n,), seed + k) for n in sizes), placement=placement)
        for k in range(2)
    )
    total = add(a, b)
    assert total.placement is placement
    same(total.flats, tuple(x + y for x, y in zip(a.flats, b.flats, strict=True)))
    same(a.flats, tuple(integers((n,), seed) for n in sizes))


@given(one=placements, other=placements)
def test_buffers_of_two_placements_do_not(one: Placement, other: Placement) -> None:
    a, b = (Buffers(flats=(torch.ones(2),), placement=p) for p in (one, other))
    if one is other:
        same(add(a, b).flats, (torch.full((2,), 2.0),))
        return
    seen = f"a {other.value} gradient met a {one.value} one"
    with pytest.raises(PhaseError, match=rf"{seen}[\s\S]*Fix: reduce first"):
        add(a, b)
    assert add(Buffers(placement=one), b) is b


def test_bytes_and_held() -> None:
    assert not Buffers().held
    assert Buffers().bytes == 0
    flats = (torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(0))
    assert Buffers(flats=flats).bytes == 16


def test_unreduced_gradients_are_no_gradients() -> None:
    for placement in Placement:
        held = Buffers(flats=(torch.ones(1),), placement=placement)
        if placement is not Placement.PARTIAL:
            assert require_reduced(held) is held
            continue
        with pytest.raises(PhaseError, match=r"partial[\s\S]*Fix: let fzero.apply_gradients"):
            require_reduced(held)


@given(stage=stages, ranks=worlds)
def test_an_update_from_unreduced_gradients_is_refused(stage: int, ranks: int) -> None:
    """Somebody moves the pending sum of a window to the gradients by hand."""

    def step_fn(state: Any) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p: p.sum(), state)()
        assert state.window.pending.placement is Placement.PARTIAL
        closed = dataclasses.replace(state.window, pending=Buffers(), is_open=False)
        return fzero.apply_gradients(
            state.replace(gradients=state.window.pending, window=closed)
        ), None

    step = fzero.shard(fzero.coalesce(step_fn), stage=stage)
    run = fzero.simulate(step, world_size=ranks)
    state = run.init(torch.ones(3), fzero.optim.sgd(1.0))
    with pytest.raises(PhaseError, match="partial"):
        run(state)
    assert (
        fzero.simulate(fzero.full_params, world_size=ranks)(state).tolist() == [[1.0] * 3] * ranks
    )


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
    full = shard * ranks
    numel = {Placement.SHARDED: shard, Placement.REPLICATED: full}
    assert state.params.flats[0].shape == (ranks, numel[params])
    assert state.gradients.flats[0].shape == (ranks, numel[gradients])
    assert state.optimizer.moments[0][0].shape == (ranks, numel[optimizer])
