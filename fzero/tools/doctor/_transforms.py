"""Transforms of a collective. The same code runs on the formula and on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Map = Callable[[Tensor], Tensor]


class Inputs(NamedTuple):
    """`x`, what the collective is given; `v`, a direction like it; `w`, weights like its result.

    Either of one rank, or of all ranks stacked, [W, ..].
    """

    x: Tensor
    v: Tensor
    w: Tensor


def _loss(run: Map, w: Tensor) -> Map:
    """L(x) = sum w A(x)^3: so that its gradient depends on x, and so does that of the gradient."""
    return lambda x: (w * run(x) ** 3).sum()


def value(run: Map, at: Inputs) -> Tensor:
    """A(x)."""
    return run(at.x)


def backward(run: Map, at: Inputs) -> Tensor:
    """dL/dx, by autograd without torch.func."""
    x = at.x.clone().requires_grad_()
    return torch.autograd.grad(_loss(run, at.w)(x), x)[0]


def grad(run: Map, at: Inputs) -> Tensor:
    """dL/dx."""
    return torch.func.grad(_loss(run, at.w))(at.x)


def grad_of_grad(run: Map, at: Inputs) -> Tensor:
    """d(dL/dx . v)/dx."""
    gradient = torch.func.grad(_loss(run, at.w))
    return torch.func.grad(lambda x: (gradient(x) * at.v).sum())(at.x)


def jvp(run: Map, at: Inputs) -> Tensor:
    """The derivative of w A(x)^2 in the direction v."""
    return torch.func.jvp(lambda x: at.w * run(x) ** 2, (at.x,), (at.v,))[1]


def vmap_of_grad(run: Map, at: Inputs) -> Tensor:
    """dL/dx at z x for z = 1, -1, 2: [n, 3]."""
    gradient = torch.func.grad(_loss(run, at.w))
    zs = torch.tensor([1, -1, 2]).to(at.x.dtype)
    return torch.func.vmap(lambda z: gradient(z * at.x), out_dims=-1)(zs)


def trace_of_grad(run: Map, at: Inputs) -> Tensor:
    """dL/dx, by a graph that make_fx traced with other numbers."""
    graph = make_fx(torch.func.grad(_loss(run, at.w)))(torch.ones_like(at.x))
    return graph(at.x)


TRANSFORMS: dict[str, Callable[[Map, Inputs], Tensor]] = {
    "value": value,
    "backward": backward,
    "grad": grad,
    "grad(grad)": grad_of_grad,
    "jvp": jvp,
    "vmap(grad)": vmap_of_grad,
    "make_fx(grad)": trace_of_grad,
}


def inputs(formula: Map, world: int) -> Inputs:
    """Return whole numbers for all ranks, stacked, in float64: others on each rank, none is zero.

    They are so small that every number on the way, and so every result, is exact in 16 bits.
    """
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int, of: list[float]) -> Tensor:
        return torch.tensor(of, dtype=torch.float64)[
            torch.randint(len(of), shape, generator=source)
        ]

    x = draw(world, 4 * world, of=[-1, 1, 2, 3])
    v = draw(world, 4 * world, of=[-1, 1])
    return Inputs(x, v, draw(*formula(x).shape, of=[1, 2]))
