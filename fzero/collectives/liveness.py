"""Which rank died: a sign of life and a last word of each rank, in the launcher's store.

A collective that fails says that another rank is gone, and not which. So a thread of each process
adds to a number in the store that the ranks have met in, and a process that ends leaves a word
there: what it raised, or that its program is over. Who gets an error reads both. A rank that was
killed has left no word and adds no more; one that waits in code of its own still adds, but has come
to fewer collectives than the others.

A rank in which nothing begins any more also says where its program is. Where one waits in a call of
fzero and another in one of torch.distributed's (a barrier, a collective of a trainer's), neither
ends before its timeout; the thread of each then prints which waits for whom.

What is compared is numbers of one process with each other, never the clocks of two. A store that
cannot be read (rank 0 may hold it) makes the answer shorter, never an error.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import json
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from fzero.errors import LostRankError, PeerFailedError, explain
from fzero.ranks.mesh import holder_of_store, when_started

_C10D: Any = dist.distributed_c10d

BEAT_S = 0.25
"""Between two signs of life; longer on more than `_RANKS` ranks, so that the store is not busy."""

PATIENCE_BEATS = 5
"""A rank is taken for dead that gives none while this one, under the same load, gives so many."""

STALLED_BEATS = 12
"""A rank says where its program is after so many beats in which no collective began."""

_RANKS = 128


class Sign(NamedTuple):
    """What a rank has put into the store."""

    beats: int = 0
    collectives: int = 0  # begun so far
    word: str = ""  # the last one, of a process that ended or lost another rank
    lost: bool = False  # whether it ended because of another rank
    calls: str = ""  # of one that begins no more: in whose call it is, "fzero" or "torch"
    where: str = ""  # that call, and the line of the program


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


def stuck(signs: Mapping[int, Sign]) -> dict[int, str]:
    """Return {rank: where it is} of ranks that wait for each other in unlike calls. Pure.

    Example:
        >>> reader = Sign(90, 9, calls="fzero", where="the read at train.py:7")
        >>> other = Sign(90, 8, calls="torch", where="barrier() at train.py:9")
        >>> stuck({0: reader, 1: other})
        {0: 'waits in the read at train.py:7', 1: 'waits in barrier() at train.py:9'}
        >>> stuck({0: reader, 1: reader})
        {}
    """
    there = {rank: sign for rank, sign in signs.items() if sign.calls and not sign.word}
    if {sign.calls for sign in there.values()} != {"fzero", "torch"}:
        return {}
    return {rank: f"waits in {sign.where}" for rank, sign in there.items()}


ALONE = (
    "a call of fzero that some ranks make alone, in a callback or under `if rank == 0:`. At "
    "stage 3 a read of a parameter, a saved state_dict(), generate(), save_model() and a forward "
    "are calls of all ranks."
)
APART = (
    "make that call on every rank; or, on every rank, `with accelerator.whole(model):` or "
    "`with fzero.adapter.gathered(model):`, and in the block read on one rank."
)
_FZERO, _TORCH = f"{Path(__file__).parents[1]}{os.sep}", f"{Path(dist.__file__).parent}{os.sep}"
_LIBRARIES = (_FZERO, str(Path(_TORCH).parents[1]), str(Path(os.__file__).parent))


def where_is(frame: FrameType | None) -> tuple[str, str]:
    """Return in whose collective a stack waits, "fzero" or "torch", and where; "" for neither."""
    stack = list[tuple[str, str, int]]()  # the innermost first
    while frame is not None:
        stack.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    waits = f"{_FZERO}collectives", f"{_TORCH}distributed_c10d"
    if not stack or not stack[0][0].startswith(waits):
        return "", ""
    of_library = [*itertools.takewhile(lambda one: one[0].startswith(_LIBRARIES), stack)]
    own = next(iter(stack[len(of_library) :]), None)
    line = "the end of the program" if own is None else f"{own[0]}:{own[2]}"
    inside = [*itertools.takewhile(lambda one: one[0].startswith(_TORCH), stack)]
    called = [function for file, function, _ in of_library if file.startswith(_FZERO)]
    if any(file.startswith(_FZERO) for file, _, _ in stack[len(inside) :][:1]):
        read = called[-1].startswith("__")  # of a placeholder, or a hook of a forward
        name = "a read of a parameter, or a forward" if read else f"{called[-1].strip('_')}()"
        return "fzero", f"{name} at {line}"
    function = [inside[0][1], *(one[1] for one in inside if one[1] != "wrapper")][-1]
    return "torch", f"torch.distributed.{function}() at {line}"


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

    def __init__(self, board: Board, size: int) -> None:
        self._board, self.size, self._over = board, size, threading.Event()
        self._every_s = BEAT_S * max(1, size / _RANKS)
        self.found: dict[int, str] = {}  # who waits for whom now, in unlike calls
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

    @property
    def lives(self) -> bool:
        """Whether there are more signs; in a fork of its process there are none."""
        return self._thread.is_alive()

    def wait(self) -> bool:
        """Wait for about a beat; return False, at once, where there are no more."""
        if self.lives:
            self._over.wait(self._every_s)
        return self.lives

    def _beat(self) -> None:
        begun, since = 0, 0
        try:
            while not self._over.is_set():
                begun, since = self.begun, since + 1 if self.begun == begun else 0
                calls, where = self._waits() if since >= STALLED_BEATS else ("", "")
                beats = self._board.mine.beats + 1
                self._board.put(collectives=begun, beats=beats, calls=calls, where=where)
                found = stuck(self._board.read(range(self.size))) if calls else {}
                if found and not self.found:
                    print(explain(_together(found), cause=ALONE, fix=APART), file=sys.stderr)
                self.found = found or (self.found if since else {})  # one may have ended since
                self._over.wait(self._every_s)
        except RuntimeError:  # the store is gone, with whoever held it
            return

    def _waits(self) -> tuple[str, str]:
        # Python 3.11 may collect garbage in this call, under a lock that threads need to start and
        # to end: a tensor that is freed there lets another thread run, which waits for the lock.
        collects = gc.isenabled()
        gc.disable()
        try:
            stacks: dict[int, FrameType] = vars(sys)["_current_frames"]()
        finally:
            if collects:
                gc.enable()
        return where_is(stacks.get(threading.main_thread().ident or 0))


class Witness:
    """What this process says, and finds out, about the ranks of one process group of all."""

    def __init__(self, world: Any, store: Any) -> None:
        self.world = weakref.ref(world)  # who ends the group frees it
        self._board = Board(store, dist.get_rank())
        self.pulse = Pulse(self._board, dist.get_world_size())
        self._blamed: dict[int, str] = {}

    def say(self, word: str, *, lost: bool) -> None:
        """Leave a last word, unless one is said."""
        if not self._board.mine.word:
            self._board.put(collectives=self.pulse.begun, word=word, lost=lost)

    def blame(self, ranks: Sequence[int]) -> dict[int, str]:
        """Say which of these ranks of the world is to blame for a collective that failed.

        What fails after a first loss fails because of it: the answer is the same.
        """
        if not self._blamed and self.pulse.found:
            self._blamed = {k: x for k, x in self.pulse.found.items() if k != self._board.rank}
            return self._blamed
        if not self._blamed:
            try:
                self._blamed = self._look(ranks)
            except RuntimeError:
                self._blamed = _gone_with_store(self._board.rank)
            with suppress(RuntimeError):
                self.say(f"lost {[*self._blamed] or 'another rank'}", lost=True)
        return self._blamed

    def ahead(self) -> list[int]:
        """Return the ranks that go on and have begun more collectives, by two beats from now."""
        others = {*range(self.pulse.size if self.pulse.lives else 0)} - {self._board.rank}
        found = set[int]()
        for _ in range(2):
            signs = self._board.read([*others])
            others = {rank for rank in others if not signs[rank].word}
            found = {rank for rank in others if signs[rank].collectives > self.pulse.begun}
            if found or not others or not self.pulse.wait():
                break
        return sorted(found)

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


def _together(found: Mapping[int, str]) -> str:
    return "ranks wait for each other: " + "; ".join(f"rank {k} {x}" for k, x in found.items())


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


def came_apart(found: Mapping[int, str]) -> bool:
    """Whether a call of this rank alone is the cause, by what became of the others."""
    stuck_here = _here is not None and bool(_here.pulse.found)
    return stuck_here or any(_OF_ITSELF in what for what in found.values())


_OF_ITSELF = "by sys.exit() or at the end of the script"


def _end() -> None:
    """Leave the last word of a program that ends: with an exception, or of itself."""
    if _here is None:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    how = _OF_ITSELF if error is None else f"with {type(error).__name__}: {error!s:.300}"
    with suppress(RuntimeError):  # the store is gone; so is who would read it
        lost = isinstance(error, LostRankError | PeerFailedError)
        _here.say(f"has ended its program, {how}", lost=lost)
        for rank in _here.ahead() if error is None else ():
            seen = f"this rank has ended, and rank {rank} waits for it in a call of fzero."
            print(explain(seen, cause=ALONE, fix=APART), file=sys.stderr)
    _here.pulse.stop()


when_started(start_signs)
