"""A folder that is there whole, or as it was before: how a checkpoint is written, for others too.

    kept -> make_folder -> files in it -> put_sealed, which names it -> sweep of all others
    kept -> read_sealed -> problems -> require_whole

Each save makes a data folder with a new name. A program that saves to a path, or loads from it,
holds a shared lock (flock) on the file `.lock` there. A save that is over removes the data folders
that the manifest does not name, under an exclusive lock: if others save or load just then, a later
save does it. So no program loses a folder that it writes or reads. The lock of a process that was
killed is gone. Without locks in the file system, nothing is removed.

What names a folder is JSON with a checksum of itself, put in place in one move. That finds damage,
not forgery: what is read is still to be found to have its form.

    {"crc32": of the body, name: body}

What stands in the place of a file may be something else, by accident or by intent. Opening a FIFO
waits for somebody at its other end, and a device may have no end. So a file is looked at before it
is opened, and again when it is open, and no open waits; and it is on the disk before a name leads
to it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar

from fzero.checkpoint.collective import (
    CheckpointError,
    Ranks,
    damaged,
    on_all_ranks,
    run_on_all_ranks,
)
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError

PathLike = str | os.PathLike[str]
LOCK = ".lock"
_BLOCK_BYTES = 2**20


class Kind(NamedTuple):
    """What is at a path: several kinds may be, and none removes the data of another."""

    manifest: str  # the name of its manifest
    data: str  # how the names of its data folders begin
    named: Callable[[Path], str]  # path -> the data folder that counts; "" where there is none


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
    return run_on_all_ranks(ranks, lambda: as_path(name, path), what=f"{name}: look at the path")


def shared_path(ranks: Ranks, name: str, path: PathLike) -> Path:
    """Return `as_path` of the path that all ranks give; raise on all of them if one has another."""
    with on_all_ranks(ranks, what=f"{name}: look at the path"):
        found = as_path(name, path)
    assert_same_everywhere([f"path {found}"], ranks.axis, what="the checkpoint")
    return found


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


def make_folder(path: Path, kind: Kind, name: str = "") -> str:
    """Make a data folder in a path that is kept, of a given name or a new one; return the name."""
    data = name or f"{kind.data}-{secrets.token_hex(8)}"
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
        named = kind.named(path) if alone else ""  # raises where nobody knows which of them is good
        for folder in path.iterdir() if alone else ():
            is_one = re.fullmatch(f"{kind.data}-[0-9a-f]{{16}}", folder.name)
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


def put_sealed(file: Path, name: str, body: dict[str, Any], *, through: Path) -> None:
    """Write it, from `through`, a file that nobody else writes: readers find the old or the new.

    The checksum is of the values of the body, and not of its spaces.
    """
    crc = zlib.crc32(json.dumps(body).encode())
    put_text(file, json.dumps({"crc32": crc, name: body}, indent=1), through=through)


def read_sealed(file: Path, name: str) -> dict[str, Any]:
    """Return the body.

    Raises `CheckpointError` unless it is what was written; `FileNotFoundError` or
    `NotADirectoryError` if there is no such file.
    """
    try:
        around = json.loads(read_text(file))
        body, crc = around[name], around["crc32"]
        if zlib.crc32(json.dumps(body).encode()) != crc:
            raise ValueError("its checksum is wrong")
        if not isinstance(body, dict):
            raise TypeError(f"it has a {type(body).__name__}")
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise damaged(file, f"is no manifest: {type(error).__name__}: {error}") from None
    return body


T = TypeVar("T")
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # an open that would wait fails; not on Windows


def is_there(file: str | Path, opened: int | None = None) -> bool:
    """Whether there is a regular file, or a link to one. opened: it is, as this descriptor.

    Raises `CheckpointError` for anything else that is there: a folder, a device, a FIFO, a socket.
    """
    try:
        mode = os.stat(file if opened is None else opened).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(mode):
        raise damaged(file, f"is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, and no file")
    return True


def regular(file: str, flags: int) -> int:
    """Open a regular file, at once or not at all: an `opener` for `open`.

    Raises `CheckpointError` for what is no regular file.
    """
    is_there(file)
    opened = os.open(file, flags | _AT_ONCE | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        is_there(file, opened)
    except BaseException:
        os.close(opened)
        raise
    return opened


def read_text(file: Path) -> str:
    """Return the text of a regular file. Raises `CheckpointError` for anything else there."""
    with open(file, encoding="utf-8", opener=regular) as stream:
        return stream.read()


def put_text(file: Path, text: str, *, through: Path) -> None:
    """Write a file in one move, from `through`: a reader finds the old text or the new one.

    Raises `CheckpointError` if there is something else than a file in either place.
    """
    is_there(file)
    with open(through, "w", encoding="utf-8", opener=regular) as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(through, file)


def sync_files(files: Iterable[Path]) -> None:
    """Have files on the disk, and the names in folders where the file system can.

    All after the last write: one sync takes more with it.
    """
    for file in files:
        is_folder = file.is_dir()
        with suppress(OSError) if is_folder else nullcontext():
            place = os.fspath(file)
            flags = os.O_RDONLY | _AT_ONCE
            opened = os.open(place, flags) if is_folder else regular(place, flags)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)


def sync(folder: Path) -> None:
    """`sync_files` of one."""
    sync_files([folder])


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return what all of some calls return, each in a thread of its own; raise what one raises.

    Not by an executor: that takes no work at the end of a program, when a save may be on its way.
    """
    if len(calls) == 1:
        return [calls[0]()]
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as error:  # it is raised below
            errors.append(error)

    threads = [Thread(target=run, args=(number,)) for number in range(1, len(calls))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in range(len(calls))]
