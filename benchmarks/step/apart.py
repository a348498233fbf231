"""Each contestant in processes of its own, which step in turn.

In one process, contestants share a heap: what one of them frees, another one finds or misses.
A training job has its heap to itself. So here a contestant has its own W processes, all of them
live beside each other, and one of them runs while the others sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

BURST = 4
"""Steps that are timed together."""

_HOST = "127.0.0.1"
_PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where the turns are noted, and which of them is that of this contestant."""

    port: int
    at: int
    count: int


def open_turns() -> dist.TCPStore:
    """Start the store that notes whose turn it is; it is the first contestant's."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    store.set("0/0", "")
    return store


class Turns:
    """`with turns:` waits for this contestant's turn, on every rank of it, and hands it on."""

    def __init__(self, turn: Turn) -> None:
        """Connect to the store."""
        self._turn, self._round = turn, 0
        self._store = dist.TCPStore(_HOST, turn.port, is_master=False, timeout=_PATIENCE)

    def __enter__(self) -> None:
        """Wait for it."""
        self._store.wait([f"{self._round}/{self._turn.at}"])
        dist.barrier()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Hand it on, once every rank has come; after an error nobody goes on."""
        if error is not None:
            return
        dist.barrier()
        self._round += 1
        following = self._turn.at + 1
        last = following == self._turn.count
        if dist.get_rank() == 0:
            self._store.set(f"{self._round}/0" if last else f"{self._round - 1}/{following}", "")


def alone(run: Callable[[], object], turns: Turns, *, rounds: int, warmup: int) -> list[float]:
    """Time a contestant in its turns; return the slowest rank's milliseconds of each round.

    A turn is a step that is not timed, for a training job does not wake up for each step, and
    `BURST` that are timed together.
    """
    with turns:
        for _ in range(warmup):
            run()
    times_ms = torch.zeros(rounds, dtype=torch.float64)
    for at in range(rounds):
        with turns:
            run()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(BURST):
                run()
            times_ms[at] = (time.perf_counter() - start) * 1e3 / BURST
    dist.all_reduce(times_ms, op=dist.ReduceOp.MAX)
    return times_ms.tolist()
