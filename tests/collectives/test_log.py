"""What `count_collectives` reports: kinds, elements, and bytes by the ring bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from tests.collectives.maps import MAPS, simulated
from tests.strategies import integers, many, seeds

WAYS = {"gather": 1, "scatter": 1, "reduce": 2, "exchange": 1}


@given(
    name=st.sampled_from(sorted(WAYS)),
    ranks=many,
    rows=st.integers(1, 3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=seeds,
)
def test_one_collective_is_one_event_on_each_rank(
    name: str, ranks: int, rows: int, dtype: torch.dtype, seed: int
) -> None:
    run = MAPS[name].run
    full = rows * ranks
    xs = integers((ranks, rows if name == "gather" else full), seed, dtype)
    with fzero.count_collectives() as log:
        simulated(run, xs)
    one_way = full * dtype.itemsize * (ranks - 1) // ranks
    assert sorted(event.rank for event in log.events) == list(range(ranks))
    for event in log.events:
        assert (event.op, event.numel, event.dtype) == (run.__name__, full, dtype)
        assert event.wire_bytes == WAYS[name] * one_way
    for rank in range(ranks):
        assert log.counts(rank) == {run.__name__: 1}
        assert log.wire_bytes(rank) == WAYS[name] * one_way
        assert log.wire_bytes(rank, ops=("broadcast",)) == 0


def test_backward_is_counted_and_so_is_nothing_outside_the_block() -> None:
    xs = torch.ones(2, 3)
    with fzero.count_collectives() as outer:
        simulated(fzero.psum, xs)
        with fzero.count_collectives() as inner:
            simulated(torch.func.grad(lambda x: fzero.all_gather(x).sum()), xs)
    simulated(fzero.psum, xs)
    assert inner.counts() == {"all_gather": 1, "reduce_scatter": 1}
    assert outer.counts() == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}


def test_an_empty_buffer_and_what_comes_after_the_block_raised_are_not_counted() -> None:
    with pytest.raises(KeyError), fzero.count_collectives() as log:
        simulated(fzero.psum, torch.ones(2, 0))
        raise KeyError
    simulated(fzero.psum, torch.ones(2, 3))
    assert log.events == []


def test_a_log_is_printed_as_a_table_of_one_rank_and_names_the_others() -> None:
    with fzero.count_collectives() as log:
        assert str(log) == "no collectives"
        simulated(fzero.psum, torch.ones(3, 1000))
        simulated(fzero.psum, torch.ones(3, 7))
        simulated(fzero.all_gather, torch.ones(3, 2, dtype=torch.float64))
    assert str(log).splitlines() == [
        "op          axis  dtype    buffers  elements  bytes sent",
        "all_reduce  dp    float32        2     1,007       5,368",
        "all_gather  dp    float64        1         6          32",
        "total                            3                 5,400",
        "rank 0, and the same on rank 1, 2",
    ]
    assert f"{log.wire_bytes():,}" == "5,400"
    log.events = [event for event in log.events if event.rank != 2 or event.op == "all_gather"]
    assert str(log).splitlines()[-1] == "rank 0, and the same on rank 1; not so on rank 2"
