"""The models of `python -m fzero certify`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IDS = 7
TOKENS = 3


class Dyadic(nn.Module):
    """Scores of ids by an embedding that is also the head; a frozen layer, and one without use.

    `sometimes` is used by every second batch, more or less: by some ranks and micro-batches only.
    All parameters and targets are -1, 0 or 1, and the loss is 12 times a sum: a gradient is a
    multiple of 12, and its sums over 1 to 4 ranks and their mean are exact, before and after an
    update with a learning rate that is a power of two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(IDS, 5), nn.Linear(5, 5)
        self.unused, self.frozen = nn.Linear(3, 1), nn.Linear(5, IDS)
        self.frozen.requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(()))
        self.sometimes, self.always = nn.Linear(5, IDS), False
        source = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = torch.randint(-1, 2, p.shape, generator=source).float()

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [n, t] -> scores [n, t, 7]."""
        h = self.embed(ids)
        scores = torch.relu(self.mix(h)) @ self.embed.weight.t() + self.frozen(h) + self.shift
        return scores + self.sometimes(h) if self.always or int(ids.sum()) % 2 else scores


class Transformer(nn.Module):
    """One pre-norm block with attention, a tied head, a frozen bias and a layer without use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(IDS, 6)
        self.norm_1, self.norm_2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6, bias=False)
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 6)
        self.unused = nn.Linear(3, 1)
        self.up.bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [n, t] -> scores [n, t, 7]."""
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.mT / 3**0.5).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return x @ self.embed.weight.t()


def dyadic_loss(model: Any, batch: Any) -> Tensor:
    """12 times the sum of scores times targets."""
    ids, targets = batch
    return 12 * (model(ids) * targets).sum()


def entropy_loss(model: Any, batch: Any) -> Tensor:
    """The cross entropy of the next id."""
    ids, _ = batch
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Ids [2, 3] and targets [2, 3, 7], whole numbers; others for each number."""
    source = torch.Generator().manual_seed(number)
    ids = torch.randint(0, IDS, (2, TOKENS), generator=source)
    return ids, torch.randint(-1, 2, (2, TOKENS, IDS), generator=source).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandModel:
    """A model of the command, with its loss; all take the same batches."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    lr: float  # of SGD; a power of two


MODELS = {
    "dyadic": CommandModel(make=Dyadic, loss=dyadic_loss, lr=2.0**-6),
    "transformer": CommandModel(make=Transformer, loss=entropy_loss, lr=2.0**-2),
}
