"""Folders and files that are this user's alone: nobody else can have put there what is read.

In a folder that others can write to, anybody can make a file of the name that is read next, or a
link, through which a program would write to another file of its own user.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fzero.checkpoint.collective import damaged
from fzero.errors import LayoutError

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FLAGS = _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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
    _require(folder, name, (os.geteuid(),), sticky=False)
    _require_way(folder, name)


def _require_way(folder: Path, name: str) -> None:
    """Raise `LayoutError` unless the folders above belong to this user or to root."""
    trusted = (os.geteuid(), *_roots())
    for each in folder.parents:
        if each.is_symlink():
            if each.lstat().st_uid not in trusted:
                raise _refused(each, name, f"is a link of {_user(each.lstat().st_uid)}")
            _require(each.resolve(), name, trusted, sticky=True)
            _require_way(each.resolve(), name)
        else:
            _require(each, name, trusted, sticky=True)


def _require(folder: Path, name: str, users: tuple[int, ...], *, sticky: bool) -> None:
    """Raise `LayoutError` for a folder of others. sticky: others may write there as in /tmp."""
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise _refused(folder, name, "is a link")
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(folder, name, "is no folder")
    if found.st_uid not in users:
        raise _refused(folder, name, f"belongs to {_user(found.st_uid)}")
    if found.st_mode & _OTHERS and not (sticky and found.st_mode & stat.S_ISVTX):
        raise _refused(folder, name, f"can be written by others ({stat.filemode(found.st_mode)})")


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


def _refused(folder: Path, name: str, seen: str) -> LayoutError:
    return LayoutError(
        f"{name}: {folder} {seen}.",
        cause="a folder of another user's program, or one that several users share: whoever writes "
        "there could have this run read copies of his, or write through a link of his.",
        fix=f"give a folder of your own, as folder=/dev/shm/$USER/run, or chmod 700 {folder} if it "
        "is yours.",
    )


def is_private(folder: Path) -> bool:
    """Whether a folder is this user's, and nobody else can write there; what is above is not seen.

    Example:
        >>> is_private(Path("/"))
        False
    """
    try:
        _require(folder, "", (os.geteuid(),), sticky=False)
    except (OSError, LayoutError):
        return False
    return folder != folder.parent


def new_file(file: Path) -> int:
    """Open a file that was not there, for this user alone. Raises `FileExistsError` otherwise."""
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)


def own_file(file: Path, flags: int) -> int:
    """Open a regular file of this user's, by no link.

    Raises `CheckpointError` for anything else that is there.
    """
    try:
        opened = os.open(file, flags | _FLAGS)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise damaged(file, "is a link, or no file") from None
    found = os.fstat(opened)
    seen = ""
    if not stat.S_ISREG(found.st_mode):
        seen = "is no file"
    elif found.st_uid != os.geteuid():
        seen = f"belongs to {_user(found.st_uid)}"
    elif found.st_nlink > 1:
        seen = "has another name beside this one"
    if seen:
        os.close(opened)
        raise damaged(file, seen)
    return opened
