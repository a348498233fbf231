"""`Mirror`: copies of a training in the memory of its hosts, which outlives its processes."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fzero.checkpoint._mirror_file import copy_bytes
from fzero.checkpoint._mirror_home import (
    SLOTS,
    WRITERS,
    Home,
    MirrorOptions,
    leave,
    open_home,
    remove_all,
    require_empty,
    require_same_ranks,
    require_writer,
    sweep,
)
from fzero.checkpoint._mirror_hosts import restarts
from fzero.checkpoint._mirror_read import restored
from fzero.checkpoint._mirror_write import Flight, Slots, part_of, start_copy, wait_for_copies
from fzero.checkpoint._pieces import pieces_of_rank
from fzero.checkpoint._process_states import Held, held_by
from fzero.checkpoint._save import draft_of
from fzero.checkpoint.collective import everywhere
from fzero.checkpoint.engine_state import Driven
from fzero.checkpoint.folders import PathLike, as_path
from fzero.checkpoint.in_memory import let_go
from fzero.errors.check import is_count, require
from fzero.state import TrainState

Thing = TypeVar("Thing")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Count:
    """Updates that a mirror was told of."""

    updates: int = 0
    complete: int = 0  # the last one that is whole on all ranks
    is_own: bool = False  # whether this attempt has copied it


class Mirror:
    """Copies of every k-th update in the memory of hosts: a restart goes on from there, no disk.

    A launcher as `torchrun --max-restarts` starts all ranks again when one has died. What they held
    is lost; what is in /dev/shm is not. Each rank copies its own part, P / W elements of parameters
    and of what the optimizer keeps, there and into the memory of a rank on another host:

        mirror = fzero.checkpoint.Mirror(every=10)
        state, extra = mirror.restore(train_step.init(params, optimizer))
        for number in range(extra.get("next", 0), steps):
            state, loss = train_step(state, batches[number])
            mirror.update(state, extra={"next": number + 1})
        mirror.close()

    A copy is taken while the update waits, and sealed with a checksum and sent by a thread beside
    the next steps. There are two files of each part: the last update that is whole on all ranks
    stays until the next one is. So a host holds 2 (1 + copies) times the parts of its ranks;
    `fzero.plan(...).mirror_bytes(copies)` says how many bytes that is.

    The copies go when the run ends well: at `close()`, at the end of a `with` block without an
    exception, and else when all processes of a host have ended without one that nobody caught.
    `sys.exit(2)` is such an end, too; in a `with` block it keeps the copies.

    Args:
        folder: in a file system in memory, on each host; one run at a time uses it. Each host has a
            folder of its name in it. Default: one in /dev/shm, named after the user and the launch
            of torchrun; without torchrun only this process finds it again.
        every: k: the updates from one copy to the next. A restart repeats at most k of them.
        copies: on how many other hosts each part is kept, too; on all others, if there are fewer:
            so on one host there are none.

    Raises:
        LayoutError: for options that cannot be, and without a folder where there is no /dev/shm; in
            a call, for a folder of another user, or one that others can write to.

    Example:
        >>> import tempfile, torch, fzero
        >>> def state_of(value):
        ...     return fzero.init({"w": torch.full((3,), value)}, fzero.optim.sgd(0.1), stage=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mirror = fzero.checkpoint.Mirror(folder, every=1)
        ...     mirror.update(state_of(5.0), extra={"next": 1})
        ...     again = fzero.checkpoint.Mirror(folder, every=1)  # of a process that was restarted
        ...     state, extra = again.restore(state_of(0.0))
        ...     again.close()
        >>> fzero.full_params(state), extra
        ({'w': tensor([5., 5., 5.])}, {'next': 1})
    """

    def __init__(self, folder: PathLike | None = None, *, every: int, copies: int = 1) -> None:
        require("every", every, is_count, "an int of 1 or more: updates between copies")
        wanted = "an int of 0 or more: on how many other hosts a part is copied"
        require("copies", copies, lambda value: is_count(value, 0), wanted)
        where = None if folder is None else Path(os.path.abspath(as_path("Mirror", folder)))
        self._options = MirrorOptions(folder=where, every=every, copies=copies)
        self._home: Home | None = None
        self._count = _Count()
        self._slots: Slots = {}
        self._flight: Flight | None = None

    def update(self, state: TrainState | Driven, *, extra: Mapping[str, Any] | None = None) -> None:
        """Copy every k-th update that it is called after; otherwise return at once.

        Call it on all ranks after each update; the first and each k-th call are collectives. All
        that `fzero.checkpoint.save` saves is copied: also random generators, buffers of an engine's
        module, options of its optimizer. With virtual ranks, give the stacked state.

        Args:
            state: one state or engine, idle, of the same ranks each time.
            extra: as for `save`: what JSON can hold, e.g. the position in the data; rank 0's.

        Raises:
            PhaseError: for a state between gradient and update, and where copies are there that
                nobody has restored.
            DonatedError: for a used-up one.
            LayoutError: for an `extra` or an optimizer state that cannot be copied.
            AxisError: when the ranks are at different updates, or others than before.
            CheckpointError: for too little shared memory, with both numbers: at the first call, if
                not by `restore` before; and what went wrong with the copies before.
        """
        updates = self._count.updates + 1
        if self._home is None:
            self._open(held_by("Mirror.update", state, apart=True), require_empty)
        if updates % self._options.every == 0:
            self._copy(state, extra, updates)
        elif self._flight is not None:
            self._flight.sealed.wait()  # so that a restart repeats no more than k updates
        self._count = replace(self._count, updates=updates)

    def restore(self, like: Thing) -> tuple[Thing, dict[str, Any]]:
        """Return the newest update that is whole somewhere, placed as `like` is. A collective.

        Each rank reads what it needs from the memory of its own host, or is sent it by another; the
        number of ranks, the stage and the hosts may be others than before. A damaged copy is passed
        over for a good one of the same update, or else for the update before. Random generators are
        set as by `load`.

        Args:
            like: as for `fzero.checkpoint.load`: a new state, or an engine, which gets the values.

        Returns:
            The state or engine, and the `extra` of that update. Without copies, as at the first
            start: `like` itself, and {}.

        Raises:
            LayoutError: for copies of another model or optimizer, naming every difference.
            CheckpointError: where copies are left and no update is whole; for too little shared
                memory.
            PhaseError: inside a coalesced step.
        """
        held = held_by("Mirror.restore", like, apart=True)
        found = self._open(held, lambda home: restored(home, held))
        assert self._home is not None
        WRITERS[self._home.folder] = self._home.attempt
        if found is None:
            return like, {}
        self._count = _Count(updates=found.update, complete=found.update)
        return found.thing, found.extra

    def close(self) -> None:
        """Remove the copies: the run is over. A collective, if anything was copied or restored.

        Raises:
            CheckpointError: what went wrong with the last copies, which stay then; of a rank that
                is gone, `AxisError`.
        """
        home, flight = self._home, self._flight
        self._forget()
        if home is None:
            return
        land = (lambda: None) if flight is None else flight.land
        everywhere(home.ranks, land, what="wait for the copies")
        if home.hosts.leads:
            remove_all(home.folder)
        let_go(home.folder.parent)

    def _open(self, held: Held, begin: Callable[[Home], T]) -> T:
        """Make the folders, as a new attempt; return what it begins with. A collective."""
        wait_for_copies()
        self._forget()
        home = open_home(self._options, held.processes, lambda: copy_bytes(part_of(held)))
        begun = begin(home)
        self._home = home
        atexit.register(self._ends)
        return begun

    def _copy(self, thing: Any, extra: Mapping[str, Any] | None, updates: int) -> None:
        home, flight = self._home, self._flight
        held = held_by("Mirror.update", thing, apart=True)
        assert home is not None
        require_same_ranks(home, held)
        self._flight = None  # whether it has landed, or raises now

        def ready() -> None:
            require_writer(home)
            if flight is not None:
                flight.land()

        draft = draft_of(held, extra, ready=ready)
        if flight is not None:  # and so it has landed on all ranks
            if not self._count.is_own:
                everywhere(home.ranks, lambda: sweep(home), what=f"sweep {home.folder}")
            self._count = replace(self._count, complete=flight.update, is_own=True)
        complete = self._count.complete
        self._flight = start_copy(home, draft, self._slots, update=updates, complete=complete)

    @property
    def _outlives(self) -> bool:
        """Whether a later process finds the copies, if this one ends with an error."""
        done, most = restarts()
        return self._options.folder is not None or done < most

    def _ends(self) -> None:
        """Leave at the end of the process, unclosed."""
        failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self._home is not None and not (failed and self._outlives):
            leave(self._home)

    def _forget(self) -> None:
        """Hold nothing any more; the copies stay."""
        atexit.unregister(self._ends)
        if self._home is not None and WRITERS.get(self._home.folder) == self._home.attempt:
            del WRITERS[self._home.folder]
        self._home, self._flight, self._slots, self._count = None, None, {}, _Count()

    def __enter__(self) -> Mirror:
        """Return the mirror itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it; after an exception, leave the copies."""
        if error[0] is None:
            self.close()
        elif self._outlives:
            self._forget()

    def __repr__(self) -> str:
        options, home = self._options, self._home
        if home is None:
            return f"<Mirror: every {options.every} updates, nothing is copied yet>"
        return (
            f"<Mirror: every {options.every} updates, in {home.folder}; each part is on "
            f"{home.hosts.held} other hosts; update {self._count.complete} is whole>"
        )


def part_bytes(state: TrainState, rank: int) -> int:
    """Return the bytes of what one rank copies of a state, but for the header."""
    return copy_bytes(pieces_of_rank(state, rank))


def mirror_bytes(part_bytes: int, copies: int) -> int:
    """Return the host memory for each rank: 2 (1 + copies) parts.

    A host keeps as many parts of other hosts' ranks as others keep of its own.
    """
    return SLOTS * (1 + copies) * part_bytes
