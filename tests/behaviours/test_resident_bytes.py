"""What a rank holds between calls: ZeRO's table, for P parameter bytes over W ranks.

stage   parameters   gradients   adam's two moments
0       P            P           2 P
1       P            P / W       2 P / W
2       P            P / W       2 P / W
3       P / W        P / W       2 P / W
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.behaviours.networks import (
    Gpt,
    Place,
    at_every_place,
    next_token_loss,
    tokens,
    virtual,
)

APPLY, PARAMS = fzero.functionalize(Gpt(width=16, depth=3))
P_BYTES = sum(p.numel() * p.element_size() for p in PARAMS.values())
LOSS = next_token_loss(APPLY)


def theory(stage: int, ranks: int) -> dict[str, float]:
    """Bytes by kind on each rank, without padding."""
    return {
        "parameters": P_BYTES / (ranks if stage == 3 else 1),
        "gradients": P_BYTES / (ranks if stage >= 1 else 1),
        "optimizer": 2 * P_BYTES / (ranks if stage >= 1 else 1),
    }


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_holds_what_theory_says(stage: int, ranks: int, donate: bool) -> None:
    """Within 1 %, before the update and after it; unused and waiting memory is none."""
    seen: list[dict[str, int]] = []

    def step(state: Any, batch: Tensor) -> tuple[Any, None]:
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(LOSS, state)(batch)
        seen.append(fzero.state_bytes(state))
        return fzero.apply_gradients(state), None

    def run(batch: Tensor) -> tuple[()]:
        sharded = fzero.shard(step, stage=stage, donate=donate, units=APPLY.units)
        state = sharded.init(PARAMS, fzero.optim.adam(1e-2))
        for _ in range(2):
            state, _ = sharded(state, batch)
        seen.append(fzero.state_bytes(state))
        return ()

    virtual(run, ranks, tokens(ranks))
    want = theory(stage, ranks)
    assert len(seen) == 3 * ranks
    for held in seen:
        after = held["gradients"] == 0
        for kind, bytes_ in want.items():
            expected = 0 if after and kind == "gradients" else bytes_
            assert held[kind] == pytest.approx(expected, rel=0.01), kind
        assert held["window"] == 0
        assert held["total"] == sum(held[kind] for kind in want)
    assert sum(held["gradients"] == 0 for held in seen) == ranks


@at_every_place
def test_a_window_holds_one_full_gradient_and_what_it_was_told_to_keep(place: Place) -> None:
    """P bytes for N = 1 and 4, and P more for kept parameters; none of it after the window."""

    def step(state: Any, batch: Tensor) -> tuple[Any, Tensor]:
        held = []
        for _ in range(4):
            state, _ = fzero.grad_and_reduce(LOSS, state)(batch)
            held.append(fzero.state_bytes(state)["window"])
            assert fzero.state_bytes(state)["gradients"] == 0
        return fzero.apply_gradients(state), torch.tensor(held)

    sharded = fzero.shard(fzero.coalesce(step), units=APPLY.units, **place)
    over = fzero.simulate(sharded, world_size=3)
    state, held = over(over.init(PARAMS, fzero.optim.adam(1e-2)), tokens(3))
    want = P_BYTES * (2 if place["reshard_after_forward"] == "window" else 1)
    assert held.double().flatten().tolist() == pytest.approx([want] * 12, rel=0.01)
    after = fzero.state_bytes(state)
    assert after["window"] == after["gradients"] == 0
    everywhere = 3 * theory(place["stage"], 3)["parameters"]  # the state is that of all ranks
    assert after["parameters"] == pytest.approx(everywhere, rel=0.01)


def test_frozen_and_tied_leaves_take_no_gradient_and_no_second_place() -> None:
    """LoRA's case: P counts once, gradients and moments only for what learns."""
    base = torch.ones(100, 100)
    params = {"base": base, "tied": base, "lora": torch.ones(100, 2)}

    def run(x: Tensor) -> Any:
        state = fzero.init(
            params, fzero.optim.adam(1e-2), stage=2, trainable=lambda path: path == "lora"
        )
        loss = fzero.grad_and_reduce(lambda p, x: (p["tied"] @ p["lora"]).sum() * x, state)
        return fzero.state_bytes(loss(x)[0])

    held = virtual(run, 2, torch.ones(2))
    want = {"parameters": 40_800, "gradients": 400, "optimizer": 800 + 8}
    assert {k: held[k].tolist() for k in want} == {k: [v, v] for k, v in want.items()}
