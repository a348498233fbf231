"""What ranks must agree on before they start: the same layout, and the same first values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from fzero.collectives import _lowering as lowering
from fzero.collectives._channel import first_difference, parts_that_differ
from fzero.collectives._performers import SETUP_OR_CHECKPOINT, performer_of
from fzero.errors import AxisError, FzeroError, MismatchError
from fzero.ranks.mesh import Axis, Runtime

Explains = Callable[[int, str, str], FzeroError | None]
"""(rank, the first line of rank 0 that differs, its own) -> an error that says more; None."""


def assert_same_everywhere(
    lines: Sequence[str], axis: Axis, *, what: str, explains: Explains | None = None
) -> None:
    """Raise `AxisError` on every rank, naming the first rank and line that differ.

    One round with digests; the lines themselves travel only when the digests differ.
    """
    if axis.runtime is Runtime.LOCAL:
        return
    performer = performer_of(axis)
    assert performer is not None
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    if len(performer.call(SETUP_OR_CHECKPOINT, number)) == 1:
        return
    raise disagreement(performer.tell(list(lines)), what=what, explains=explains)


def disagreement(
    everyone: Sequence[Sequence[str]], *, what: str, explains: Explains | None = None
) -> FzeroError:
    """Return the error that names the first rank and line that differ, of the lines of each."""
    rank, _, mine, theirs = first_difference(everyone)
    if explains is not None and (said := explains(rank, mine, theirs)) is not None:
        return said
    mine, theirs = parts_that_differ(mine, theirs)
    return MismatchError(
        f"the ranks disagree about {what}: rank 0 has {mine}, rank {rank} has {theirs}.",
        cause="the model, an option or a branch of the step depends on what differs by rank.",
        fix=f"build the same on every rank; compare ranks 0 and {rank} first.",
    )


@contextmanager
def told_everywhere(axis: Axis, *, what: str) -> Generator[None]:
    """Tell of an error in this block to ranks that wait in `assert_same_everywhere`."""
    try:
        yield
    except Exception as error:
        with suppress(AxisError):  # this rank's own error says more
            assert_same_everywhere([f"{type(error).__name__}: {error}"], axis, what=what)
        raise


def broadcast(values: Sequence[Tensor], axis: Axis, source: int) -> list[Tensor]:
    """Each [*t] -> [*t]: the values of rank `source` of the axis, on every rank."""
    if axis.runtime is Runtime.LOCAL:
        return list(values)
    with torch.no_grad():
        wanted = [value.detach() for value in values if value.numel()]
        done = iter(lowering.broadcast(wanted, axis, source))
        return [next(done) if value.numel() else value.detach().clone() for value in values]
