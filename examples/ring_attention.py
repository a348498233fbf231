"""Ring attention: keys and values go around the ranks, and a running softmax adds up the result.

    python examples/ring_attention.py
    torchrun --nproc-per-node 2 examples/ring_attention.py --stage 3

No rank ever has the keys of all (Liu et al., arXiv 2310.01889). With a causal mask a rank with the
first piece would have nothing to do; so of 2 W chunks rank r has r and 2 W - 1 - r ("zigzag"), and
each computes 2 W + 1 blocks. 2 W has to divide the 24 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from one_process import compare

TOKENS, WIDTH, WORDS = 24, 16, 17

torch.manual_seed(0)
params: dict[str, Tensor] = {
    "words": torch.randn(WORDS, WIDTH).double(),
    "qkv": torch.randn(WIDTH, 3 * WIDTH).double() / 4,
}
text = torch.randint(WORDS, (2, TOKENS + 1))
whole = text[:, :-1], text[:, 1:]  # tokens, and the next one of each


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally over all of a sequence: each is [batch, sequence, width]."""
    scores = (q @ k.mT) / WIDTH**0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend over the chunks of all ranks along "seq": each is [batch, 2 chunks, width]."""
    size, rank = fzero.axis_size("seq"), fzero.axis_index("seq")
    rows, kv = q.chunk(2, 1), torch.stack([k, v])
    top = [x.new_full((*x.shape[:2], 1), -torch.inf) for x in rows]  # maximum of the scores so far
    total = [torch.zeros_like(x) for x in top]  # sum of exp(score - top)
    out = [torch.zeros_like(x) for x in rows]  # sum of exp(score - top) v
    for turn in range(size):
        source = (rank - turn) % size
        for i, mine in enumerate((rank, 2 * size - 1 - rank)):
            for j, theirs in enumerate((source, 2 * size - 1 - source)):
                if theirs > mine:  # all of it is later
                    continue
                key, value = kv.chunk(2, 2)[j]
                scores = (rows[i] @ key.mT) / WIDTH**0.5
                if theirs == mine:
                    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
                    scores = scores.masked_fill(later, -torch.inf)
                highest = torch.maximum(top[i], scores.detach().amax(-1, keepdim=True))
                less, part = (top[i] - highest).exp(), (scores - highest).exp()
                total[i] = total[i] * less + part.sum(-1, keepdim=True)
                out[i], top[i] = out[i] * less + part @ value, highest
        if turn < size - 1:
            kv = fzero.ppermute(kv, [(r, (r + 1) % size) for r in range(size)], axis="seq")
    return torch.cat([x / n for x, n in zip(out, total, strict=True)], 1)


def mean_loss(p: Any, tokens: Tensor, following: Tensor, attention: Any) -> Tensor:
    """Return the loss of the next token, averaged over those that are given."""
    x = p["words"][tokens]
    y = fzero.remat(lambda x, qkv: attention(*(x @ qkv).chunk(3, -1)))(x, p["qkv"])
    return F.cross_entropy(((x + y) @ p["words"].T).flatten(0, 1), following.flatten())


def loss(p: Any, tokens: Tensor, following: Tensor) -> Tensor:
    """Return the mean over this rank's tokens: all ranks have as many."""
    return mean_loss(p, tokens, following, ring)


def plain(p: Any, tokens: Tensor, following: Tensor) -> Tensor:
    """Return the same of one process."""
    return mean_loss(p, tokens, following, attend)


def piece(x: Tensor, rank: int, size: int) -> Tensor:
    """Return the two chunks that a rank reads of [batch, sequence]."""
    chunks = x.chunk(2 * size, 1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1)


if __name__ == "__main__":
    compare(loss, plain, params, whole, axis="seq", piece=piece)
