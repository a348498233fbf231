"""Folders and checksums: which data counts, and whether it is what was written."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from pathlib import Path

from fzero.checkpoint._everywhere import CheckpointError
from fzero.checkpoint._manifest import MANIFEST, read_manifest
from fzero.errors import LayoutError, explain

_DATA = re.compile(r"data-[0-9a-f]{16}")
_BLOCK_BYTES = 2**20


def require_path(name: str, path: str | os.PathLike[str]) -> None:
    """Raise `LayoutError` for an empty path: as a folder, it would be the current one."""
    if not os.fspath(path):
        raise LayoutError(
            explain(
                f"{name}: the path is empty.",
                cause="an option or a variable that was not set.",
                fix='give the folder of the checkpoint; "." is the current one.',
            )
        )


def digest(file: Path) -> list[int]:
    """Return [bytes, crc32] of a file. Plain sums: they find damage, not forgery."""
    crc = size = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def require_whole(folder: Path, files: dict[str, list[int]], rank: int, ranks: int) -> None:
    """Raise `CheckpointError` if a file is not what was written.

    Every rank looks for every file, and the ranks share the reading.
    """
    for number, (name, wanted) in enumerate(files.items()):
        file = folder / name
        if not file.is_file():
            raise _bad(file, "is missing")
        size = file.stat().st_size
        if size != wanted[0]:
            raise _bad(file, f"has {size:,} bytes, {wanted[0]:,} were written")
        if number % ranks == rank and digest(file) != wanted:
            raise _bad(file, "is not what was written: its checksum is wrong")


def sweep(path: Path) -> None:
    """Remove the data folders that the manifest at `path` does not name: old, or cut off."""
    try:
        kept = read_manifest(path).data if (path / MANIFEST).exists() else ""
    except CheckpointError:
        return  # nobody knows which of them is good
    for folder in path.iterdir():
        if _DATA.fullmatch(folder.name) and folder.name != kept:
            shutil.rmtree(folder, ignore_errors=True)


def _bad(file: Path, seen: str) -> CheckpointError:
    return CheckpointError(
        explain(
            f"the checkpoint is damaged: {file} {seen}.",
            cause="a copy that was cut off, a full disk, or a path that not all ranks share.",
            fix="use another copy of the checkpoint, or an older one. Nothing was changed.",
        )
    )
