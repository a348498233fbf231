"""The model of `grad_cache.py`: one small encoder for docstrings and one for code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pairs import Pairs

TRIGRAMS = 4093  # a prime: trigrams are told apart by their number modulo this


class Tower(nn.Module):
    """Text [b, LENGTH] uint8 -> unit vector [b, width]: the mean of byte trigrams, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.grams = nn.Embedding(TRIGRAMS, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        nn.init.normal_(self.grams.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        """Embed the rows of `text`."""
        first, second, third = text[:, :-2].long(), text[:, 1:-1].long(), text[:, 2:].long()
        grams = self.grams((first * 65536 + second * 256 + third) % TRIGRAMS)
        real = (third > 0).to(grams.dtype).unsqueeze(-1)  # 0 is padding
        pooled = (grams * real).sum(1) / real.sum(1).clamp(min=1).sqrt()
        return F.normalize(pooled + self.narrow(F.gelu(self.wide(pooled))), dim=-1)


class TwoTowers(nn.Module):
    """Pairs [b] -> [b, 2, width]: what embeds docstrings, and what embeds code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.code = Tower(width), Tower(width)

    def forward(self, docstrings: Tensor, codes: Tensor) -> Tensor:
        """Embed both sides."""
        return torch.stack([self.query(docstrings), self.code(codes)], dim=1)


def accuracy(apply: Callable[..., Tensor], params: Any, pool: Pairs) -> float:
    """Return how often a docstring's nearest code among `pool` is its own."""
    with torch.no_grad():
        queries, codes = apply(params, *pool).unbind(1)
    nearest = (queries @ codes.T).argmax(1)
    return (nearest == torch.arange(len(nearest), device=nearest.device)).float().mean().item()
