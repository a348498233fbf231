"""A loss may read its parameters in any way, at every stage.

At stage 3 a parameter is a tensor that gathers itself when a kernel reads it, so every kind of
kernel, view and control flow is tried, and what leaves the loss must be a plain value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.behaviours.networks import (
    Place,
    assert_every_rank,
    at_every_place,
    gradient_on,
    virtual,
)

P = {
    "w": torch.arange(6.0, dtype=torch.float64).view(2, 3),
    "s": torch.tensor(2.0, dtype=torch.float64),
    "frozen": nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False),
}
X = torch.tensor([1.0, 3.0], dtype=torch.float64)


def autocast(params: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = params["w"].float() @ torch.ones(3, 2)
    assert y.dtype == torch.bfloat16
    return (y.double() * params["w"][:, :2]).sum() * x


def saved_elsewhere(params: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(params["w"] @ params["w"].T).square().sum() * x


def ensemble(params: Any, x: Tensor) -> Tensor:
    """A member for each row of w, mapped over."""
    return torch.func.vmap(lambda row: torch.tanh(row * x).sum() * params["s"])(params["w"]).prod()


USES: dict[str, Callable[..., Tensor]] = {
    "views of views": lambda p, x: p["w"].T[1:].unsqueeze(0).expand(2, 2, 2).flatten().sum() * x,
    "strides": lambda p, x: p["w"].as_strided((3,), (2,)).sum() * p["w"].unfold(1, 2, 1).sum() * x,
    "iteration": lambda p, x: sum(row @ row for row in p["w"]) * x,
    "a mask": lambda p, x: p["w"][p["w"] > 2].prod() * x,
    "python numbers": lambda p, x: p["w"].sum() * p["s"].item() * x,
    "a branch on a value": lambda p, x: (p["w"] * x).sum() if p["s"] > 1 else x,
    "the parameter itself, on one rank": lambda p, x: p["s"] if x == 1 else 4 * p["w"].sum(),
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
    "an ensemble under vmap": ensemble,
    "autocast": autocast,
    "saved tensors on the host": saved_elsewhere,
    "printing": lambda p, x: p["w"].sum() * x * bool(repr(p["w"])),
}


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


@at_every_place
@pytest.mark.parametrize("name", USES)
def test_any_kernel_may_read_a_parameter(name: str, place: Place) -> None:
    got = gradient_on(USES[name], P, X, **place)
    assert got.pop("frozen") is None
    assert_every_rank(got, plain_gradient(USES[name]))


@at_every_place
def test_what_leaves_the_loss_is_a_plain_value(place: Place) -> None:
    """The loss may be a parameter, aux may hold some; an update does not change them."""

    def loss(params: Any, x: Tensor) -> tuple[Tensor, Any]:
        w = params["w"]
        return params["s"], {"all": w, "row": w[1], "frozen": params["frozen"], "sum": w.sum()}

    def run(x: Tensor) -> Any:
        state = fzero.init(P, fzero.optim.sgd(1.0), **place)
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
