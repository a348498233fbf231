"""What a flight recorder holds: states now and then, and each call's inputs and digests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fzero.checkpoint.collective import Ranks
from fzero.errors import LayoutError
from fzero.ranks.mesh import Axis
from fzero.tools.record._files import read_folder, write_folder
from fzero.tools.record._records import RecordedPart, Snapshot
from fzero.transforms.pattern import Pattern


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording(RecordedPart):
    """A part of a run: what `fzero.replay` and `fzero.bisect` take.

    Attributes:
        form: stage, ranks and leaves of its state.
        ranks: those whose part it has: one of a process, or all.
        kept: states, the oldest first; calls before the first one are not held.
        calls: without a gap, the oldest first.
        updates: that the state had made after the last call.
        last: [R, n] digests of the state after the last call.
        step_fn: what was recorded; None of a recording that was loaded.
        origin: of its state, setup and local updates; None of a recording that was loaded.
        processes: of the run; None of a recording that was loaded.
    """

    ranks: tuple[int, ...]
    step_fn: Callable[..., Any] | None = None
    origin: Pattern | None = None
    processes: Ranks | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in host memory: of the states that are kept there, the inputs and the digests."""
        return sum(one.nbytes for one in (*self.kept, *self.calls))

    def call_of(self, update: int) -> int:
        """Return the place in `calls` of the call that made an update, which counts from 1.

        Raises `LayoutError` for an update that is not recorded.
        """
        ends = [*(call.updates for call in self.calls[1:]), self.updates]
        for place, (call, end) in enumerate(zip(self.calls, ends, strict=True)):
            if call.updates < update <= end:
                return place
        raise LayoutError(
            f"update {update} is not recorded: {self!r}.",
            cause="an update from before the oldest state that was kept, or a call that made none.",
            fix="choose a recorded one; record with keep=None to keep them all.",
        )

    def rows_after(self, place: int) -> Tensor | None:
        """Return the digests [R, n] of each rank's part after a call; None where none are.

        So it is before a call that raised: what it has changed of an engine is not known.
        """
        if place + 1 == len(self.calls):
            return self.last
        after = self.calls[place + 1]
        return after.words if after.number == self.calls[place].number + 1 else None

    def state_before(self, number: int) -> Snapshot | None:
        """Return the state that was kept before a call, if it was."""
        return next((one for one in self.kept if one.call == number), None)

    def save(self, folder: str | Path) -> None:
        """Write it to a folder, for `fzero.load_recording`. A collective of the ranks of the run.

        A recording that is there already counts until this one is whole; then it is removed.

        Raises `LayoutError` for inputs that are no tensors, numbers, texts, or tuples, lists and
        dicts of them, and for a recording that was loaded from there; `CheckpointError` if the disk
        does not take it.
        """
        ranks = self.processes or Ranks(axis=Axis(size=1))
        write_folder(self, Path(folder), self.ranks, ranks)

    def __repr__(self) -> str:
        form, held = self.form, "nothing"
        if self.calls:
            held = f"updates {self.calls[0].updates + 1} to {self.updates}"
        ranks = "all ranks" if len(self.ranks) == form.world_size else f"rank {self.ranks[0]}"
        return (
            f"Recording({held} of a {form.driver} at stage {form.stage}, {ranks} of "
            f"{form.world_size}, {len(self.kept)} states, {self.nbytes:,} bytes)"
        )


def require_all_ranks(recording: Recording, what: str) -> None:
    """Raise `LayoutError` for a recording of one process of several."""
    if len(recording.ranks) != recording.form.world_size:
        raise LayoutError(
            f"{what} needs all ranks; this is {recording!r}.",
            cause="a recording of one process of a run on several.",
            fix="recording.save(folder) on every rank, and fzero.load_recording(folder).",
        )


def load_recording(folder: str | Path) -> Recording:
    """Return what `recording.save(folder)` wrote on all ranks. No collective, no pickle.

    Args:
        folder: that was given to `save`, with the parts of all ranks.

    Returns:
        A recording of all ranks, without functions: `replay` is then given the step, and `init` or
        `engine`.

    Raises:
        CheckpointError: for a folder without a recording, and for one that is not as it was saved:
            a file or a field that is missing, changed or another's.

    Example:
        >>> import tempfile, torch, fzero
        >>> step = fzero.record(fzero.shard(lambda s, x: (s, x), stage=0), every=1)
        >>> state, _ = step(step.init({"w": torch.ones(2)}, fzero.optim.sgd(0.5)), 3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     step.recording.save(folder)
        ...     fzero.load_recording(folder).calls[0].inputs
        (((3,), {}),)
    """
    files = read_folder(Path(folder))
    return Recording(
        form=files.form,
        ranks=tuple(range(files.form.world_size)),
        kept=files.kept,
        calls=files.calls,
        updates=files.updates,
        last=files.last,
    )
