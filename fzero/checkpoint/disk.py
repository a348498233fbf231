"""Files of a checkpoint: regular ones only, and on the disk before a name leads to them.

What stands in the place of a file may be something else, by accident or by intent. Opening a FIFO
waits for somebody at its other end, and a device may have no end. So a file is looked at before it
is opened, and again when it is open, and no open waits.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TypeVar

from fzero.checkpoint.everywhere import damaged

T = TypeVar("T")
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # an open that would wait fails; not on Windows


def is_there(file: Path) -> bool:
    """Whether there is a regular file, or a link to one.

    Raises `CheckpointError` for anything else that is there: a folder, a device, a FIFO, a socket.
    """
    try:
        mode = os.stat(file).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    _require_regular(file, mode)
    return True


def regular(file: str, flags: int) -> int:
    """Open a regular file, at once or not at all: an `opener` for `open`.

    Raises `CheckpointError` for what is no regular file.
    """
    is_there(Path(file))
    opened = os.open(file, flags | _AT_ONCE | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        _require_regular(file, os.fstat(opened).st_mode)
    except BaseException:
        os.close(opened)
        raise
    return opened


def _require_regular(file: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise damaged(file, f"is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, and no file")


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
    """Have files and folders on the disk. All after the last write: one sync takes more with it."""
    for file in files:
        if file.is_dir():
            sync(file)
        else:
            with open(file, "rb", opener=regular) as stream:
                os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk, where the file system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | _AT_ONCE)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return what all of some calls return, each in a thread of its own; raise what one raises.

    Not by an executor: that takes no work at the end of a program, when a save may be on its way.
    """
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
