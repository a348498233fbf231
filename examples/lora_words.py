"""A small transformer with LoRA, and sequences for it: some are public, and some are private."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, WIDTH, RANK = 16, 12, 32, 4


class LoRA(nn.Module):
    """A frozen linear layer, and beside it a learned one of a low rank, which begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return what both give together."""
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """A block of a transformer, with one head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [n, words, WIDTH] after attention to the words before, and two layers."""
        q, k, v = self.qkv(F.layer_norm(x, [WIDTH])).chunk(3, dim=-1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(later, -torch.inf)
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.narrow(F.gelu(self.wide(F.layer_norm(x, [WIDTH]))))


def texts(count: int, next_word: Tensor) -> Tensor:
    """Return [count, LENGTH + 1] words: each follows the one before, or is any, one time in ten."""
    words = [torch.randint(WORDS, (count,))]
    for _ in range(LENGTH):
        anything, is_any = torch.randint(WORDS, (count,)), torch.rand(count) < 0.1
        words.append(torch.where(is_any, anything, next_word[words[-1]]))
    return torch.stack(words, 1)


def loss_of(scores: Tensor, rows: Tensor) -> Tensor:
    """Return the loss of each row [n]: the mean over its words."""
    return F.cross_entropy(scores.mT, rows[:, 1:], reduction="none").mean(1)


def make_model(next_word: Tensor, device: torch.device) -> nn.Module:
    """Return a model that has learned some sequences, frozen, with adapters in float64."""
    layers = [nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS)]
    model = nn.Sequential(*layers).double()
    rule = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for rows in texts(60 * 64, next_word).split(64):
        rule.zero_grad()
        loss_of(model(rows[:, :-1]), rows).mean().backward()
        rule.step()
    model.requires_grad_(False)
    for block, name in itertools.product(layers[1:3], ("qkv", "out", "wide", "narrow")):
        setattr(block, name, LoRA(getattr(block, name)).double())
    return model.to(device)
