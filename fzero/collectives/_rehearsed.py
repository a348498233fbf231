"""Collectives of a function that is tried on one rank alone: answered as if all ranks were alike.

Nothing is sent. What is parallel to pieces, a multiple of so many elements, is answered anew in
each run; any other answer of the first run is given again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

_HERE = threading.local()


class Rehearsal:
    """What collectives of this thread have answered in the first of several blocks."""

    def __init__(self, size: int) -> None:
        self._size, self.asked, self._number = size, list[tuple[bool, Tensor]](), 0

    @contextmanager
    def given(self) -> Generator[None]:
        """Let collectives be answered by it in this block."""
        before, self._number, _HERE.answers = rehearsal(), 0, self
        try:
            yield
        finally:
            _HERE.answers = before

    def answer(self, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what the next collective answers."""
        if self._number == len(self.asked):
            self.asked.append((x.numel() > 0 and x.numel() % self._size == 0, make(x)))
        is_cut, kept = self.asked[self._number]
        self._number += 1
        return make(x) if is_cut else kept.clone()


def rehearsal() -> Rehearsal | None:
    """Return what answers collectives of this thread; None: the ranks do."""
    return getattr(_HERE, "answers", None)


def of_ranks_alike(kind: str, size: int, rank: int, x: Tensor) -> Tensor:
    """Return what a linear map of `size` ranks makes of x, where each of them has x."""
    if kind in ("reduce", "permute"):
        return x * (size if kind == "reduce" else 1)
    own = x if kind == "gather" else x.chunk(size)[rank]
    return own * size if kind == "scatter" else torch.cat([own] * size)
