"""Small modules in float64, each with one thing that engines get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.failing import fails_in_backward

F64 = torch.float64


def linear(n: int, m: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(n, m, bias=bias, dtype=F64)


class Net(nn.Module):
    """x [n, 3] -> [n, 3]; curved, so that gradients of gradients are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(3, 5), linear(5, 3), linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Odd(nn.Module):
    """Sizes that do not divide, a parameter that nothing uses, a frozen one between others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(3, 5), linear(5, 3)
        self.fixed = nn.Parameter(torch.full((3,), 0.5, dtype=F64), requires_grad=False)
        self.unused, self.c = linear(2, 1), linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))) * self.fixed)


@dataclass
class Record:
    hidden: Tensor
    rest: dict[str, Any]
    name: str = "record"


class Outputs(Net):
    """Returns `wrap(h, out)`."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return self.wrap(h, self.c(torch.tanh(self.b(h))))


class Shared(nn.Module):
    """ALBERT: one layer, several times; and a layer without parameters between."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.layer, self.act = linear(2, 4), linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x)
        for _ in range(3):
            h = self.act(self.layer(h))
        return h


class Tied(nn.Module):
    """Embedding and head are one parameter; an encoder's and a decoder's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3, dtype=F64)
        self.encoder, self.decoder = linear(3, 3), linear(3, 3)
        self.decoder.weight = self.encoder.weight
        self.head = linear(3, 7)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.decoder(self.encoder(self.embedding(ids)))))


class Foreign(nn.Module):
    """Uses another module's weight, and returns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.own = linear(3, 3), linear(3, 3), nn.Parameter(torch.ones(3).double())

    def forward(self, x: Tensor) -> tuple[Tensor, nn.Parameter]:
        return F.linear(self.b(x), self.a.weight, self.own), self.own


class Shapes(nn.Module):
    """Scalars, nothing at all, sizes below the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5).double())
        self.empty = nn.Parameter(torch.zeros(0, 3).double())
        self.one = nn.Parameter(torch.ones(1).double())
        self.odd = nn.Parameter(torch.linspace(-1, 1, 7).double())
        self.nothing = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.nothing(x) * self.odd * self.scalar + self.one
        return h.square().sum() + (self.empty.sum() * 2).sin()


class Adapted(nn.Module):
    """LoRA: a frozen base, low-rank updates, a frozen tail, an unused part."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = linear(3, 3), linear(3, 1, bias=False), linear(1, 3)
        self.tail, self.unused = linear(3, 2), linear(2, 2)
        for part in (self.base, self.tail):
            part.requires_grad_(False)
        self.tail.bias.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(torch.tanh(self.base(x) + self.up(self.down(x))))


class Experts(nn.Module):
    """The rank's own choice; -1 for none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = linear(3, 3), nn.ModuleList([linear(3, 3) for _ in range(4)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        h = self.gate(x)
        return self.experts[which](h) if which >= 0 else h


class Dtypes(nn.Module):
    """fp64, fp32 and bf16 parameters; integers, so that sums are exact in each."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.usual = nn.Parameter(torch.ones(2, 3, dtype=torch.float32))
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.last = nn.Parameter(torch.ones(5, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        total = (self.wide * x).sum() + (self.last * x.float()).sum().double()
        return total + (self.usual * x[:3].float()).sum() + (self.low * x[:3].bfloat16()).sum()


class Low(nn.Module):
    """bf16; the gradient of each parameter is its factor, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
        self.v = nn.Parameter(torch.full((2, 3), -2.0, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum() + (self.v * x[:6].view(2, 3)).sum()


class Checkpointed(Net):
    """Recomputes b, and uses b's weight outside of that part, too."""

    def __init__(self, *, reentrant: bool, outside: bool) -> None:
        super().__init__()
        self.reentrant, self.outside = reentrant, outside

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        for _ in range(2):
            h = checkpoint(self._part, h, use_reentrant=self.reentrant)
        if self.outside:
            h = h + self.b.weight.sum() * self.a.bias.mean()
        return self.c(h[:, :3])

    def _part(self, h: Tensor) -> Tensor:
        return h + torch.tanh(F.linear(torch.tanh(self.b(h)), self.b.weight.t()))


class TiledLoss(torch.autograd.Function):
    """Sum of squares of head(h), tile by tile: each tile's backward runs inside this forward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, head: nn.Module) -> Tensor:
        rows = h.detach().requires_grad_()
        total = h.new_zeros(())
        with torch.enable_grad():
            for tile in rows.split(2):
                loss = head(tile).square().sum()
                torch.autograd.backward(loss)
                total += loss.detach()
        ctx.save_for_backward(rows.grad)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * gradient, None


@contextmanager
def faulty(e: Any, where: str) -> Iterator[None]:
    """The module of `e` raises in its "forward", or in the "middle" of its backward."""
    e.module.fault = where
    try:
        yield
    finally:
        e.module.fault = ""


class Fragile(Net):
    """Raises where `faulty` says."""

    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.fault == "forward":
            raise ValueError("raised in forward")
        if self.fault == "middle":
            h = fails_in_backward(h, ValueError("raised in backward"))
        return self.c(torch.tanh(self.b(h)))
