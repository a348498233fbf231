"""A window of N backward passes costs the collectives of one.

Counts and bytes of whole windows, for each stage, N and number of ranks, are in gloo/test_laws.py,
which compares those of virtual ranks and of processes with theory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from tests.behaviours.costs import (
    LAYERS,
    NUMEL,
    P_BYTES,
    chain_loss,
    cost_of,
    counts,
    payload_bytes,
    steps_of,
)
from tests.behaviours.networks import Place, at_every_place


@pytest.mark.parametrize("bucket_numel", [1, NUMEL, 2 * NUMEL, LAYERS * NUMEL])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_there_is_one_reduction_for_each_bucket(stage: int, bucket_numel: int) -> None:
    log = cost_of(steps_of(3), stage=stage, ranks=2, bucket_bytes=8 * bucket_numel)
    buckets = LAYERS // max(1, bucket_numel // NUMEL)
    assert set(counts(log).values()) == {buckets}
    assert payload_bytes(log) == P_BYTES


@pytest.mark.parametrize(("stage", "factor"), [(0, 2), (1, 1), (2, 1), (3, 3)])
def test_without_a_window_each_pass_pays(stage: int, factor: int) -> None:
    for n in (1, 3):
        log = cost_of(steps_of(n, coalesced=False), stage=stage, ranks=2)
        update = 1 if stage in (1, 2) else 0
        assert payload_bytes(log) == (n * factor + update) * P_BYTES // 2


@at_every_place
def test_clipping_costs_one_number_and_no_second_reduction(place: Place) -> None:
    plain = cost_of(steps_of(2), ranks=2, **place)
    clipped = cost_of(fzero.clip(steps_of(2), max_norm=1.0), ranks=2, **place)
    norm_bytes = 8 if place["stage"] else 0  # of an fp64 scalar; replicas need not ask each other
    assert payload_bytes(clipped) - payload_bytes(plain) == norm_bytes


@at_every_place
def test_an_empty_window_or_one_that_raises_reduces_nothing(place: Place) -> None:
    def raises(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(chain_loss, state)(x)
        raise ArithmeticError

    empty = fzero.coalesce(lambda state, x: (state, None))
    log = cost_of(empty, ranks=2, **place)  # a rank does not know that the others have nothing
    assert counts(log) == {} and [one.op for one in log.of(0)] == ["agree"]
    log = cost_of(fzero.coalesce(raises), ranks=2, error=ArithmeticError, **place)
    assert {"reduce_scatter", "all_reduce"}.isdisjoint(counts(log))


@given(n=st.integers(1, 4), accumulated=st.sampled_from([1, 2]), stage=st.integers(0, 3))
def test_the_count_does_not_depend_on_where_the_passes_come_from(
    n: int, accumulated: int, stage: int
) -> None:
    """Frozen and unused leaves, accumulate inside the window, several updates after it."""

    def part(state: Any, x: Tensor) -> tuple[Any, None]:
        for _ in range(n):
            state, _ = fzero.grad_and_reduce(lambda p, x: (p["used"] * x.sum()).sum(), state)(x)
        return state, None

    def step(state: Any, x: Tensor) -> tuple[Any, None]:
        state, _ = fzero.accumulate(part, steps=accumulated)(state, x)
        return fzero.apply_gradients(state), None

    params = {"used": torch.ones(6), "unused": torch.ones(4), "frozen": torch.ones(2)}
    log = cost_of(
        fzero.coalesce(step),
        stage=stage,
        ranks=2,
        params=params,
        trainable=lambda path: path != "frozen",
        x=torch.ones(2, 2),
    )
    reductions = counts(log).get("reduce_scatter", 0) + counts(log).get("all_reduce", 0)
    assert reductions == (2 if stage == 3 else 1)  # stage 3 has a unit for each leaf here
