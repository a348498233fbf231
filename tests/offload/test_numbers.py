"""Where a state lives changes no bit: both drivers, windows, micro-batches, clipping, masters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapter.programs import LOW, TOGETHER, Numbers, Options, Part, Plan, Run, runs
from tests.adapter.same_bits import on_gloo, on_virtual_ranks
from tests.ranks import run_ranks
from tests.strategies import worlds

STREAMED = Run(3, "torch adamw", "bf16", Plan((Part(False, 2), TOGETHER)), LOW, away="ogp")


@settings(max_examples=6)
@given(runs, worlds, st.sampled_from(["o", "g", "og", "ogp"]))
def test_what_lives_on_disk_is_trained_with_the_same_bits(run: Run, world: int, away: str) -> None:
    away = away if run.stage == 3 else away.replace("p", "")
    compare(run._replace(away=away), world)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    "run",
    [
        STREAMED,
        STREAMED._replace(optimizer="lion", numbers=Numbers(state_dtype=torch.bfloat16)),
        STREAMED._replace(
            plan=Plan((TOGETHER,), one_window=True), options=Options(reshard="window")
        ),
    ],
)
def test_so_it_is_on_chosen_programs(run: Run, world_size: int) -> None:
    compare(run, world_size)


def compare(run: Run, world: int) -> None:
    alone = world == 1 and "p" in run.away
    if alone:
        # One rank has a buffer for each leaf; if it brings them to the device unit by unit, one for
        # each unit. Kernels round the last elements of a buffer in another way than those before.
        run = run._replace(dtype="fp32", options=run.options._replace(max_norm=None))
    wanted = on_virtual_ranks(run._replace(away=""), world)
    found = on_virtual_ranks(run, world)
    assert torch.equal(found, wanted) or (alone and torch.allclose(found, wanted, atol=1e-6))


@pytest.mark.xdist_group("gloo")
def test_gloo_ranks_with_everything_on_disk_hold_the_bits_of_virtual_ranks_without() -> None:
    wanted = on_virtual_ranks(STREAMED._replace(away=""), 2)
    for real in run_ranks(on_gloo, 2, STREAMED):
        assert torch.equal(real, wanted[0])
