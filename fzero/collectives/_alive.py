"""Which rank died: a sign of life and a last word of each rank, in the launcher's store.

A collective that fails says that another rank is gone, and not which. So a thread of each process
adds to a number in the store that the ranks have met in, and a process that ends leaves a word
there: what it raised, or that its program is over. Who gets an error reads both. A rank that was
killed has left no word and adds no more; one that waits in code of its own still adds, but has come
to fewer collectives than the others.

What is compared is numbers of one process with each other, never the clocks of two. A store that
cannot be read (rank 0 may hold it) makes the answer shorter, never an error.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from fzero.errors import LostRankError, PeerFailedError
from fzero.ranks.mesh import holder_of_store, when_started

_C10D: Any = dist.distributed_c10d

BEAT_S = 0.25
"""Between two signs of life; longer on more than `_RANKS` ranks, so that the store is not busy."""

PATIENCE_BEATS = 5
"""A rank is taken for dead that gives none while this one, under the same load, gives so many."""

_RANKS = 128


class Sign(NamedTuple):
    """What a rank has put into the store."""

    beats: int = 0
    collectives: int = 0  # begun so far
    word: str = ""  # the last one, of a process that ended or lost another rank
    lost: bool = False  # whether it ended because of another rank


LATE = "is alive and did not come"


def lost_ranks(before: Mapping[int, Sign], after: Mapping[int, Sign]) -> dict[int, str]:
    """Return {rank: what became of it} of those to blame, by their signs at two times. Pure.

    Those that ended of themselves; if there are none, those that went silent; else those that are
    alive and have come to fewer collectives. A rank that lost another one is not to blame.

    Example:
        >>> was = {0: Sign(4, 9), 1: Sign(4, 9), 2: Sign(3, 9)}
        >>> lost_ranks(was, {0: Sign(9, 9), 1: Sign(9, 9), 2: Sign(3, 9)})
        {2: 'is dead or stopped: it gives no sign of life any more, and left no word'}
    """
    ended = {rank: sign.word for rank, sign in after.items() if sign.word and not sign.lost}
    silent = {
        rank: "is dead or stopped: it gives no sign of life any more, and left no word"
        for rank, sign in after.items()
        if not sign.word and sign.beats == before[rank].beats
    }
    if ended or silent:
        return ended or silent
    counts = [sign.collectives for sign in after.values()]
    few, many = min(counts), max(counts)
    return {
        rank: f"{LATE}: it has begun {few} collectives, another rank {many}"
        for rank, sign in after.items()
        if sign.collectives == few < many
    }


_HELD_THE_STORE = "is gone, and with it the store that it held, where the others' last words are"


class Board:
    """The signs of the ranks, in their store: this process writes its own and reads the others'."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self.rank, self.mine = store, rank, Sign()
        self._process, self._lock = os.getpid(), threading.Lock()

    def put(self, **facts: Any) -> None:
        """Change the sign of this rank; in a fork of its process, do nothing."""
        if os.getpid() == self._process:
            with self._lock:
                self.mine = self.mine._replace(**facts)
                self._store.set(_key(self.rank), json.dumps(self.mine))

    def read(self, ranks: Sequence[int]) -> dict[int, Sign]:
        """Return the signs of these ranks; of one that has given none, an empty one."""
        return {rank: self._sign_of(rank) for rank in ranks}

    def _sign_of(self, rank: int) -> Sign:
        with self._lock:  # one question of this connection at a time
            there = self._store.check([_key(rank)])
            return Sign(*json.loads(self._store.get(_key(rank)))) if there else Sign()


class Pulse:
    """The thread of this process that gives signs of life on a board."""

    def __init__(self, board: Board, every_s: float) -> None:
        self._board, self._every_s, self._over = board, every_s, threading.Event()
        self.begun, self._collectives = 0, itertools.count(1)
        self._thread = threading.Thread(target=self._beat, name="fzero-alive", daemon=True)
        self._thread.start()

    def count(self) -> None:
        """Count a collective that begins on this rank, in any thread."""
        self.begun = next(self._collectives)

    def stop(self) -> None:
        """Give no more signs of life: before the interpreter ends under the thread."""
        self._over.set()
        self._thread.join(timeout=2)

    def wait(self) -> bool:
        """Wait for about a beat; return False, at once, where there are no more."""
        if self._thread.is_alive():
            self._over.wait(self._every_s)
        return self._thread.is_alive()

    def _beat(self) -> None:
        try:
            while not self._over.is_set():
                self._board.put(collectives=self.begun, beats=self._board.mine.beats + 1)
                self._over.wait(self._every_s)
        except RuntimeError:  # the store is gone, with whoever held it
            return


