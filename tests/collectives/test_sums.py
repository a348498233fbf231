"""How numbers are added: 16-bit floats in fp32, in rank order, the same whatever the buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from tests.collectives.maps import simulated
from tests.ranks import run_ranks
from tests.strategies import everywhere, same, seeds, stages

# 2 is lost, one by one, when it is added to the big one in 16 bits; in fp32 it is not.
LOST = {torch.bfloat16: (512.0, 2.0, 2.0), torch.float16: (4096.0, 2.0, 2.0)}


def summed(x: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's rows of the sum, and the sum."""
    return fzero.reduce_scatter(x), fzero.all_reduce(x)


def summed_on_rank(rank: int, world_size: int, xs: Tensor) -> tuple[Tensor, Tensor]:
    return summed(xs[rank])


def in_fp32(xs: Tensor) -> Tensor:
    """The fp32 sum in rank order, rounded once."""
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total.to(xs.dtype)


def lost(dtype: torch.dtype) -> Tensor:
    """[rank, 3]: a sum that sequential rounding gets wrong."""
    xs = torch.tensor(LOST[dtype], dtype=dtype)[:, None].expand(3, 3)
    assert (xs[0] + xs[1] + xs[2])[0] == xs[0, 0] != in_fp32(xs)[0]
    return xs


@pytest.mark.smoke
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("dtype", list(LOST))
def test_16_bit_floats_are_added_in_fp32(dtype: torch.dtype) -> None:
    xs = lost(dtype)
    rows, total = fzero.simulate(summed, world_size=3)(xs)
    same(rows, in_fp32(xs)[:, None])
    everywhere(total, in_fp32(xs), 3)
    for rank, (rows, total) in enumerate(run_ranks(summed_on_rank, 3, xs)):
        same(rows, in_fp32(xs)[rank : rank + 1])
        same(total, in_fp32(xs))


@given(ranks=st.integers(2, 4), dtype=st.sampled_from(list(LOST)), seed=seeds)
def test_any_16_bit_sum_is_the_fp32_sum_rounded_once(
    ranks: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    xs = torch.randn(ranks, 5).to(dtype)
    everywhere(simulated(fzero.psum, xs), in_fp32(xs), ranks)


@given(stage=stages, coalesced=st.booleans())
def test_gradients_of_16_bit_parameters_are_added_in_fp32(stage: int, coalesced: bool) -> None:
    def step_fn(state: Any, x: Tensor) -> tuple[Any, Any]:
        state, _ = fzero.grad_and_reduce(lambda p, x: (p * x).sum(), state)(x)
        return state, fzero.gradients(state)

    step = fzero.shard(fzero.coalesce(step_fn) if coalesced else step_fn, stage=stage)
    run = fzero.simulate(step, world_size=3)
    params = torch.zeros(2, dtype=torch.bfloat16)
    _, grads = run(run.init(params, fzero.optim.sgd(1.0)), lost(torch.bfloat16)[:, :2])
    everywhere(grads, torch.full((2,), 516.0) / 3, 3)


def ordered_gradient(
    rank: int, world_size: int, stage: int, bucket_bytes: int, params: Any, cs: Tensor
) -> Any:
    """The mean of cs[rank] over ranks, as the gradient of a linear loss, `ordered`."""

    def loss(p: Any) -> Tensor:
        return sum(((x * c).sum() for x, c in zip(p, cs[rank], strict=True)), torch.zeros(()))

    options: Any = {"stage": stage, "bucket_bytes": bucket_bytes, "ordered": True}
    state = fzero.init(params, fzero.optim.sgd(0.1), **options)
    state, _ = fzero.grad_and_reduce(loss, state)()
    return fzero.gradients(state)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", range(4))
def test_ordered_bits_do_not_depend_on_the_buckets(stage: int) -> None:
    torch.manual_seed(stage)
    cs = torch.randn(3, 4, 257)
    want = list((((cs[0] + cs[1]) + cs[2]) / 3).unbind())
    for bucket_bytes in (1, 2 * 257 * 4, 10**6):
        params = list(torch.zeros(4, 257).unbind())
        for got in run_ranks(ordered_gradient, 3, stage, bucket_bytes, params, cs):
            same(got, want)


def test_what_is_no_tensor_and_no_number_is_refused() -> None:
    for x in ({"loss": torch.ones(())}, (torch.ones(()), "a"), object()):
        with pytest.raises(fzero.LayoutError, match=r"take a tensor or a number.*\n.*\n.*tree_map"):
            fzero.pmean(x)  # type: ignore[arg-type]
