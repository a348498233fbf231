"""Seed the random numbers of a loss from its batch, the same on each rank and in one process.

A rank draws the dropout masks of its batches, and the one process those of all batches. With a
seed for each batch the masks are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from fzero.state import NAMESPACE

_PRIME = 2654435761  # Knuth's multiplicative hash; of int64, modulo 2^64


@contextmanager
def seeded(batch: Any) -> Iterator[None]:
    """Draw torch's random numbers from the seed of a batch; afterwards they go on as before.

    Under a transform that hides the values of the batch (vmap, a trace) nothing is changed.
    """
    tensors = [x for x in optree.tree_leaves(batch, namespace=NAMESPACE) if isinstance(x, Tensor)]
    if any(isinstance(x, FakeTensor) or is_functorch_wrapped_tensor(x) for x in tensors):
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(tensors))
        yield


def seed_of(tensors: list[Tensor]) -> int:
    """Return a hash of the values of some tensors."""
    seed = torch.zeros((), dtype=torch.int64)
    for x in tensors:
        raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
        places = torch.arange(1, raw.numel() + 1, dtype=torch.int64) * _PRIME
        seed = (seed + ((raw + 1) * (places ^ (places >> 7))).sum() + 1) * _PRIME
    return int(seed) & 0x7FFFFFFFFFFF
