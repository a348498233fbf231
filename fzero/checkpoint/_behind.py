"""Saves in flight: a thread that writes while the training goes on, and how it ended."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from fzero.errors import AxisError, CheckpointError, explain
from fzero.ranks.mesh import Axis, Runtime, own_group

_EARLIER: list[AsyncSave] = []
"""The last save that this process started, until somebody has got its result."""

_GROUPS: dict[tuple[Axis, str], Axis] = {}
"""For each axis, and what writes, the same ranks with a process group of its own: made once."""


class AsyncSave:
    """A save in flight. `save_async` returns one."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._future: Future[None] = Future()
        self._asked = False
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether its thread is of this process: one that was forked meanwhile has none."""
        return self._process == os.getpid()

    def done(self) -> bool:
        """Return whether it is over, well or not. No collective, and no wait."""
        return not self.is_here or self._future.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is there, for `timeout` seconds at most.

        Raises:
            TimeoutError: if it is not over by then; it goes on.
            CheckpointError: what went wrong, on every rank; what was there before is still there.
                In a process that was forked meanwhile, always.
        """
        if not self.is_here:
            raise CheckpointError(
                f"{self._what} was begun by process {self._process}; this is {os.getpid()}.",
                cause="a process that was forked while the save was in flight: it has no thread "
                "that writes.",
                fix="ask in the process that began it, which goes on with it.",
            )
        try:
            self._future.result(timeout)
        except TimeoutError:
            if self._future.done():
                raise
            raise TimeoutError(
                explain(
                    f"{self._what} is not over after {timeout} s.",
                    cause="a slow disk, or another rank that has not come to save_async.",
                    fix="wait longer; the save goes on.",
                )
            ) from None
        finally:
            self._asked = self._asked or self._future.done()

    def __repr__(self) -> str:
        if not self.is_here or not self.done():
            return f"<{self._what}: in flight{'' if self.is_here else ' elsewhere'}>"
        return f"<{self._what}: {'failed' if self._future.exception() else 'done'}>"


def start_thread(run: Callable[[], None], *, what: str) -> AsyncSave:
    """Run in a thread, as the save that the next one waits for."""
    handle = run_beside(run, what=what)
    _EARLIER[:] = [handle]
    return handle


@atexit.register
def _say_what_failed() -> None:
    """End a program with an error, if nobody has heard that its last save failed.

    All threads are over then. Only `os._exit` sets the status of a program that ends; what was
    registered before this, by torch and Python, has nothing to do for one that fails.
    """
    for handle in _EARLIER:
        if handle.is_here and not handle._asked and (error := handle._future.exception()):
            traceback.print_exception(error)
            text = explain(
                f"{handle._what} failed, and nobody asked for its result.",
                cause="what is said above; or torch.distributed.destroy_process_group() before the "
                "save was over.",
                fix="call result() of what save_async returned before the end. What was saved "
                "before is still there.",
            )
            print(text, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def run_beside(run: Callable[[], None], *, what: str) -> AsyncSave:
    """Run in a thread, which the interpreter waits for when it ends."""
    handle = AsyncSave(what)

    def body() -> None:
        try:
            run()
        except BaseException as error:  # `result` raises it, whatever it is
            handle._future.set_exception(error)
        else:
            handle._future.set_result(None)

    threading.Thread(target=body, name=what, daemon=False).start()
    return handle


def wait_for_earlier(*, raises: bool = True) -> None:
    """Wait for a save in flight; raise its error, if nobody has asked for its result."""
    for handle in [one for one in _EARLIER if one.is_here]:
        if raises and not handle._asked:
            _EARLIER.clear()
            handle.result()
        else:
            handle._future.exception()


def group_beside(axis: Axis, *, use: str = "saves") -> Axis:
    """Return the same ranks with a group that only one use has. A collective at first.

    use: of which one thread is in flight at a time.
    """
    if axis.runtime is not Runtime.PROCESSES:
        return axis
    found = _GROUPS.get((axis, use))
    if found is not None:
        with suppress(AxisError):  # torch.distributed may have been started anew
            found.group()
            return found
    found = _GROUPS[axis, use] = own_group(axis, backend="gloo")
    return found
