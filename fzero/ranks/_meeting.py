"""Where the ranks of a program meet before their process group starts: a store, and a roll call.

Each rank puts its name into the store and waits for all. Who has waited too long gives up the ranks
that have not come, in the store too, so that all who wait raise at once and name the same ones.
Without torchrun rank 0 holds the store, and says whom it has met: a process that is not among them
has come to the store of another run, or as a rank that is there already.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from fzero.errors import AxisError, LostRankError

GIVEN_UP = "given up"
LINGER = datetime.timedelta(seconds=3)  # of the rank that holds the store, for those who still read


class MeetingPlace(NamedTuple):
    """What the environment says of where the ranks meet."""

    rank: int
    size: int
    host: str
    port: int
    of_launcher: bool  # whether torchrun holds the store, and not rank 0

    @property
    def holds(self) -> bool:
        """Whether this rank holds the store."""
        return self.rank == 0 and not self.of_launcher

    @property
    def name(self) -> str:
        """Host and port, as an error says them."""
        return f"{self.host}:{self.port}"


def place_in(environ: Mapping[str, str]) -> MeetingPlace:
    """Return where the ranks meet, of an environment that says it."""
    return MeetingPlace(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        host=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        of_launcher=is_of_launcher(environ),
    )


def is_of_launcher(environ: Mapping[str, str]) -> bool:
    """Whether torchrun holds the store where its ranks meet, and not rank 0."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def open_store(place: MeetingPlace, limit: datetime.timedelta) -> Store:
    """Return the store; on the rank that holds it, at once.

    Raises `AxisError` on a rank that cannot open it, or does not reach it within the limit.
    """
    try:
        if not place.holds:
            torch_dist: Any = dist  # rendezvous has no types
            store, _, _ = next(iter(torch_dist.rendezvous("env://", timeout=limit)))
            return store
        # As torch makes it, but for the wait, which would not say for whom.
        return TCPStore(
            place.host,
            place.port,
            place.size,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
    except (RuntimeError, ValueError) as error:
        raise _no_store(place, limit, error) from error


def _no_store(place: MeetingPlace, limit: datetime.timedelta, error: Exception) -> AxisError:
    first = _first_line(error)
    if place.holds and _is_taken(place.port):
        return AxisError(
            f"rank 0 of {place.size} cannot open port {place.port} for the ranks to meet: another "
            f"program on {socket.gethostname()} has it.",
            cause="a job on this host with the same MASTER_PORT (29500 is everybody's first "
            "choice), or ranks of an earlier run that still live.",
            fix=f"export another MASTER_PORT on all ranks, as {_free_port()}, which is free here; "
            "or torchrun --standalone, which finds one. ss -ltnp says who has it.",
        )
    if place.holds:
        return AxisError(
            f"rank 0 of {place.size} cannot open the store at {place.name} for the ranks to meet: "
            f"{first}",
            cause="a MASTER_ADDR that is not this host, or a port that may not be opened.",
            fix="export MASTER_ADDR as the host of rank 0, and a MASTER_PORT above 1023.",
        )
    who = "torchrun" if place.of_launcher else "rank 0"
    return LostRankError(
        f"rank {place.rank} of {place.size} has not reached {who}, which holds the store at "
        f"{place.name} where the ranks meet, within {limit.total_seconds():g} s: {first}",
        cause=f"{who} was not started, or has ended (its output says why, as a port that is taken);"
        " another MASTER_ADDR or MASTER_PORT than there; a firewall between the hosts; or another "
        "program behind that port.",
        fix=f"see the first error in the output of {who}; start all {place.size} ranks with one "
        "MASTER_ADDR and MASTER_PORT. FZERO_TIMEOUT_S sets how long they wait.",
        ranks=[] if place.of_launcher else [0],
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def call_roll(store: Any, place: MeetingPlace, limit: datetime.timedelta) -> None:
    """Wait until all ranks are there. A collective of those who come.

    Raises `LostRankError` on all of them that names those who have not come, or the rank that held
    the store; `AxisError` on a process that is one too many.
    """
    keys = [f"{rank}" for rank in range(place.size)]
    me = f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})"
    try:
        if store.check([keys[place.rank]]) and store.get(keys[place.rank]) == GIVEN_UP.encode():
            raise _too_late(place)
        if place.of_launcher:  # which numbers them, and may start them again
            store.set(keys[place.rank], me)
        else:
            _come_once(store, place, keys, me)
        try:
            store.wait(keys, limit)
        except dist.DistStoreError:  # it is over, and not all are there
            for key in keys:
                if not store.check([key]):
                    store.set(key, GIVEN_UP)
        names = [store.get(key).decode() for key in keys]
        missing = [rank for rank, name in enumerate(names) if name == GIVEN_UP]
        if missing and store.check(["twice"]):
            raise _twice(place, store.get("twice").decode())
        if missing:
            _hear(store, place, missing)
            raise _not_come(place, missing, limit)
        if not place.of_launcher:
            _require_met(store, place, names, me)
    except dist.DistError as error:
        raise _store_gone(place, error) from error


def _come_once(store: Any, place: MeetingPlace, keys: Sequence[str], me: str) -> None:
    """Put a name into the store. Raise `AxisError`, on every rank, if another one has this rank."""
    there = store.compare_set(keys[place.rank], "", me).decode()
    if there == me or store.check(["met"]):
        return
    seen = f"two processes came as rank {place.rank} of {place.size}: {there}, and {me}."
    store.set("twice", seen)
    for key in keys:  # nobody waits for who is not there
        store.compare_set(key, "", GIVEN_UP)
    raise _twice(place, seen)


