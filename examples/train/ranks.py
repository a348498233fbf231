"""What the ranks tell each other beside the training, by torch's own collectives of objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

import fzero

T = TypeVar("T")


def everyones(value: T) -> list[T]:
    """Return the value of each rank. A collective: all ranks call it.

    Example:
        >>> everyones("one rank")
        ['one rank']
    """
    size = fzero.axis_size()
    if size == 1:
        return [value]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, value)
    return found


def any_rank(value: bool) -> bool:
    """Return whether `value` holds on any rank. A collective."""
    return any(everyones(value))


def any_signal(received: Sequence[int], device: torch.device) -> bool:
    """Return whether any rank has received a signal. A collective: one number, in each step.

    Ranks that get a signal at different moments must not leave the loop at different steps.
    """
    return bool(fzero.pmean(torch.tensor(float(bool(received)), device=device)))


def by_first(call: Callable[[], T]) -> T:
    """Return what `call` returns on rank 0, on every rank, or raise its error there.

    Rank 0 alone writes into the folder of the run, so that it is the one that looks, too.
    """
    result: T | fzero.FzeroError | None = None
    if fzero.axis_index() == 0:
        try:
            result = call()
        except fzero.FzeroError as error:
            result = error
    result = everyones(result)[0]
    if isinstance(result, fzero.FzeroError):
        raise result
    return cast(T, result)


def require_same(lines: list[str], *, what: str) -> None:
    """Raise on every rank if the ranks have not the same lines.

    Raises:
        MismatchError: it shows the first line that differs, of rank 0 and of the first rank that
            has another.
    """
    all_lines = everyones(lines)
    for rank, others in enumerate(all_lines):
        for mine, other in zip(all_lines[0], others, strict=True):
            if mine != other:
                raise fzero.MismatchError(
                    f"the ranks disagree about {what}: rank 0 has {mine}, rank {rank} has {other}.",
                    cause="ranks that were started by hand, with other options or another Python.",
                    fix="start all ranks by one command, on machines with the same text.",
                )
