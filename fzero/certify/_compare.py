"""What the ranks have against what one process has: the first parameter that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.certify._drivers import Seen
from fzero.certify._reference import Task, Update
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """The updates of one process, and the same disturbed: how far rounding can carry."""

    updates: Sequence[Update]
    disturbed: Sequence[Update]
    task: Task

    def check_params(self, what: str, ranks: Sequence[Sequence[Seen]]) -> Check:
        """Compare the parameters after each update."""
        first, largest = None, 0.0
        for number, (update, other) in enumerate(zip(self.updates, self.disturbed, strict=True)):
            moved = _moved(update.masters, other.masters)
            for path in update.params:
                for rank, seen in enumerate(ranks):
                    found = seen[number].params.get(path)
                    wanted, twin = _of_dtype(update, path, found), _of_dtype(other, path, found)
                    bound = 0.0 if path in update.exact else _bound(wanted, twin, moved)
                    largest = max(largest, bound / max(_top(update.params), 1e-300))
                    if first is None:
                        first = _compare(number, rank, path, found, wanted, bound)
        return Check(what=what, compared=True, bound=largest, difference=first)

    def check_losses(self, ranks: Sequence[Sequence[Seen]]) -> Check:
        """Compare the mean loss of each rank in each update."""
        low = self.task.precision.low
        first, largest = None, 0.0
        for number, (update, other) in enumerate(zip(self.updates, self.disturbed, strict=True)):
            size = float(update.losses.abs().max())
            moved = float((update.losses - other.losses).abs().max())
            bound = 0.0 if update.exact_losses else self._rounded(size, low) + MARGIN * moved
            largest = max(largest, bound / max(size, 1e-300))
            for rank, seen in enumerate(ranks):
                losses = seen[number].losses
                found = torch.stack(losses).double().mean() if losses else torch.tensor(torch.nan)
                wanted = update.losses[rank].mean()
                first = first or _compare(number, rank, "", found, wanted, bound)
        return Check(what="loss", compared=True, bound=largest, difference=first)

    def check_norms(self, ranks: Sequence[Sequence[Seen]]) -> Check:
        """Compare the norms that the driver tells."""
        first, largest, told = None, 0.0, False
        for number, (update, other) in enumerate(zip(self.updates, self.disturbed, strict=True)):
            bound = self._rounded(update.norm, self.task.low)
            bound += MARGIN * abs(update.norm - other.norm)
            for rank, seen in enumerate(ranks):
                norm = seen[number].norm
                if norm is None:
                    continue
                told, largest = True, max(largest, bound / max(update.norm, 1e-300))
                found, wanted = torch.tensor(norm).double(), torch.tensor(update.norm).double()
                first = first or _compare(number, rank, "", found, wanted, bound)
        return Check(what="norm", compared=told, bound=largest, difference=first)

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


def worst_over(mine: Tensor, theirs: Tensor, bound: Tensor | float) -> int | None:
    """The flat index of the element that is furthest over its bound; None if none is.

    A NaN is, on either side.
    """
    off = (mine - theirs).abs()
    if bool((off <= bound).all()):
        return None
    return int((off - bound).nan_to_num(torch.inf).flatten().argmax())


def _compare(
    number: int, rank: int, path: str, found: Tensor | None, wanted: Tensor, bound: float
) -> Difference | None:
    if found is None or found.shape != wanted.shape:
        found = torch.full_like(wanted, torch.nan, dtype=torch.float64)  # it is not there
    mine, theirs = found.double(), wanted.double()
    worst = worst_over(mine, theirs, bound)
    if worst is None:
        return None
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), wanted.shape))
    return Difference(
        update=number + 1,
        rank=rank,
        parameter=path,
        index=index,
        found=float(mine.flatten()[worst]),
        wanted=float(theirs.flatten()[worst]),
        bound=bound,
    )
