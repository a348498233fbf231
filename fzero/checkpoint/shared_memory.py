"""Folders in the memory of this host, of this user alone: they outlive their processes.

Who can write to a folder can make a file of the name that is read next, or a link, through which a
program would write to another file of its own user. So a folder is used only if nobody else can
write there, nor put another one in its place.

Nobody else frees what is in memory. So each folder has a lock, which its processes hold as long as
they live, and which may name one more process, that would start them again. When the lock is free
and that process is gone, the next program of the same user removes the folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fzero.errors import LayoutError

SHARED_MEMORY = Path("/dev/shm")
LOCK = ".lock"
MIRROR, REPLAY = "fzero-mirror", "fzero-replay"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_HELD: dict[Path, int] = {}
"""{folder: its lock, open}, of this process."""


def new_folder(kind: str) -> Path:
    """Return a new folder in memory, which this process holds; sweep those of programs gone.

    On a system without a file system in memory, it is among the temporary files.
    """
    sweep_gone()
    folder = _memory_folder() / f"{kind}-{os.geteuid()}-{secrets.token_hex(8)}"
    hold(folder, kind)
    return folder


def hold(folder: Path, name: str, keeper: str = "") -> None:
    """Make a folder for this user alone, and hold it until the end of this process.

    name: of the call, for an error. keeper: a process that keeps it, too, as `process_of` says it.

    Raises `LayoutError` for a folder of others.
    """
    import fcntl  # not on Windows, where fzero can be imported all the same

    while not _is_held(folder):
        try:
            make_private(folder, name)
            opened = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o600)
        except FileNotFoundError:
            continue  # swept just now, by another program of this user that saw no lock in it
        fcntl.flock(opened, fcntl.LOCK_SH)
        let_go(folder)
        _HELD[folder] = opened  # unless it was swept before the lock was there
    if keeper:
        os.pwrite(_HELD[folder], keeper.encode(), 0)


def _is_held(folder: Path) -> bool:
    opened = _HELD.get(folder)
    try:
        return opened is not None and os.path.samestat(os.fstat(opened), os.lstat(folder / LOCK))
    except OSError:
        return False


def let_go(folder: Path) -> None:
    """Hold a folder no longer."""
    if (opened := _HELD.pop(folder, None)) is not None:
        os.close(opened)


def remove_folder(folder: Path) -> None:
    """Remove a folder in memory, and hold it no longer."""
    shutil.rmtree(folder, ignore_errors=True)
    let_go(folder)


def sweep_gone() -> None:
    """Remove this user's folders in memory whose programs are gone."""
    for kind in (MIRROR, REPLAY):
        for folder in _memory_folder().glob(f"{kind}-{os.geteuid()}-*"):
            if not why_not_private(folder) and not _is_held(folder):
                _sweep(folder)


def _sweep(folder: Path) -> None:
    import fcntl

    try:
        opened = os.open(folder / LOCK, os.O_RDWR | _NO_LINK)
    except FileNotFoundError:
        with suppress(OSError):
            folder.rmdir()  # of a program that has ended, or will make it again
        return
    except OSError:
        return
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_gone(os.read(opened, 1024).decode(errors="replace")):
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # somebody holds it
    finally:
        os.close(opened)


def process_of(pid: int) -> str:
    """Return what tells a process from all others, also from one that has its number later.

    The boot of the machine, the namespaces in which its number and the time of its start are what
    they are, both of these; "unknown" where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = ",".join(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "time"))
        return f"{boot} {spaces} {pid} {_state_and_start(pid)[1]}"
    except OSError:
        return "unknown"


def _is_gone(keeper: str) -> bool:
    """Whether the process that keeps a folder has surely ended: of another container none has."""
    here, said = process_of(os.getpid()).split(), keeper.split()
    if not said:
        return True  # nobody keeps it
    if len(said) != 4 or len(here) != 4 or not said[2].isdigit():
        return False
    if said[0] != here[0]:
        return True  # memory does not outlive a boot, nor processes
    if said[1] != here[1]:
        return False
    try:
        state, start = _state_and_start(int(said[2]))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return state in "ZX" or start != said[3]


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state of a process, and when it has started, in ticks since the boot."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()  # the name before may have anything in it
    return fields[0], fields[19]


def _memory_folder() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


# Whose a folder is.


def make_private(folder: Path, name: str) -> None:
    """Make a folder for this user alone, and those above it that are not there.

    name: of the call, for an error.

    Raises `LayoutError` for one that is another user's, that others can write to, or that others
    could put another one in the place of.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            with suppress(FileExistsError):
                each.mkdir(mode=0o700)
    trusted = (os.geteuid(), *_roots())
    found = [(folder, why_not_private(folder))]
    found += [(each, _seen(each, trusted, is_above=True)) for each in _way_to(folder)]
    for each, seen in found:
        if seen:
            raise LayoutError(
                f"{name}: {each} {seen}.",
                cause="a folder of another user's program, or one that several users share: "
                "whoever writes there could have this run read copies of his, or write through a "
                "link of his.",
                fix=f"give a folder of your own, as folder=/dev/shm/$USER/run, or chmod 700 {each} "
                "if it is yours.",
            )


def why_not_private(folder: Path) -> str:
    """Return why a folder is not this user's alone; "" if it is. What is above it is not seen."""
    return _seen(folder, (os.geteuid(),), is_above=False)


def _way_to(folder: Path) -> Iterator[Path]:
    """Yield the folders above one, and those above of what they are links to."""
    for each in folder.parents:
        yield each
        if each.is_symlink():
            yield each.resolve()
            yield from _way_to(each.resolve())


def _seen(folder: Path, users: tuple[int, ...], *, is_above: bool) -> str:
    """Return what is wrong with a folder. is_above: others may write there as in /tmp."""
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        foreign = f"is a link of {_user(found.st_uid)}" if found.st_uid not in users else ""
        return foreign if is_above else "is a link"
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid not in users:
        return f"belongs to {_user(found.st_uid)}"
    if found.st_mode & _OTHERS and not (is_above and found.st_mode & stat.S_ISVTX):
        return f"can be written by others ({stat.filemode(found.st_mode)})"
    return ""


def _roots() -> Iterator[int]:
    """Yield the users that root appears as here: another one in some containers."""
    yield 0
    with suppress(OSError, ValueError):
        maps = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if not any(int(first) == 0 for first, _, _ in maps):
            yield int(Path("/proc/sys/kernel/overflowuid").read_text())


def _user(uid: int) -> str:
    with suppress(ImportError, KeyError):
        import pwd

        return f"the user {pwd.getpwuid(uid).pw_name}"
    return f"the user {uid}"
