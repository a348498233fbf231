"""Virtual ranks: W threads of this process that run one at a time and wait at collectives.

A rank runs alone until it reaches a collective; then it is the turn of the next rank. So a run
is deterministic, every rank executes the very kernels that a real process would, any Python is
allowed (also code that differs by rank), and each rank has a random stream of its own. The
threads exist only inside `run_ranks`; nothing outlives the call.

What a collective gives is made once, by the rank that comes to it last, before any other goes on.
So the work of a rank does not grow with the number of ranks, and nobody copies what it hands in.
"""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fzero.context.current_rank import BASE_NESTING, Here, Make, be, current_ranks, ranks_run
from fzero.context.modes import Ambient
from fzero.context.rng import TorchGlobals
from fzero.errors import AxisError, MismatchError, PeerFailedError


class _Aborted(BaseException):
    """Unwinds a rank whose peer has failed; never leaves this file."""


def run_ranks(
    body: Callable[[int], Any], size: int, names: Sequence[str] | None = None
) -> list[Any]:
    """Run `body(rank)` on `size` virtual ranks; return the results in rank order.

    names: of the ranks, as errors say them.

    Every rank starts from the caller's random state (as processes with one seed do), and has its
    modes (no_grad, autocast, the default device); afterwards the caller's state is the one that
    rank 0 reached. The first exception of any rank is raised here, with the rank in its notes.
    """
    # Python's garbage collector runs after some number of new objects, and looks at those of all
    # ranks: its work would grow with the square of their number. So it runs as often for each rank
    # as in a process of its own.
    new, *older = gc.get_threshold()
    gc.set_threshold(min(new * size, 2**31 - 1), *older)
    try:
        return _Turns(body, size, names).run()
    finally:
        gc.set_threshold(new, *older)


class _Outcome(NamedTuple):
    """What a collective gives to every rank."""

    made: Any = None
    error: Exception | None = None


