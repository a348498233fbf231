"""What the environment says about the world: how many ranks, and how they connect. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from fzero.errors import AxisError

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
