"""Folders in the memory of this host: they outlive their processes, and nobody else frees them.

So each of them has a lock, which its processes hold as long as they live; and it may name one more
process, which would start them again. When the lock is free and that process is gone, the next
program of the same user removes the folder.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fzero.checkpoint._private import is_private, make_private, new_file, own_file
from fzero.checkpoint.collective import CheckpointError

SHARED_MEMORY = Path("/dev/shm")
LOCK, KEEPER = ".lock", "keeper.json"
MIRROR, REPLAY = "fzero-mirror", "fzero-replay"
_HELD: dict[Path, int] = {}
"""{folder: its lock, open}, of this process."""


class KnownProcess(NamedTuple):
    """A process, and no other that has its number later."""

    boot: str  # of the machine
    spaces: str  # in which its number and the time of its start are what they are
    pid: int
    start: int  # in ticks since the boot


def process_of(pid: int) -> KnownProcess | None:
    """Return what tells a process from all others; None where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = " ".join(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "time"))
    except OSError:
        return None
    found = _state_and_start(pid)
    return None if found is None else KnownProcess(boot, spaces, pid, found[1])


def is_gone(said: KnownProcess) -> bool:
    """Whether a process has surely ended: of another container nothing is known."""
    here = process_of(os.getpid())
    if here is None or said.boot != here.boot:  # memory does not outlive a boot, nor processes
        return here is not None
    if said.spaces != here.spaces:
        return False
    try:
        os.kill(said.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    found = _state_and_start(said.pid)
    return found is not None and (found[0] in "ZX" or found[1] != said.start)


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may have anything in it
    return fields[0], int(fields[19])


def memory_folder() -> Path:
    """Return where folders in memory are; on a system without that, those of temporary files."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def new_folder(kind: str) -> Path:
    """Return a new folder in memory, which this process holds; sweep those of programs gone."""
    sweep_gone()
    folder = memory_folder() / f"{kind}-{os.geteuid()}-{secrets.token_hex(8)}"
    hold(folder, kind)
    return folder


def hold(folder: Path, name: str, keeper: KnownProcess | None = None) -> None:
    """Make a folder for this user alone, and hold it until the end of this process.

    name: of the call, for an error. keeper: a process that keeps it, too.

    Raises `LayoutError` for a folder of others.
    """
    import fcntl  # not on Windows, where fzero can be imported all the same

    while not _is_held(folder):
        try:
            make_private(folder, name)
            with suppress(FileExistsError):
                os.close(new_file(folder / LOCK))
            opened = own_file(folder / LOCK, os.O_RDWR)
        except FileNotFoundError:
            continue  # swept just now, by another program of this user that saw no lock in it
        fcntl.flock(opened, fcntl.LOCK_SH)
        let_go(folder)
        _HELD[folder] = opened  # unless it was swept before the lock was there
    if keeper is not None:
        with suppress(FileExistsError), os.fdopen(new_file(folder / KEEPER), "w") as file:
            json.dump(keeper, file)


def _is_held(folder: Path) -> bool:
    opened = _HELD.get(folder)
    try:
        return opened is not None and os.path.samestat(os.fstat(opened), os.lstat(folder / LOCK))
    except OSError:
        return False


def let_go(folder: Path) -> None:
    """Hold a folder no longer."""
    opened = _HELD.pop(folder, None)
    if opened is not None:
        os.close(opened)


def remove_folder(folder: Path) -> None:
    """Remove a folder in memory, and hold it no longer."""
    shutil.rmtree(folder, ignore_errors=True)
    let_go(folder)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder with nothing in it but what says who keeps it."""
    with suppress(OSError):
        if {file.name for file in folder.iterdir()} <= {LOCK, KEEPER}:
            for name in (KEEPER, LOCK):
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def sweep_gone() -> None:
    """Remove this user's folders in memory whose programs are gone."""
    for kind in (MIRROR, REPLAY):
        for folder in memory_folder().glob(f"{kind}-{os.geteuid()}-*"):
            if is_private(folder) and not _is_held(folder):
                _sweep(folder, needs_keeper=kind == MIRROR)


def _sweep(folder: Path, *, needs_keeper: bool) -> None:
    import fcntl

    try:
        opened = own_file(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        with suppress(OSError):
            folder.rmdir()  # of a program that has ended, or will make it again
        return
    except (OSError, CheckpointError):
        return
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        keeper = _keeper_of(folder)
        if is_gone(keeper) if keeper is not None else not needs_keeper:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # somebody holds it
    finally:
        os.close(opened)


def _keeper_of(folder: Path) -> KnownProcess | None:
    try:
        with os.fdopen(own_file(folder / KEEPER, os.O_RDONLY)) as file:
            boot, spaces, pid, start = json.load(file)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    good = type(pid) is int and pid > 0 and type(start) is int
    return KnownProcess(str(boot), str(spaces), pid, start) if good else None
