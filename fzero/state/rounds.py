"""A round: one message from every rank, read by all of them.

PASS   "my forward (or backward) begins"      replayed if all ranks announce the same
ASK    "I need this collective now"           every rank takes part in it
DONE   "my pass is over"                      repeated until no rank is in a pass
CALL   "step(), full_params(), ..."           repeated until every rank makes the same call
FAILED "I raised"                             every other rank raises, too
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

CODES = 8
"""How many numbers a message has room for: collectives that are asked for, or values of a call."""

ASKED, BROUGHT = 1, 2
"""What a rank says of its pass when that is done, in the hint of the message."""

PLACES = 48
"""How many passes of others a call may take part in, apart from those in which all calls do."""

MANY = 2**24
"""More units than a state has."""


class MessageKind(IntEnum):
    """The kind of a message."""

    FAILED = 0
    DONE = 1
    ASK = 2
    PASS = 3
    CALL = 4


class What(IntEnum):
    """Which collective of a unit a rank asks for."""

    GATHER = 0  # rounded, under autocast
    REDUCE = 1
    GATHER_EXACT = 2


class Asked(NamedTuple):
    """One collective that a rank asks all ranks to take part in."""

    model: int
    what: What
    unit: int


class Served(IntEnum):
    """Who takes part in a pass of this rank without being in the same pass.

    More than `ALL`: one bit, and ranks whose call has it among its own; those in a pass are in this
    one.
    """

    NOBODY = 0  # all ranks announce the same
    ALL = 1  # ranks that make a call, or are in another pass of theirs


class Message(NamedTuple):
    """What one rank says in one round.

    Attributes:
        kind: what is said.
        text: what is announced: equal texts go together.
        hint: stands for the order of collectives that the rank expects; of DONE: `ASKED` if this
            rank has asked for any, `BROUGHT` if its pass may have brought gradients.
        served: who takes part in this pass; of a call, in which passes it does, bit by bit beside
            `ALL`.
        codes: the values of a call, or what is asked for: the first of it, as much as a row of
            numbers has room for.
    """

    kind: MessageKind
    text: str = ""
    hint: int = 0
    served: int = Served.ALL
    codes: tuple[int, ...] = ()


class Row(NamedTuple):
    """A message as numbers, as it crosses ranks. `digest` replaces its text."""

    kind: MessageKind
    digest: int
    hint: int
    served: int
    codes: tuple[int, ...]


def row_of(message: Message) -> list[int]:
    """Return a message as numbers. Codes count from 1; 0 means none."""
    digest, codes = zlib.crc32(message.text.encode()), message.codes
    if message.kind is MessageKind.ASK:
        codes = codes[:CODES]  # the others are asked for again
    return [message.kind, digest, message.hint, message.served, *(1 + code for code in codes)]


def as_code(asked: Asked) -> int:
    """Return the number of a collective that is asked for; see `as_asked`.

    Example:
        >>> as_asked(as_code(Asked(2, What.REDUCE, 7)))
        Asked(model=2, what=<What.REDUCE: 1>, unit=7)
    """
    return asked.what + len(What) * (asked.unit + asked.model * MANY)


def as_asked(code: int) -> Asked:
    """Return the collective that a number stands for; see `as_code`."""
    rest, what = divmod(code, len(What))
    model, unit = divmod(rest, MANY)
    return Asked(model, What(what), unit)


def asking(model: int, what: What, units: Sequence[int]) -> Message:
    """Return the message that asks for these units."""
    codes = tuple(as_code(Asked(model, what, unit)) for unit in units)
    return Message(MessageKind.ASK, codes=codes)


class Round:
    """What all ranks said in one round: a row of numbers from each, in rank order.

    Virtual ranks share it: what a round means is found out once, and not by each of them.

    Attributes:
        kinds: the kinds of what was said.
        failed: the ranks that raised.
        is_same: whether the announcements of all ranks are compatible.
        is_in_order: whether all ranks expect the same order of collectives.
        is_served: whether all ranks take part in the pass of every other.
        asked: the collectives that ranks ask for, each once, in one order.
        values: the numbers that each rank gives with its call, in rank order.
        is_over: whether no rank is in a pass any more.
        has_asked: whether a rank that ends its pass has asked for a collective in it.
        has_brought: whether a rank that ends its pass may have brought gradients in it.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        said = [
            Row(MessageKind(kind), digest, hint, served, tuple(code - 1 for code in codes if code))
            for kind, digest, hint, served, *codes in rows
        ]
        self.kinds = frozenset(row.kind for row in said)
        self.failed = [r for r, row in enumerate(said) if row.kind is MessageKind.FAILED]
        self.is_same = len({row.digest for row in said}) == 1
        self.is_in_order = len({row.hint for row in said}) == 1
        passes = {row.digest: row.served for row in said if row.kind is MessageKind.PASS}
        calls = [row.served for row in said if row.kind is MessageKind.CALL]
        self.is_served = Served.NOBODY not in {row.served for row in said} and all(
            one == Served.ALL or (len(passes) < 2 and all(one & call for call in calls))
            for one in passes.values()
        )
        asks = {code for row in said if row.kind is MessageKind.ASK for code in row.codes}
        self.asked = [as_asked(code) for code in sorted(asks)]
        self.values = tuple([row.codes for row in said])
        self.is_over = self.kinds.isdisjoint((MessageKind.ASK, MessageKind.PASS))
        done = [row.hint for row in said if row.kind is MessageKind.DONE]
        self.has_asked = any(hint & ASKED for hint in done)
        self.has_brought = any(hint & BROUGHT for hint in done)
