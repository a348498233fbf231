"""Which ranks share a host, who keeps whose copy, and where. Pure, but for the environment."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from fzero.checkpoint.in_memory import MIRROR, SHARED_MEMORY, KnownProcess, process_of
from fzero.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where the ranks are, as one of them sees it."""

    of_ranks: tuple[str, ...]
    rank: int
    copies: int  # on other hosts, if there are so many

    @property
    def own(self) -> str:
        """The host of this rank."""
        return self.of_ranks[self.rank]

    @property
    def names(self) -> list[str]:
        """All hosts, in the order of their first ranks."""
        return list(dict.fromkeys(self.of_ranks))

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its host, which looks after the folder."""
        return self.ranks_on(self.own)[0] == self.rank

    @property
    def held(self) -> int:
        """How many copies there are of each part on other hosts."""
        return min(self.copies, len(self.names) - 1)

    def ranks_on(self, host: str) -> list[int]:
        """Return the ranks of a host."""
        return [rank for rank, one in enumerate(self.of_ranks) if one == host]

    def keepers(self, rank: int) -> list[int]:
        """Return the ranks, each on another host than `rank` and than the others, that copy it.

        Example:
            >>> Hosts(of_ranks=("a", "a", "b", "b"), rank=0, copies=1).keepers(1)
            [3]
        """
        names, host = self.names, self.of_ranks[rank]
        place, own = self.ranks_on(host).index(rank), names.index(host)
        after = (names[(own + step) % len(names)] for step in range(1, self.held + 1))
        return [ranks[place % len(ranks)] for ranks in map(self.ranks_on, after)]

    def kept_by(self, rank: int) -> list[int]:
        """Return the ranks of other hosts that a rank keeps copies of."""
        return [other for other in range(len(self.of_ranks)) if rank in self.keepers(other)]

    def parts_on(self, host: str) -> list[int]:
        """Return the ranks of which a host has the part, its own ones and those that it keeps."""
        own = self.ranks_on(host)
        return [*own, *(other for rank in own for other in self.kept_by(rank))]


def host_name() -> str:
    """Return the name of this host, as a file name: FZERO_HOST, or the system's.

    Raises `LayoutError` for a name without a letter or a digit.
    """
    name = os.environ.get("FZERO_HOST") or socket.gethostname()
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    if re.search(r"[A-Za-z0-9]", safe):
        return safe
    raise LayoutError(
        f"FZERO_HOST={name!r} names no host.",
        cause="a variable of the shell that was not expanded.",
        fix="export FZERO_HOST as a word, the same for all ranks of a host; or unset it.",
    )


def _launch() -> tuple[str, int]:
    """Return the name of this launch, and the process that would start its ranks again.

    Ranks that torchrun starts again have the same agent as their parent. Without torchrun nobody
    starts them again: it is this process itself.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return ("process", os.getpid()) if run is None else (run, os.getppid())


def keeper() -> KnownProcess | None:
    """Return the process whose end is the end of this launch; None where that is not known."""
    return process_of(_launch()[1])


def default_folder() -> Path:
    """Return the folder of the mirror of a program that gives none: another one for each launch.

    Raises `LayoutError` where there is no shared memory.
    """
    if not SHARED_MEMORY.is_dir():
        raise LayoutError(
            f"Mirror: there is no {SHARED_MEMORY} on this system.",
            cause="a system without a file system in memory, as macOS.",
            fix="Mirror(folder=..., every=...), with a folder that outlives the processes.",
        )
    run, pid = _launch()
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", run)[:64]
    digest = hashlib.sha256(f"{run} {process_of(pid) or pid}".encode()).hexdigest()
    return SHARED_MEMORY / f"{MIRROR}-{os.geteuid()}-{safe}-{digest[:16]}"


def restarts() -> tuple[int, int]:
    """Return how often torchrun has started these ranks again, and how often it would at most."""
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    done, most = (int(os.environ.get(name) or 0) for name in names)
    return done, most
