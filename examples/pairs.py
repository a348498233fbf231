"""Real pairs (docstring, code) that every machine has: the functions of the standard library."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import fzero

# Installed packages are not the library; tests repeat it; the rest are generated tables.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}


class Pairs(NamedTuple):
    """n functions as bytes, 0 behind the end: row i of `docstrings` describes row i of `codes`."""

    docstrings: Tensor  # [n, length] uint8
    codes: Tensor  # [n, length] uint8

    def rows(self, which: Tensor | slice) -> Pairs:
        """Return some of the pairs."""
        return Pairs(self.docstrings[which], self.codes[which])

    def to(self, device: str) -> Pairs:
        """Return the pairs on `device`."""
        return Pairs(self.docstrings.to(device), self.codes.to(device))


def read_pairs(length: int, *, held_out: int = 256, count: int = 6000) -> tuple[Pairs, Pairs]:
    """Return up to `count` training pairs and `held_out` others, the same on every rank.

    Files come in the order of `sha256(relative path)`, an unbiased sample of the library. The
    held-out pairs are those of the first files, and no file is in both: a function's neighbours
    would give it away.

    Example:
        >>> train, pool = read_pairs(64, held_out=50, count=100)
        >>> train.codes.shape, pool.docstrings.shape
        (torch.Size([100, 64]), torch.Size([50, 64]))
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p.relative_to(root) for p in root.rglob("*.py") if not SKIPPED & {*p.parts}]
    paths.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    seen: set[str] = set()
    pool: list[tuple[str, str]] = []
    train: list[tuple[str, str]] = []
    for path in paths:
        chosen = pool if len(pool) < held_out else train
        for docstring, code in functions((root / path).read_text(encoding="utf-8")):
            if docstring not in seen:  # one docstring for two functions has no right answer
                seen.add(docstring)
                chosen.append((docstring, code))
        if len(train) >= count:
            break
    return to_bytes(train[:count], length), to_bytes(pool[:held_out], length)


def functions(source: str) -> Iterator[tuple[str, str]]:
    r"""Yield (docstring, code without it) of every function that has both.

    Example:
        >>> list(functions("def f(x):\n    'Add one.'\n    return x + 1"))
        [('Add one.', 'def f(x):\n    return x + 1')]
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
            docstring, first = ast.get_docstring(node), node.body[0]
            if docstring:
                head = lines[node.lineno - 1 : first.lineno - 1]
                yield docstring, "\n".join(head + lines[first.end_lineno : node.end_lineno])


def my_chunks(batch: Pairs, chunks: int) -> list[Pairs]:
    """Return this rank's share of the whole batch, in equal chunks."""
    axis = fzero.world()
    mine = batch.rows(slice(axis.rank, None, axis.size))
    return [mine.rows(slice(i, None, chunks)) for i in range(chunks)]


def to_bytes(pairs: list[tuple[str, str]], length: int) -> Pairs:
    """Cut or zero-pad the UTF-8 bytes of both sides to [n, length].

    Example:
        >>> to_bytes([("ab", "cdef")], 3).codes
        tensor([[ 99, 100, 101]], dtype=torch.uint8)
    """
    sides = []
    for texts in zip(*pairs, strict=True):
        rows = b"".join(text.encode()[:length].ljust(length, b"\0") for text in texts)
        sides.append(torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, length))
    return Pairs(*sides)
