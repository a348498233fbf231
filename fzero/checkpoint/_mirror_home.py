"""The folder of a mirror on this host: made, found to be large enough, listed, swept, removed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fzero.checkpoint._behind import group_beside
from fzero.checkpoint._held import Held
from fzero.checkpoint._mirror_find import HostCopy
from fzero.checkpoint._mirror_hosts import SHARED_MEMORY, Hosts, default_folder, host_name
from fzero.checkpoint.everywhere import (
    CheckpointError,
    Ranks,
    everywhere,
    from_first,
    results_of_ranks,
)
from fzero.collectives import assert_same_everywhere
from fzero.errors import AxisError, LayoutError, PhaseError

WRITING = "writing-"  # how a file is named, before the rank, that is no copy yet
ENDED = "ended-"  # of a file that says, with the rank, that its process has ended well
SLOTS = 2  # of each part on a host: the last whole update, and the one that is written


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions:
    """What a user has asked for."""

    folder: Path | None
    every: int
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where the processes of a training keep copies."""

    ranks: Ranks
    beside: Ranks  # the same, over a group that a mirror's thread has to itself
    hosts: Hosts
    folder: Path  # on this host
    attempt: str
    pid: int  # a forked process runs what is left to do at the end, too

    @property
    def rank(self) -> int:
        """This process."""
        return self.hosts.rank


WRITERS: dict[Path, str] = {}
"""{folder: the attempt that writes there}, of all mirrors of this process."""


def open_home(options: MirrorOptions, ranks: Ranks, part_bytes: Callable[[], int]) -> Home:
    """Make the folder of each host, and see that there is room in it. A collective.

    part_bytes: that a copy of this process takes.
    """

    def say() -> tuple[str, str]:
        folder = default_folder() if options.folder is None else options.folder
        return host_name(), os.fspath(folder)

    told = results_of_ranks(ranks, say, what="make a Mirror")
    same = [f"every={options.every}", f"copies={options.copies}"]
    assert_same_everywhere(same, ranks.axis, what="the Mirror")
    hosts = Hosts(
        of_ranks=tuple(host for host, _ in told), rank=ranks.axis.rank, copies=options.copies
    )
    base = Path(told[hosts.ranks_on(hosts.own)[0]][1])
    folder = base / hosts.own

    def make() -> tuple[int, int]:
        if options.folder not in (None, base):
            raise LayoutError(
                f"Mirror: folder={options.folder} on rank {hosts.rank}, {base} on another rank of "
                f"the host {hosts.own}.",
                cause="a folder whose name has the rank in it.",
                fix="give all ranks of a host the same folder.",
            )
        if hosts.leads:
            _make_private(base, folder)
        return part_bytes(), _free_bytes(folder) if hosts.leads else 0

    sizes = results_of_ranks(ranks, make, what=f"make {folder}")
    everywhere(ranks, lambda: _require_room(hosts, folder, sizes), what=f"make {folder}")
    attempt = from_first(ranks, lambda: secrets.token_hex(8), what="make a Mirror")
    beside = Ranks(axis=group_beside(ranks.axis, use="mirrors"), beside=True)
    pid = os.getpid()
    return Home(ranks=ranks, beside=beside, hosts=hosts, folder=folder, attempt=attempt, pid=pid)


def _make_private(base: Path, folder: Path) -> None:
    """Make the folder for this user alone; in /dev/shm every user may make any name."""
    base.parent.mkdir(parents=True, exist_ok=True)
    base.mkdir(mode=0o700, exist_ok=True)
    if base.parent == SHARED_MEMORY and (base.is_symlink() or base.stat().st_uid != os.getuid()):
        raise LayoutError(
            f"Mirror: {base} is not a folder of this user.",
            cause="another user's program has made it.",
            fix="Mirror(folder=...), with a folder of your own.",
        )
    folder.mkdir(mode=0o700, exist_ok=True)


