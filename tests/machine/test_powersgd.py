"""PowerSGD on tensors alone: its basis, its bound, its bytes, where factors start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from fzero.machine.compress import require_codec
from fzero.machine.partition import plan_layout
from fzero.machine.powersgd import matrices_of, powersgd
from tests.strategies import seeds

SIZES = st.integers(1, 40)


def received(codec: powersgd, matrix: Tensor, times: int = 1) -> Tensor:
    """What is received of a matrix, by the start that is made of it in so many updates."""
    rank = min(codec.rank, *matrix.shape)
    q = codec.start(matrix.shape[1], rank).to(matrix.dtype)
    basis = matrix
    for _ in range(times):
        basis = codec.basis(matrix @ q)
        q = codec.next_start(matrix.T @ basis, q)
    return basis @ (matrix.T @ basis).T


def random(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(rows=SIZES, columns=SIZES, rank=st.integers(1, 6), seed=seeds)
def test_what_is_received_is_a_projection_within_the_bound(
    rows: int, columns: int, rank: int, seed: int
) -> None:
    codec = powersgd(rank=rank)
    for dtype in (torch.float32, torch.float64):
        matrix = random(rows, columns, seed, dtype)
        found = received(codec, matrix)
        assert ((found - matrix).abs() <= codec.bound_of(matrix)).all()
        assert found.norm() <= matrix.norm() * (1 + 1e-3)


@given(rows=SIZES, columns=SIZES, of_rank=st.integers(0, 3), seed=seeds)
def test_a_matrix_of_no_higher_rank_is_received_whole(
    rows: int, columns: int, of_rank: int, seed: int
) -> None:
    matrix = random(rows, of_rank, seed) @ random(of_rank, columns, seed + 1)
    torch.testing.assert_close(received(powersgd(rank=3), matrix), matrix, rtol=0, atol=1e-5)


@given(rows=SIZES, of_rank=st.integers(0, 5), power=st.integers(-60, 60), seed=seeds)
def test_columns_of_a_basis_are_orthonormal_or_zero(
    rows: int, of_rank: int, power: int, seed: int
) -> None:
    p = (random(rows, of_rank, seed) @ random(of_rank, 4, seed + 1)).float() * 2.0**power
    basis = powersgd.basis(p)
    gram = basis.T @ basis
    alive = gram.diagonal() > 0.5
    assert int(alive.sum()) == min(rows, of_rank, 4)
    torch.testing.assert_close(gram, torch.diag(alive.float()), rtol=0, atol=1e-5)


def test_a_start_that_goes_on_finds_the_largest_directions() -> None:
    u, _, v = torch.linalg.svd(random(30, 20, 0))
    sizes = 0.7 ** torch.arange(20, dtype=torch.float64)
    matrix = (u[:, :20] * sizes) @ v
    best = float(sizes[2:].square().sum().sqrt())
    lost = [float((matrix - received(powersgd(rank=2), matrix, n)).norm()) for n in (1, 4, 30)]
    assert lost[0] > lost[1] > 0.999 * lost[2] and lost[2] < best * 1.001 < lost[0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_in_all_of_a_matrix(bad: float) -> None:
    matrix = random(9, 7, 0)
    matrix[3, 2] = bad
    codec, start = powersgd(rank=2), powersgd.start(7, 2).double()
    basis = codec.basis(matrix @ start)
    found = basis @ (matrix.T @ basis).T
    assert found.isnan().all()
    assert torch.equal(codec.next_start(matrix.T @ basis, start), start)


def test_starts_are_the_same_everywhere_and_of_full_rank() -> None:
    first = powersgd.start(50, 4)
    assert torch.equal(first[:, :2], powersgd.start(50, 2)) and first.all()
    assert int(torch.linalg.matrix_rank(first)) == 4 and float(first.mean().abs()) < 0.1
    beyond = first * torch.inf
    assert torch.equal(powersgd.next_start(beyond, first), first)
    zeros = torch.zeros(50, 4)
    assert torch.equal(powersgd.next_start(zeros, first), first)  # no gradient: as it was


@pytest.mark.parametrize(
    ("shape", "rank", "wire"),
    [
        ((), 0, 4),
        ((7,), 0, 28),
        ((0, 5), 0, 0),
        ((2, 2), 0, 16),  # factors of rank 1 have as many elements
        ((3, 5), 1, 4 * 8),
        ((100, 80), 4, 4 * 4 * 180),
        ((8, 3, 3, 3), 4, 4 * 4 * 35),
        ((2, 1000), 1, 4 * 1002),
    ],
)
def test_what_is_sent_of_a_parameter(shape: tuple[int, ...], rank: int, wire: int) -> None:
    codec = powersgd(rank=1 if shape in ((3, 5), (2, 1000)) else 4)
    assert codec.rank_of(shape) == rank and codec.wire_bytes_of(shape) == wire


def test_complex_matrices_are_real_ones_and_complex_vectors_are_none() -> None:
    params = {"m": torch.ones(6, 5, dtype=torch.complex64), "v": torch.ones(40, dtype=torch.cfloat)}
    layout = plan_layout(params, ranks=2, bucket_bytes=10_000)
    (one,) = matrices_of(powersgd(rank=1), layout, 0)
    assert (one.rows, one.columns, one.rank) == (6, 10, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: powersgd(rank=0),
        lambda: powersgd(rank=-1),
        lambda: powersgd(memory=False),
        lambda: powersgd(memory=torch.int32),
        lambda: fzero.compress(lambda state: (state, None), parameters=powersgd()),
    ],
)
def test_what_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(LayoutError, match="Fix: "):
        make()
    require_codec("compress: gradients", powersgd())
