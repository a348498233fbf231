"""Run a step of saving or loading on all ranks: an error of one rank is raised on all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fzero.collectives import gather_objects, gather_objects_beside
from fzero.errors import CheckpointError as CheckpointError
from fzero.errors import FzeroError, LostRankError
from fzero.ranks.mesh import Axis, axis_index
from fzero.transforms.simulate import simulate

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that save or load together, and the group over which they compare outcomes."""

    axis: Axis
    beside: bool = False  # in a thread beside the training: over a group that only saves use

    def tell(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value`, in rank order. A collective."""
        tell = gather_objects_beside if self.beside else gather_objects
        return tell(value, self.axis)


def _as_fzero_error(what: str, error: Exception) -> FzeroError:
    """Return an fzero error as it is; of the file system or of torch a `CheckpointError`.

    It has the first line of `error` and not its traceback, which is torch's own: tens of frames,
    and advice about other programs.
    """
    if isinstance(error, FzeroError):
        return error
    seen: BaseException = error
    while not isinstance(seen, OSError) and seen.__context__ is not None:
        seen = seen.__context__  # of the disk: torch says something else when a write has failed
    seen = seen if isinstance(seen, OSError) else error
    first = next(iter(str(seen).splitlines()), "")
    return CheckpointError(
        f"could not {what}: {type(seen).__name__}: {first}",
        cause="a full disk, no permission, a damaged file, or a path that not all ranks share.",
        fix="free the space, or choose another path or copy; what was saved before is still there.",
    )


def damaged(what: object, seen: str) -> CheckpointError:
    """Return a `CheckpointError` for content that `save` never writes."""
    return CheckpointError(
        f"the checkpoint is damaged: {what} {seen}.",
        cause="a copy that was cut off, a full disk, a path that not all ranks share, or files "
        "that another program wrote.",
        fix="use another copy of the checkpoint, or an older one. Nothing was changed.",
    )


@contextmanager
def on_all_ranks(ranks: Ranks, *, what: str) -> Iterator[None]:
    """Run the block on every rank. A collective at its end, and a barrier.

    Raises what the first rank raised that failed, on all ranks: an fzero error as it is, any other
    as a `CheckpointError` that says `what` was being done. Ranks may wait for their disks: no
    longer than the timeout.
    """
    problem: FzeroError | None = None
    try:
        yield
    except Exception as error:  # whatever it is: the other ranks wait to hear of it
        problem = _as_fzero_error(what, error)
    _outcomes(ranks, problem, None, what)


def results_of_ranks(ranks: Ranks, do: Callable[[], T], *, what: str) -> list[T]:
    """Return what `do()` returned on each rank, in rank order; raise as `on_all_ranks`."""
    result: list[T] = []
    problem: FzeroError | None = None
    try:
        result.append(do())
    except Exception as error:
        problem = _as_fzero_error(what, error)
    return [own[0] for own in _outcomes(ranks, problem, result, what)]


def _outcomes(ranks: Ranks, problem: FzeroError | None, result: Any, what: str) -> list[Any]:
    """Return the result of each rank, unless one has a problem: that is raised on all."""
    try:
        outcomes = ranks.tell((problem, result))
    except LostRankError as error:
        if error.ranks and not error.late:
            raise
        who = f"rank {error.ranks[0]}" if error.ranks else "this rank"
        raise CheckpointError(
            f"could not {what}: {who} was not ready within the timeout of the process group.",
            cause="a slow disk, or a rank that is elsewhere in the program.",
            fix="give init_process_group a longer timeout (FZERO_TIMEOUT_S, of a group that fzero "
            "starts), and start again: the group is broken. What was saved before is still there.",
        ) from error
    for rank, (error, _) in enumerate(outcomes):
        if error is not None:
            if ranks.axis.size > 1:
                error.add_note(f"(raised on rank {rank} of {ranks.axis.size})")
            error.__suppress_context__ = True  # what torch has raised
            raise error
    return [own for _, own in outcomes]


def run_on_all_ranks(ranks: Ranks, do: Callable[[], T], *, what: str) -> T:
    """Return `do()` once it has succeeded on every rank; raise as `on_all_ranks`."""
    with on_all_ranks(ranks, what=what):
        result = do()
    return result


def from_first(ranks: Ranks, do: Callable[[], T], *, what: str) -> T:
    """Call `do()` on rank 0; return its result on every rank. Raises as `results_of_ranks`."""
    first: Any = results_of_ranks(ranks, lambda: None if ranks.axis.rank else do(), what=what)[0]
    return first


def on_ranks(size: int, do: Callable[[int], T]) -> list[T]:
    """Return what `do(rank)` returns on each of so many virtual ranks."""
    found: list[Any] = [None] * size

    def body() -> None:
        found[axis_index()] = do(axis_index())

    simulate(body, world_size=size)()
    return found


def written_by_first(
    ranks: Ranks,
    folder: Path,
    *,
    begin: Callable[[Path], None],
    values: Iterable[T],
    write: Callable[[Path, T], None],
    finish: Callable[[Path], None],
) -> None:
    """Let rank 0 write values, which all ranks gather, whole or not at all. A collective.

    begin: called on every rank with a hidden path in `folder`, which is there for rank 0 alone, and
        is removed at the end.
    write: called on rank 0, with that path and each of the values.
    finish: called on rank 0, with that path: gives what is there its place.

    Raises as `run_on_all_ranks` does, when all values were gathered: the other ranks are on their
    way to the next one while rank 0 writes.
    """
    partial, first = folder / f".partial-{secrets.token_hex(8)}", ranks.axis.rank == 0
    problem: list[Exception] = []

    def end() -> None:
        if problem:
            raise problem[0]
        if first:
            finish(partial)

    try:
        run_on_all_ranks(ranks, lambda: begin(partial), what=f"write {folder}")
        for value in values:
            if first and not problem:
                try:
                    write(partial, value)
                except Exception as error:
                    problem.append(error)
        run_on_all_ranks(ranks, end, what=f"write {folder}")
    finally:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
