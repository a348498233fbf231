"""Process groups of torch.distributed: the world's, groups of fzero's own, and parts of a group."""

from __future__ import annotations

import atexit
import datetime
import importlib
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fzero.context.device import accelerator
from fzero.errors import LostRankError
from fzero.ranks.rendezvous import (
    MeetingPlace,
    attempt,
    call_roll,
    is_of_launcher,
    leave,
    local_rank,
    not_started,
    open_store,
    place_in,
    roll_of,
    say_started,
    timeout,
)

_C10D: Any = dist.distributed_c10d
"""What torch.distributed has no public name or no types for."""


_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], str]] = (
    weakref.WeakKeyDictionary()
)
"""Names of the groups that were made of each live group: a table of handles, as torch has one."""


_WHEN_STARTED: list[Callable[[], None]] = []
"""What else begins with the group of the world."""


_STARTS = itertools.count()
"""How often this process has started the group of the world: all ranks count alike."""


_MET: Counter[tuple[int, ...]] = Counter()
"""How often these ranks have made a group together, without the others of the world."""


_OF_PARENT: list[dist.ProcessGroup] = []
"""Of a process that was forked from a rank, the groups of that rank: sockets that are not its."""


os.register_at_fork(after_in_child=lambda: _OF_PARENT.extend(_C10D._world.pg_map))


def is_of_parent(group: dist.ProcessGroup) -> bool:
    """Whether a group is that of the rank that this process was forked from."""
    return any(group is one for one in _OF_PARENT)


def resolve(name: str) -> dist.ProcessGroup:
    """Return the live group of that name; raise as torch does if there is none."""
    return _C10D._resolve_process_group(name)


def new_group(
    like: dist.ProcessGroup, ranks: Sequence[int], *, backend: str | None = None, all_call: bool
) -> dist.ProcessGroup:
    """Return a group of the global `ranks`, with the timeout and the backend of another group.

    Every rank of the world calls this, or (not `all_call`) every one that is in it.
    """
    try:
        if not all_call:
            _count_alike(ranks)
        return _C10D.new_group(
            list(ranks),
            timeout=_timeout_of(like),
            backend=backend or dist.get_backend_config(like),  # torch's default: the world's
            use_local_synchronization=not all_call,
        )
    except RuntimeError as error:
        holder, seen = holder_of_store(), f"{type(error).__name__}: {str(error).splitlines()[0]}"
        store: Any = _C10D._get_default_store()
        gone = False
        try:
            store.check(["fzero"])
        except dist.DistNetworkError:
            gone = True
        who = "the launcher" if holder is None else f"rank {holder}"
        fault = f"{who}, which held the store of the ranks, is gone. So a" if gone else "a"
        raise LostRankError(
            f"{fault} process group of the ranks {[*ranks]} could not be made on rank "
            f"{dist.get_rank()}: {seen}",
            cause="a rank that ended before all of them came to this call, or that does not come.",
            fix="see the first error in the outputs of these ranks; FZERO_TIMEOUT_S sets how long "
            "a group that fzero starts waits.",
            ranks=[holder] if gone and holder is not None else [],
        ) from error


def _count_alike(ranks: Sequence[int]) -> None:
    """Make groups of this rank alone until it has as many groups as any of these ranks has.

    torch names a group that its own ranks make by how many groups they have. So ranks of which one
    was in more groups before would wait under other names, for ever. They meet in the store.
    """
    store: Any = _C10D._get_default_store()
    names: Any = _C10D._world.pg_names
    mine, number = dist.get_rank(), _MET[tuple(ranks)]
    _MET[tuple(ranks)] += 1
    key = f"fzero groups {attempt(os.environ)} {number} {[*ranks]}"
    store.set(f"{key} {mine}", str(len(names)))
    most = max(int(store.get(f"{key} {rank}")) for rank in ranks)
    while len(names) < most:
        _C10D.new_group([mine], backend="gloo", use_local_synchronization=True)


def copy_of(group: dist.ProcessGroup, backend: str | None = None) -> dist.ProcessGroup:
    """Return a new group of the same ranks. All of them call it."""
    ranks = dist.get_process_group_ranks(group)
    return new_group(group, ranks, backend=backend, all_call=_is_everybody(ranks))