class _Turns:
    """Who may run, what was handed in for the current collective, and how each rank ended."""

    def __init__(
        self, body: Callable[[int], Any], size: int, names: Sequence[str] | None = None
    ) -> None:
        self.body, self.size = body, size
        self.names = names or [f"rank {rank}" for rank in range(size)]
        self.noted = names or [f"virtual rank {rank} of {size}" for rank in range(size)]
        self.turn = [threading.Lock() for _ in range(size)]  # a rank has its turn: it can acquire
        for turn in self.turn:
            turn.acquire()
        self.globals = TorchGlobals.take().of_ranks(size, BASE_NESTING)
        self.waiting: dict[int, tuple[str, Any, Make]] = {}
        self.outcomes: dict[int, _Outcome] = {}  # what each rank is to get from the last collective
        self.results: dict[int, Any] = {}
        self.error: BaseException | None = None

    def run(self) -> list[Any]:
        ambient = Ambient.take()
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._thread, rank, ambient),
                name=f"fzero-rank{rank}",
                daemon=True,
            )
            for rank in range(self.size)
        ]
        # Inside of a virtual rank it is open already, for there is one for the whole process.
        nested = current_ranks() is not None
        with nullcontext() if nested else forward_ad.dual_level(), ranks_run():
            started = threads[: self._start(threads)]
            if started:
                self.turn[0].release()
            try:
                for thread in started:
                    thread.join()
            except BaseException as interrupt:  # it ends each rank at its next collective
                self.error = interrupt
                for thread in started:
                    thread.join()
        self.globals[0].with_jvp_nesting(BASE_NESTING if nested else 0).put()
        if self.error is not None:
            raise self.error
        return [self.results[rank] for rank in range(self.size)]

    def _start(self, threads: list[threading.Thread]) -> int:
        """Start the threads; return how many there are. If not all, those only end."""
        for rank, thread in enumerate(threads):
            try:
                thread.start()
            except RuntimeError as error:
                self.error = AxisError(
                    f"{rank} of {self.size} virtual ranks were started: {error}.",
                    cause="each is a thread, and the system or a container has a limit.",
                    fix="simulate fewer ranks, or raise the limit (ulimit -u, pids.max).",
                )
                self.error.__cause__ = error
                self.results = dict.fromkeys(range(rank, self.size))
                return rank
        return self.size

    def _thread(self, rank: int, ambient: Ambient) -> None:
        def exchange(op: str, value: Any, make: Make) -> Any:
            return self._exchange(rank, op, value, make)

        self.turn[rank].acquire()
        be(Here(rank, self.size, exchange, {}))
        # On CUDA all backward passes share one device thread unless told otherwise; a rank that
        # waits there in a collective would stop every other rank.
        self.globals[rank].put()
        with torch.autograd.set_multithreading_enabled(False), ambient.entered():
            try:
                if self.error is None:
                    self.results[rank] = self.body(rank)
            except _Aborted:
                pass  # the rank that failed has already left its error
            except BaseException as raised:
                # A rank that raised because another one did says less than that other one.
                if self.error is None or isinstance(self.error, PeerFailedError):
                    self.error = raised
                    self.error.add_note(f"(raised on {self.noted[rank]})")
        self.globals[rank] = TorchGlobals.take()
        self.results.setdefault(rank, None)
        self._pass_on(rank)

    def _exchange(self, rank: int, op: str, value: Any, make: Make) -> Any:
        """Hand in a value; return what is made of those of all ranks: one object, for all of them.

        The rank that comes last makes it, before any other goes on: so nobody needs a copy of what
        it hands in. What all ranks get is not to be written to.
        """
        self.waiting[rank] = (op, value, make)
        self.globals[rank] = TorchGlobals.take()
        self._pass_on(rank)
        self.turn[rank].acquire()
        self.globals[rank].put()
        outcome = self.outcomes.pop(rank, None)
        if outcome is None or (outcome.error is not None and self.error is not None):
            raise _Aborted
        if outcome.error is not None:
            raise outcome.error
        return outcome.made

    def _pass_on(self, rank: int) -> None:
        """Let a rank run that still can; complete the collective if all are in it."""
        if len(self.waiting) == self.size and self.error is None:
            self._complete()
        elif self.waiting and len(self.waiting) + len(self.results) == self.size:
            self.error = self.error or self._unmatched()
        for step in range(1, self.size + 1):  # nearly always the first one can
            peer = (rank + step) % self.size
            if peer not in self.results and (peer not in self.waiting or self.error is not None):
                self.waiting.pop(peer, None)
                self.turn[peer].release()
                return

    def _complete(self) -> None:
        ops = {rank: op for rank, (op, _, _) in self.waiting.items()}
        if len(set(ops.values())) > 1:
            self.error = different({self.names[rank]: ops[rank] for rank in range(self.size)})
            return
        everyone, make = [self.waiting[rank][1] for rank in range(self.size)], self.waiting[0][2]
        self.waiting = {}
        try:
            outcome = _Outcome(made=make(everyone))
        except Exception as error:  # on every rank, as it would be on each of many processes
            outcome = _Outcome(error=error)
        self.outcomes = dict.fromkeys(range(self.size), outcome)

    def _unmatched(self) -> AxisError:
        stuck = "; ".join(
            f"{self.names[rank]} waits in {op}" for rank, (op, _, _) in self.waiting.items()
        )
        done = sorted(self.results)
        ranks = f"rank{'s' * (len(done) > 1)} {done}"
        if self.names != [f"rank {rank}" for rank in range(self.size)]:
            ranks = ", ".join(self.names[rank] for rank in done)
        return AxisError(
            f"{stuck}, but {ranks} finished without it.",
            cause="a branch that depends on the rank, or on its data, has a collective.",
            fix=f"call the same collectives in the same order on every rank. {UNUSED}",
        )


UNUSED = (
    "In a backward: a rank whose loss does not use what a collective gave. "
    "fzero.grad_and_reduce and engine.backward(loss) take part in its backward on every rank; a "
    "derivative of your own (loss.backward(), torch.autograd.grad) does where each loss uses it: "
    "loss + 0 * y.sum()."
)


def different(calls: Mapping[str, str]) -> MismatchError:
    """Return the error of ranks that call collectives that cannot go together, {rank: call}."""
    seen = "; ".join(f"{rank}: {call}" for rank, call in calls.items())
    if len({call.partition("[")[0] for call in calls.values()}) > 1:
        cause = "a branch that depends on the rank, or on its data, has another collective."
        fix = ""
    else:
        cause = (
            "a tensor whose shape or dtype depends on the rank (a last batch, rows that were "
            "filtered), or a branch that does."
        )
        fix = ", with the same shapes: pad a tensor to the longest, or gather its length first"
    return MismatchError(
        f"the ranks called different collectives: {seen}.",
        cause=cause,
        fix=f"call the same collectives in the same order on every rank{fix}. Nothing was sent. "
        f"{UNUSED}",
    )
