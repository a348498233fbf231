"""How ranks find each other before their process group starts: what the launcher says, and a store.

The environment says how many ranks there are, and how they connect. Each rank puts its name into
the store and waits for all. Who has waited too long gives up the ranks that have not come, in the
store too, so that all who wait raise at once and name the same ones. Without torchrun rank 0 holds
the store, and says whom it has met: a process that is not among them has come to the store of
another run, or as a rank that is there already.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fzero.errors import AxisError, LostRankError

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torch's env:// needs
# srun, Open MPI and the MPICH family: (number of processes, index of this one)
_LAUNCHERS = (
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)
# torchrun, srun, Open MPI, Intel MPI; last the rank itself, where each node has as many GPUs
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "RANK",
)
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_TIMEOUT = "FZERO_TIMEOUT_S"


def describes_several_ranks(environ: Mapping[str, str]) -> bool:
    """Whether `environ` describes a world of several ranks that torch can join.

    WORLD_SIZE=1, or no word of ranks at all, is one rank. WORLD_SIZE=1 also overrules what srun or
    mpirun say: it is how a user says that each process is to run alone.

    Raises `AxisError` if there are several ranks (or there is a RANK) and a variable that they
    need to find each other is missing, or a number is none.

    Example:
        >>> describes_several_ranks({})
        False
        >>> at = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        >>> describes_several_ranks({"RANK": "1", "WORLD_SIZE": "2", **at})
        True
    """
    if environ.get("WORLD_SIZE") and _whole(environ, "WORLD_SIZE") == 1:
        return False
    counts = [pair for pair in _LAUNCHERS if all(map(environ.get, pair))]
    counts = [(size, rank) for size, rank in counts if _whole(environ, size) > 1]
    if not (counts or environ.get("RANK") or environ.get("WORLD_SIZE")):
        return False
    missing = [name for name in _RENDEZVOUS if not environ.get(name)]
    if missing:
        raise _not_told(environ, missing, counts)
    rank, size = _whole(environ, "RANK"), _whole(environ, "WORLD_SIZE")
    _whole(environ, "MASTER_PORT")
    if rank >= size:
        raise AxisError(
            f"RANK={rank} with WORLD_SIZE={size}.",
            cause="ranks that were counted from 1, or a WORLD_SIZE of another run.",
            fix="export another RANK for each process, from 0 to WORLD_SIZE - 1.",
        )
    return True


def local_rank(environ: Mapping[str, str]) -> int:
    """Return this process's index on its node, by which it takes a GPU; 0 if nobody says.

    Example:
        >>> local_rank({"RANK": "9", "SLURM_LOCALID": "1"})
        1
    """
    name = next((name for name in _LOCAL_RANKS if environ.get(name)), None)
    return _whole(environ, name) if name else 0


def attempt(environ: Mapping[str, str]) -> int:
    """Return how often torchrun has started these ranks again, on one machine.

    With several machines each agent counts for itself, so the number says nothing there: 0.

    Example:
        >>> attempt({"TORCHELASTIC_RESTART_COUNT": "1", "GROUP_WORLD_SIZE": "1"})
        1
        >>> attempt({})
        0
    """
    return restarts(environ) if environ.get("GROUP_WORLD_SIZE") == "1" else 0


def restarts(environ: Mapping[str, str]) -> int:
    """Return how often the agent of torchrun on this machine has started its ranks again."""
    return _whole(environ, _RESTARTS) if environ.get(_RESTARTS) else 0


def timeout(environ: Mapping[str, str]) -> datetime.timedelta:
    """Return how long a collective waits for the other ranks: FZERO_TIMEOUT_S, or 600 s.

    Raises `AxisError` for what is no positive number of seconds.

    Example:
        >>> timeout({"FZERO_TIMEOUT_S": "90"})
        datetime.timedelta(seconds=90)
    """
    text = environ.get(_TIMEOUT) or "600"
    try:
        found = datetime.timedelta(seconds=float(text))
    except (ValueError, OverflowError):  # no number, nan, or more than a timedelta holds
        found = datetime.timedelta(0)
    if found > datetime.timedelta(0):
        return found
    raise AxisError(
        f"{_TIMEOUT}={text!r} is not a positive number of seconds.",
        cause="a unit in it, as in 90s, or a word such as none.",
        fix=f"export {_TIMEOUT}=90, or unset it for 600 s.",
    )


def _whole(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if text.strip().isdecimal():
        return int(text)
    raise AxisError(
        f"{name}={text!r} is not a whole number of at least 0.",
        cause="a variable of the shell that was not expanded, or a typing error.",
        fix=f"export {name} as a plain number, or unset it.",
    )


def _not_told(
    environ: Mapping[str, str], missing: list[str], counts: list[tuple[str, str]]
) -> AxisError:
    """Name what is set and what is missing, and where a missing number can be had."""
    seen = [name for pair in counts for name in pair]
    seen += [name for name in _RENDEZVOUS if environ.get(name)]
    size, rank = counts[0] if counts else ("<number of ranks>", "<this rank, from 0>")
    value = {
        "RANK": f"${rank}" if counts else rank,
        "WORLD_SIZE": f"${size}" if counts else size,
        "MASTER_ADDR": "<host of rank 0>",
        "MASTER_PORT": "29500",
    }
    exports = " ".join(f"{name}={value[name]}" for name in missing)
    return AxisError(
        f"{', '.join(f'{name}={environ[name]}' for name in seen)} "
        f"{'is' if len(seen) == 1 else 'are'} set, and {', '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not.",
        cause="the program was started by srun, mpirun or a script of your own, which say "
        "that there are several ranks, but not how they find each other.",
        fix=f"export {exports} in each process, or start it with torchrun. If each process "
        "is to run alone, export WORLD_SIZE=1.",
    )


GIVEN_UP = "given up"
LINGER = datetime.timedelta(seconds=3)  # of the rank that holds the store, for those who still read


class MeetingPlace(NamedTuple):
    """What the environment says of where the ranks meet."""

    rank: int
    size: int
    host: str
    port: int
    of_launcher: bool  # whether torchrun holds the store, and not rank 0
    job: tuple[tuple[str, str], ...] = ()  # variables that are the same on all ranks of a job

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
    # The variables by which jobs differ. Parts of one of Slurm have others.
    slurm = next((f"SLURM_{x}JOB_ID" for x in ("HET_", "") if f"SLURM_{x}JOB_ID" in environ), "")
    names = [slurm, "TORCHELASTIC_RUN_ID", "PBS_JOBID", "LSB_JOBID", "PMIX_NAMESPACE"]
    return MeetingPlace(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        host=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        of_launcher=is_of_launcher(environ),
        job=tuple((name, environ[name]) for name in names if environ.get(name, "") not in _NO_ID),
    )


_NO_ID = ("", "none")  # of torchrun without --rdzv-id


def is_of_launcher(environ: Mapping[str, str]) -> bool:
    """Whether torchrun holds the store where its ranks meet, and not rank 0."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def roll_of(store: Store, number: int) -> Store:
    """Return the part of the store in which ranks meet for the group of this number."""
    return PrefixStore(f"fzero meets {number}", store)


