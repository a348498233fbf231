"""Data folders: each save makes one with a new name, and removes those that nobody uses.

A program that saves to a path, or loads from it, holds a shared lock (flock) on the file `.lock`
there. A save that is over removes the data folders which the manifest does not name, under an
exclusive lock: if others save or load just then, a later save does it. So no program loses a folder
that it writes or reads. The lock of a process that was killed is gone. Without locks in the file
system, nothing is removed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fzero.checkpoint.disk import is_there, regular
from fzero.checkpoint.everywhere import CheckpointError, Ranks, at_once, damaged
from fzero.checkpoint.manifest import MANIFEST, manifest_file, read_manifest
from fzero.errors import LayoutError

PathLike = str | os.PathLike[str]
LOCK = ".lock"
_BLOCK_BYTES = 2**20


class Kind(NamedTuple):
    """What is at a path: several kinds may be, and none removes the data of another."""

    manifest: str  # the name of its manifest
    data: str  # how the names of its data folders begin
    named: Callable[[Path], str]  # path -> the data folder that counts; "" where there is none

    @property
    def names(self) -> re.Pattern[str]:
        """Of its data folders."""
        return re.compile(f"{self.data}-[0-9a-f]{{16}}")


def _named(path: Path) -> str:
    """Return the data folder that counts at a path; "" where there is none yet."""
    return read_manifest(path).data if manifest_file(path).exists() else ""


CHECKPOINT = Kind(MANIFEST, "data", _named)


def as_path(name: str, path: PathLike) -> Path:
    """Return the path of a folder. Raises `LayoutError` for what is none. `name`: of the call.

    An empty text is none: as a folder, it would be the current one. A relative path is made
    absolute, so that a program may change its folder while something is on its way.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not (isinstance(text, str) and text):
        seen = "is empty" if text == "" else f"is a {type(path).__name__}"
        raise LayoutError(
            f"{name}: the path {seen}.",
            cause="an option or a variable that was not set, or the path and the state in the "
            "place of each other.",
            fix=f"fzero.checkpoint.{name}(path, ...) takes the folder of the checkpoint first, as "
            'a text or a pathlib.Path; "." is the current one.',
        )
    return Path(text).absolute()


def path_everywhere(ranks: Ranks, name: str, path: PathLike) -> Path:
    """Return `as_path` of every rank's own path; raise on all of them if one has none."""
    return at_once(ranks, lambda: as_path(name, path), what=f"{name}: look at the path")


@contextmanager
def kept(path: Path, *, makes: Kind | None = None) -> Iterator[None]:
    """Keep the data folders at a path from removal, by a shared lock, for the time of the block.

    makes: what will be written; the path is made, and the lock in it, if they are not there.

    Raises `CheckpointError` if the lock, or the manifest of what is made, is no regular file.
    """
    if makes is not None:
        path.mkdir(parents=True, exist_ok=True)
        is_there(path / makes.manifest)  # before anything is written that would end in its place
        with open(path / LOCK, "ab", opener=regular):
            pass
    with locked(path, alone=False):
        yield


def new_name(kind: Kind) -> str:
    """Return a name of a data folder that nobody else has."""
    return f"{kind.data}-{secrets.token_hex(8)}"


def make_folder(path: Path, kind: Kind, name: str = "") -> str:
    """Make a data folder in a path that is kept, of a new name or a given one; return the name."""
    data = name or new_name(kind)
    (path / data).mkdir()
    return data


def digest_of_file(file: Path) -> list[int]:
    """Return [bytes, crc32] of a file. Plain sums: they find damage, not forgery."""
    crc = size = 0
    with open(file, "rb", opener=regular) as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def require_whole(
    folder: Path, files: dict[str, list[int]], reads: Container[str] | None = None
) -> None:
    """Raise `CheckpointError` if a file is not there, or has another size, or lies elsewhere.

    reads: of which files the checksums are looked at; by default of all.
    """
    if folder.is_symlink():
        raise damaged(folder, "is a link: it would be read from elsewhere")
    if folder.exists() and not folder.is_dir():
        raise damaged(folder, "is no folder")
    for name, wanted in files.items():
        file = folder / name
        if file.is_symlink():
            raise damaged(file, "is a link: it would be read from elsewhere")
        if not is_there(file):
            raise damaged(file, "is missing")
        size = file.stat().st_size
        if size != wanted[0]:
            raise damaged(file, f"has {size:,} bytes, {wanted[0]:,} were written")
        if reads is None or name in reads:
            require_digest(file, wanted)


def require_digest(file: Path, wanted: list[int]) -> None:
    """Raise `CheckpointError` unless a file has the bytes and the checksum that were written."""
    if digest_of_file(file) != wanted:
        raise damaged(file, "is not what was written: its checksum is wrong")


def sweep(path: Path, kind: Kind) -> None:
    """Remove the data folders that the manifest at `path` does not name, if nobody is there.

    What cannot be removed stays: it is no part of a checkpoint, and a later sweep looks again.
    """
    with locked(path, alone=True) as alone, suppress(OSError, CheckpointError):
        remove_data(path, kind, kind.named(path) if alone else None)


def remove_data(path: Path, kind: Kind, named: str | None) -> None:
    """Remove all data folders at a path but one; for None nobody knows which of them is good."""
    for folder in path.iterdir() if named is not None else ():
        is_one = kind.names.fullmatch(folder.name)
        if is_one and not folder.is_symlink() and folder.name != named:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(path: Path, *, alone: bool, file: str = LOCK) -> Iterator[bool]:
    """Lock a path; say whether it is locked. A shared lock waits for a removal to be over.

    file: that has the lock; "": the folder itself.
    """
    import fcntl  # not on Windows, where fzero can be imported all the same

    is_locked, held = False, None
    try:
        flags = os.O_RDWR if alone and file else os.O_RDONLY
        place = os.fspath(path / file)
        held = regular(place, flags) if file else os.open(place, flags)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
        is_locked = True
    except CheckpointError:
        if not alone:
            raise
    except OSError:
        pass  # somebody else has it, it is not there, or the system has no locks
    try:
        yield is_locked
    finally:
        if held is not None:
            with suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_UN)  # also for a forked process that has it open
            os.close(held)
