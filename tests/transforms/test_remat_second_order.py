"""A function under `remat` that takes a derivative itself: forces, gradient penalties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError
from tests.behaviours.networks import Place, assert_every_rank, at_every_place, gradient_on

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 4, 3)  # [rank, sample, feature]


def plain(fn: Any) -> Any:
    return fn


class Energy(nn.Module):
    """The mean square of a force, -dE/dx, and a penalty on its gradient: third derivatives of E."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
        self.head = nn.Linear(4, 1).double()
        self.wrap = wrap

    def force(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.head(self.wrap(self.body)(x)).sum()
        return -torch.autograd.grad(energy, x, create_graph=True)[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.wrap(self.force)(x).square().mean() + self.head.bias.sum() * 0


@at_every_place
def test_a_force_has_the_gradient_that_it_has_without_remat(place: Place) -> None:
    apply, params = fzero.functionalize(Energy(fzero.remat))
    module = Energy(plain)
    torch.stack([module(x) for x in X]).mean().backward()
    want = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert_every_rank(gradient_on(apply, params, X, **place), want)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_force_under_an_engine(stage: int) -> None:
    def trained(x: Tensor) -> list[Tensor]:
        module = Energy(fzero.remat)
        engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.5), stage=stage)
        for _ in range(2):
            engine(x).backward()
            engine.step()
        found = engine.full_state_dict()
        engine.close()
        return [*found.values()]

    module = Energy(plain)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([module(x) for x in X]).mean().backward()
        optimizer.step()
    for got, want in zip(
        fzero.simulate(trained, world_size=2)(X), module.state_dict().values(), strict=True
    ):
        for one in got:
            torch.testing.assert_close(one, want, rtol=1e-12, atol=1e-12)


def test_a_penalty_is_differentiated_by_the_input_too() -> None:
    def penalty(x: Tensor, w: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((x**3 * w).sum(), x, create_graph=True)
        return slope.square().sum()

    def derivatives(fn: Any) -> list[Tensor]:
        x = torch.tensor([1.0, -2.0, 3.0]).requires_grad_()
        w = torch.tensor([2.0, 1.0, -1.0]).requires_grad_()
        first = torch.autograd.grad(fn(x, w), [x, w], create_graph=True)
        return [*first, *torch.autograd.grad(first[0].sum() + first[1].sum(), [x, w])]

    got, want = derivatives(fzero.remat(penalty)), derivatives(penalty)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_tensor_that_requires_grad_because_of_the_function_is_its_own() -> None:
    def fn(x: Tensor) -> Tensor:
        leaf = x.detach().clone()
        leaf.requires_grad = True
        (slope,) = torch.autograd.grad((leaf**2).sum(), leaf)
        return x * slope

    x = torch.tensor([1.0, 3.0]).requires_grad_()
    fzero.remat(fn)(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 6.0]


def test_what_is_saved_in_the_first_run_meets_no_hook() -> None:
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    x = torch.ones(5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fzero.remat(lambda x: x.sin().cos())(x)
        assert kept == [5]  # the input
        x.sin()
        assert kept == [5, 5]


def test_a_function_may_write_to_what_it_is_given() -> None:
    x = torch.tensor([-1.0, 2.0]).requires_grad_()
    fzero.remat(lambda y: torch.relu_(y) * 3)(x * 1).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 3.0]


def test_under_torch_func_the_way_is_named() -> None:
    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad((x**2).sum(), x, create_graph=True)[0].sum()

    message = r"calls torch.autograd.grad[\s\S]*Fix: call torch.func.grad"
    with pytest.raises(LayoutError, match=message):
        torch.func.grad(fzero.remat(slope))(torch.ones(2))