def open_store(place: MeetingPlace, limit: datetime.timedelta, number: int = 0) -> Store:
    """Return the store; on the rank that holds it, at once. number: as of `roll_of`.

    Raises `AxisError` on a rank that cannot open it, or does not reach it within the limit; on all
    that meet there, where another process has come as rank 0.
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
        if place.holds and (roll := _roll_of_others(place, number)) is not None:
            call_roll(roll, place, LINGER)
        raise _no_store(place, limit, error) from error


def _roll_of_others(place: MeetingPlace, number: int) -> Store | None:
    """Return the roll of ranks that meet behind a port that is taken; None if there are none.

    In a thread: a store's timeout counts from its first answer, and another program that has the
    port may never give one.
    """
    found: list[Store] = []

    def look() -> None:
        with suppress(RuntimeError, ValueError):
            store = TCPStore(place.host, place.port, is_master=False, timeout=LINGER)
            roll = roll_of(store, number)
            if not roll.check(["met"]) and roll.get("0"):
                found.append(roll)

    looking = threading.Thread(target=look, name="fzero-port", daemon=True)
    looking.start()
    looking.join(2 * LINGER.total_seconds())
    return found[0] if found else None


def _no_store(place: MeetingPlace, limit: datetime.timedelta, error: Exception) -> AxisError:
    first = _first_line(error)
    is_taken = False
    with socket.socket() as probe:
        try:
            probe.bind(("", place.port))
        except OSError:
            is_taken = True
    if place.holds and is_taken:
        with socket.socket() as probe:
            probe.bind(("", 0))
            free_port = int(probe.getsockname()[1])
        return AxisError(
            f"rank 0 of {place.size} cannot open port {place.port} for the ranks to meet: another "
            f"program on {socket.gethostname()} has it.",
            cause="a job on this host with the same MASTER_PORT (29500 is everybody's first "
            "choice), or ranks of an earlier run that still live.",
            fix=f"export another MASTER_PORT on all ranks, as {free_port}, which is free here; "
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


def call_roll(store: Any, place: MeetingPlace, limit: datetime.timedelta) -> None:
    """Wait until all ranks are there. A collective of those who come.

    Raises `LostRankError` on all of them that names those who have not come, or the rank that held
    the store; `AxisError` on a process that is one too many.
    """
    keys = [f"{rank}" for rank in range(place.size)]
    name = f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})"
    mine = {"name": name, "WORLD_SIZE": f"{place.size}", **dict(place.job)}
    me = json.dumps(mine)
    try:
        if store.check([keys[place.rank]]) and store.get(keys[place.rank]) == GIVEN_UP.encode():
            raise (
                _said_twice(place, store)
                or _unlike(_there(store, keys), place)
                or AxisError(
                    f"rank {place.rank} of {place.size} came to {place.name} when the others had "
                    "given it up.",
                    cause="long work before its first call of fzero: imports, data, a slow file "
                    "system.",
                    fix="set FZERO_TIMEOUT_S (seconds) on all ranks, or do the long work after "
                    "that call.",
                )
            )
        here = {**_there(store, keys[:1]), place.rank: mine}
        stranger = _unlike(here, place, dict(place.job)) if place.job else None
        if stranger is not None:  # the other job goes on
            store.set("stranger", f" {name} came there, of another job.")
            raise stranger
        if place.of_launcher:  # which numbers them, and may start them again
            store.set(keys[place.rank], me)
        else:
            first = store.compare_set(keys[place.rank], "", me).decode()
            if first != me and not store.check(["met"]):
                both = [json.loads(x)["name"] if x != GIVEN_UP else x for x in (first, me)]
                seen = f"two processes came as rank {place.rank} of {place.size}: {both[0]}, and "
                store.set("twice", seen := f"{seen}{both[1]}.")
                _give_up(store, keys)
                raise _twice(place, seen)
        _require_alike(store, place, keys)
        try:
            store.wait(keys, limit)
        except dist.DistStoreError:  # it is over, and not all are there
            _give_up(store, keys)
        _require_alike(store, place, keys)
        names = [store.get(key).decode() for key in keys]
        missing = [rank for rank, name in enumerate(names) if name == GIVEN_UP]
        if missing:
            if (twice := _said_twice(place, store)) is not None:
                raise twice
            there = [rank for rank in range(place.size) if rank not in missing]
            with suppress(dist.DistError):  # who holds the store waits for all to have read this
                store.set(f"heard {place.rank}", "")
                if place.holds:
                    store.wait([f"heard {rank}" for rank in there], LINGER)
            beside = store.get("stranger").decode() if store.check(["stranger"]) else ""
            who = _ranks(missing)
            raise LostRankError(
                f"{who} of {place.size} {'has' if len(missing) == 1 else 'have'} not come to "
                f"{place.name}, where the ranks meet, within {limit.total_seconds():g} s; "
                f"{_ranks(there)} {'has' if len(there) == 1 else 'have'}.{beside}",
                cause="a process that was not started, that ended, or that hangs before it asks "
                "for its ranks (imports, data); a WORLD_SIZE that is too large; a host that does "
                "not reach the others.",
                fix=f"see the first error in the output of {who}. If it only is late, set "
                "FZERO_TIMEOUT_S (seconds) on all ranks, or do the long work after the first call "
                "of fzero.",
                ranks=missing,
            )
        if place.of_launcher:
            return
        if place.holds:
            store.set("met", json.dumps(names))
        met = json.loads(store.get("met"))  # by rank 0
        if len(met) != place.size or met[place.rank] != me:
            other = json.loads(met[place.rank])["name"] if place.rank < len(met) else "nobody"
            raise AxisError(
                f"this process came as rank {place.rank} of {place.size} to the store at "
                f"{place.name}, and the {len(met)} ranks there have met without it: rank "
                f"{place.rank} is {other}.",
                cause="two jobs with one MASTER_ADDR and MASTER_PORT, of which this is the second; "
                "or two processes with one RANK.",
                fix="export another MASTER_PORT for each job, and another RANK for each process.",
            )
    except dist.DistError as error:
        raise _store_gone(place, error) from error


def _there(store: Any, keys: Sequence[str]) -> dict[int, dict[str, str]]:
    """Return what the ranks say that are there, by rank."""
    texts = {int(key): store.get(key).decode() for key in keys if store.check([key])}
    return {rank: json.loads(text) for rank, text in texts.items() if text != GIVEN_UP}


def _give_up(store: Any, keys: Sequence[str]) -> None:
    """Give up the ranks that are not there, so that nobody waits for them."""
    for key in keys:
        store.compare_set(key, "", GIVEN_UP)


def _require_alike(store: Any, place: MeetingPlace, keys: Sequence[str]) -> None:
    """Raise `AxisError`, on every rank, where ranks of two jobs or of two sizes meet."""
    there = _there(store, keys)
    unlike = None if store.check(["met"]) else _unlike(there, place)
    if unlike is not None:
        most = max(int(one["WORLD_SIZE"]) for one in there.values())
        _give_up(store, [f"{rank}" for rank in range(most)])
        raise unlike


def _unlike(
    there: Mapping[int, dict[str, str]], place: MeetingPlace, names: Iterable[str] = ()
) -> AxisError | None:
    """Return the error of ranks that say other values of a variable of a job, or of `names`."""
    for name in names or dict.fromkeys(name for one in there.values() for name in one):
        by_value = {one[name]: rank for rank, one in there.items() if name in one}
        if name != "name" and len(by_value) > 1:
            seen = [f"rank {r}, {there[r]['name']}, has {name}={x}" for x, r in by_value.items()]
            return AxisError(
                f"ranks that do not go together meet at {place.name}: {'; '.join(seen)}.",
                cause="two jobs with one MASTER_ADDR and MASTER_PORT, or a script that exports "
                f"another {name} on some ranks.",
                fix=f"export another MASTER_PORT for each job, and one {name} on all its ranks.",
            )
    return None


def _said_twice(place: MeetingPlace, store: Any) -> AxisError | None:
    """Return the error of two processes with one rank, if one of them has said so."""
    return _twice(place, store.get("twice").decode()) if store.check(["twice"]) else None


def _twice(place: MeetingPlace, seen: str) -> AxisError:
    return AxisError(
        f"{seen} They met at {place.name}.",
        cause="a script that exports one RANK for two processes, or two jobs with one MASTER_ADDR "
        "and MASTER_PORT.",
        fix=f"export another RANK for each process, from 0 to {place.size - 1}, and another "
        "MASTER_PORT for each job.",
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
