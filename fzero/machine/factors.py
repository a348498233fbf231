"""Gradients of one state -> their factors -> the factors of their sum: what `powersgd` sends.

    sent         M = g + e    [P of each matrix | what is no matrix]        all-reduce
    sent_back    B of P       [Q' of each matrix]; e is known               all-reduce
    result       B Q'^T, and what is no matrix, in the order of the flat; this rank's part of it

All of a group's gradient is here before its reduction, at every stage: so its matrices are whole.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.machine.encode import Encoder
from fzero.machine.packing import part_of
from fzero.machine.powersgd import powersgd
from fzero.machine.residual import Memories, starts_of
from fzero.state import Part, Setup
from fzero.state.codec import wide


class _There(NamedTuple):
    """A gradient whose P is on the wire."""

    whole: Tensor  # [n], with what was left of those before it
    remembers: bool  # whether what it lacks is kept: it is this rank's own


class _Back(NamedTuple):
    """What is known of a sum before its second factors have come."""

    bases: list[Tensor]
    rest: Tensor  # the sum of what is no matrix


class FactorEncoder(Memories):
    """Makes factors of the gradients of one state; adds to each what was left of those before."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert isinstance(setup.codec, powersgd)
        self.codec = setup.codec
        self._matrices = starts_of(setup)
        first = len(self._memories)  # the starts follow, of groups that have matrices
        self._start = {i: first + n for n, i in enumerate(self._matrices)}
        # In the order of their reductions, of which one may begin before the last one is over.
        self._there: dict[int, deque[_There]] = {i: deque() for i in setup.layout.trainable}
        self._back: dict[int, deque[_Back]] = {i: deque() for i in setup.layout.trainable}

    def discard(self) -> None:
        """Forget what memories hold now, and what was on its way: nothing is any more."""
        super().discard()
        for waiting in (*self._there.values(), *self._back.values()):
            waiting.clear()

    def sent(self, index: int, gradient: Tensor, *, mine: bool = True) -> Tensor:
        """Return [P of each matrix | the rest] of a group's gradient [n], for an all-reduce.

        Not `mine`: zeros, and the memory stays as it is.
        """
        whole = gradient.to(wide(self._setup.accumulate_dtype(index)))
        whole = self.shared(whole, self._slot[index, False] if mine else None)
        self._there[index].append(_There(whole, mine))
        starts, matrices = self._starts(index), self._matrices.get(index, [])
        pairs = zip(matrices, starts, strict=True)
        factors = [(one.of(whole) @ start).reshape(-1) for one, start in pairs]
        return torch.cat([*factors, *self._rest(index, whole)])

    def sent_back(self, index: int, received: Tensor) -> Tensor:
        """Return [Q' of each matrix], for an all-reduce; keep what this rank's own lacks."""
        whole, remembers = self._there[index].popleft()
        matrices = self._matrices.get(index, [])
        sizes = [one.rows * one.rank for one in matrices]
        *sums, rest = received.split([*sizes, received.numel() - sum(sizes)])
        pairs = zip(matrices, sums, strict=True)
        bases = [self.codec.basis(p.view(one.rows, one.rank)) for one, p in pairs]
        factors = [one.of(whole).T @ b for one, b in zip(matrices, bases, strict=True)]
        if remembers:
            left = torch.zeros_like(whole)
            for one, basis, q in zip(matrices, bases, factors, strict=True):
                torch.sub(one.of(whole), basis @ q.T, out=one.of(left))
            self.remember(self._slot[index, False], left)
        self._back[index].append(_Back(bases, rest))
        return torch.cat([q.reshape(-1) for q in factors]) if factors else whole.new_empty(0)

    def result(self, index: int, received: Tensor) -> Tensor:
        """Return this rank's part of the sum; keep where to start from next time."""
        setup, (bases, rest) = self._setup, self._back[index].popleft()
        matrices = self._matrices.get(index, [])
        total = rest.new_zeros(setup.layout.full_numel(index))
        factors = received.split([one.start_numel for one in matrices]) if matrices else ()
        new: list[Tensor] = []
        for one, basis, flat, start in zip(
            matrices, bases, factors, self._starts(index), strict=True
        ):
            q = flat.view(one.columns, one.rank)
            torch.matmul(basis, q.T, out=one.of(total))
            new.append(self.codec.next_start(q, start).reshape(-1))
        if new:
            self.keep(self._start[index], torch.cat(new))
        places = self._rest(index, total)
        for place, x in zip(places, rest.split([x.numel() for x in places]), strict=True):
            place.copy_(x)
        part = setup.part(setup.gradients, setup.axis.rank)
        return part_of(total, Part(1, 0), part).clone() if part.count > 1 else total

    def _starts(self, index: int) -> list[Tensor]:
        """Return Q of each matrix of a group."""
        matrices = self._matrices.get(index)
        if matrices is None:
            return []
        flat = self.borrowed(self._start[index])
        pieces = flat.split([one.start_numel for one in matrices])
        return [x.view(one.columns, one.rank) for one, x in zip(matrices, pieces, strict=True)]

    def _rest(self, index: int, flat: Tensor) -> list[Tensor]:
        """Return what lies between the matrices of a flat [n]: views; without padding."""
        layout, matrices = self._setup.layout, self._matrices.get(index, [])
        of, group = {one.leaf for one in matrices}, layout.groups[index]
        pairs = zip(group.leaves, group.offsets, strict=True)
        places = [(o, layout.leaves[n].numel) for n, o in pairs if n not in of]
        return [flat[offset : offset + numel] for offset, numel in places]


GradientEncoder = Encoder | FactorEncoder


def encoder_of(setup: Setup) -> GradientEncoder | None:
    """Return what encodes the gradients of a state; None if they cross ranks as they are."""
    if not setup.encodes_gradients:
        return None
    return FactorEncoder(setup) if isinstance(setup.codec, powersgd) else Encoder(setup)
