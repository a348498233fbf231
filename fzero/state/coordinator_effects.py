"""What the coordinator asks its shell to do: a closed set of frozen records.

The shell runs the effects of one transition in their order. Ids are those of `Units`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gather:
    """Start to gather these units: a module that is about to run needs them."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start to gather these units: modules that come later will need them, in this order."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until these units are whole, then report them with `gathered`."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Free the full values of these units; the shards stay."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait for the gathers of these units to end, well or not, and free what they brought."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Agree:
    """Compare these lines with those of the other ranks, before the order drives a gather."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the user; nothing is wrong with any value."""

    message: str


Effect = Gather | Prefetch | Wait | Release | Drain | Agree | Warn
