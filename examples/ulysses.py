"""Ulysses attention: pieces of a sequence on ranks, and all of it for some heads inside attention.

    python examples/ulysses.py
    torchrun --nproc-per-node 2 examples/ulysses.py --stage 3

Two all-to-alls take [sequence / W, heads] to [sequence, heads / W] and back (Jacobs et al.,
"DeepSpeed Ulysses", arXiv 2309.14509). W has to divide the 12 heads and the 24 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from one_process import compare

TOKENS, HEADS, WIDTH, LAYERS, WORDS = 24, 12, 36, 2, 17

torch.manual_seed(0)
params: dict[str, Tensor] = {"words": torch.randn(WORDS, WIDTH).double()}
for i in range(LAYERS):
    params[f"qkv{i}"] = torch.randn(WIDTH, 3 * WIDTH).double() / 6
    params[f"out{i}"] = torch.randn(WIDTH, WIDTH).double() / 6
text = torch.randint(WORDS, (2, TOKENS + 1))
whole = text[:, :-1], text[:, 1:]  # tokens, and the next one of each


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally over all of a sequence: each is [batch, sequence, heads, width]."""
    scores = torch.einsum("bqhw,bkhw->bhqk", q, k) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhqk,bkhw->bqhw", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend over the pieces of all ranks along "seq": each is [batch, piece, heads, width]."""
    qkv = fzero.all_to_all(torch.stack([q, k, v]), split_dim=3, concat_dim=2, axis="seq")
    return fzero.all_to_all(attend(*qkv), split_dim=1, concat_dim=2, axis="seq")


def mean_loss(p: Any, tokens: Tensor, following: Tensor, attention: Any) -> Tensor:
    """Return the loss of the next token, averaged over those that are given."""
    x = p["words"][tokens]

    def layer(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
        q, k, v = (x @ qkv).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return x + torch.tanh(attention(q, k, v).flatten(2) @ out)

    for i in range(LAYERS):
        x = fzero.remat(layer)(x, p[f"qkv{i}"], p[f"out{i}"])
    return F.cross_entropy((x @ p["words"].T).flatten(0, 1), following.flatten())


def loss(p: Any, tokens: Tensor, following: Tensor) -> Tensor:
    """Return the mean over this rank's tokens: all ranks have as many."""
    return mean_loss(p, tokens, following, ulysses)


def plain(p: Any, tokens: Tensor, following: Tensor) -> Tensor:
    """Return the same of one process."""
    return mean_loss(p, tokens, following, attend)


def piece(x: Tensor, rank: int, size: int) -> Tensor:
    """Return what a rank reads of [batch, sequence]."""
    return x.chunk(size, 1)[rank]


if __name__ == "__main__":
    compare(loss, plain, params, whole, axis="seq", piece=piece)
