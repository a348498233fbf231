"""Small networks in float64 with data for each rank, and their unsharded gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from tests import oracle

Tensors = dict[str, Tensor]
Loss = Callable[..., Tensor]
STAGES = (0, 1, 2, 3)
KEEPS = (True, False, "window")
PLACES = [(0, True), (1, True), (2, True), *[(3, reshard) for reshard in KEEPS]]
"""(stage, reshard) pairs that differ: resharding means nothing below stage 3."""
Place = dict[str, Any]
at_every_place = pytest.mark.parametrize(
    "place",
    [{"stage": stage, "reshard_after_forward": reshard} for stage, reshard in PLACES],
    ids=[f"stage {stage}, reshard {reshard}" for stage, reshard in PLACES],
)
"""Run a test with each of them, as options of `fzero.init`."""


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    """Linear layers with tanh between them, in float64, the same in every process."""
    generator = torch.Generator().manual_seed(sum(widths))
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias, dtype=torch.float64), nn.Tanh()]
    module = nn.Sequential(*layers[:-1])
    fill(module, generator)
    return module


def fill(module: nn.Module, generator: torch.Generator) -> None:
    """Set all parameters to reproducible random numbers."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)


class Gpt(nn.Module):
    """A decoder with its head tied to its embedding."""

    def __init__(self, vocab: int = 11, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 1, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.to(torch.float64)
        fill(self, torch.Generator().manual_seed(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def regression(ranks: int, samples: int, features: int, outputs: int) -> tuple[Tensor, Tensor]:
    """x [ranks, samples, features] and y [ranks, samples, outputs], other numbers on each rank."""
    generator = torch.Generator().manual_seed(17)
    x = torch.randn(ranks, samples, features, generator=generator, dtype=torch.float64)
    y = torch.randn(ranks, samples, outputs, generator=generator, dtype=torch.float64)
    return x, y


def tokens(ranks: int, samples: int = 3, length: int = 5, vocab: int = 11) -> Tensor:
    """[ranks, samples, length] of token numbers."""
    generator = torch.Generator().manual_seed(23)
    return torch.randint(0, vocab, (ranks, samples, length), generator=generator)


def next_token_loss(apply: Callable[..., Tensor]) -> Loss:
    """(params, tokens) -> the cross entropy of each next token."""

    def loss(params: Any, batch: Tensor) -> Tensor:
        logits = apply(params, batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return loss


def squared_loss(apply: Callable[..., Tensor]) -> Loss:
    """(params, x, y) -> the mean squared error. (torch's own fails under jvp of grad.)"""
    return lambda params, x, y: (apply(params, x) - y).square().mean()


def mean_gradient(loss: Loss, params: Any, batches: Sequence[Sequence[Any]]) -> Any:
    """mean_r of dL(params, *batches[r])/dparams."""
    return oracle.mean_gradient(lambda params, batch: loss(params, *batch), params, batches)


def per_rank(*stacked: Tensor) -> list[tuple[Tensor, ...]]:
    """The arguments of each rank."""
    return list(zip(*stacked, strict=True))


def total(values: Iterable[Tensor]) -> Tensor:
    """Their sum, by tensors alone."""
    return functools.reduce(torch.add, values)


def hvp(fn: Callable[[Any], Tensor], params: Any, v: Any) -> Any:
    """The Hessian of fn times v, forward over reverse, on whole parameters."""
    out: Any = torch.func.jvp(torch.func.grad(fn), (params,), (v,))
    return out[1]


def virtual(fn: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """`fn` on virtual ranks; the result of each rank that is a tensor is stacked."""
    return fzero.simulate(fn, world_size=ranks)(*args)


def gradient_on(
    loss: Loss, params: Any, *args: Tensor, ranks: int = 2, **options: Any
) -> dict[str, Any]:
    """The gradient that fzero makes with these options of init, on every rank: [ranks, ...]."""

    def run(*batch: Any) -> Any:
        state = fzero.init(params, fzero.optim.sgd(0.1), **options)
        return fzero.gradients(fzero.grad_and_reduce(loss, state)(*batch)[0])

    return virtual(run, ranks, *args)


def assert_every_rank(got: Tensors, want: Tensors, *, exact: bool = False) -> None:
    """Each got[name][rank] is want[name], to 1e-12 of float64 or bit for bit."""
    assert got.keys() == want.keys()
    for name, right in want.items():
        for rank, row in enumerate(got[name]):
            rtol, atol = (0.0, 0.0) if exact else (1e-10, 1e-12)
            where = f"rank {rank}, {name}: "
            torch.testing.assert_close(
                row, right, rtol=rtol, atol=atol, msg=lambda m, w=where: w + m
            )
