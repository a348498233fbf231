"""Behaviours 2 and 6 for more than one model, for buffers, and for parameters nobody asked for.

Each at every stage and keep, equal to unsharded training.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from tests.behaviours.networks import (
    PLACES,
    Tensors,
    assert_every_rank,
    fill,
    mlp,
    per_rank,
    regression,
    virtual,
)

RANKS = 2
X, Y = regression(RANKS, 6, 3, 2)
PAIRS = [(PLACES[i], PLACES[(i + shift) % len(PLACES)]) for i in range(6) for shift in (0, 2)]


def assert_trees_close(got: Any, want: Any) -> None:
    """Every rank's row of each leaf of `got` is that leaf of `want`."""
    for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
        for row in a:
            torch.testing.assert_close(row, b, rtol=1e-10, atol=1e-12)


def unsharded_adamw(tree: Tensors, grads: Tensors, lr: float) -> Tensors:
    """One step of torch's own AdamW."""
    leaves = {k: nn.Parameter(p.clone()) for k, p in tree.items()}
    for k, leaf in leaves.items():
        leaf.grad = grads[k]
    torch.optim.AdamW(leaves.values(), lr=lr).step()
    return {k: leaf.detach() for k, leaf in leaves.items()}


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(("place_a", "place_b"), PAIRS)
def test_one_loss_over_two_models_of_different_stages_and_optimizers(
    place_a: tuple[int, Any], place_b: tuple[int, Any], window: bool
) -> None:
    apply_a, params_a = fzero.functionalize(mlp(3, 4, 4))
    apply_b, params_b = fzero.functionalize(mlp(4, 5, 2))

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return (apply_b(params["head"], apply_a(params["body"], x)) - y).square().mean()

    def step(states: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
        states, value = fzero.grad_and_reduce(loss, states)(x[:3], y[:3])
        states, _ = fzero.grad_and_reduce(loss, states)(x[3:], y[3:])
        return fzero.apply_gradients(states), value

    def run(x: Tensor, y: Tensor) -> Any:
        states = {
            "body": fzero.init(
                params_a, fzero.optim.adamw(0.1), stage=place_a[0], reshard_after_forward=place_a[1]
            ),
            "head": fzero.init(
                params_b, fzero.optim.sgd(0.1), stage=place_b[0], reshard_after_forward=place_b[1]
            ),
        }
        states, _ = (fzero.coalesce(step) if window else step)(states, x, y)
        return fzero.full_params(states)

    both = {"body": params_a, "head": params_b}
    halves = [(x[i : i + 3], y[i : i + 3]) for x, y in per_rank(X, Y) for i in (0, 3)]
    found = [torch.func.grad(loss)(both, *half) for half in halves]
    grads: Any = optree.tree_map(lambda *gs: sum(gs) / RANKS, *found)
    want = {
        "body": unsharded_adamw(params_a, grads["body"], 0.1),
        "head": {k: p - 0.1 * grads["head"][k] for k, p in params_b.items()},
    }
    assert_trees_close(virtual(run, RANKS, X, Y), want)


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
def test_a_gan_updates_one_model_at_a_time(stage: int, reshard: Any) -> None:
    """The other model is a constant of the loss: its gathered values, by a state of its own."""
    apply_g, g_params = fzero.functionalize(mlp(3, 4, 2))
    apply_d, d_params = fzero.functionalize(mlp(2, 4, 1))

    def d_loss(d: Any, g: Any, x: Tensor, y: Tensor) -> Tensor:
        fake = apply_g(g, x).detach()
        return F.softplus(-apply_d(d, y)).mean() + F.softplus(apply_d(d, fake)).mean()

    def g_loss(both: Any, x: Tensor) -> Tensor:
        return F.softplus(-apply_d(both["d"], apply_g(both["g"], x))).mean()

    def run(x: Tensor, y: Tensor) -> Any:
        place = {"stage": stage, "reshard_after_forward": reshard}
        g = fzero.init(g_params, fzero.optim.sgd(0.1), **place)
        d = fzero.init(d_params, fzero.optim.sgd(0.1), **place)
        both, _ = fzero.grad_and_reduce(
            lambda p, x, y: d_loss(p["d"], p["g"], x, y), {"g": g, "d": d}
        )(x, y)
        d = fzero.apply_gradients(both["d"])
        both, _ = fzero.grad_and_reduce(g_loss, {"g": g, "d": d})(x)
        g = fzero.apply_gradients(both["g"])
        return {"d": fzero.full_params(d), "g": fzero.full_params(g)}

    pairs = per_rank(X, Y)
    dg = [torch.func.grad(d_loss)(d_params, g_params, *pair) for pair in pairs]
    d_new = {k: p - 0.1 * sum(g[k] for g in dg) / RANKS for k, p in d_params.items()}
    gg = [torch.func.grad(g_loss)({"d": d_new, "g": g_params}, x)["g"] for x, _ in pairs]
    g_new = {k: p - 0.1 * sum(g[k] for g in gg) / RANKS for k, p in g_params.items()}
    assert_trees_close(virtual(run, RANKS, X, Y), {"d": d_new, "g": g_new})


def batch_norm_net() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    module.to(torch.float64)
    fill(module, torch.Generator().manual_seed(9))
    return module


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
def test_batch_norm_statistics_go_in_and_come_out(stage: int, reshard: Any) -> None:
    """Two passes; each rank's own statistics, as torch's BatchNorm has them on each rank."""
    module = batch_norm_net()
    apply, params, buffers = fzero.functionalize(module, buffers=True)

    def loss(params: Any, buffers: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        out, buffers = apply(params, x, buffers=buffers)
        return (out - y).square().mean(), buffers

    def run(x: Tensor, y: Tensor) -> Any:
        state, now = (
            fzero.init(params, fzero.optim.sgd(0.1), stage=stage, reshard_after_forward=reshard),
            buffers,
        )
        for half in (slice(0, 3), slice(3, 6)):
            state, (_, now) = fzero.grad_and_reduce(loss, state, has_aux=True)(
                now, x[half], y[half]
            )
        return fzero.gradients(state), now

    gradients, now = virtual(run, RANKS, X, Y)
    total = {k: torch.zeros_like(p) for k, p in params.items()}
    for rank, (x, y) in enumerate(per_rank(X, Y)):
        reference = batch_norm_net()
        for half in (slice(0, 3), slice(3, 6)):
            (reference(x[half]) - y[half]).square().mean().backward()
        for k, p in reference.named_parameters():
            total[k] += p.grad.div(RANKS)
        for k, b in reference.named_buffers():
            torch.testing.assert_close(now[k][rank], b, rtol=1e-10, atol=1e-12)
    assert_every_rank(gradients, total)
    assert not buffers["1.running_mean"].any()  # what was passed in is as it was


@pytest.mark.filterwarnings("ignore:the loss requires no grad:UserWarning")
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(("stage", "reshard"), PLACES)
def test_6_experts_that_the_data_of_some_ranks_never_reach(
    stage: int, reshard: Any, window: bool
) -> None:
    """Rank r uses expert r; one expert is for nobody; rank 2 uses no parameter at all."""
    ranks, names = 3, [f"expert{i}" for i in range(4)]
    apply, body = fzero.functionalize(mlp(3, 3))
    params: Any = {name: {k: p + i for k, p in body.items()} for i, name in enumerate(names)}
    x = regression(ranks, 4, 3, 1)[0]

    def loss(params: Any, x: Tensor, rank: int) -> Tensor:
        if rank == 2:
            return x.sum()
        hidden = torch.tanh(apply(params[names[rank]], x))
        return apply(params[names[1 - rank]], hidden).square().mean() if rank else hidden.sum()

    def step(state: Any, x: Tensor) -> tuple[Any, Any]:
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(loss, state)(x, fzero.axis_index())
        return fzero.apply_gradients(state), fzero.gradients(state)

    def run(x: Tensor) -> Any:
        state = fzero.init(
            params, fzero.optim.sgd(0.25), stage=stage, reshard_after_forward=reshard
        )
        state, found = (fzero.coalesce(step) if window else step)(state, x)
        return found, fzero.full_params(state)

    gradients, after = virtual(run, ranks, x)
    found = [torch.func.grad(loss)(params, x[rank], rank) for rank in range(2)]
    want: Any = optree.tree_map(lambda *gs: 2 * sum(gs) / ranks, *found)
    assert_trees_close(gradients, want)
    assert_trees_close(after, optree.tree_map(lambda p, g: p - 0.25 * g, params, want))
    assert not gradients["expert3"]["0.weight"].any()
