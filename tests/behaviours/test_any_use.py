"""Behaviours 6, 10, 29 and 31: a loss may use its parameters in any way, and each rank in its own.

At stage 3 a parameter is a tensor that gathers itself when a kernel reads it, so every kind of
kernel, view and control flow is tried, and what leaves the loss must be a plain value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from tests.behaviours.networks import (
    PLACES,
    STAGES,
    assert_every_rank,
    gradient_on,
    mean_gradient,
    mlp,
    per_rank,
    regression,
    squared_loss,
    total,
    virtual,
)

LAYERS, RANKS = 5, 3
WALKS = st.lists(st.integers(0, LAYERS - 1), max_size=6)


def walk_params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(i + 1,) for i in range(LAYERS)]
    values = [torch.randint(-3, 4, s, generator=generator).double() for s in shapes]
    return {f"layers.{i}": value for i, value in enumerate(values)}


def walk_loss(params: Any, x: Tensor, walk: list[int], inner: bool) -> Tensor:
    """Read the layers in the order of the walk; in the middle differentiate, in two ways."""
    total = torch.zeros((), dtype=torch.float64)
    for step, i in enumerate(walk):
        w = params[f"layers.{i}"]
        if inner and step == len(walk) // 2:
            here = x.detach().requires_grad_()
            value = (w**2).sum() * here**2
            total = total + torch.autograd.grad(value, here, create_graph=True)[0]
            value.backward(retain_graph=True)  # inside a forward: isolated, counted nowhere
        total = total + (w**2).sum() * (step + 1) * x
    return 12 * total


@pytest.mark.filterwarnings("ignore:the loss requires no grad:UserWarning")
@given(
    walks=st.lists(WALKS, min_size=RANKS, max_size=RANKS),
    inner=st.lists(st.booleans(), min_size=RANKS, max_size=RANKS),
    place=st.sampled_from([*PLACES, (3, True), (3, True)]),
    window=st.booleans(),
)
def test_6_each_rank_walks_its_own_way(
    walks: list[list[int]], inner: list[bool], place: tuple[int, Any], window: bool
) -> None:
    """In its own order, as often as it likes, differentiating inside the loss or not."""
    xs = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

    def step(state: Any, x: Tensor) -> tuple[Any, None]:
        rank = fzero.axis_index()
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(walk_loss, state)(x, walks[rank], inner[rank])
        return state, None

    def run(x: Tensor) -> Any:
        state = fzero.init(
            walk_params(), fzero.optim.sgd(0.1), stage=place[0], reshard_after_forward=place[1]
        )
        return fzero.gradients((fzero.coalesce(step) if window else step)(state, x)[0])

    want = {name: torch.zeros_like(p) for name, p in walk_params().items()}
    for x, walk, differentiates in zip(xs, walks, inner, strict=True):
        leaves = {name: p.requires_grad_() for name, p in walk_params().items()}
        value = walk_loss(leaves, x, walk, False)
        if differentiates and walk:
            value = value + 24 * x.detach() * (leaves[f"layers.{walk[len(walk) // 2]}"] ** 2).sum()
        if value.requires_grad:
            found = torch.autograd.grad(value, [*leaves.values()], allow_unused=True)
            for name, g in zip(leaves, found, strict=True):
                want[name] += 0 if g is None else 2 * g / RANKS
    assert_every_rank(virtual(run, RANKS, xs), want, exact=True)


P = {
    "w": torch.arange(6.0, dtype=torch.float64).view(2, 3),
    "s": torch.tensor(2.0, dtype=torch.float64),
    "frozen": nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False),
}
X = torch.tensor([1.0, 3.0], dtype=torch.float64)
USES: dict[str, Callable[..., Tensor]] = {
    "views of views": lambda p, x: p["w"].T[1:].unsqueeze(0).expand(2, 2, 2).flatten().sum() * x,
    "strides": lambda p, x: p["w"].as_strided((3,), (2,)).sum() * p["w"].unfold(1, 2, 1).sum() * x,
    "iteration": lambda p, x: sum(row @ row for row in p["w"]) * x,
    "a mask": lambda p, x: p["w"][p["w"] > 2].prod() * x,
    "python numbers": lambda p, x: p["w"].sum() * p["s"].item() * x,
    "a branch on a value": lambda p, x: (p["w"] * x).sum() if p["s"] > 1 else x,
    "detached": lambda p, x: (p["w"].detach() * p["w"]).sum() * p["w"].data.sum() * x,
    "a hook": lambda p, x: (p["w"].register_hook(lambda g: 2 * g), p["w"].sum() * x)[1],
    "every parameter in one kernel": lambda p, x: torch.cat(
        [t.view(-1) for t in p.values()]
    ).norm(),
    "foreach": lambda p, x: sum(t.sum() for t in torch._foreach_mul([p["w"], p["s"]], 3.0)) * x,
    "an einsum": lambda p, x: torch.einsum("ij,kj,j->ik", p["w"], p["w"], p["frozen"]).sum() * x,
    "linear algebra": lambda p, x: (
        torch.linalg.svdvals(p["w"]).sum() * torch.logdet(p["s"].view(1, 1))
    ),
    "autocast": lambda p, x: _autocast(p, x),
    "saved tensors on the host": lambda p, x: _saved_elsewhere(p, x),
    "printing": lambda p, x: p["w"].sum() * len(repr(p["w"])) / len(repr(p["w"])) * x,
}


def _autocast(params: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = params["w"].float() @ torch.ones(3, 2)
    assert y.dtype == torch.bfloat16
    return (y.double() * params["w"][:, :2]).sum() * x


def _saved_elsewhere(params: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(params["w"] @ params["w"].T).square().sum() * x


def plain_gradient(fn: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The mean over X of the gradient by the two leaves that learn."""
    mean = {name: torch.zeros_like(P[name]) for name in ("w", "s")}
    for x in X:
        leaves = {name: P[name].clone().requires_grad_() for name in mean}
        value = fn({"w": leaves["w"], "s": leaves["s"], "frozen": P["frozen"]}, x)
        found = torch.autograd.grad(value, [*leaves.values()], allow_unused=True)
        for name, g in zip(mean, found, strict=True):
            mean[name] += 0 if g is None else g / len(X)
    return mean


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
@pytest.mark.parametrize("name", USES)
def test_29_any_kernel_may_read_a_parameter(name: str, stage: int, reshard: Any) -> None:
    got = gradient_on(USES[name], P, X, stage=stage, reshard_after_forward=reshard)
    assert got.pop("frozen") is None
    assert_every_rank(got, plain_gradient(USES[name]))


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
def test_29_what_leaves_the_loss_is_a_plain_value(stage: int, reshard: Any) -> None:
    """The loss may be a parameter, aux may hold some; an update does not change them."""

    def loss(params: Any, x: Tensor) -> tuple[Tensor, Any]:
        w = params["w"]
        return params["s"], {"all": w, "row": w[1], "frozen": params["frozen"], "sum": w.sum()}

    def run(x: Tensor) -> Any:
        state = fzero.init(P, fzero.optim.sgd(1.0), stage=stage, reshard_after_forward=reshard)
        state, (value, aux) = fzero.grad_and_reduce(loss, state, has_aux=True)(x)
        state, _ = fzero.grad_and_reduce(lambda p: (p["w"] ** 2).sum(), state)()
        state = fzero.apply_gradients(state)
        assert {type(t) for t in (value, *aux.values())} == {Tensor}
        return value, aux

    value, aux = virtual(run, 2, X)
    for rank in range(2):
        assert value[rank] == 2.0
        assert torch.equal(aux["all"][rank], P["w"])
        assert torch.equal(aux["row"][rank], P["w"][1])
        assert torch.equal(aux["frozen"][rank], P["frozen"])
        assert aux["sum"][rank] == 15.0


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
def test_8_a_loss_that_writes_to_a_parameter_is_refused(stage: int, reshard: Any) -> None:
    """A state is immutable; its values are as before, also after a second try."""

    def writes(params: Any, x: Tensor) -> Tensor:
        params["w"].mul_(2)
        return (params["w"] * params["frozen"]).sum() * x

    def run(x: Tensor) -> Any:
        state = fzero.init(P, fzero.optim.sgd(1.0), stage=stage, reshard_after_forward=reshard)
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError), match=r"in[- ]?place"):
                fzero.grad_and_reduce(writes, state)(x)
        return fzero.full_params(state)["w"]

    assert all(torch.equal(row, P["w"]) for row in virtual(run, 2, X))


