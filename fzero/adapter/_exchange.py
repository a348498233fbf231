"""Stage 3's collectives: ranks tell each other what they ask for, and serve the union of it.

    ask(codes)   posts an exchange of 64 bytes    nobody waits
    settle()     waits for it, starts what any rank asked for; every later call begins with it

Ranks may use other parameters (experts chosen by the data), or use them in another order. Before
each collective they exchange what they are about to ask for, and all of them take part in all of
it, in one order. A rank whose backward is over goes on serving until every rank's is; one that
comes to the end of a window or to its update serves until all have come, however many backwards
they make before. All engines of an axis share one exchange, for ranks may also come to two engines
in another order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Protocol

from fzero.collectives import InFlight, exchange_ids, start_exchange
from fzero.errors import AxisError, PhaseError, explain
from fzero.lazy import PeerFailedError
from fzero.mesh import Axis, own_group
from fzero.virtual import current_ranks

AT_ONCE = 8
"""How much a rank may ask for in one exchange."""

_FAILED = -1
_MANY = 2**32  # more groups than an engine has, and more than any number that ranks tell


class Ask(IntEnum):
    """What a rank wants the others to take part in."""

    GATHER = 0  # the full values of a group
    REDUCE = 1  # the gradient of a group
    MEET = 2  # nothing more: this rank waits for all, with a number for them


class Serving(Protocol):
    """An engine, as the exchange sees it."""

    def serve(self, what: Ask, group: int, mine: bool) -> None:
        """Start that collective; `mine` if this rank asked for it."""
        ...

    def abandon(self) -> None:
        """A rank raised: forget what is in flight."""
        ...


class Exchange:
    """Decides, with the other ranks, which collective of which engine comes next."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._members: dict[int, weakref.ref[Serving]] = {}
        self._joined = 0
        self._watched: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}
        self._posted: tuple[InFlight, Sequence[int]] | None = None
        self.failures = 0  # told or heard of, so far: the same on every rank

    def join(self, engine: Serving) -> Member:
        """Add an engine."""
        number, self._joined = self._joined, self._joined + 1
        self._members[number] = weakref.ref(engine)
        return Member(self, number)

    def leave(self, number: int) -> None:
        """Take an engine out."""
        self._members.pop(number, None)
        self._watched.pop(number, None)

    def watch(self, number: int, look: Callable[[], None]) -> None:
        """Call `look`, which may `fail`, before whatever engine goes on."""
        self._watched[number] = weakref.WeakMethod(look)

    def look(self) -> None:
        """Have every engine look whether its last backward raised."""
        for method in tuple(self._watched.values()):
            if look := method():
                look()

    def post(self, mine: Sequence[int]) -> None:
        """Tell what this rank asks for; it starts with the next call here."""
        self.settle()
        self._posted = start_exchange(mine, self.axis, width=AT_ONCE), mine

    def settle(self) -> list[list[int]]:
        """Take part in all that any rank posted last; return what each did."""
        posted, self._posted = self._posted, None
        if posted is None:
            return []
        asked: list[list[int]] = posted[0].wait()[0].tolist()
        failed = [rank for rank, codes in enumerate(asked) if _FAILED in codes]
        if failed:
            self._abandon()
            raise PeerFailedError(
                explain(
                    f"rank {self.axis.rank}: rank {failed[0]} raised in the middle of a step.",
                    cause="an error in the forward or backward of that rank only.",
                    fix=f"see the error of rank {failed[0]}; the gradients of this step are gone.",
                )
            )
        for code in sorted({code for codes in asked for code in codes if code}):
            number, group, what = _decode(code)
            if what is not Ask.MEET:
                self._engine(number).serve(what, group, code in posted[1])
        return asked

    def _engine(self, number: int) -> Serving:
        engine = self._members.get(number, lambda: None)()
        if engine is None:
            raise PhaseError(
                explain(
                    f"rank {self.axis.rank}: another rank uses engine {number} of stage 3, which "
                    "is closed or gone here.",
                    cause="close(), or the last reference to an engine, on some ranks only.",
                    fix="keep an engine on every rank for as long as any rank uses it.",
                )
            )
        return engine

    def fail(self) -> None:
        """Tell the others that this rank raised, unless one of them did and has told."""
        with suppress(PeerFailedError):
            self.post([_FAILED])
            self.settle()

    def _abandon(self) -> None:
        self.failures += 1
        for member in self._members.values():
            if engine := member():
                engine.abandon()