def _free_bytes(folder: Path) -> int:
    """Bytes that copies can take: what is free, and what copies in the folder take now."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize + sum(file.stat().st_size for file in folder.iterdir())


def _require_room(hosts: Hosts, folder: Path, sizes: list[tuple[int, int]]) -> None:
    """Raise for the first host that is too small. sizes: of each rank, (its part, what is free)."""
    for host in hosts.names:
        needed = SLOTS * sum(sizes[rank][0] for rank in hosts.parts_on(host))
        free = sizes[hosts.ranks_on(host)[0]][1]
        if needed > free:
            raise no_room(needed, free, f"{folder.parent / host} on the host {host}")


def no_room(needed: int, free: int, where: str) -> CheckpointError:
    """Return the error of too little shared memory."""
    return CheckpointError(
        f"Mirror: its copies need {needed:,} bytes in {where}, and {free:,} bytes are free.",
        cause="a small /dev/shm (64 MB in a container of Docker, half of the memory elsewhere), or "
        "copies that another job has left there.",
        fix="docker run --shm-size=..., or mount -o remount,size=... /dev/shm; a folder= in more "
        "memory; copies=0; or remove /dev/shm/fzero-mirror-* of jobs that are over.",
    )


@contextmanager
def explains_no_room(needed: int, folder: Path) -> Iterator[None]:
    """Raise the error of too little shared memory with both numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise no_room(needed, _free_bytes(folder), os.fspath(folder)) from error


def copies_in(folder: Path) -> list[Path]:
    """Return the files in a folder that have the name of a copy."""
    return sorted(folder.glob("*-update-*"))


def sweep(home: Home, keep: Collection[HostCopy] = ()) -> None:
    """Remove what other attempts have left on this host, but for these copies.

    The first rank of a host does, when no other is at work there on what is removed.
    """
    if home.hosts.leads:
        names = {one.label.name for one in keep if one.host == home.hosts.own}
        for file in _own_files(home.folder):
            if home.attempt not in file.name and file.name not in names:
                file.unlink(missing_ok=True)


def leave(home: Home) -> None:
    """Note that this process has come to its end; the last one of a host removes the copies.

    So one that ends early, or badly by `sys.exit`, takes no copy from those that are still at work.
    """
    if os.getpid() != home.pid or WRITERS.get(home.folder, home.attempt) != home.attempt:
        return  # another process, or another mirror of this one, has the folder now
    marks = [
        home.folder / f"{ENDED}{rank:05d}-{home.attempt}"
        for rank in home.hosts.ranks_on(home.hosts.own)
    ]
    with suppress(OSError):  # somebody has removed the folder
        marks[home.hosts.ranks_on(home.hosts.own).index(home.rank)].touch()
        if all(mark.exists() for mark in marks):
            remove_all(home.folder)


def remove_all(folder: Path) -> None:
    """Remove every copy on this host; then the folders, if nothing else is in them."""
    for file in _own_files(folder):
        file.unlink(missing_ok=True)
    for each in (folder, folder.parent):
        with suppress(OSError):
            each.rmdir()


def _own_files(folder: Path) -> list[Path]:
    return [*copies_in(folder), *folder.glob(f"{WRITING}*"), *folder.glob(f"{ENDED}*")]


def require_empty(home: Home) -> None:
    """Raise `PhaseError` where copies are that nobody has asked for. A collective."""

    def look() -> None:
        found = copies_in(home.folder)
        if not found:
            return
        raise PhaseError(
            f"Mirror.update: {home.folder} has copies that were not restored: {found[-1].name}.",
            cause="a run that was started again and did not call restore, which would have lost "
            "them now; or two mirrors in one folder.",
            fix="call mirror.restore(state) before the first update, or remove the folder; give "
            "each Mirror a folder= of its own.",
        )

    everywhere(home.ranks, look, what=f"list {home.folder}")


def require_writer(home: Home) -> None:
    """Raise `PhaseError` where another mirror of this process writes into the folder."""
    if WRITERS.setdefault(home.folder, home.attempt) != home.attempt:
        raise PhaseError(
            f"Mirror.update: another Mirror of this program keeps its copies in {home.folder}.",
            cause="two models, each with a Mirror, and no folder= for them; or a Mirror that was "
            "made anew and restored, while the old one is still used.",
            fix="give each Mirror a folder= of its own, and use one for each model.",
        )


def require_same_ranks(home: Home, held: Held) -> None:
    """Raise `AxisError` for a state of other ranks than before."""
    if held.processes.axis != home.ranks.axis:
        raise AxisError(
            f"Mirror.update: a state on {held.processes.axis}, before on {home.ranks.axis}.",
            cause="states of two models, or of two meshes, given to one Mirror.",
            fix="use one Mirror, with a folder= of its own, for each of them.",
        )