def among(ranks: Sequence[int], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of these global ranks: the world, or one that is made once for them."""
    world: Any = dist.group.WORLD
    if _is_everybody(ranks):
        return world
    known, key = _MADE.setdefault(world, {}), tuple(ranks)
    if key not in known:
        known[key] = new_group(like, ranks, all_call=False).group_name
    return resolve(known[key])


def part_of_group(whole: dist.ProcessGroup, *, size: int, stride: int) -> dist.ProcessGroup:
    """Return the group of this rank's part of `whole`: `size` ranks, `stride` places apart.

    All ranks of the whole make it when they first ask for it.
    """
    known, key = _MADE.setdefault(whole, {}), (size, stride)
    if key not in known:
        ranks, mine = dist.get_process_group_ranks(whole), dist.get_rank()
        everybody = _is_everybody(ranks)
        for first in range(len(ranks)):
            part = ranks[first : first + stride * size : stride]
            begins = first // stride % size == 0
            # Of the world all ranks make all parts, as torch asks for: it numbers a rank's groups,
            # and ranks must go on counting alike.
            if begins and (everybody or mine in part):
                made = new_group(whole, part, all_call=everybody)
                if mine in part:
                    known[key] = made.group_name
    return resolve(known[key])


def _is_everybody(ranks: Sequence[int]) -> bool:
    return len(ranks) == dist.get_world_size()


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """The timeout that a group was started with: torch gives a new one its default again."""
    for pair in dist.get_backend_config(group).split(","):
        try:
            backend: Any = group._get_backend(torch.device(pair.partition(":")[0]))
            return backend.options._timeout
        except (RuntimeError, AttributeError):  # no such backend, or one without options
            continue
    return None


def start_world() -> None:
    """Start the group of all ranks that the environment describes."""
    # Its functions take the world as default argument when it is imported, as checkpoints do: if
    # that is after the start, the group outlives destroy_process_group, and a gloo thread that
    # then frees a tensor while the interpreter ends aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    limit = timeout(os.environ)
    kind = accelerator()
    if kind is not None:
        count = torch.accelerator.device_count()
        torch.accelerator.set_device_index(local_rank(os.environ) % count)
    place = place_in(os.environ)
    number = next(_STARTS)
    store = open_store(place, limit, number)
    store.set_timeout(limit)
    # The launcher's store outlives its ranks. Without a prefix, a rank that was started again finds
    # the addresses of those that are gone, and connects to nobody.
    again = attempt(os.environ)
    if again:
        store = PrefixStore(f"attempt {again}", store)
    roll = roll_of(store, number)
    call_roll(roll, place, limit)
    try:
        dist.init_process_group(
            backends(kind),
            store=PrefixStore(f"default_pg{number or ''}", store),
            rank=place.rank,
            world_size=place.size,
            timeout=limit,
        )
    except RuntimeError as error:
        raise not_started(roll, place, error) from error
    say_started(roll, place)
    # A weak one: a group that lives beyond its end would have threads until the interpreter ends.
    atexit.register(_stop_group, weakref.ref(dist.group.WORLD), roll, place)
    for do in _WHEN_STARTED:
        do()


def when_started(do: Callable[[], None]) -> None:
    """Have something done whenever fzero has started the group of the world."""
    _WHEN_STARTED.append(do)


def holder_of_store() -> int | None:
    """Return the rank whose process holds the store of the world; None: the launcher, or unknown.

    Without torchrun, torch has rank 0 hold it.
    """
    store: Any = _C10D._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    ours = isinstance(store, TCPStore) and not is_of_launcher(os.environ)
    return 0 if ours else None


def backends(kind: str | None) -> str:
    """Return the backends of a group, where there is an accelerator of this type.

    Then both: what ranks agree on in passing goes over gloo, and syncs no device. One for which
    torch.distributed knows none goes over gloo, through the host.
    """
    own = dist.Backend.default_device_backend_map.get(kind or "cpu", "gloo")
    if own == "gloo" or not dist.is_gloo_available():
        return own
    return f"cpu:gloo,{kind}:{own}"


def _stop_group(world: weakref.ref[Any], roll: Store, place: MeetingPlace) -> None:
    if not dist.is_initialized():
        return
    ours = dist.group.WORLD is world()  # and not one that was started later
    dist.destroy_process_group()  # so that others hear of an end that they did not expect
    if ours:
        leave(roll, place)
