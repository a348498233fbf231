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
from torch._C import _DisableFuncTorch
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
)
from torch._subclasses.fake_tensor import FakeTensor

from fzero.state import NAMESPACE

_PRIME = 2654435761  # Knuth's multiplicative hash; of int64, modulo 2^64


@contextmanager
def seeded(batch: Any) -> Iterator[int | None]:
    """Draw torch's random numbers from the seed of a batch; afterwards they go on as before.

    Where a transform hides the values of the batch there is no seed, and nothing is changed.
    """
    seed = seed_of(batch)
    if seed is None:
        yield None
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield seed


def seed_of(batch: Any) -> int | None:
    """Return a hash of the values of a batch; None where a transform (vmap, a trace) hides them."""
    leaves = optree.tree_leaves(batch, namespace=NAMESPACE)
    tensors = [unwrapped(x) for x in leaves if isinstance(x, Tensor)]
    if any(isinstance(x, FakeTensor) or is_functorch_wrapped_tensor(x) for x in tensors):
        return None
    seed = torch.zeros((), dtype=torch.int64)
    for x in tensors:
        raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
        places = torch.arange(1, raw.numel() + 1, dtype=torch.int64) * _PRIME
        seed = (seed + ((raw + 1) * (places ^ (places >> 7))).sum() + 1) * _PRIME
    return int(seed) & 0x7FFFFFFFFFFF


def unwrapped(x: Tensor) -> Tensor:
    """Return the value inside of torch.func.grad and the like; vmap hides it."""
    while is_functorch_wrapped_tensor(x) and not is_batchedtensor(x):
        x = get_unwrapped(x)
    if is_functorch_wrapped_tensor(x):
        return x
    with _DisableFuncTorch():  # which would wrap it again
        return x.detach()
