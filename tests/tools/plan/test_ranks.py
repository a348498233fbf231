"""Every rank of a plan: what of its part is parameters, and what is padding."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero


@settings(max_examples=25, deadline=None)
@given(
    stage=st.integers(0, 3),
    mesh=st.sampled_from([(1, 2), (1, 3), (1, 7), (2, 2), (3, 2), (2, 1)]),
    over=st.sampled_from(["shard", "all"]),
    numels=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    frozen=st.integers(0, 4),
)
def test_real_elements_are_those_that_are_not_zero(
    stage: int, mesh: tuple[int, int], over: str, numels: list[int], frozen: int
) -> None:
    """In a state of ones, padding is what is zero; of masters too, which are as sharded."""
    params = {f"p{i}": torch.ones(n, dtype=torch.bfloat16) for i, n in enumerate(numels)}
    options: dict[str, Any] = {"trainable": lambda path: path != f"p{frozen}"}
    options |= {"mesh": mesh, "optimizer_over": over}
    step = fzero.shard(lambda state: (state, None), stage=stage, **options)
    world = mesh[0] * mesh[1]
    state = fzero.simulate(step, world_size=world).init(params, fzero.optim.adamw(1e-3))

    def counted(flats: tuple[Tensor, ...], rank: int) -> tuple[int, int]:
        ones = sum(int(flat[rank].count_nonzero()) for flat in flats)
        return ones, sum(flat[rank].numel() for flat in flats) - ones

    plan = fzero.plan.of_step(step, params, fzero.optim.adamw(1e-3), world=world)
    for share in plan.ranks:
        held = counted(state.params.flats, share.rank)
        updated = counted(state.optimizer.masters, share.rank)
        assert (share.params, share.params_padding) == held
        assert (share.updated, share.updated_padding) == updated
        assert share.is_empty == (updated[0] == 0)


def test_more_ranks_than_elements() -> None:
    plan = fzero.plan(torch.nn.Linear(3, 5), torch.ones(2, 3), stage=3, world=1024)
    assert len(plan.ranks) == 1024
    assert sum(share.params for share in plan.ranks) == 20
    # 15 elements of the weight, in shards of 16 bytes, on 4 ranks, and 5 of the bias on 2 of them.
    assert sum(share.is_empty for share in plan.ranks) == 1024 - 4
    assert "1,020 ranks update nothing" in repr(plan)
