"""A text that says what a folder holds: JSON with a checksum of itself, put in place in one move.

    {"crc32": of the body, name: body}

A checksum finds damage, not forgery: what is read is still to be found to have its form.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from fzero.checkpoint.disk import put_text, read_text
from fzero.checkpoint.everywhere import CheckpointError, damaged


def put_sealed(file: Path, name: str, body: dict[str, Any], *, through: Path) -> None:
    """Write it, from `through`, a file that nobody else writes: readers find the old or the new."""
    put_text(file, json.dumps({"crc32": _crc32(body), name: body}, indent=1), through=through)


def read_sealed(file: Path, name: str) -> dict[str, Any]:
    """Return the body.

    Raises `CheckpointError` unless it is what was written; `FileNotFoundError` or
    `NotADirectoryError` if there is no such file.
    """
    try:
        around = json.loads(read_text(file))
        body, crc = around[name], around["crc32"]
        if _crc32(body) != crc:
            raise ValueError("its checksum is wrong")
        if not isinstance(body, dict):
            raise TypeError(f"it has a {type(body).__name__}")
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise damaged(file, f"is no manifest: {type(error).__name__}: {error}") from None
    return body


def _crc32(body: Any) -> int:
    """Return the checksum of a body, of its values and not of its spaces."""
    return zlib.crc32(json.dumps(body).encode())
