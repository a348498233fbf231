"""`remat` differentiates by arguments and parameters of modules; what else it reads is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import LayoutError
from tests.behaviours.networks import (
    Place,
    assert_every_rank,
    at_every_place,
    gradient_on,
    mean_gradient,
)
from tests.strategies import integers, same

X = integers((3,), 1)


def plain(fn: Any) -> Any:
    return fn


class Scaled:
    """An object that holds a tensor."""

    def __init__(self, w: Tensor) -> None:
        self.w = w

    def __call__(self, x: Tensor) -> Tensor:
        return self.w * x


REACHED: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "a closure": lambda w: lambda x: w * x,
    "a partial": lambda w: functools.partial(torch.mul, w),
    "an object": Scaled,
    "a collective": lambda w: lambda x: fzero.psum(w) * x,
    "a remat inside": lambda w: lambda x: fzero.remat(torch.mul)(w, x),
    "an output only": lambda w: lambda x: (w, x)[0],
}


@pytest.mark.parametrize("name", list(REACHED))
def test_a_tensor_that_is_no_argument_is_refused_if_it_has_a_gradient(name: str) -> None:
    make, w = REACHED[name], integers((3,), 4)

    def loss(w: Tensor) -> Tensor:
        return fzero.remat(make(w))(X).sum()

    message = r"requires grad and was not given to it[\s\S]*Fix: pass it as an argument"
    with pytest.raises(LayoutError, match=message):
        torch.func.grad(loss)(w)
    own = w.clone().requires_grad_()
    with pytest.raises(LayoutError, match=message):
        loss(own)
    with torch.no_grad():
        same(loss(own), make(w)(X).sum())
    same(loss(w), make(w)(X).sum())


def test_a_module_that_updates_its_statistics_is_refused() -> None:
    norm = torch.nn.BatchNorm1d(3)
    with pytest.raises(LayoutError, match=r"running statistics[\s\S]*Fix: leave it out of remat"):
        fzero.remat(norm)(torch.randn(4, 3))
    x = torch.randn(4, 3)
    same(fzero.remat(norm.eval())(x), norm(x))


class Layers(nn.Module):
    """A layer that is used twice, and one whose weight is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, dtype=torch.float64)
        self.two = nn.Linear(3, 3, dtype=torch.float64)
        self.two.weight = self.one.weight
        self.layers = nn.Sequential(self.one, nn.Tanh(), self.two, self.one)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def squared(self, x: Tensor, *, scale: float) -> Tensor:
        return self.layers(x).square() * scale


class Net(nn.Module):
    """Blocks under remat, made once with the module or in each forward, and a method of one."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.wrap = Layers(), Layers(), wrap
        self.run_first = wrap(self.first)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wrap(self.second)(self.run_first(x))
        return self.wrap(self.second.squared)(x, scale=2.0).sum()


def of_module(wrap: Any) -> list[Tensor]:
    """The gradients of the module's own parameters, which stay in their places."""
    net = Net(wrap)
    before = dict(net.named_parameters(remove_duplicate=False))
    net(X).backward()
    after = dict(net.named_parameters(remove_duplicate=False))
    assert all(after[path] is p for path, p in before.items())
    gradients = [p.grad for p in net.parameters() if p.grad is not None and p.grad.any()]
    assert len(gradients) == len(list(net.parameters()))
    return gradients


def of_two_calls(wrap: Any) -> list[Tensor]:
    """Two forwards of a functionalized module, and then two backwards."""
    apply, params = fzero.functionalize(Net(wrap))
    leaves = [{k: (p * n).requires_grad_() for k, p in params.items()} for n in (1, 2)]
    losses = [apply(own, X) for own in leaves]
    pairs = zip(losses, leaves, strict=True)
    return [g for loss, own in pairs for g in torch.autograd.grad(loss, [*own.values()])]


def of_hessian(wrap: Any) -> list[Tensor]:
    apply, params = fzero.functionalize(Net(wrap))
    return [torch.func.hessian(lambda b: apply(params | {"first.one.bias": b}, X))(X)]


@pytest.mark.parametrize("derivatives", [of_module, of_two_calls, of_hessian])
def test_the_parameters_of_a_module_are_arguments(derivatives: Any) -> None:
    got, want = derivatives(fzero.remat), derivatives(plain)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@at_every_place
def test_a_functionalized_module_with_remat_inside_at_every_stage(place: Place) -> None:
    apply, params = fzero.functionalize(Net(fzero.remat))
    xs = torch.stack([X, X / 2 + 1])
    without, _ = fzero.functionalize(Net(plain))
    want = mean_gradient(without, params, [(x,) for x in xs])
    assert_every_rank(gradient_on(apply, params, xs, **place), want)