@pytest.mark.parametrize(("stage", "reshard"), [(0, True), (1, True), (2, True), (3, True)])
def test_8_a_write_to_a_frozen_parameter_is_never_silent(stage: int, reshard: Any) -> None:
    """torch allows it, so the buffer of stages 0 to 2 has changed by then: the error says so."""

    def writes(params: Any, x: Tensor) -> Tensor:
        params["frozen"].mul_(2)
        return (params["w"] * params["frozen"]).sum() * x

    def run(x: Tensor) -> Any:
        state = fzero.init(P, fzero.optim.sgd(1.0), stage=stage, reshard_after_forward=reshard)
        with pytest.raises((RuntimeError, ValueError), match=r"in[- ]?place"):
            fzero.grad_and_reduce(writes, state)(x)
        return fzero.full_params(state)["w"]

    assert all(torch.equal(row, P["w"]) for row in virtual(run, 2, X))


@pytest.mark.parametrize("stage", STAGES)
def test_31_an_ensemble_under_vmap(stage: int) -> None:
    """Parameters with a leading dim of members, mapped over inside the loss."""
    apply, _ = fzero.functionalize(mlp(3, 4, 2))
    members = [dict(mlp(3, 4, 2).named_parameters()) for _ in range(3)]
    params = {
        k: torch.stack([(i + 1) * m[k].detach() for i, m in enumerate(members)]) for k in members[0]
    }
    x, y = regression(2, 4, 3, 2)

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.func.vmap(squared_loss(apply), in_dims=(0, None, None))(params, x, y).mean()

    want = mean_gradient(loss, params, per_rank(x, y))
    assert_every_rank(gradient_on(loss, params, x, y, stage=stage), want)