class Witness:
    """What this process says, and finds out, about the ranks of one process group of all."""

    def __init__(self, world: Any, store: Any) -> None:
        self.world = weakref.ref(world)  # who ends the group frees it
        self._board = Board(store, dist.get_rank())
        self.pulse = Pulse(self._board, BEAT_S * max(1, dist.get_world_size() / _RANKS))
        self._blamed: dict[int, str] = {}

    def say(self, word: str, *, lost: bool) -> None:
        """Leave a last word, unless one is said."""
        if not self._board.mine.word:
            self._board.put(collectives=self.pulse.begun, word=word, lost=lost)

    def blame(self, ranks: Sequence[int]) -> dict[int, str]:
        """Say which of these ranks of the world is to blame for a collective that failed.

        What fails after a first loss fails because of it: the answer is the same.
        """
        if not self._blamed:
            try:
                self._blamed = self._look(ranks)
            except RuntimeError:
                self._blamed = _gone_with_store(self._board.rank)
            with suppress(RuntimeError):
                self.say(f"lost {[*self._blamed] or 'another rank'}", lost=True)
        return self._blamed

    def _look(self, ranks: Sequence[int]) -> dict[int, str]:
        board = self._board
        others = [rank for rank in ranks if rank != board.rank]
        before = after = board.read(others)
        last = board.mine.beats + PATIENCE_BEATS
        while not any(sign.word and not sign.lost for sign in after.values()):
            if board.mine.beats >= last or not self.pulse.wait():
                break
            after = board.read(others)
        return lost_ranks(before | {board.rank: Sign()}, after | {board.rank: board.mine})


def _gone_with_store(rank: int) -> dict[int, str]:
    """Return {rank: what became of it} of another rank that held the store, if that is gone."""
    holder, store = holder_of_store(), _C10D._get_default_store()
    if holder is None or holder == rank:
        return {}
    try:
        store.check([_key(0)])
    except RuntimeError:
        return {holder: _HELD_THE_STORE}
    return {}


def _key(rank: int) -> str:
    return f"fzero/alive/{rank}"


_here: Witness | None = None
"""The witness of this process: a handle, as its process group is one of torch's."""


def start_signs() -> None:
    """Give signs of life from now on, once for each process group of the world."""
    global _here
    world: Any = dist.group.WORLD
    if dist.get_world_size() == 1 or (_here is not None and _here.world() is world):
        return
    if _here is not None:
        _here.pulse.stop()
    else:
        atexit.register(_end)
    # A clone has a connection of its own: it does not wait while this process waits in the store.
    with suppress(RuntimeError):  # that of a fake group keeps nothing
        store = _C10D._get_default_store()
        store.check([_key(0)])  # raises at once where the store is gone; to connect to it waits
        _here = Witness(world, store.clone())


def count_call(*, real: bool) -> None:
    """A collective begins on this rank. real: of processes, who give signs from the first on."""
    if real and _here is None:
        start_signs()
    if _here is not None:
        _here.pulse.count()


def what_became_of(ranks: Sequence[int]) -> dict[int, str]:
    """Return {rank: what became of it} of those of these ranks that made a collective fail.

    Ranks are those of the world. Takes a second or two, for the signs of a rank that is silent.
    """
    if not dist.is_initialized():
        return {}
    if _here is None or _here.world() is not dist.group.WORLD:
        return _gone_with_store(dist.get_rank())
    return _here.blame(ranks)


def _end() -> None:
    """Leave the last word of a program that ends: with an exception, or of itself."""
    if _here is None:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    word = "has ended its program, " + (
        f"with {type(error).__name__}: {error!s:.300}"
        if error is not None
        else "by sys.exit() or at the end of the script"
    )
    with suppress(RuntimeError):  # the store is gone; so is who would read it
        _here.say(word, lost=isinstance(error, LostRankError | PeerFailedError))
    _here.pulse.stop()


when_started(start_signs)
