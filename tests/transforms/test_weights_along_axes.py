"""Law 15 of losses that call collectives: ranks that these connect may give other weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from tests.covering import covered
from tests.weights_along_axes import (
    PARAMS,
    RATE,
    batches,
    by_arguments,
    by_engine,
    own_mean,
    plain,
    step_fn,
    updated,
)

AXES = [{"data": 2, "seq": 2}, {"data": 1, "seq": 3}, {"seq": 1, "data": 2}]


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def cut(axes: dict[str, int]) -> tuple[list[Tensor], list[Tensor]]:
    """The whole, and what each rank has of it: [rank, call, ...]."""
    whole = batches(axes["data"], axes["seq"])
    own = [x if [*axes] == ["data", "seq"] else x.transpose(1, 2) for x in whole]
    return [*whole], [x.movedim((1, 2), (0, 1)).flatten(0, 1) for x in own]


HOW: dict[str, Any] = {
    "as it is": lambda step: step,
    "in a window": fzero.coalesce,
    "with a loss scale": fzero.scale_loss(scale=2.0**10),
    "checked": fzero.check_finite,
}


@covered(axes=AXES, stage=range(4), step=[step_fn, by_arguments], how=[*HOW])
def test_an_update_is_that_of_one_process(
    axes: dict[str, int], stage: int, step: Any, how: str
) -> None:
    if how == "checked" and step is by_arguments:
        step = step_fn  # values cannot be read there
    whole, own = cut(axes)
    ranks = len(own[0])
    run = fzero.simulate(fzero.shard(HOW[how](step), stage=stage, mesh=axes), world_size=ranks)
    state, _ = run(run.init(PARAMS, fzero.optim.sgd(RATE)), *own)
    found = fzero.simulate(fzero.full_params, world_size=ranks)(state)
    for name, want in updated(*whole).items():
        close(found[name].detach(), want.expand_as(found[name]))


@covered(axes=AXES[:2], stage=range(4), scales=[False, True], scale=[None, 2.0**10])
def test_an_update_of_an_engine_is_that_of_one_process(
    axes: dict[str, int], stage: int, scales: bool, scale: float | None
) -> None:
    whole, own = cut(axes)
    mesh = fzero.Mesh(axes)
    options = {} if scale is None else {"loss_scale": scale}

    def body(x: Tensor, counts: Tensor) -> Any:
        return by_engine(mesh, x, counts, scales=scales, stage=stage, **options)

    found = fzero.simulate(body, world_size=len(own[0]))(*own)
    for name, want in updated(*whole).items():
        close(found[name], want.expand_as(found[name]))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_mean_over_no_tokens_is_refused_by_the_update_on_every_rank(stage: int) -> None:
    """0 times its NaN is no 0, and the backward of a collective takes it to other ranks."""

    def without_clamp(p: Any, x: Tensor, counts: Tensor) -> Tensor:
        return own_mean(p, x, counts) * counts.sum().clamp(min=1) / counts.sum()

    def body(x: Tensor, counts: Tensor) -> Any:
        def step(state: Any, loss: Any, counts: Tensor) -> Any:
            weight = counts[0].sum()
            state, _ = fzero.grad_and_reduce(loss, state, weight=weight)(x[0], counts[0])
            return fzero.apply_gradients(state), None

        run = fzero.shard(step, stage=stage, mesh=AXES[0])
        state = run.init(PARAMS, fzero.optim.sgd(RATE))
        with pytest.raises(LayoutError, match=r"or 0 where the loss called[\s\S]*clamp\(min=1\)"):
            run(state, without_clamp, counts)
        return fzero.full_params(run(state, own_mean, counts)[0])["w"]

    whole, own = cut(AXES[0])
    found = fzero.simulate(body, world_size=4)(*own)
    want = updated(*(x[:1] for x in whole))["w"]
    close(found, want.expand_as(found))


def test_a_step_is_differentiable_in_the_weights_of_ranks_that_are_connected() -> None:
    whole, own = cut(AXES[0])
    weights = torch.tensor([1.0, 2.0, 0.5, 0.0], dtype=torch.float64)

    def after(weight: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        state = fzero.init(PARAMS, fzero.optim.sgd(RATE), stage=2, mesh=AXES[0])
        state, _ = fzero.grad_and_reduce(own_mean, state, weight=weight)(x[0], counts[0])
        return fzero.full_params(fzero.apply_gradients(state))["w"].pow(2).sum()

    def plainly(weights: Tensor) -> Tensor:
        x, counts = whole[0][:1], whole[1][:1]
        means = counts / counts.sum((-1, -2), keepdim=True).clamp(min=1)
        each = means * weights.view(1, 2, 2, 1, 1)
        grads = torch.func.grad(lambda p: plain(p, x, each) * each.sum())(PARAMS)
        w = PARAMS["w"] - RATE * grads["w"] / weights.sum()
        return 4 * w.pow(2).sum()  # every rank differentiates its own

    of_ranks = fzero.simulate(torch.func.grad(after), world_size=4)
    close(of_ranks(weights, *own), torch.func.grad(plainly)(weights))


def test_a_metric_is_no_connection() -> None:
    """A call whose gradient goes nowhere leaves a mean over no rows of weight 0 a zero."""

    def loss(p: Any, x: Tensor) -> Tensor:
        value = (p["v"] * x).sum(-1).square().mean()
        fzero.pmean(value.detach())
        return value

    def step(state: Any, rows: Any) -> Any:
        x = torch.ones(int(rows), 2, dtype=torch.float64)
        state, _ = fzero.grad_and_reduce(loss, state, weight=len(x))(x)
        return state, fzero.full_gradients(state)["v"]

    run = fzero.simulate(fzero.shard(step, stage=2), world_size=2)
    _, found = run(run.init(PARAMS, fzero.optim.sgd(RATE)), torch.tensor([0, 3]))
    close(found, torch.full((2, 2), -2.0, dtype=torch.float64))


def test_a_metric_beside_an_engine_is_no_connection() -> None:
    def body(rows: Tensor) -> Tensor:
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(model.weight)
        engine = fzero.adapter.Engine(model, torch.optim.SGD(model.parameters(), RATE), stage=2)
        loss = engine(torch.ones(int(rows), 2, dtype=torch.float64)).square().mean()
        fzero.pmean(loss)
        engine.backward(loss, weight=int(rows))
        return engine.full_gradient("weight").clone()

    found = fzero.simulate(body, world_size=2)(torch.tensor([0, 3]))
    close(found, torch.full((2, 1, 2), 4.0, dtype=torch.float64))


def test_weights_of_a_loss_in_16_bits_are_those_that_count() -> None:
    """317 is no number of bf16: what multiplies the loss is what divides the sum."""
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}

    def loss(p: Any, x: Tensor) -> Tensor:
        return (p["w"] * fzero.psum((p["w"] * x).sum())).sum()

    def step(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(loss, state, weight=317)(x)
        return state, fzero.gradients(state)["w"]

    run = fzero.simulate(fzero.shard(step, stage=2), world_size=2)
    xs = torch.ones(2, 2, dtype=torch.bfloat16)
    assert run(run.init(params, fzero.optim.sgd(RATE)), xs)[1].tolist() == [[8.0, 8.0]] * 2
