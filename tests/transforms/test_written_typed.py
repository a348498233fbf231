# pyright: strict
"""A user's transform under a strict type checker: `make lint` checks this file."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor

import fzero

Pieces = dict[str, Tensor]


def begin(params: Pieces, ctx: fzero.Context) -> dict[str, Any]:
    return {"mean": {path: p.clone() for path, p in params.items()}, "norm": 0.0}


def follow(slots: dict[str, Any], params: Pieces, ctx: fzero.Context) -> tuple[Any, Pieces]:
    norm = assert_type(ctx.norm(params), Tensor)
    assert_type(ctx.norm(params, by="row"), dict[str, Tensor])
    assert_type(ctx.norm(params, by="leaf"), dict[str, Tensor])
    assert_type(ctx.sum(params) + ctx.step, Tensor)
    mean = {path: x.lerp(params[path], 0.5) for path, x in slots["mean"].items()}
    return {"mean": mean, "norm": norm}, params


forms = {"mean": fzero.Form(placement=fzero.Placement.SHARDED), "norm": fzero.Form(leaves="number")}
ema = fzero.transform(name="ema", init=begin, updated=follow, slots=forms)
noise = fzero.transform(
    name="noise",
    reduced=lambda slots, grads, ctx: (slots, {k: g + 0 * ctx.normal(k) for k, g in grads.items()}),
)
whole = fzero.transform(
    name="whole", update=lambda slots, grads, ctx, rule: (slots, rule(grads)), excludes=["muon"]
)


@noise
def step_fn(state: fzero.TrainState, x: Tensor) -> tuple[fzero.TrainState, Tensor]:
    there, loss = fzero.grad_and_reduce(lambda p: (p["w"] * x).sum(), state)()
    there = fzero.map_params(lambda p: p, there)
    state = fzero.map_params(lambda p, g: p + 0 * g, state, there.gradients)
    return fzero.apply_gradients(fzero.add_gradients(state, there)), loss


def test_a_step_keeps_its_types_and_a_lambda_has_them() -> None:
    step = fzero.shard(whole(ema(step_fn)), stage=2)
    state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0))
    state, loss = step(state, torch.ones(2))
    assert_type(state, fzero.TrainState)
    assert_type(loss, Tensor)
    assert_type(fzero.slots(state, "ema"), dict[str, Any])
    assert fzero.slots(state, "ema")["mean"]["w"].tolist() == [0.5, 0.5]
    other = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=1, transforms=[ema])
    assert fzero.slots(other, "ema")["norm"] == 0
