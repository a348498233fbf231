"""Data folders: each save makes one with a new name, and removes those that nobody uses.

A program that writes a folder, or reads it, holds a shared lock (flock) on the file `lock` in it. A
save removes a folder only while it holds an exclusive lock on that file, and only if the manifest,
which it reads under the lock, does not name the folder. A manifest never names a folder again that
it named before. So no program loses a folder that it writes or reads. The lock of a process that
was killed is gone, and the next save removes its folder. Without locks in the file system, nothing
is removed.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fzero.checkpoint._everywhere import CheckpointError, damaged
from fzero.checkpoint._form import DATA
from fzero.checkpoint._manifest import MANIFEST, read_manifest
from fzero.errors import LayoutError

LOCK = "lock"
_BLOCK_BYTES = 2**20
_ATTEMPTS = 100


def require_path(name: str, path: str | os.PathLike[str]) -> None:
    """Raise `LayoutError` for an empty path: as a folder, it would be the current one."""
    if not os.fspath(path):
        raise LayoutError(
            f"{name}: the path is empty.",
            cause="an option or a variable that was not set.",
            fix='give the folder of the checkpoint; "." is the current one.',
        )


def make_folder(path: Path) -> tuple[str, int]:
    """Make a data folder of a new name; return the name, and the open lock that keeps it."""
    for _ in range(_ATTEMPTS):
        data = f"data-{secrets.token_hex(8)}"
        (path / data).mkdir(parents=True)
        with suppress(FileNotFoundError):  # a sweep came before the lock
            (path / data / LOCK).touch()
            return data, keep(path / data)
    raise CheckpointError(f"{path}: every new folder was removed at once.")


def keep(folder: Path) -> int:
    """Lock a data folder against removal; return what `let_go` takes.

    Raises `FileNotFoundError` if it is not there, or no longer.
    """
    held = os.open(folder / LOCK, os.O_RDONLY)
    _flock(held, alone=False)
    if _is_removed(held):  # while this waited
        let_go(held)
        raise FileNotFoundError(folder / LOCK)
    return held


def let_go(held: int) -> None:
    """Unlock, also for a forked process that has the file open as well."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)


@contextmanager
def kept(held: int) -> Iterator[None]:
    """Let go at the end of the block."""
    try:
        yield
    finally:
        let_go(held)


def digest(file: Path) -> list[int]:
    """Return [bytes, crc32] of a file. Plain sums: they find damage, not forgery."""
    crc = size = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def require_whole(folder: Path, files: dict[str, list[int]], rank: int, ranks: int) -> None:
    """Raise `CheckpointError` if a file is not what was written, or lies elsewhere.

    Every rank looks for every file, and the ranks share the reading.
    """
    if folder.is_symlink():
        raise damaged(folder, "is a link: it would be read from elsewhere")
    for number, (name, wanted) in enumerate(files.items()):
        file = folder / name
        if file.is_symlink():
            raise damaged(file, "is a link: it would be read from elsewhere")
        if not file.is_file():
            raise damaged(file, "is missing")
        size = file.stat().st_size
        if size != wanted[0]:
            raise damaged(file, f"has {size:,} bytes, {wanted[0]:,} were written")
        if number % ranks == rank and digest(file) != wanted:
            raise damaged(file, "is not what was written: its checksum is wrong")


def sweep(path: Path) -> None:
    """Remove the data folders that nobody uses and the manifest at `path` does not name."""
    for folder in path.iterdir():
        if DATA.fullmatch(folder.name) and not folder.is_symlink():
            _remove_if_unused(path, folder)


def _remove_if_unused(path: Path, folder: Path) -> None:
    try:
        held = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        with suppress(OSError):  # what a sweep that was killed left; a full folder stays
            folder.rmdir()
        return
    with kept(held):
        free = _flock(held, alone=True) and not _is_removed(held)
        if free and not _is_named(path, folder.name):
            for file in sorted(folder.iterdir(), key=lambda file: file.name == LOCK):
                with suppress(OSError):
                    file.unlink()  # the lock last: until then nobody takes the rest for good
            with suppress(OSError):
                folder.rmdir()


def _is_removed(held: int) -> bool:
    """Whether another sweep removed the folder between this lock's opening and its locking."""
    return not os.fstat(held).st_nlink


def _is_named(path: Path, data: str) -> bool:
    try:
        return (path / MANIFEST).exists() and read_manifest(path).data == data
    except CheckpointError:
        return True  # nobody knows which of them is good


def _flock(held: int, *, alone: bool) -> bool:
    """Lock; a shared lock waits for a removal. Whether it is locked: not if there are no locks."""
    import fcntl  # not on Windows, where fzero can be imported all the same

    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except OSError:
        return False
    return True
