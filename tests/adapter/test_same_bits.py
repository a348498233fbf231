"""Laws 8 and 11: the engine and the functional step give the same bits, whatever they are asked
to do, and those of real ranks are those of virtual ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from tests.adapter.programs import CHOSEN, Run, runs
from tests.adapter.same_bits import on_gloo, on_virtual_ranks
from tests.ranks import run_ranks
from tests.strategies import worlds


@given(runs, worlds)
def test_on_virtual_ranks_both_drivers_hold_the_same_bits(run: Run, world_size: int) -> None:
    on_virtual_ranks(run, world_size)


def worlds_of(number: int, run: Run) -> list[Any]:
    """Two or three ranks in turn, four for a mesh of two dims; the others every night."""
    chosen = 4 if run.options.replicas > 1 else 2 + number % 2
    rest = [pytest.param(w, run, marks=pytest.mark.slow) for w in (2, 3, 4) if w != chosen]
    return [(chosen, run), *rest]


@pytest.mark.floor
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("world_size", "run"), [case for n, run in enumerate(CHOSEN) for case in worlds_of(n, run)]
)
def test_on_gloo_ranks_both_drivers_hold_the_bits_of_virtual_ranks(
    run: Run, world_size: int
) -> None:
    found = on_virtual_ranks(run, world_size)
    for rank, real in enumerate(run_ranks(on_gloo, world_size, run)):
        assert torch.equal(found[rank], found[0])
        if run.options.ordered or world_size < 3:  # else the backend chooses the order of sums
            assert torch.equal(found[rank], real)
