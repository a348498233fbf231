"""Modules as they are, with their buffers, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.behaviours.networks import (
    Gpt,
    Place,
    assert_every_rank,
    at_every_place,
    fill,
    gradient_on,
    mean_gradient,
    next_token_loss,
    per_rank,
    regression,
    tokens,
    virtual,
)


def smooth_sum(y: Tensor) -> Tensor:
    return nn.functional.softplus(y).square().sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)
        self.cell = nn.GRUCell(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.lstm(x)[0].mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.MultiheadAttention(3, 1, batch_first=True)
        self.cross = nn.MultiheadAttention(3, 3, kdim=2, vdim=1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.same(x, x, x)[0]
        return self.cross(x, x[..., :2], x[..., :1], need_weights=False)[0]


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in range(3))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.zeros(3, 3))})
        self.bag = nn.EmbeddingBag(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        bags = self.bag(torch.arange(6).view(2, 3))
        return x @ self.named["a"] * torch.stack([*self.rows]).sum(0) + bags.sum()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "recurrent": Recurrent,
    "attention": Attention,
    "encoder layer": lambda: nn.TransformerEncoderLayer(3, 1, 8, dropout=0.0, batch_first=True),
    "encoder layer in eval": lambda: nn.TransformerEncoderLayer(3, 1, 8, batch_first=True).eval(),
    "convolutions": lambda: nn.Sequential(
        nn.Conv1d(4, 4, 3, groups=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.PReLU(4),
        nn.ConvTranspose1d(4, 2, 2),
        nn.InstanceNorm1d(2, affine=True),
    ),
    "parametrized": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        nn.RMSNorm(3),
    ),
    "lists and bags": Lists,
}


@at_every_place
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch_need_no_edit(name: str, place: Place) -> None:
    module = MODULES[name]().to(torch.float64)
    fill(module, torch.Generator().manual_seed(4))
    apply, params = fzero.functionalize(module)
    x = regression(2, 2, 12, 1)[0].unflatten(-1, (4, 3))  # [ranks, samples, 4, 3]
    mean = {k: torch.zeros_like(p) for k, p in params.items()}
    for rows in x:
        named = dict(module.named_parameters())
        found = torch.autograd.grad(smooth_sum(module(rows)), [*named.values()])
        for k, g in zip(named, found, strict=True):
            mean[k] += g / len(x)
    got = gradient_on(lambda p, x: smooth_sum(apply(p, x)), params, x, **place)
    assert_every_rank(got, mean)


@at_every_place
def test_a_model_with_a_tied_head_equals_the_unsharded_one(place: Place) -> None:
    apply, params = fzero.functionalize(Gpt(depth=2))
    loss, batch = next_token_loss(apply), tokens(3)
    want = mean_gradient(loss, params, per_rank(batch))
    assert_every_rank(gradient_on(loss, params, batch, ranks=3, **place), want)


def batch_norm_net() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    module.to(torch.float64)
    fill(module, torch.Generator().manual_seed(9))
    return module


@at_every_place
def test_batch_norm_statistics_go_in_and_come_out(place: Place) -> None:
    """Two passes; each rank's own statistics, as torch's BatchNorm has them on each rank."""
    apply, params, buffers = fzero.functionalize(batch_norm_net(), buffers=True)
    batches = regression(2, 6, 3, 2)
    halves = (slice(0, 3), slice(3, 6))

    def loss(params: Any, buffers: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        out, buffers = apply(params, x, buffers=buffers)
        return (out - y).square().mean(), buffers

    def run(x: Tensor, y: Tensor) -> Any:
        state, now = fzero.init(params, fzero.optim.sgd(0.1), **place), buffers
        for half in halves:
            one_pass = fzero.grad_and_reduce(loss, state, has_aux=True)
            state, (_, now) = one_pass(now, x[half], y[half])
        return fzero.gradients(state), now

    gradients, now = virtual(run, 2, *batches)
    mean = {name: torch.zeros_like(p) for name, p in params.items()}
    for rank, (x, y) in enumerate(per_rank(*batches)):
        reference = batch_norm_net()
        for half in halves:
            (reference(x[half]) - y[half]).square().mean().backward()
        for name, p in reference.named_parameters():
            mean[name] += p.grad.div(2)
        for name, value in reference.named_buffers():
            torch.testing.assert_close(now[name][rank], value, rtol=1e-10, atol=1e-12)
    assert_every_rank(gradients, mean)
    assert not buffers["1.running_mean"].any()  # what was passed in is as it was
