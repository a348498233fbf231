"""One outcome for all ranks: what fails on one of them is raised on every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fzero.collectives import gather_objects
from fzero.errors import FzeroError, explain
from fzero.mesh import Axis

T = TypeVar("T")


class CheckpointError(FzeroError, OSError):
    """A checkpoint that is missing or damaged, or could not be written; the state is still good."""


def could_not(what: str, error: Exception) -> CheckpointError:
    """Return the error that says what the disk, or torch, did not let us do.

    It has the first line of `error` and not its traceback, which is torch's own: tens of frames,
    and advice about other programs.
    """
    first = next(iter(str(error).splitlines()), "")
    return CheckpointError(
        explain(
            f"could not {what}: {type(error).__name__}: {first}",
            cause="a full disk, no permission, a damaged file, or a path that not all ranks share.",
            fix="free the space, or choose another path or copy; what was saved before is still "
            "there.",
        )
    )


def said_by(error: FzeroError, rank: int, axis: Axis) -> FzeroError:
    """Return `error` with the rank in its notes, where there are several."""
    if axis.size > 1:
        error.add_note(f"(raised on rank {rank} of {axis.size})")
    return error


def everywhere(axis: Axis, do: Callable[[], T], *, what: str) -> T:
    """Return `do()` once it has succeeded on every rank. A collective, and a barrier.

    Raises what the first rank raised that failed, on all ranks: an fzero error as it is, any
    other as a `CheckpointError` that says `what` was being done.
    """
    found: list[T] = []
    problem: FzeroError | None = None
    try:
        found.append(do())
    except FzeroError as error:
        problem = error
    except Exception as error:  # whatever it is: the other ranks wait to hear of it
        problem = could_not(what, error)
    for rank, one in enumerate(gather_objects(problem, axis)):
        if one is not None:
            raise said_by(one, rank, axis)
    return found[0]


def gathered(axis: Axis, do: Callable[[], T], *, what: str) -> list[T]:
    """Return what `do()` returned on every rank, in rank order; raise as `everywhere` does."""
    return gather_objects(everywhere(axis, do, what=what), axis)


def first_of(axis: Axis, do: Callable[[], T], *, what: str) -> T:
    """Call `do()` on rank 0; return its result on every rank. Raises as `everywhere` does."""
    mine = everywhere(axis, lambda: [do()] if axis.rank == 0 else [], what=what)
    return gather_objects(mine, axis)[0][0]
