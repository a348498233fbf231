"""The file of exported graphs: JSON, with what it was made by and a sum over it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from fzero.errors import LayoutError

FORMAT = "graphs of an fzero step, format 3"


def write(path: Path, content: dict[str, Any]) -> Path:
    """Write the file as a whole, or not at all; return its path."""
    text = json.dumps(content)
    head = {"format": FORMAT, "torch": _torch(), "sha256": _sum(text)}
    other = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        other.write_text(f"{json.dumps(head)}\n{text}\n")
        other.replace(path)
    finally:
        other.unlink(missing_ok=True)
    return path


def read(path: Path) -> dict[str, Any]:
    """Return what was written. Raises `LayoutError` for a file that is not whole, or not such."""
    try:
        head, text = path.read_text().splitlines()
        known = json.loads(head)
        if known["format"] != FORMAT:
            raise ValueError(f"its format is {known['format']!r}")
        if known["torch"] != _torch():
            raise ValueError(f"torch {known['torch']} wrote it, and this is torch {_torch()}")
        if known["sha256"] != _sum(text):
            raise ValueError("its content is not what was written")
        return json.loads(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LayoutError(
            f"{path} cannot be run: {error}.",
            cause="a path without a file, a copy that broke off, or a file of another version.",
            fix="write it again: fzero.export(step, path)(state, *args).",
        ) from error


def _torch() -> str:
    """The version whose ops a graph has, without how it was built."""
    return torch.__version__.split("+")[0]


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
