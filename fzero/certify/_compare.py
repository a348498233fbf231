"""What the ranks have against what one process has: the first parameter that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.certify._drivers import Seen
from fzero.certify._reference import Task, Update
from fzero.certify._rounding import worst_over
from fzero.state.buffers import SIXTEEN_BIT

MARGIN = 3.0  # times the change of the same number when the gradients are disturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number that is not that of the one-process step."""

    update: int  # counted from 1
    rank: int
    parameter: str  # its path; "" for a loss or a norm
    index: tuple[int, ...]  # of the element that differs most
    found: float
    wanted: float
    bound: float  # what was allowed; 0 for bit for bit

    def __str__(self) -> str:
        where = f"{self.parameter}{list(self.index) if self.index else ''}"
        off = abs(self.found - self.wanted)
        allowed = f"allowed: {self.bound:.1e}" if self.bound else "all bits must be equal"
        return (
            f"update {self.update}, rank {self.rank}{', ' if where else ''}{where}: "
            f"{self.found:.15g} and not {self.wanted:.15g}, off by {off:.2e} ({allowed})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One quantity of a cell, over all updates, ranks and parameters."""

    what: str  # "loss", "gradient", "norm" or "update"
    compared: bool  # False where the driver does not tell it
    bound: float  # the largest that was allowed, relative to the largest number; 0: bit for bit
    difference: Difference | None  # the first; None if all agree


class _Number(NamedTuple):
    """A number that a rank has, and the one of the one process; a parameter has many."""

    rank: int
    path: str
    found: Tensor | None  # None: it is not there
    wanted: Tensor
    bound: float
    size: float  # of the largest number of its kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """The updates of one process, and the same disturbed: how far rounding can carry."""

    updates: Sequence[Update]
    disturbed: Sequence[Update]
    task: Task

    def check(self, what: str, ranks: Sequence[Sequence[Seen]]) -> Check:
        """Compare the "loss", the "norm", or the parameters (under any other name)."""
        numbers = {"loss": self._losses, "norm": self._norms}.get(what, self._params)
        first, largest, compared = None, 0.0, False
        for k, (update, other) in enumerate(zip(self.updates, self.disturbed, strict=True)):
            for one in numbers(update, other, [seen[k] for seen in ranks]):
                compared, largest = True, max(largest, one.bound / max(one.size, 1e-300))
                first = first or _difference(k + 1, one)
        return Check(what=what, compared=compared, bound=largest, difference=first)

    def _params(self, update: Update, other: Update, ranks: Sequence[Seen]) -> Iterator[_Number]:
        """The parameters after an update."""
        moved, size = _moved(update.masters, other.masters), _top(update.params)
        for path in update.params:
            for rank, seen in enumerate(ranks):
                found = seen.params.get(path)
                wanted, twin = _of_dtype(update, path, found), _of_dtype(other, path, found)
                bound = 0.0 if path in update.exact else _bound(wanted, twin, moved)
                yield _Number(rank, path, found, wanted, bound, size)

    def _losses(self, update: Update, other: Update, ranks: Sequence[Seen]) -> Iterator[_Number]:
        """The mean loss of each rank."""
        size = float(update.losses.abs().max())
        moved = float((update.losses - other.losses).abs().max())
        bound = self._rounded(size, self.task.precision.low) + MARGIN * moved
        bound = 0.0 if update.exact_losses else bound
        for rank, seen in enumerate(ranks):
            found = torch.stack(seen.losses).double().mean() if seen.losses else None
            yield _Number(rank, "", found, update.losses[rank].mean(), bound, size)

    def _norms(self, update: Update, other: Update, ranks: Sequence[Seen]) -> Iterator[_Number]:
        """The norms, where the driver tells them."""
        bound = self._rounded(update.norm, self.task.low)
        bound += MARGIN * abs(update.norm - other.norm)
        for rank, seen in enumerate(ranks):
            if seen.norm is not None:
                found, wanted = torch.tensor([seen.norm, update.norm], dtype=torch.float64)
                yield _Number(rank, "", found, wanted, bound, update.norm)

    def _rounded(self, size: float, low: torch.dtype) -> float:
        terms = 4 if low in SIXTEEN_BIT else 64 * self.task.summands
        return size * torch.finfo(low).eps * terms


def _bound(wanted: Tensor, twin: Tensor, moved: float) -> float:
    """Of a parameter that was moved so far itself; all of them were, by `moved` of their size."""
    if not wanted.numel():
        return 0.0
    own, size = float((wanted.double() - twin.double()).abs().max()), float(wanted.abs().max())
    return MARGIN * (max(own, moved * size) + torch.finfo(wanted.dtype).eps * size)


def _moved(params: Mapping[str, Tensor], twins: Mapping[str, Tensor]) -> float:
    pairs = [(p.double(), twins[path].double()) for path, p in params.items()]
    off = sum(float((p - twin).square().sum()) for p, twin in pairs)
    size = sum(float(p.square().sum()) for p, _ in pairs)
    return (off / size) ** 0.5 if size else 0.0


def _of_dtype(update: Update, path: str, found: Tensor | None) -> Tensor:
    """The wanted parameter, or its master where that is what was found."""
    params = update.params[path]
    if found is not None and found.dtype != params.dtype and path in update.masters:
        return update.masters[path]
    return params


def _top(params: Mapping[str, Tensor]) -> float:
    return max(float(p.abs().max()) for p in params.values() if p.numel())


def _difference(update: int, one: _Number) -> Difference | None:
    found, theirs = one.found, one.wanted.double()
    if found is None or found.shape != theirs.shape:
        found = torch.full_like(theirs, torch.nan)
    mine = found.double()
    worst = worst_over(mine, theirs, one.bound)
    if worst is None:
        return None
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), theirs.shape))
    return Difference(
        update=update,
        rank=one.rank,
        parameter=one.path,
        index=index,
        found=float(mine.flatten()[worst]),
        wanted=float(theirs.flatten()[worst]),
        bound=one.bound,
    )
