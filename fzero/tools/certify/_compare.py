"""Compare the numbers of the ranks with those of one process; find the first difference."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.tools.certify._drivers import Seen
from fzero.tools.certify._reference import ExpectedUpdate
from fzero.tools.compare import eps_of, furthest, largest

STORED = 3.0  # times the spacing of numbers at the largest one of a parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class CellDifference:
    """A number that differs from that of the one-process step by more than its bound."""

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
    """The result for one quantity of a cell, over all updates, ranks and parameters."""

    what: str  # "loss", "gradient", "norm" or "update"
    compared: bool  # False if the driver does not report it
    bound: float  # the largest that was allowed, relative to the largest number; 0: bit for bit
    difference: CellDifference | None  # the first; None if all agree


class _Number(NamedTuple):
    """A value of a rank, and that of one process: a number, or a parameter."""

    rank: int
    path: str
    found: Tensor | None  # None: it is not there
    wanted: Tensor
    bound: Tensor | float  # of each element, or of all
    size: float  # of the largest number of its kind


def check(
    what: str,
    wanted: Sequence[ExpectedUpdate],
    ranks: Sequence[Sequence[Seen]],
    places: Sequence[int] = (),
) -> Check:
    """Compare "loss", "norm", or the parameters (any other name) with those of one process.

    `places` says which of the batches each rank has read, of which losses are compared.
    """
    of_losses = functools.partial(_losses, places=places)
    numbers = {"loss": of_losses, "norm": _norms}.get(what, _params)
    first, top, compared = None, 0.0, False
    for k, update in enumerate(wanted):
        for one in numbers(update, [seen[k] for seen in ranks]):
            allowed = largest([torch.as_tensor(one.bound)])
            compared, top = True, max(top, allowed / max(one.size, 1e-300))
            first = first or _difference(k + 1, one)
    return Check(what=what, compared=compared, bound=top, difference=first)


def _params(update: ExpectedUpdate, ranks: Sequence[Seen]) -> Iterator[_Number]:
    """Yield the parameters of each rank with those expected, after an update."""
    size = largest([*update.params.values()])
    for path in update.params:
        for rank, seen in enumerate(ranks):
            found = seen.params.get(path)
            wanted = _of_dtype(update, path, found)
            yield _Number(rank, path, found, wanted, _bound(update, path, wanted), size)


def _losses(
    update: ExpectedUpdate, ranks: Sequence[Seen], *, places: Sequence[int]
) -> Iterator[_Number]:
    """Yield the mean loss of each rank, or of the ranks with the pieces of a batch."""
    size, bound = largest([update.losses]), update.losses_reach
    for place, wanted in enumerate(update.losses):
        sharing = [rank for rank, its in enumerate(places) if its == place]
        losses = [loss for rank in sharing for loss in ranks[rank].losses]
        if losses:  # else the step has hidden them
            found = torch.stack(losses).double().mean()
            yield _Number(sharing[0], "", found, wanted.mean(), bound, size)


def _norms(update: ExpectedUpdate, ranks: Sequence[Seen]) -> Iterator[_Number]:
    """Yield the norms of the ranks whose driver reports them, with that expected."""
    for rank, seen in enumerate(ranks):
        if seen.norm is not None:
            found, wanted = torch.tensor([seen.norm, update.norm], dtype=torch.float64)
            yield _Number(rank, "", found, wanted, update.norm_reach, update.norm)


def _bound(update: ExpectedUpdate, path: str, wanted: Tensor) -> Tensor | float:
    """Return the bound of a parameter: its reach, and the rounding of the addition."""
    if path in update.exact or not wanted.numel():
        return 0.0
    return update.reach[path] + STORED * eps_of(wanted.dtype) * largest([wanted])


def _of_dtype(update: ExpectedUpdate, path: str, found: Tensor | None) -> Tensor:
    """Return the expected parameter, or its master if `found` is in the dtype of a master."""
    params = update.params[path]
    if found is not None and found.dtype != params.dtype and path in update.masters:
        return update.masters[path]
    return params


def _difference(update: int, one: _Number) -> CellDifference | None:
    found, theirs = one.found, one.wanted.double()
    if found is None or found.shape != theirs.shape:
        found = torch.full_like(theirs, torch.nan)
    worst = furthest(
        found.double().flatten(), theirs.flatten(), _flat(one.bound), shape=theirs.shape
    )
    return worst and CellDifference(
        update=update,
        rank=one.rank,
        parameter=one.path,
        index=worst.index,
        found=worst.b,
        wanted=worst.a,
        bound=worst.bound,
    )


def _flat(bound: Tensor | float) -> Tensor | float:
    return bound.flatten() if isinstance(bound, Tensor) else bound
