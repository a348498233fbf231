"""Rounds and exchanges of the ranks of an axis, over a CPU group of fzero's own.

A round is one small all_to_all: every rank posts one `Message`, and gets those of all ranks. It
goes over a gloo group whatever the backend of the axis is, so no rank waits for a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from fzero.collectives import _lowering as lowering
from fzero.collectives._backend import explained
from fzero.errors import MismatchError
from fzero.ranks.mesh import Axis, Runtime
from fzero.ranks.virtual import UNUSED
from fzero.state.protocol import SYNC
from fzero.state.rounds import CODES, Message, Round, row_of


class Channel:
    """The rounds of one axis. Every rank makes the same rounds in the same order.

    axis: for rounds. data: for gathers and reductions, see `over`.
    """

    def __init__(self, axis: Axis, data: Axis) -> None:
        self.axis, self.data = axis, data
        self._posted: lowering.Started | None = None
        self._unread: Round | None = None
        self.rounds = 0

    def over(self, axis: Axis) -> Axis:
        """Return the axis that gathers and reductions of the states on `axis` go over.

        The same ranks with groups of fzero's own, also of its two dims if it has them. A collective
        at first.
        """
        own = replace(self.data, name=axis.name, dims=axis.dims, named=axis.named)
        for part in (own.replicas, own.shards) if own.dims is not None else ():
            if part.runtime is Runtime.PROCESSES:
                with explained("making the groups of the mesh", axis):
                    part.group()
        return own

    def post(self, message: Message) -> None:
        """Say something to all ranks; nobody waits, but for the round before."""
        self._complete()
        self._posted = lowering.begin_exchange(
            row_of(message), self.axis, Round, width=4 + CODES, said=message.text
        )
        self._unread = None
        self.rounds += 1

    def read(self) -> Round:
        """Return what every rank said in the last round."""
        self._complete()
        assert self._unread is not None
        return self._unread

    def _complete(self) -> None:
        posted, self._posted = self._posted, None
        if posted is not None:
            (self._unread,) = posted.wait()

    @property
    def is_answered(self) -> bool:
        """Whether every rank has posted this round, so that `read` need not wait for them."""
        return self._posted is None or self._posted.is_over

    def tell(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in rank order."""
        return lowering.gather_objects(value, self.axis)

    def tell_each_once(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks that differ, in the order of the ranks."""
        return lowering.gather_objects(value, self.axis, each_once)


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


def parts_that_differ(mine: str, theirs: str) -> tuple[str, str]:
    """Return the options in which two long lines of the same differ; other lines as they are."""
    both = [_OPTION.findall(text) for text in (mine, theirs)]
    names, others = ([x.partition("=")[0].split()[:1] for x in some] for some in both)
    if max(len(mine), len(theirs)) < LONG or names != others:
        return mine, theirs
    only = [[x.strip() for x in some if x not in other] for some, other in (both, both[::-1])]
    head = re.match(r"[^:=,(]*: ", mine)
    where = head[0] if head else ""  # "param group 0: "
    mine, theirs = (where + (", ".join(some) or "nothing more") for some in only)
    return mine, theirs


_OPTION = re.compile(r"\s*\w+=\([^()]*\)|\s*\w+=[^,()]*|[^,()=]+")
LONG = 150


def mismatch(texts: Sequence[str]) -> MismatchError:
    """Return the error of ranks that announce what cannot go together; a text from each rank."""
    lines = [text.splitlines() for text in texts]
    rank, line, mine, theirs = first_difference(lines)
    mine, theirs = parts_that_differ(mine, theirs)
    if line:  # after the call, which is the first one
        mine, theirs = f"{lines[0][0]} with {mine}", f"{lines[rank][0]} with {theirs}"
    return MismatchError(
        f"the ranks make different calls: rank 0 {mine}, rank {rank} {theirs}.",
        cause="a call under `if rank == 0:`, one step more on some ranks, or an option "
        "that differs by rank.",
        fix="make the same calls, with the same options, on every rank. Nothing was changed."
        + (f" {UNUSED}" if any(SYNC in text for text in texts) else ""),
    )
