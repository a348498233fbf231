"""`remat(fn)` is `fn`: the same values and derivatives of every kind, with less kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import fzero
from tests.covering import covered
from tests.strategies import LEARNING, Block, Pair, integers, same, seeds, tensors, trees

X = integers((3,), 1)
V = integers((3,), 2)


def plain(fn: Any) -> Any:
    return fn


def cubic(p: Tensor) -> Tensor:
    """[3] -> [3], with a gradient, a Hessian and a third derivative."""
    return p**3 + p.sum() * p


def of_views(p: Tensor) -> Tensor:
    """Slices, chunks and views of views of what it is given."""
    rows = p.view(1, 3).T[:, 0] * p[1:].sum()
    return rows + sum(part.square().sum() for part in p.chunk(3))


def scalar(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (fn(x) * V).sum()


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f(X),
    "grad": lambda f: torch.func.grad(scalar(f))(X),
    "vjp": lambda f: torch.func.vjp(f, X)[1](V)[0],
    "jvp": lambda f: torch.func.jvp(f, (X,), (V,)),
    "jacrev": lambda f: torch.func.jacrev(f)(X),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X),
    "hessian": lambda f: torch.func.hessian(f)(X),
    "reverse over reverse": lambda f: torch.func.jacrev(torch.func.jacrev(f))(X),
    "reverse over forward": lambda f: torch.func.jacrev(torch.func.jacfwd(f))(X),
    "third": lambda f: torch.func.jacrev(torch.func.hessian(f))(X),
    "forward twice": lambda f: torch.func.jacfwd(torch.func.jacfwd(f))(X),
    "forward three times": lambda f: along(along(along(f)))(X),
    "forward over reverse over forward": lambda f: along(torch.func.jacrev(along(f)))(X),
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([X, V])),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(scalar(f)))(torch.stack([X, V])),
    "grad of vmap": lambda f: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(
        torch.stack([X, V])
    ),
    "autograd": lambda f: by_autograd(f, 1),
    "autograd twice": lambda f: by_autograd(f, 2),
}


def along(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """x -> the derivative of f at x in the direction 2 x."""
    return lambda x: torch.func.jvp(f, (x,), (x * 2,))[1]


def by_autograd(f: Callable[[Tensor], Tensor], order: int) -> Tensor:
    x = X.clone().requires_grad_()
    y = scalar(f)(x)
    for i in range(order):
        y = torch.autograd.grad(y.sum(), x, create_graph=i + 1 < order)[0]
    return y


SHAPES: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "alone": lambda r: r(cubic),
    "of views": lambda r: r(of_views),
    "in a chain": lambda r: lambda x: r(cubic)(r(torch.sin)(x)),
    "nested": lambda r: r(lambda x: r(cubic)(x * x)),
    "twice": lambda r: r(r(cubic)),
    "around a gradient": lambda r: r(lambda x: torch.func.grad(lambda z: cubic(z).sum())(x)),
    "around a gradient of itself": lambda r: r(
        lambda x: torch.func.grad(lambda z: r(cubic)(z).sum())(x)
    ),
}


@covered(shape=[*SHAPES], name=[*DERIVATIVES])
def test_every_derivative_is_that_of_the_function(name: str, shape: str) -> None:
    make, derivative = SHAPES[shape], DERIVATIVES[name]
    got, want = derivative(make(fzero.remat)), derivative(make(plain))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@given(tree=trees(LEARNING, max_leaves=4), flag=st.booleans(), seed=seeds)
def test_any_pytree_in_and_out(tree: Any, flag: bool, seed: int) -> None:
    c = integers((), seed)

    def fn(p: Any, *, scale: Tensor, flag: bool, word: str) -> dict[str, Any]:
        total = sum((x.double().sum() for x in tensors(p)), scale * 0)
        out = Pair(total * scale, [None, word] if flag else total)
        return {"pair": out, "block": Block(weight=total, bias=scale), "same": p, "count": 3}

    got = fzero.remat(fn)(tree, scale=c, flag=flag, word="w")
    same(got, fn(tree, scale=c, flag=flag, word="w"))


def test_outputs_that_are_inputs_twice_the_same_or_integers() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        values, order = torch.sort(x)
        return x, values, values, order, x > 0

    def loss(x: Tensor) -> Tensor:
        x, one, other, order, positive = fzero.remat(fn)(x)
        return (x * 2 + one * order + other * positive).sum()

    x = torch.tensor([3.0, 1.0, -2.0])
    same(torch.func.grad(loss)(x), torch.tensor([2.0, 4.0, 5.0]))
    same(torch.func.jvp(loss, (x,), (torch.ones(3),))[1], torch.tensor(11.0))
    assert fzero.remat(lambda n: n + 1)(2) == 3


def test_inputs_that_are_integers_or_need_no_gradient() -> None:
    rows = fzero.remat(lambda table, ids, mask: table[ids] * mask)
    table, ids = integers((4, 2), 1).requires_grad_(), torch.tensor([1, 3, 1])
    rows(table, ids, torch.tensor([True])).sum().backward()
    same(table.grad, torch.tensor([[0.0, 0], [2, 2], [0, 0], [1, 1]]).double())


def test_activations_are_not_kept_only_inputs_are() -> None:
    def kept(fn: Any) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.data_ptr()] = x.numel()
            return x

        x = torch.ones(100, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y = fn(x).sum()
        y.backward()
        return sum(sizes.values())

    calls: list[int] = []

    def deep(x: Tensor) -> Tensor:
        calls.append(1)
        for _ in range(8):
            x = torch.sin(x)
        return x

    assert kept(deep) == 800
    assert kept(fzero.remat(deep)) == 100
    assert len(calls) == 3  # the second was run once more for its backward


def test_random_numbers_are_drawn_again_as_they_were() -> None:
    def run(wrap: Any) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(3)

        def loss(x: Tensor) -> tuple[Tensor, Tensor]:
            y = wrap(lambda x: F.dropout(x * x, 0.5) * torch.rand(x.shape))(x)
            return (y * torch.rand(x.shape)).sum(), y

        grad, y = torch.func.grad(loss, has_aux=True)(torch.ones(20))
        return grad, y, torch.rand(3)

    same(run(fzero.remat), run(plain))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers_under_vmap(randomness: str) -> None:
    def run(wrap: Any) -> Tensor:
        torch.manual_seed(3)
        grad = torch.func.grad(lambda x: wrap(lambda x: F.dropout(x * x, 0.5))(x).sum())
        return torch.func.vmap(grad, randomness=randomness)(torch.ones(4, 6))

    got = run(fzero.remat)
    assert set(got.unique().tolist()) == {0.0, 4.0}
    assert (got == got[0]).all() == (randomness == "same")
    same(got, run(plain))


def test_nothing_is_left_behind() -> None:
    """Without the collector's help: no cycle holds the input or what was computed from it."""
    seen: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        y = x * x
        seen.append(weakref.ref(y))
        return (y * y).sum()

    gc.disable()
    try:
        x = torch.ones(3, requires_grad=True)
        seen.append(weakref.ref(x))
        y = fzero.remat(fn)(x)
        assert seen[1]() is None
        y.backward()
        del x, y
        torch.func.grad(fzero.remat(fn))(torch.ones(3))
        torch.func.jvp(fzero.remat(fn), (torch.ones(3),), (torch.ones(3),))
        assert [ref() for ref in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_it_recomputes_under_the_autocast_of_its_call() -> None:
    seen: list[torch.dtype] = []

    def fn(w: Tensor) -> Tensor:
        y = w @ w
        seen.append(y.dtype)
        return y.float().sum()

    w = torch.eye(2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fzero.remat(fn)(w)
    inside.backward()
    outside = fzero.remat(fn)(w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outside.backward()
    assert seen == [torch.bfloat16] * 2 + [torch.float32] * 2
