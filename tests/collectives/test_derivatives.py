"""Derivatives of functions of the maps: every mode of torch.func, to third order.

Rank r has a loss of its own, L_r = sum w_r A(x)_r^3. What rank r gets by differentiating it by
its own x is what the unsharded sum over all ranks gives: d(sum_s L_s)/dx_r. The same holds of
every derivative of a derivative, with the same direction on every rank. Integers, so exact.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from tests.collectives.maps import MAPS, simulated
from tests.strategies import integers, same, seeds, worlds

names = st.sampled_from(sorted(MAPS))
Loss = Callable[[Tensor, Tensor], Tensor]  # (x, w) -> scalar


def on_rank(name: str) -> Loss:
    """L_r of one rank."""
    return lambda x, w: (w * MAPS[name].run(x) ** 3).sum()


def unsharded(name: str, ws: Tensor) -> Callable[[Tensor], Tensor]:
    """sum_r L_r of all ranks' x stacked."""
    return lambda xs: (ws * MAPS[name].formula(xs) ** 3).sum()


def inputs(name: str, ranks: int, seed: int, count: int = 1) -> tuple[Tensor, ...]:
    """xs, directions vs.., weights ws: different on each rank."""
    xs = [integers((ranks, 2 * ranks), seed + i, bound=2) for i in range(count)]
    return *xs, integers(MAPS[name].formula(xs[0]).shape, seed + 9, bound=2)


def hvp_unsharded(name: str, xs: Tensor, vs: Tensor, ws: Tensor) -> Tensor:
    total = unsharded(name, ws)
    return torch.func.jvp(torch.func.grad(total), (xs,), (vs,))[1]


@given(name=names, ranks=worlds, seed=seeds)
def test_grad_and_vjp(name: str, ranks: int, seed: int) -> None:
    xs, ws = inputs(name, ranks, seed)
    loss = on_rank(name)
    want = torch.func.grad(unsharded(name, ws))(xs)
    same(simulated(torch.func.grad(loss), xs, ws), want)

    def by_autograd(x: Tensor, w: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(loss(x, w), x)[0]

    same(simulated(by_autograd, xs, ws), want)


@given(name=names, ranks=worlds, seed=seeds)
def test_jvp_and_what_is_made_of_it(name: str, ranks: int, seed: int) -> None:
    """Hessian-vector products of all three kinds, and a third derivative."""
    xs, vs, us, ws = inputs(name, ranks, seed, 3)
    loss = on_rank(name)

    def push(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: loss(x, w), (x,), (v,))[1]

    def forward_over_reverse(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: torch.func.grad(loss)(x, w), (x,), (v,))[1]

    def reverse_over_reverse(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (torch.func.grad(loss)(x, w) * v).sum())(x)

    def by_autograd(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(x, w), x, create_graph=True)
        return torch.autograd.grad((g * v).sum(), x)[0]

    def third(x: Tensor, v: Tensor, u: Tensor, w: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (reverse_over_reverse(x, v, w) * u).sum())(x)

    def each(xs: Tensor) -> Tensor:
        return (ws * MAPS[name].formula(xs) ** 3).flatten(1).sum(1)

    same(simulated(push, xs, vs, ws), torch.func.jvp(each, (xs,), (vs,))[1])
    for hvp in (forward_over_reverse, reverse_over_reverse, by_autograd):
        same(simulated(hvp, xs, vs, ws), hvp_unsharded(name, xs, vs, ws))
    wanted = torch.func.grad(lambda xs: (hvp_unsharded(name, xs, vs, ws) * us).sum())(xs)
    same(simulated(third, xs, vs, us, ws), wanted)


@given(name=names, ranks=worlds, seed=seeds)
def test_the_gradient_of_a_mapped_gradient(name: str, ranks: int, seed: int) -> None:
    """A gradient penalty for each sample: grad of vmap of grad."""
    xs, ws = inputs(name, ranks, seed)
    zs = integers((ranks, 2), seed + 1, bound=1)

    def penalty(x: Tensor, zs: Tensor, w: Tensor) -> Tensor:
        grads = torch.func.vmap(lambda z: torch.func.grad(on_rank(name))(z * x, w))(zs)
        return (grads * w.sum()).sum()

    def total(xs: Tensor) -> Tensor:
        grads = [torch.func.grad(unsharded(name, ws))(z[:, None] * xs) for z in zs.unbind(1)]
        return (sum(grads, torch.zeros(())) * ws.flatten(1).sum(1)[:, None]).sum()

    same(simulated(torch.func.grad(penalty), xs, zs, ws), torch.func.grad(total)(xs))


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch ends the process there")
@pytest.mark.parametrize("name", sorted(MAPS))
def test_linearize_is_refused_and_the_ranks_go_on(name: str) -> None:
    def linearized(x: Tensor) -> Tensor:
        _, push = torch.func.linearize(lambda x: MAPS[name].run(x) ** 2, x)
        return push(x)

    xs = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="Nested forward mode AD is not supported"):
        simulated(linearized, xs)
    same(simulated(fzero.psum, xs), torch.full((2, 2), 2.0))