class Member:
    """One engine's place in an exchange."""

    def __init__(self, exchange: Exchange, number: int) -> None:
        self._exchange, self._number = exchange, number
        self.fail, self.settle, self.look = exchange.fail, exchange.settle, exchange.look

    def ask(self, what: Ask, groups: Sequence[int]) -> None:
        """Post `what` for each of `groups`. It starts with `settle`, or whatever comes next."""
        codes = [_encode(self._number, group, what) for group in groups]
        for at in range(0, len(codes), AT_ONCE):
            self._exchange.post(codes[at : at + AT_ONCE])

    def finish(self) -> None:
        """Serve the other ranks until none asks for anything."""
        self.look()
        self._exchange.post([])
        while any(_is_work(codes) for codes in self.settle()):
            self._exchange.post([])

    def meet(self, value: int) -> list[int]:
        """Serve the other ranks until all have come here; return the `value` of each.

        Raises `PhaseError` if they have come here for different engines.
        """
        self.look()
        mine = [_encode(self._number, value, Ask.MEET)]
        asked: list[list[int]] = [[0]]
        while not all(_is_meeting(codes) for codes in asked):
            self._exchange.post(mine)
            asked = self.settle()
        met = [_decode(codes[0])[:2] for codes in asked]
        if others := [r for r, (number, _) in enumerate(met) if number != self._number]:
            raise PhaseError(
                explain(
                    f"rank {self._exchange.axis.rank} updates or reduces engine {self._number} of "
                    f"stage 3, rank {others[0]} engine {met[others[0]][0]}.",
                    cause="step(), the end of a window or full_gradients() of several engines, in "
                    "another order on some ranks.",
                    fix="call them in one order on every rank.",
                )
            )
        return [theirs for _, theirs in met]

    @property
    def failures(self) -> int:
        """How often a rank has raised, and all were told."""
        return self._exchange.failures

    def watch(self, look: Callable[[], None]) -> None:
        """Call `look` before any engine goes on: not between a transition and its effects."""
        self._exchange.watch(self._number, look)

    def leave(self) -> None:
        """The engine is closed."""
        self._exchange.leave(self._number)


class Lockstep:
    """In the place of a `Member` where ranks have promised to ask for the same in one order."""

    def __init__(self, engine: Serving, axis: Axis) -> None:
        self._engine, self._axis = weakref.ref(engine), axis
        self.failures = 0

    def ask(self, what: Ask, groups: Sequence[int]) -> None:
        """Start `what` for each of `groups`."""
        engine = self._engine()
        assert engine is not None  # it is what asks
        for group in groups:
            engine.serve(what, group, True)

    def settle(self) -> list[list[int]]:
        """Nothing is posted: what was asked has started."""
        return []

    def finish(self) -> None:
        """Nothing is left: no rank asks for more than this one."""

    def meet(self, value: int) -> list[int]:
        """Return the `value` of each rank."""
        return exchange_ids(value, self._axis)

    def fail(self) -> None:
        """Nobody listens: the others wait for this rank's collectives until it ends."""

    def watch(self, look: Callable[[], None]) -> None:
        """Nobody is told."""

    def look(self) -> None:
        """Nobody could be told."""

    def leave(self) -> None:
        """Nobody knows of this engine."""


def private_axis(axis: Axis, *, asks: bool) -> tuple[Axis, Exchange | None]:
    """The axis for an engine's collectives: of its own, or with an exchange if it `asks`."""
    if not asks or axis.size == 1:
        return own_group(axis), None
    exchange = shared_exchange(axis)
    return exchange.axis, exchange


def shared_exchange(axis: Axis) -> Exchange:
    """The one exchange of the engines on `axis`, with a process group of its own. A collective."""
    ranks = current_ranks()
    if ranks is not None:  # they share a process, and live for one run
        if axis not in ranks.kept:
            ranks.kept[axis] = Exchange(own_group(axis))
        return ranks.kept[axis]
    found = _EXCHANGES.get(axis)
    try:
        alive = found is not None and found.axis.group() is not None
    except AxisError:  # torch.distributed was shut down and started again
        alive = False
    if found is None or not alive:
        found = _EXCHANGES[axis] = Exchange(own_group(axis))
    return found


_EXCHANGES: dict[Axis, Exchange] = {}
"""Kept for the process: when an engine is garbage differs by rank, so a count would, too."""


def _is_meeting(codes: Sequence[int]) -> bool:
    return bool(codes[0]) and _decode(codes[0])[2] is Ask.MEET


def _is_work(codes: Sequence[int]) -> bool:
    return bool(codes[0]) and not _is_meeting(codes)


def _encode(number: int, group: int, what: Ask) -> int:
    return 1 + what + len(Ask) * (group + number * _MANY)


def _decode(code: int) -> tuple[int, int, Ask]:
    rest, what = divmod(code - 1, len(Ask))
    number, group = divmod(rest, _MANY)
    return number, group, Ask(what)
