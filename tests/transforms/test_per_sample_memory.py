"""Gradients by sample need the memory of a chunk, at every stage, and at stage 3 of one unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.drivers import each_rank
from tests.live_bytes import LiveBytes

DEPTH, WIDTH = 4, 32
UNIT = 4 * WIDTH * WIDTH
PARAMS = DEPTH * UNIT

torch.manual_seed(0)
APPLY, VALUES = fzero.functionalize(
    nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
)


def one(params: Any, x: Tensor) -> Tensor:
    return APPLY(params, x).square().mean()


OF_EACH = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))
Sum = Callable[[Any, Tensor, int], dict[str, Tensor]]


def clipped(each: dict[str, Tensor]) -> dict[str, Tensor]:
    norm = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    factor = (0.1 / (norm + 1e-6)).clamp(max=1)
    return {name: torch.einsum("n,n...->...", factor, g) for name, g in each.items()}


def in_chunks(params: Any, x: Tensor, chunk: int) -> dict[str, Tensor]:
    """Clip and add up each chunk before the next one is differentiated."""
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for part in x.split(chunk):
        each = OF_EACH(params, part)
        norm = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factor = (0.1 / (norm + 1e-6)).clamp(max=1)
        for name, g in each.items():
            total[name] += torch.einsum("n,n...->...", factor, g)
        del each, g
    return total


def by_chunk_size(params: Any, x: Tensor, chunk: int) -> dict[str, Tensor]:
    """Let vmap make the chunks: it concatenates what they give."""
    of_each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0), chunk_size=chunk)
    return clipped(of_each(params, x))


def loss_of(summed: Sum, chunk: int) -> Any:
    """Return the loss whose gradient is that sum, and nothing else: its gradient by p is g."""

    def loss(params: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            total = summed(params, x, chunk)
        return torch.stack([(params[name] * g).sum() for name, g in total.items()]).sum()

    return loss


def peak_of(stage: int, summed: Sum, samples: int, chunk: int, ranks: int = 2) -> int:
    """Return the most bytes that were made and alive in a step on rank 0, beside the state."""

    def step_fn(state: Any, x: Tensor) -> Any:
        state, value = fzero.grad_and_reduce(loss_of(summed, chunk), state)(x)
        return fzero.apply_gradients(state), value

    peaks: dict[int, int] = {}

    def body(rank: int) -> Tensor:
        step = fzero.shard(step_fn, stage=stage, units=APPLY.units)
        state = step.init(VALUES, fzero.optim.sgd(0.1))
        x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            state, _ = step(state, x)
        live = LiveBytes()
        with live:
            live.begin()
            step(state, x)
        peaks[rank] = live.peak
        return torch.zeros(())

    each_rank(body, ranks)
    return peaks[0]


STAGES = pytest.mark.parametrize("stage", range(4))


@STAGES
def test_a_loop_needs_the_gradients_of_a_chunk_their_sum_and_one_leaf(stage: int) -> None:
    for chunk in (2, 4):
        held = (chunk + 1) * PARAMS + UNIT  # what is added to the sum is made leaf by leaf
        held += UNIT * (stage == 3)  # gathered: one unit, of four
        peak, activations = peak_of(stage, in_chunks, 16, chunk), 2 * chunk * 4 * WIDTH
        assert held <= peak <= held + activations
        assert peak_of(stage, in_chunks, 32, chunk) == peak  # whatever the batch


@STAGES
def test_chunk_size_of_vmap_holds_the_gradients_of_all_samples(stage: int) -> None:
    for samples in (16, 32):
        held = samples * (PARAMS + UNIT)  # a leaf is there in chunks and as a whole
        assert peak_of(stage, by_chunk_size, samples, 2) == held + UNIT * (stage == 3)


@STAGES
def test_both_give_the_sum_of_one_process(stage: int) -> None:
    x = torch.randn(12, WIDTH)
    wanted = clipped(OF_EACH(VALUES, x))

    def body(rank: int, summed: Sum) -> Tensor:
        state = fzero.init(VALUES, fzero.optim.sgd(0.1), stage=stage)
        state, _ = fzero.grad_and_reduce(loss_of(summed, 3), state)(x[rank::2])
        for name, g in fzero.full_gradients(state).items():
            torch.testing.assert_close(2 * g, wanted[name], rtol=1e-5, atol=1e-7)
        return torch.zeros(())

    for summed in (in_chunks, by_chunk_size):
        each_rank(lambda rank, summed=summed: body(rank, summed), 2)
