"""Behaviour 31: torch's own modules, as they are, at every stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.behaviours.networks import (
    PLACES,
    assert_every_rank,
    fill,
    gradient_on,
    regression,
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


@pytest.mark.parametrize("name", MODULES)
def test_31_modules_of_torch_need_no_edit(name: str) -> None:
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
    for stage, reshard in PLACES:
        got = gradient_on(
            lambda p, x: smooth_sum(apply(p, x)),
            params,
            x,
            stage=stage,
            reshard_after_forward=reshard,
        )
        assert_every_rank(got, mean)
