"""The GPT that is trained, and its batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm attention and feed-forward of width d."""

    def __init__(self, width: int, heads: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, t, d] -> [n, t, d], causal."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Embedding, blocks, tied head; forward(symbols [n, t + 1]) -> mean cross-entropy, []."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.symbols = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, max(width // 128, 1)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.symbols.weight, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        """See the class."""
        h = self.symbols(symbols[:, :-1])
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.symbols.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), symbols[:, 1:].flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The model, the batch of each rank, and in which precision everyone trains.

    precision "bf16": parameters, gradients and AdamW's moments are bf16, no masters. "masters":
    arithmetic in bf16, parameters (or masters), reduced gradients and moments in fp32.
    """

    layers: int
    width: int
    vocabulary: int
    samples: int
    tokens: int
    precision: str
    device: str

    def module(self, dtype: torch.dtype) -> Gpt:
        """The model in that dtype; the same weights at every call and on every rank."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return Gpt(self.layers, self.width, self.vocabulary).to(dtype)

    def batch(self, number: int, ranks: range) -> Tensor:
        """Symbols [samples x ranks, tokens + 1]; no two ranks or numbers share a row."""
        shape = (self.samples, self.tokens + 1)
        rows = []
        for rank in ranks:
            generator = torch.Generator().manual_seed(1000 * number + rank)
            # Few of the symbols, so that the loss falls within a few steps.
            rows.append(torch.randint(min(self.vocabulary, 64), shape, generator=generator))
        return torch.cat(rows).to(self.device)
