"""SigLIP's loss in a ring: images of a rank with the texts of all ranks, one piece at a time.

    python examples/siglip.py
    torchrun --nproc-per-node 2 examples/siglip.py --stage 3

The loss is a sum over all pairs, so no rank needs all texts at once (Zhai et al., "Sigmoid Loss for
Language Image Pre-Training", arXiv 2303.15343): memory is that of (batch / W)^2 pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from one_process import compare

PAIRS, WIDTH = 24, 6

torch.manual_seed(0)
params: dict[str, Tensor] = {
    "image": torch.randn(10, WIDTH).double() / 3,
    "text": torch.randn(7, WIDTH).double() / 3,
    "scale": torch.tensor(1.0).double(),
    "bias": torch.tensor(-2.0).double(),
}
whole = torch.randn(PAIRS, 10).double(), torch.randn(PAIRS, 7).double()


def embedded(p: Any, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as unit vectors [n, width]."""
    towers = fzero.remat(lambda x, w: F.normalize(torch.tanh(x @ w), dim=-1))
    return towers(images, p["image"]), towers(texts, p["text"])


def of_pairs(p: Any, x: Tensor, y: Tensor, same: bool) -> Tensor:
    """Return the sum of the losses of all pairs of x and y; pairs (i, i) match if `same`."""
    signs = 2 * torch.eye(len(x), device=x.device) * same - 1
    return -F.logsigmoid(signs * (p["scale"].exp() * x @ y.T + p["bias"])).sum()


def loss(p: Any, images: Tensor, texts: Tensor) -> Tensor:
    """Return the loss of this rank's images with the texts of all ranks, for each image."""
    size, total = fzero.axis_size("ring"), torch.zeros(())
    x, y = embedded(p, images, texts)
    for turn in range(size):
        total = total + fzero.remat(of_pairs)(dict(p), x, y, same=turn == 0)
        if turn < size - 1:
            y = fzero.ppermute(y, [(r, (r + 1) % size) for r in range(size)], axis="ring")
    return total / len(images)


def plain(p: Any, images: Tensor, texts: Tensor) -> Tensor:
    """Return the same of one process: all pairs at once."""
    return of_pairs(p, *embedded(p, images, texts), same=True) / len(images)


def piece(x: Tensor, rank: int, size: int) -> Tensor:
    """Return the rows that a rank reads."""
    return x.chunk(size)[rank]


if __name__ == "__main__":
    compare(loss, plain, params, whole, axis="ring", piece=piece)
