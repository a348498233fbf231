"""Bytes that are on the disk before a name leads to them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def put_text(file: Path, text: str, *, through: Path) -> None:
    """Write a file in one move, from `through`: a reader finds the old text or the new one."""
    with through.open("w", encoding="utf-8") as stream:
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
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk, where the file system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
