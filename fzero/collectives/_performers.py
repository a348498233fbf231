"""The performers: one for each set of ranks, which all states and engines on them share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import torch.distributed as dist

from fzero.collectives import _alive
from fzero.collectives import _lowering as lowering
from fzero.collectives._backend import explained
from fzero.collectives._channel import Channel
from fzero.collectives._kept import keeping
from fzero.collectives._performer import FUNCTIONAL, Performer
from fzero.context.here import Here, current_ranks, is_abstract
from fzero.context.modes import for_training
from fzero.errors import AxisError
from fzero.ranks.mesh import Axis, Runs, Runtime, carried_here, own_group
from fzero.ranks.virtual import different
from fzero.state.protocol import SYNC, Met, SyncPoint

_OPEN: dict[tuple[tuple[int, ...], str], Performer] = {}
"""The performer of each set of processes and backend: a handle, like torch's own table of groups.
It lives as long as the process group, for garbage is collected at another time on each rank."""

SETUP_OR_CHECKPOINT = "init, an Engine or a checkpoint"
"""The call that ranks announce. One name for all: a rank that raised does not know in which of them
the others wait."""


def performer_of(axis: Axis) -> Performer | None:
    """Return the performer of the ranks of `axis`; None on one local rank. A collective at first.

    States and engines on the same ranks share it.
    """
    if axis.runtime is Runtime.LOCAL:
        return None
    here = current_ranks()
    if here is not None:  # virtual ranks: it lives for one run
        return _of_run(here.kept, axis)
    place = _ranks_of(axis), dist.get_backend_config(axis.group())
    found = _OPEN.get(place)
    if found is None or not _is_alive(found):
        _alive.start_signs()
        whole = axis.plain
        with explained("the first call of fzero", axis, cause=_ALONE):
            channel = Channel(own_group(whole, backend="gloo"), own_group(whole))
        found = _OPEN[place] = Performer(channel)
    return found


_ALONE = (
    "init, an Engine or a collective under `if rank == 0:`, which every rank must call; or a rank "
    "that raised or ended before, or did not come within the timeout."
)


def _ranks_of(axis: Axis) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(axis.group()))


def _is_alive(performer: Performer) -> bool:
    """Whether the axis's process group exists: torch.distributed may have been restarted."""
    with suppress(AxisError):
        performer.axis.group()
        return True
    return False


def _of_run(kept: dict[Any, Any], axis: Axis) -> Performer:
    ranks = Performer, axis.size, axis.stride  # all of them, or those of a replica
    if ranks not in kept:
        whole = axis.plain
        kept[ranks] = Performer(Channel(whole, whole))
    return kept[ranks]


class UserCall(NamedTuple):
    """A collective of the user's: its name, and the shapes and dtypes of what this rank gives.

    said: of it, in bits: all ranks hear what any of them has said. connects: as of a `SyncPoint`.
    """

    name: str
    shapes: str
    backward: bool = False  # of one that was made before
    said: tuple[int, ...] = ()
    connects: bool = False

    def __str__(self) -> str:
        """Return it as virtual ranks write it."""
        return f"{self.name}[{self.shapes}]"


def before_collective(
    axis: Axis, call: UserCall | None = None, *, connects: bool = False
) -> tuple[int, ...]:
    """A collective begins: ranks in the middle of a pass come to the same place.

    All ranks of a mesh do, also for a collective over one of its dims. The name and the shapes of a
    user's `call`, and what is said of it, go with the round in which they come. Returns what any
    rank has said, bit by bit. Raises `MismatchError`, on every rank, if ranks make other calls, or
    one with other shapes on the ranks that it is over. `connects`: as of a `SyncPoint`.
    """
    whole = axis.whole or axis
    codes: tuple[int, ...] = ()
    performers = _in_a_pass(whole)
    # An abstract rank stands for a process, and is planned with the rounds of one.
    as_process = axis.runtime is Runtime.PROCESSES or (call is not None and is_abstract())
    by_round = as_process or any(map(_announces_anywhere, performers))
    if call is not None and by_round:
        codes = digest(f"{call.name} {axis.name}"), digest(call.shapes), *call.said
    met = None
    for performer in performers:
        performer.drop_raised()
        if not performer.protocol.inside:
            continue
        backward, own = (False, connects) if call is None else (call.backward, call.connects)
        for_training(performer.send, SyncPoint(codes, backward, own))
        if performer.protocol.meeting and performer.axis.size == whole.size:
            met = performer
    if call is None:
        return ()
    if not by_round:
        rows = lowering.told(call.name, call.said, axis, call.shapes) if call.said else [()]
        return lowering.any_of(rows)
    return lowering.any_of(_rows_of_call(call, codes, axis, met))