def _twice(place: MeetingPlace, seen: str) -> AxisError:
    return AxisError(
        f"{seen} They met at {place.name}.",
        cause="a script that exports one RANK for two processes, or two jobs with one MASTER_ADDR "
        "and MASTER_PORT.",
        fix=f"export another RANK for each process, from 0 to {place.size - 1}, and another "
        "MASTER_PORT for each job.",
    )


def _require_met(store: Any, place: MeetingPlace, names: Sequence[str], me: str) -> None:
    """Raise `AxisError` unless this process is one of those that rank 0 has met."""
    if place.holds:
        store.set("met", json.dumps(names))
    met = json.loads(store.get("met"))
    if len(met) != place.size or met[place.rank] != me:
        there = met[place.rank] if place.rank < len(met) else "nobody"
        raise AxisError(
            f"this process came as rank {place.rank} of {place.size} to the store at {place.name}, "
            f"and the {len(met)} ranks there have met without it: rank {place.rank} is {there}.",
            cause="two jobs with one MASTER_ADDR and MASTER_PORT, of which this is the second; or "
            "two processes with one RANK.",
            fix="export another MASTER_PORT for each job, and another RANK for each process.",
        )


def _hear(store: Any, place: MeetingPlace, missing: Sequence[int]) -> None:
    """Say that this rank has read who is missing; who holds the store waits for all to have."""
    there = [f"heard {rank}" for rank in range(place.size) if rank not in missing]
    with suppress(dist.DistError):
        store.set(f"heard {place.rank}", "")
        if place.holds:
            store.wait(there, LINGER)


def _not_come(
    place: MeetingPlace, missing: Sequence[int], limit: datetime.timedelta
) -> LostRankError:
    there = [rank for rank in range(place.size) if rank not in missing]
    who = _ranks(missing)
    return LostRankError(
        f"{who} of {place.size} {'has' if len(missing) == 1 else 'have'} not come to {place.name}, "
        f"where the ranks meet, within {limit.total_seconds():g} s; {_ranks(there)} "
        f"{'has' if len(there) == 1 else 'have'}.",
        cause="a process that was not started, that ended, or that hangs before it asks for its "
        "ranks (imports, data); a WORLD_SIZE that is too large; a host that does not reach the "
        "others.",
        fix=f"see the first error in the output of {who}. If it only is late, set FZERO_TIMEOUT_S "
        "(seconds) on all ranks, or do the long work after the first call of fzero.",
        ranks=missing,
    )


def _too_late(place: MeetingPlace) -> AxisError:
    return AxisError(
        f"rank {place.rank} of {place.size} came to {place.name} when the others had given it up.",
        cause="long work before its first call of fzero: imports, data, a slow file system.",
        fix="set FZERO_TIMEOUT_S (seconds) on all ranks, or do the long work after that call.",
    )


def _store_gone(place: MeetingPlace, error: Exception) -> LostRankError:
    who = "torchrun" if place.of_launcher else "rank 0"
    return LostRankError(
        f"{who}, which holds the store at {place.name}, has gone while the ranks met there; so "
        f"rank {place.rank} of {place.size} cannot meet them: {_first_line(error)}",
        cause=f"{who} ended, or was killed; or the network to its host broke.",
        fix=f"see the first error in the output of {who}.",
        ranks=[] if place.of_launcher else [0],
    )


def not_started(store: Any, place: MeetingPlace, error: Exception) -> LostRankError:
    """Return the error of a process group that did not start, though all ranks came. Collective."""
    try:
        store.set(f"failed {place.rank}", "")
        with suppress(dist.DistStoreError):
            store.wait([f"failed {rank}" for rank in range(place.size)], LINGER)
        gone = [
            rank
            for rank in range(place.size)
            if not any(store.check([f"{what} {rank}"]) for what in ("failed", "started"))
        ]
    except dist.DistError as lost:
        return _store_gone(place, lost)
    seen = f"{_ranks(gone)} came and {'is' if len(gone) == 1 else 'are'} gone. So " if gone else ""
    return LostRankError(
        f"{seen}the process group of {place.size} ranks did not start on rank {place.rank}: "
        f"{_first_line(error)}",
        cause="a rank that ended just then; or hosts that reach the store and not each other, by "
        "the interface that gloo or NCCL has chosen.",
        fix="see the first error in the output of each rank; GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME name the interface.",
        ranks=gone,
    )


def say_started(store: Any, place: MeetingPlace) -> None:
    """Say that the group has started here."""
    with suppress(dist.DistError):
        store.set(f"started {place.rank}", "")


def leave(store: Any, place: MeetingPlace) -> None:
    """Say that this process ends; who holds the store waits a little for the others.

    They may still read there who was to blame for a collective that failed.
    """
    with suppress(dist.DistError):
        store.set(f"left {place.rank}", "")
        if place.holds:
            store.wait([f"left {rank}" for rank in range(place.size)], LINGER)


def _ranks(some: Sequence[int]) -> str:
    if len(some) == 1:
        return f"rank {some[0]}"
    shown = ", ".join(map(str, some[:16])) + (", ..." if len(some) > 16 else "")
    return f"ranks {shown}"