@pytest.mark.parametrize("outer", PLACES)
@pytest.mark.parametrize("inner", PLACES)
def test_38_one_state_is_trained_inside_the_loss_of_another(
    inner: tuple[int, Any], outer: tuple[int, Any]
) -> None:
    """Bilevel: weights of samples are learned through an update of the model, both sharded."""
    apply, params = fzero.functionalize(mlp(3, 4, 2))
    params, weights = {k: p.clone() for k, p in params.items()}, {"logits": torch.zeros(5).double()}
    x, y = regression(2, 10, 3, 2)

    def weighted(params: Any, logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (torch.sigmoid(logits)[:, None] * (apply(params, x) - y).square()).mean()

    def run(x: Tensor, y: Tensor) -> Any:
        learner = fzero.init(
            weights, fzero.optim.sgd(0.1), stage=outer[0], reshard_after_forward=outer[1]
        )
        model = fzero.init(
            params, fzero.optim.sgd(0.1), stage=inner[0], reshard_after_forward=inner[1]
        )

        def validation(weights: Any, x: Tensor, y: Tensor) -> Tensor:
            new, _ = fzero.grad_and_reduce(weighted, model)(weights["logits"], x[:5], y[:5])
            after = fzero.full_params(fzero.apply_gradients(new))
            return squared_loss(apply)(after, x[5:], y[5:])

        return fzero.gradients(fzero.grad_and_reduce(validation, learner)(x, y)[0])

    def unsharded(weights: Any) -> Tensor:
        batches = per_rank(x, y)
        gs = [
            torch.func.grad(weighted)(params, weights["logits"], a[:5], b[:5]) for a, b in batches
        ]
        after = {k: p - 0.1 * sum(g[k] for g in gs) / 2 for k, p in params.items()}
        return total(squared_loss(apply)(after, a[5:], b[5:]) for a, b in batches) / 2

    assert_every_rank(virtual(run, 2, x, y), torch.func.grad(unsharded)(weights))