def _announces_anywhere(performer: Performer) -> bool:
    """Whether a backward is announced where its first gradient comes, as that of an engine is.

    Virtual ranks wait in the round of it, and so have to come to a call in a round, too.
    """
    return any(number < FUNCTIONAL for number in performer.protocol.inside)


def also_connects(axis: Axis) -> None:
    """Let the passes here know that the backward of the last collective comes, by other ranks."""
    for performer in _in_a_pass(axis.whole or axis):
        if performer.protocol.inside:
            for_training(performer.send, Met(connects=True))


def _rows_of_call(
    call: UserCall, codes: tuple[int, ...], axis: Axis, met: Performer | None
) -> list[tuple[int, ...]]:
    """Return what each process has said of a call, which they have `met` for or meet for now."""
    whole = axis.whole or axis
    if met is None:
        met = performer_of(whole)
        assert met is not None
        performer = met
        met.call_with(SYNC, lambda: (*codes, performer.protocol.reducible))
    heard = met.protocol.heard
    if not _go_together([values[:2] for values in heard], axis):
        before = sys.exception()  # in a `finally`, or where an error is handled
        after = "" if before is None else f" after {type(before).__name__}: {before}"
        texts = met.tell(f"{call}{f' over {axis.name!r}' if axis.whole else ''}{after}")
        first = [rank for rank, text in enumerate(texts) if text not in texts[:rank]]
        raise different({f"rank {rank}": texts[rank] for rank in first})
    count = len(codes)
    if all(values[count:] for values in heard):
        for_training(met.send, Met(tuple([values[count] for values in heard])))
    return [values[2:count] for values in heard]


def end_of_run(here: Here) -> str:
    """Return what a virtual rank says where its run ends, as in a round: its local calls."""
    mine = here.kept.get((Performer, here.size, 1))
    return f"the end of the simulated function{mine.protocol.noted.said if mine else ''}"


def agreed(text: str, said: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
    """Return what any rank of `axis` has said, bit by bit: a call of all of them."""
    performer = performer_of(axis)
    if performer is None:
        return said
    carried = carried_here()
    if carried is not None and carried.runs is Runs.TOGETHER:
        return lowering.any_of(lowering.told(text, said, axis))
    return lowering.any_of(performer.call_with(text, lambda: said))


def rows_of_ranks(what: str, row: Sequence[int], axis: Axis) -> list[list[int]]:
    """Return the numbers of every rank of `axis`, as many as this rank's, in rank order.

    All ranks of the mesh call it, and come to this place together. The host waits for them.
    """
    kept, _ = keeping(f"{what} {list(row)}")
    return _rows(what, row, axis) if kept is None else kept.values(lambda: _rows(what, row, axis))


def _rows(what: str, row: Sequence[int], axis: Axis) -> list[list[int]]:
    whole = axis.whole or axis
    before_collective(axis, UserCall(what, f"({len(row)},)"))
    performer = performer_of(whole)
    if performer is None:
        return [list(row)]
    over = replace(performer.axis, name=whole.name)

    def every(rows: list[list[int]]) -> list[list[int]]:
        return rows

    rows = lowering.begin_exchange(row, over, every, width=len(row), said=what).wait()[0]
    return axis.parts(rows)[axis.first(whole.rank)]


def _in_a_pass(whole: Axis) -> list[Performer]:
    """The performers of these ranks, or of some of them, that may be in a pass."""
    here = current_ranks()
    if here is not None:
        return [one for one in here.kept.values() if isinstance(one, Performer)]
    running = [place for place, one in _OPEN.items() if one.protocol.inside]
    ours = set(_ranks_of(whole) if running else ())
    return [_OPEN[place] for place in running if ours.issuperset(place[0])]


def _go_together(heard: Sequence[tuple[int, ...]], axis: Axis) -> bool:
    """Whether all ranks make one call, and those that it is over give the same shapes."""
    if len({codes[:1] for codes in heard}) > 1:
        return False
    return all(len(set(some)) == 1 for some in axis.parts(list(heard)).values())


def digest(text: str) -> int:
    """Return a number of 56 bits for a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return every rank's picklable `value` in rank order. A collective.

    Ranks in a pass are served until they come here, too. Raises `MismatchError` on every rank if
    one makes another call instead, as after `if rank == 0: save(...)`.
    """
    performer = performer_of(axis)
    if performer is None:
        return [value]
    performer.call(SETUP_OR_CHECKPOINT)
    return performer.tell(value)


def gather_objects_beside(value: Any, axis: Axis) -> list[Any]:
    """`gather_objects` over the group of `axis` itself: for a thread that has it to itself.

    The channel's rounds are those of the thread that trains; a second thread would mix with them.
    """
    return lowering.gather_objects(value, axis)
