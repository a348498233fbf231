"""Elementwise kernels whose bits do not depend on where a tensor is cut, nor on threads.

torch computes the elements at the end of a tensor that fill no vector one by one, and some kernels
round otherwise there. Where a kernel runs on several threads, each has such an end. Of 1,000
elements in such ends differ (torch 2.13 on a CPU with AVX-512):

| kernel                                              | fp64 | fp32 | bf16 | fp16 |
|-----------------------------------------------------|------|------|------|------|
| `add`, `mul`, `div`, `sqrt`, `lerp`, `addcmul`,     |    0 |    0 |    0 |    0 |
| `addcdiv`, `sign`, `where`, `exp`, `log`, casts     |      |      |      |      |
| `add(alpha=)`, also of `torch._foreach_add`         |    0 |    0 |   81 |   77 |
| `rsqrt`                                             |    0 |    0 |  143 |  129 |
| `pow(0.75)`                                         |    3 |    8 |    0 |    0 |
| `sigmoid`                                           |    5 |   17 |    0 |    0 |
| `atan2`                                             |    5 |   73 |    0 |    0 |
| fused Adam, AdamW                                   |   12 |   26 |    0 |    0 |
| fused SGD with momentum                             |   11 |   32 |    - |    - |
| fused Adagrad                                       |    0 |    0 |    6 |   13 |

So rules made of these differ, too: SGD, Adam, RMSprop and others in 16 bits without masters. None
differs in whole blocks of 64 elements (`state.layout.BLOCK`), which are two vectors of 512 bits of
a dtype of 16 bits. Fused kernels give each thread whole vectors. All others give each of t threads
one t-th of the elements, if there are more than `_GRAIN`; so a tensor is cut where these are whole
blocks, and what is left is too short for a second thread.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from fzero.state.layout import BLOCK

_GRAIN = 32_768
"""The elements that torch gives at least to each thread (at::internal::GRAIN_SIZE)."""


def threads_on(device: torch.device) -> int:
    """Return on how many threads an elementwise kernel runs there."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def even_spans(start: int, stop: int, threads: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into spans of which each thread gets whole blocks: one or two.

    Example:
        >>> even_spans(0, 100_032, 2), even_spans(0, 100_032, 1)
        ([(0, 99968), (99968, 100032)], [(0, 100032)])
    """
    numel = stop - start
    used = min(threads, -(-numel // _GRAIN))
    if used <= 1 or numel % (used * BLOCK) == 0:
        return [(start, stop)] if numel else []
    even = numel - numel % (used * BLOCK)
    if even <= (used - 1) * _GRAIN:  # so few that one thread less would run
        even = (used - 1) * _GRAIN
    return [(start, start + even), (start + even, stop)]


@contextmanager
def one_thread(wanted: bool) -> Generator[None]:
    """Run kernels on the CPU on one thread inside of the block, if that is `wanted`."""
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
