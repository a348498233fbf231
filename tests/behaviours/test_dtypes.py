"""Behaviour 13: the dtype that gradients add up in is the same at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.behaviours.networks import PLACES, STAGES, virtual

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def params_of(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"w": torch.ones(5, dtype=dtype), "b": torch.ones(2, 3, dtype=dtype)}


def held_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of such parameters add up."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def loss(params: Any, x: Tensor) -> Tensor:
    return (params["w"] * x).sum() + (params["b"] ** 2).sum() * x


def accumulated(dtype: torch.dtype, xs: Tensor, *, window: bool = False, **place: Any) -> Any:
    """The summed gradients of one pass for each number in xs [ranks, passes], and p'."""

    def step(state: Any, x: Tensor) -> tuple[Any, Any]:
        for one in x:
            state, _ = fzero.grad_and_reduce(loss, state)(one.to(dtype))
        return fzero.apply_gradients(state), fzero.gradients(state)

    def run(x: Tensor) -> Any:
        state = fzero.init(params_of(dtype), fzero.optim.adam(1e-2), **place)
        state, found = (fzero.coalesce(step) if window else step)(state, x)
        return found, fzero.full_params(state), state.optimizer.moments

    return virtual(run, len(xs), xs)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_13_sums_that_round_are_the_same_bits_at_every_stage(
    dtype: torch.dtype, window: bool
) -> None:
    xs = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = None
    for stage, reshard in PLACES:
        gradients, params, _ = accumulated(
            dtype, xs, window=window, stage=stage, reshard_after_forward=reshard
        )
        assert {t.dtype for t in gradients.values()} == {held_in(dtype)}
        assert {t.dtype for t in params.values()} == {dtype}
        flat = torch.cat([t.reshape(-1).double() for t in (*gradients.values(), *params.values())])
        want = flat if want is None else want
        assert torch.equal(flat, want), f"stage {stage}, reshard {reshard}"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_13_ranks_are_summed_in_fp32_and_rounded_once(stage: int, dtype: torch.dtype) -> None:
    """256 + 1 + 1 + 1 + ... has no bf16 partial sums: in 16 bits it would stay at 256."""
    big = {torch.bfloat16: 256.0, torch.float16: 2048.0}[dtype]
    xs = torch.tensor([[big], [1.0], [1.0], [1.0], [1.0]])
    gradients, _, _ = accumulated(dtype, xs, stage=stage)
    total = torch.tensor(big + 4, dtype=torch.float32).to(dtype)
    assert torch.equal(gradients["w"], (total.float() / 5).expand(5, 5))


@pytest.mark.parametrize("stage", STAGES)
def test_13_an_optimizer_sees_16_bit_parameters_in_fp32(stage: int) -> None:
    """Updates too small for bf16 add up in the fp32 masters, at every stage."""

    def step(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        return fzero.apply_gradients(state)

    def run(x: Tensor) -> Any:
        state = fzero.init(params_of(torch.bfloat16), fzero.optim.sgd(2.0**-12), stage=stage)
        for _ in range(16):
            state = step(state, x)
        return fzero.full_params(state)["w"], *state.optimizer.masters

    after, *masters = virtual(run, 2, torch.ones(2, dtype=torch.bfloat16))
    assert torch.equal(after, torch.full((2, 5), 1 - 2.0**-8, dtype=torch.bfloat16))
    assert {m.dtype for m in masters} == {torch.float32}


@pytest.mark.parametrize("stage", STAGES)
def test_13_mixed_dtypes_keep_each_its_own(stage: int) -> None:
    params = {str(dtype): torch.ones(3, dtype=dtype) for dtype in DTYPES}

    def run(x: Tensor) -> Any:
        def mixed(p: Any, x: Tensor) -> Tensor:
            return sum((t.double() * (i + 1)).sum() for i, t in enumerate(p.values())) * x

        state = fzero.init(params, fzero.optim.sgd(1.0), stage=stage, bucket_bytes=2**20)
        state, _ = fzero.grad_and_reduce(mixed, state)(x)
        return fzero.gradients(state), fzero.full_params(fzero.apply_gradients(state))

    gradients, after = virtual(run, 2, torch.tensor([1.0, 3.0], dtype=torch.float64))
    for i, dtype in enumerate(DTYPES):
        want = torch.full((2, 3), 2.0 * (i + 1), dtype=dtype)
        assert gradients[str(dtype)].dtype == held_in(dtype)
        assert after[str(dtype)].dtype == dtype
        assert torch.equal(gradients[str(dtype)].to(dtype), want)
        assert torch.equal(after[str(dtype)], 1 - want)
