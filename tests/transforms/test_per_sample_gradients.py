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

import functools
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
    """The most bytes that a rank of two holds beyond its state and batch, after two steps."""
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


# Other numbers of the gradients of samples: no more is held than for the clipped sum.


def sums_of(apply: Any, chunk: int) -> Any:
    """(sum_i g_i, sum_i |g_i|^2) of the samples x, for `evaluate`."""
    one = torch.func.grad(lambda params, x: apply(params, x).square().sum())

    def sums(params: Any, x: Tensor) -> Any:
        total = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in params.items()}
        squares = torch.zeros((), dtype=x.dtype)
        for part in x.split(chunk) if len(x) else ():
            each = torch.func.vmap(one, in_dims=(None, 0))(params, part)
            for name, g in each.items():
                total[name] += g.sum(0)
                squares += torch.linalg.vector_norm(g).square()
            del each, g
        return total, squares

    return sums


def noise_scale(state: Any, sums: Any, x: Tensor) -> tuple[Any, Tensor]:
    """The state with the mean gradient of all samples, and tr(S) / |G|^2 of McCandlish (2018).

    By the two batch sizes of its appendix A: 1, and all samples of all ranks.
    """
    total, squares = fzero.evaluate(sums, state)(x)
    samples = fzero.psum(torch.tensor(float(len(x)), dtype=x.dtype))
    scale = fzero.world().size / samples  # the mean over ranks is taken
    state = fzero.add_gradients(state, {name: scale * t for name, t in total.items()})
    big, small = fzero.global_norm(state).square(), fzero.psum(squares) / samples
    noise = (small - big) / (1 - 1 / samples)
    return state, noise * (samples - 1) / (samples * big - small)


def influence_of(apply: Any, chunk: int) -> Any:
    """<g_i, g> of each sample x, g being the gradient of a test sample, for `evaluate`."""

    def loss(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().sum()

    def influence(params: Any, test: Tensor, x: Tensor) -> Tensor:
        # Torch makes a tangent as large as the whole buffer that a parameter is a part of.
        params = {name: p.clone() for name, p in params.items()}
        direction = torch.func.grad(loss)(params, test)
        losses = torch.func.vmap(loss, in_dims=(None, 0))
        scores = [x.new_zeros(0)]
        for part in x.split(chunk) if len(x) else ():
            of_chunk = functools.partial(lambda part, params: losses(params, part), part)
            scores.append(torch.func.jvp(of_chunk, (params,), (direction,))[1])
        return torch.cat(scores)

    return influence


def gradients_of(module: nn.Module, samples: Tensor) -> Tensor:
    """The gradient of each sample, by a loop in plain PyTorch: [samples, numbers]."""
    rows = []
    for x in samples:
        grads = torch.autograd.grad(module(x).square().sum(), [*module.parameters()])
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


RANKS = pytest.mark.parametrize("counts", [(7,), (4, 3), (5, 0, 2), (1, 1, 1, 4)], ids=str)


@STAGES
@RANKS
def test_the_noise_scale_is_that_of_a_loop_over_samples(stage: int, counts: Any) -> None:
    module = network(torch.float64)
    apply, params = fzero.functionalize(module)
    samples = torch.randn(sum(counts), WIDTH, dtype=torch.float64)
    each = gradients_of(module, samples)
    wanted = each.var(0).sum() / (each.mean(0).square().sum() - each.var(0).sum() / len(each))

    def body(rank: int) -> Tensor:
        state = fzero.init(params, fzero.optim.sgd(0.5), stage=stage, units=apply.units)
        x = samples.split(list(counts))[rank]
        state, found = noise_scale(state, sums_of(apply, 2), x)
        mean = torch.cat([g.flatten() for g in fzero.full_gradients(state).values()])
        torch.testing.assert_close(mean, each.mean(0), rtol=0, atol=1e-13)
        return found

    for found in each_rank(body, len(counts)):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=0)


@STAGES
@RANKS
def test_influence_is_that_of_a_loop_over_samples(stage: int, counts: Any) -> None:
    module = network(torch.float64)
    apply, params = fzero.functionalize(module)
    samples = torch.randn(sum(counts), WIDTH, dtype=torch.float64)
    test = torch.randn(WIDTH, dtype=torch.float64)
    wanted = gradients_of(module, samples) @ gradients_of(module, test[None])[0]

    def body(rank: int) -> Tensor:
        state = fzero.init(params, fzero.optim.sgd(0.5), stage=stage, units=apply.units)
        influence = fzero.evaluate(influence_of(apply, 2), state)
        found = influence(test, samples.split(list(counts))[rank])
        torch.testing.assert_close(found, wanted.split(list(counts))[rank], rtol=1e-11, atol=1e-12)
        return torch.zeros(())

    each_rank(body, len(counts))


def peak_of(stage: int, of: Any, samples: int, *given: Tensor) -> int:
    """The most bytes that a rank of two holds in `evaluate(of, state)` beyond state and batch."""
    apply, params = fzero.functionalize(network())
    peaks: list[int] = []

    def body(rank: int) -> Tensor:
        state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage, units=apply.units)
        x = torch.randn(samples, WIDTH)
        run = fzero.evaluate(of(apply, 2), state)
        run(*given, x)
        with LiveBytes() as live:
            live.begin()
            run(*given, x)
        peaks.append(live.peak)
        return torch.zeros(())

    each_rank(body, 2)
    return max(peaks)


@STAGES
def test_the_noise_scale_holds_a_chunk_and_influence_no_gradient_by_sample(stage: int) -> None:
    activations = 2 * 4 * WIDTH * 8 * LAYERS
    bound = P + 2 * P + UNIT + (2 * UNIT if stage == 3 else 0) + activations
    peak = peak_of(stage, sums_of, 16)
    assert P + 2 * P <= peak <= bound, peak / UNIT
    assert peak_of(stage, sums_of, 64) == peak
    test = torch.randn(WIDTH)
    peak = peak_of(stage, influence_of, 16, test)
    parts = 2 * P  # copies of the parameters, and the direction: no gradients by sample
    assert parts <= peak <= parts + UNIT + (UNIT if stage == 3 else 0) + activations, peak / UNIT
    assert peak_of(stage, influence_of, 64, test) == peak + 48 * 4  # scores of 48 more samples
