"""Gradients by sample in bounded memory: a loop over chunks in `evaluate`, at every stage.

    what is held beyond the state      bytes
    the sum                            P
    the gradients of a chunk of n      n P
    one leaf of a chunk's sum          P / L
    stage 3: units that are gathered   2 P / L at most

P bytes of parameters in L equal layers. `torch.func.vmap(chunk_size=n)` in the place of the loop
puts its chunks together at the end, so it holds the gradients of all samples.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.drivers import each_rank
from tests.live_bytes import LiveBytes

LAYERS, WIDTH = 4, 64
UNIT = 4 * WIDTH**2
P = LAYERS * UNIT
STAGES = pytest.mark.parametrize("stage", range(4))


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()] * LAYERS
    return nn.Sequential(
        *(
            nn.Linear(WIDTH, WIDTH, bias=False) if i % 2 == 0 else layer
            for i, layer in enumerate(layers)
        )
    ).to(dtype)


def clipped_sum_of(apply: Any, chunk: int, *, at_once: bool = False) -> Any:
    """sum_i g_i min(1, 1 / |g_i|) of the samples x, for `evaluate`."""
    one = torch.func.grad(lambda params, x: apply(params, x).square().sum())

    def clipped_sum(params: Any, x: Tensor) -> Any:
        total = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in params.items()}
        for part in [x] if at_once else x.split(chunk) if len(x) else ():
            size = chunk if at_once else None
            each = torch.func.vmap(one, in_dims=(None, 0), chunk_size=size)(params, part)
            norm = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
            for name, g in each.items():
                total[name] += torch.einsum("n,n...->...", (1 / norm).clamp(max=1), g)
            del each, g
        return total

    return clipped_sum


def step_of(clipped_sum: Any, samples: int) -> Any:
    def step_fn(state: Any, x: Tensor) -> Any:
        total = fzero.evaluate(clipped_sum, state)(x)
        scale = fzero.world().size / samples  # the mean over ranks is taken
        state = fzero.add_gradients(state, {name: scale * t for name, t in total.items()})
        return fzero.apply_gradients(state), None

    return step_fn


def peak_bytes(stage: int, samples: int, chunk: int, *, at_once: bool = False) -> int:
    """The most bytes that a rank of two holds in the third step beyond its state and batch."""
    apply, params = fzero.functionalize(network())
    clipped_sum = clipped_sum_of(apply, chunk, at_once=at_once)
    peaks: list[int] = []

    def body(rank: int) -> Tensor:
        step = fzero.shard(step_of(clipped_sum, 2 * samples), stage=stage, units=apply.units)
        state: Any = step.init(params, fzero.optim.sgd(0.1))
        x = torch.randn(samples, WIDTH)
        for _ in range(2):
            state, _ = step(state, x)
        with LiveBytes() as live:
            live.begin()
            fzero.evaluate(clipped_sum, state)(x)
        peaks.append(live.peak)
        return torch.zeros(())

    each_rank(body, 2)
    return max(peaks)


@STAGES
def test_a_chunk_is_held_whatever_the_number_of_samples(stage: int) -> None:
    of_chunk = {chunk: peak_bytes(stage, 16, chunk) for chunk in (1, 2, 4)}
    for chunk, peak in of_chunk.items():
        bound = P + chunk * P + UNIT + (2 * UNIT if stage == 3 else 0)
        activations = chunk * 4 * WIDTH * 8 * LAYERS
        assert P + chunk * P <= peak <= bound + activations, (chunk, peak / UNIT)
    assert peak_bytes(stage, 64, 2) == of_chunk[2]


@STAGES
def test_chunks_of_vmap_itself_hold_all_samples(stage: int) -> None:
    assert peak_bytes(stage, 16, 2, at_once=True) >= P + 16 * P
    assert peak_bytes(stage, 32, 2, at_once=True) >= P + 32 * P


@STAGES
@pytest.mark.parametrize("counts", [(7,), (4, 3), (5, 0, 2), (1, 1, 1, 4)], ids=str)
def test_a_step_is_that_of_a_loop_over_samples(stage: int, counts: tuple[int, ...]) -> None:
    """Also where ranks have other numbers of samples, and of chunks, or none."""
    module = network(torch.float64)
    apply, params = fzero.functionalize(module)
    samples = torch.randn(sum(counts), WIDTH, dtype=torch.float64)
    want = {name: p.detach().clone() for name, p in module.named_parameters()}
    for x in samples:
        grads = torch.autograd.grad(module(x).square().sum(), [*module.parameters()])
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for name, g in zip(want, grads, strict=True):
            want[name] -= 0.5 * g * (1 / norm).clamp(max=1) / len(samples)

    def body(rank: int) -> Any:
        step_fn = step_of(clipped_sum_of(apply, 2), len(samples))
        step = fzero.shard(step_fn, stage=stage, units=apply.units)
        state: Any = step.init(params, fzero.optim.sgd(0.5))
        state, _ = step(state, samples.split(list(counts))[rank])
        return fzero.full_params(state)

    found = each_rank(body, len(counts))
    for name, p in want.items():
        for of_rank in found[name]:
            torch.testing.assert_close(of_rank, p, rtol=0, atol=1e-13)
