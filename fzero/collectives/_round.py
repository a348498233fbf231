"""What one rank says in a round of a channel, and what a round of all ranks means."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from fzero.errors import MismatchError, explain


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


def is_over(messages: Sequence[Message]) -> bool:
    """Whether no rank is in a pass any more."""
    return all(message.kind not in (Kind.ASK, Kind.PASS) for message in messages)


def has_asked(messages: Sequence[Message]) -> bool:
    """Whether a rank that ends its pass has asked for a collective in it."""
    return any(message.hint for message in messages if message.kind is Kind.DONE)


def _named(lines: Sequence[str], at: int) -> str:
    """The call, and the line of it that differs."""
    if at == 0:
        return lines[0] if lines else "nothing"
    return f"{lines[0]} with {lines[at] if at < len(lines) else 'nothing'}"


def mismatch(texts: Sequence[str]) -> MismatchError:
    """Return the error of ranks that announce what cannot go together; a text from each rank."""
    lines = [text.splitlines() for text in texts]
    first = lines[0]
    rank, other = next((r, t) for r, t in enumerate(lines) if t != first)
    at = next(i for i in range(max(len(first), len(other))) if first[i : i + 1] != other[i : i + 1])
    return MismatchError(
        explain(
            f"the ranks make different calls: rank 0 {_named(first, at)}, "
            f"rank {rank} {_named(other, at)}.",
            cause="a call under `if rank == 0:`, one step more on some ranks, or an option "
            "that differs by rank.",
            fix="make the same calls, with the same options, on every rank. Nothing was changed.",
        )
    )
