"""The folder of a mirror on this host: made, found to be large enough, listed, swept, removed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fzero.checkpoint._mirror_file import slot_bytes
from fzero.checkpoint._mirror_find import HostCopy
from fzero.checkpoint._mirror_hosts import Hosts, default_folder, host_name, keeper
from fzero.checkpoint._private import make_private, new_file
from fzero.checkpoint._process_states import Held
from fzero.checkpoint._save import group_beside
from fzero.checkpoint.collective import (
    CheckpointError,
    Ranks,
    everywhere,
    from_first,
    results_of_ranks,
)
from fzero.checkpoint.in_memory import hold, remove_if_empty, sweep_gone
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


class Room(NamedTuple):
    """What this host had for copies when the mirror was made."""

    needed: int
    free: int  # with what copies in the folder took then


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where the processes of a training keep copies."""

    ranks: Ranks
    beside: Ranks  # the same, over a group that a mirror's thread has to itself
    hosts: Hosts
    folder: Path  # on this host
    attempt: str
    pid: int  # a forked process runs what is left to do at the end, too
    room: Room

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
            _make_folders(base, folder, options)
        return part_bytes(), sum(_bytes_in(folder)) if hosts.leads else 0

    def enter() -> Room:
        if options.folder is None and not hosts.leads:
            hold(base, "Mirror")
        return _require_room(hosts, folder, sizes)

    sizes = results_of_ranks(ranks, make, what=f"make {folder}")
    room = everywhere(ranks, enter, what=f"make {folder}")
    attempt = from_first(ranks, lambda: secrets.token_hex(8), what="make a Mirror")
    beside = Ranks(axis=group_beside(ranks.axis, use="mirrors"), beside=True)
    pid = os.getpid()
    return Home(
        ranks=ranks, beside=beside, hosts=hosts, folder=folder, attempt=attempt, pid=pid, room=room
    )


def _make_folders(base: Path, folder: Path, options: MirrorOptions) -> None:
    """Make the folders for this user alone, and sweep what programs that are gone have left."""
    sweep_gone()
    if options.folder is None:
        hold(base, "Mirror", keeper())
    else:  # it outlives the processes
        make_private(base, "Mirror")
    make_private(folder, "Mirror")


def _bytes_in(folder: Path) -> tuple[int, int]:
    """Return the bytes that are free, and those that copies in the folder take now."""
    found, taken = os.statvfs(folder), 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # another rank has renamed it
            taken += file.lstat().st_size
    return found.f_bavail * found.f_frsize, taken


def _require_room(hosts: Hosts, folder: Path, sizes: list[tuple[int, int]]) -> Room:
    """Return what this host has. sizes: of each rank, (its part, what copies can take).

    Raises `CheckpointError` for the first host that is too small.
    """
    rooms: dict[str, Room] = {}
    for host in hosts.names:
        needed = SLOTS * sum(slot_bytes(sizes[rank][0]) for rank in hosts.parts_on(host))
        rooms[host] = room = Room(needed, sizes[hosts.ranks_on(host)[0]][1])
        if room.needed > room.free:
            raise CheckpointError(
                f"Mirror: its copies need {room.needed:,} bytes in {folder.parent / host} on the "
                f"host {host}, and {room.free:,} bytes are free.",
                cause="a small /dev/shm (64 MB in a container of Docker, half of the memory "
                "elsewhere), or what other programs keep there.",
                fix=_MORE_ROOM,
            )
    return rooms[hosts.own]


_MORE_ROOM = (
    "docker run --shm-size=..., or mount -o remount,size=... /dev/shm; a folder= in more memory; "
    "copies=0; or remove what is of no use there (ls -l /dev/shm)."
)


@contextmanager
def explains_no_room(home: Home, more: int) -> Iterator[None]:
    """Raise the error of memory that is short now, for a copy that takes so many bytes more."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        raise _short_now(home, more, error) from error


def _short_now(home: Home, more: int, error: OSError) -> CheckpointError:
    """Say what is free now, and what has become of what was free when the mirror was made."""
    free, own = _bytes_in(home.folder)
    others = home.room.free - own - free
    seen = (
        f"Mirror: a copy needs {more:,} bytes more in {home.folder}, and {free:,} bytes are free "
        f"now ({error.strerror}). Its copies take {own:,} bytes there. When the mirror was made, "
        f"{home.room.free:,} bytes were free for the {home.room.needed:,} that it needs in all"
    )
    if others > 0:
        seen += f": since then others have taken {others:,} bytes"
        cause = "another program on this host that has put files into this memory meanwhile."
    elif free >= more:
        cause = "memory that was full just then and is free again, or a limit below what is free: "
        cause += "a quota of the user, or of the container."
    else:
        cause = "a state that has grown since (an optimizer that makes its own in the first step, "
        cause += "a larger extra=)."
    return CheckpointError(f"{seen}.", cause=cause, fix=_MORE_ROOM)


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
        mark = marks[home.hosts.ranks_on(home.hosts.own).index(home.rank)]
        with suppress(FileExistsError):
            os.close(new_file(mark))
        if all(mark.exists() for mark in marks):
            remove_all(home.folder)


def remove_all(folder: Path) -> None:
    """Remove every copy on this host; then the folders, if nothing else is in them."""
    for file in _own_files(folder):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
    remove_if_empty(folder.parent)


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
