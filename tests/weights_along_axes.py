"""A loss that calls collectives along axes, of ranks with other counts of tokens: the same, plain.

The updates by each driver are those of the mean over all tokens in one process.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine

RATE = 0.5
PARAMS = {
    "w": torch.tensor([[0.5, -0.25], [0.75, 1.0]], dtype=torch.float64),
    "v": torch.tensor([1.0, -2.0], dtype=torch.float64),
}
CALLS, ROWS, TOKENS = 2, 2, 3


def batches(data: int, seq: int) -> tuple[Tensor, Tensor]:
    """[call, data, seq, row, token] of features and of ones that count; the last rank has none."""
    torch.manual_seed(3)
    shape = CALLS, data, seq, ROWS, TOKENS
    x, counts = torch.randn(*shape, 2, dtype=torch.float64), (torch.rand(shape) < 0.6).double()
    counts[:, -1, -1] = 0
    counts[:, 0, 0, 0] = 1
    return x, counts


def own_mean(p: Any, x: Tensor, counts: Tensor) -> Tensor:
    """The mean over this rank's tokens, each beside all of its row, and a token of another row."""

    def beside(x: Tensor, w: Tensor) -> Tensor:
        h = torch.tanh(x @ w)
        return h * fzero.all_gather(h, "seq", dim=1).mean(1, keepdim=True)

    y = fzero.remat(beside)(x, p["w"])
    return total(p, y, beside_of_last(y), counts) / counts.sum().clamp(min=1)


def beside_of_last(y: Tensor) -> Tensor:
    """What the rank before this one along "data" has."""
    size = fzero.axis_size("data")
    return fzero.ppermute(y, [(r, (r + 1) % size) for r in range(size)], axis="data")


def total(p: Any, y: Tensor, other: Tensor, counts: Tensor) -> Tensor:
    return (((y + other) @ p["v"] - 1) ** 2 * counts).sum()


def plain(p: Any, x: Tensor, counts: Tensor) -> Tensor:
    """The mean over all tokens of some calls, of [call, data, seq, row, token]."""
    h = torch.tanh(x @ p["w"])
    y = h * h.transpose(2, 3).flatten(3, 4).mean(3)[:, :, None, :, None]
    return total(p, y, y.roll(1, 1), counts) / counts.sum()


def updated(x: Tensor, counts: Tensor) -> dict[str, Tensor]:
    grads = torch.func.grad(plain)(PARAMS, x, counts)
    return {name: value - RATE * grads[name] for name, value in PARAMS.items()}


def step_fn(state: Any, x: Tensor, counts: Tensor) -> Any:
    for one, n in zip(x, counts, strict=True):
        state, _ = fzero.grad_and_reduce(own_mean, state, weight=n.sum())(one, n)
    return fzero.apply_gradients(state), None


def by_arguments(state: Any, x: Tensor, counts: Tensor) -> Any:
    """As `step_fn`, where arguments require grad: by torch.func, and differentiable."""
    return step_fn(state, x.requires_grad_(), counts)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(PARAMS[name].clone()) for name in ("w", "v"))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w)


def by_engine(mesh: fzero.Mesh, x: Tensor, counts: Tensor, *, scales: bool, **options: Any) -> Any:
    """An update by an engine; the collectives are outside of the forward."""
    model, seq, data = Model(), mesh.axis.along("seq"), mesh.axis.along("data")
    engine = Engine(model, torch.optim.SGD(model.parameters(), RATE), mesh=mesh, **options)
    with engine.coalesce() if scales else contextlib.nullcontext():
        for one, n in zip(x, counts, strict=True):
            h = engine(one)
            y = h * fzero.all_gather(h, seq, dim=1).mean(1, keepdim=True)
            pairs = [(r, (r + 1) % data.size) for r in range(data.size)]
            other = fzero.ppermute(y, pairs, axis=data)
            loss = total({"v": model.v}, y, other, n) / n.sum().clamp(min=1)
            if scales:
                engine.scale(loss, weight=n.sum()).backward()
            else:
                engine.backward(loss, weight=int(n.sum()))
    engine.step()
    return {name: x.clone() for name, x in engine.full_parameters().items()}
