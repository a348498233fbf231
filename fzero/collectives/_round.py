"""What one rank says in a round of a channel, and what a round of all ranks means."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

from fzero.errors import MismatchError


class Kind(IntEnum):
    """What a rank says in a round."""

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


class Message(NamedTuple):
    """What one rank says in one round.

    `digest` stands for what must be equal to go together, `hint` for the order of collectives that
    the rank expects. `served`: ranks that make a call take part in this pass.
    """

    kind: Kind
    digest: int
    hint: int
    served: int
    codes: tuple[int, ...]


class Round:
    """What all ranks said in one round: a row of numbers from each, in rank order.

    Virtual ranks share it: what a round means is found out once, and not by each of them.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._messages = [
            Message(Kind(kind), digest, hint, served, tuple(code for code in codes if code))
            for kind, digest, hint, served, *codes in rows
        ]

    @cached_property
    def failed(self) -> list[int]:
        """The ranks that raised."""
        return [r for r, message in enumerate(self._messages) if message.kind is Kind.FAILED]

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """What was said."""
        return frozenset(message.kind for message in self._messages)

    @cached_property
    def is_same(self) -> bool:
        """Whether all ranks announce what can go together."""
        return len({message.digest for message in self._messages}) == 1

    @cached_property
    def is_in_order(self) -> bool:
        """Whether all ranks expect the same order of collectives."""
        return len({message.hint for message in self._messages}) == 1

    @cached_property
    def is_served(self) -> bool:
        """Whether ranks that make a call take part in the pass of every other."""
        return all(message.served for message in self._messages)

    @cached_property
    def asked(self) -> list[int]:
        """The codes of the collectives that ranks ask for, each once, in ascending order."""
        return sorted({c for m in self._messages if m.kind is Kind.ASK for c in m.codes})

    @cached_property
    def values(self) -> list[tuple[int, ...]]:
        """The numbers that each rank gives with its call, in rank order."""
        return [tuple(code - 1 for code in message.codes) for message in self._messages]

    @cached_property
    def is_over(self) -> bool:
        """Whether no rank is in a pass any more."""
        return self.kinds.isdisjoint((Kind.ASK, Kind.PASS))

    @cached_property
    def has_asked(self) -> bool:
        """Whether a rank that ends its pass has asked for a collective in it."""
        return any(message.hint for message in self._messages if message.kind is Kind.DONE)


def each_once(values: Sequence[Any]) -> list[Any]:
    """Return the values that differ, in the order in which they come first."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def first_difference(everyone: Sequence[Sequence[str]]) -> tuple[int, int, str, str]:
    """Return (rank, line, rank 0's text of it, that rank's): where lines first differ."""
    mine = everyone[0]
    rank, theirs = next((r, other) for r, other in enumerate(everyone) if other != mine)
    pairs = enumerate(zip_longest(mine, theirs, fillvalue="nothing"))
    line, texts = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return rank, line, *texts


def mismatch(texts: Sequence[str]) -> MismatchError:
    """Return the error of ranks that announce what cannot go together; a text from each rank."""
    lines = [text.splitlines() for text in texts]
    rank, line, mine, theirs = first_difference(lines)
    if line:  # after the call, which is the first one
        mine, theirs = f"{lines[0][0]} with {mine}", f"{lines[rank][0]} with {theirs}"
    return MismatchError(
        f"the ranks make different calls: rank 0 {mine}, rank {rank} {theirs}.",
        cause="a call under `if rank == 0:`, one step more on some ranks, or an option "
        "that differs by rank.",
        fix="make the same calls, with the same options, on every rank. Nothing was changed.",
    )
