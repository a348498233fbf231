"""Real text that every machine has: the source of the installed Python standard library."""

import hashlib
import sysconfig
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from fzero import LayoutError

HELD_OUT = 0.05  # share of the bytes that is kept for validation
# Installed packages are not the library; tests repeat it; the rest are generated tables.
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Bytes to train on and bytes of other files to validate on.

    Attributes:
        train: `[n]` uint8.
        valid: `[m]` uint8, of files that give no byte to `train`.
        files: how many files were read.
        sha256: hex digest of `train` and `valid`; two runs see the same data if it is equal.
    """

    train: Tensor
    valid: Tensor
    files: int
    sha256: str


def read_corpus(root: Path | None = None, *, cap_bytes: int = 8_000_000) -> Corpus:
    """Read the `*.py` files under `root` and split them, by file, into train and validation.

    Files come in the order of `sha256(relative path)`, which is the same on every rank and
    machine and makes the first `cap_bytes` an unbiased sample of the library. The files that
    begin in the first 5 % of those bytes are held out, the first file always.

    Args:
        root: a folder; by default the standard library of the running Python.
        cap_bytes: at most this many bytes are used; the last file is cut.

    Raises:
        LayoutError: `root` has fewer than two non-empty files, or `cap_bytes` leaves one.

    Example:
        >>> corpus = read_corpus(cap_bytes=300_000)
        >>> corpus.train.numel() + corpus.valid.numel()
        300000
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    texts = _first_bytes(_sources(root), cap_bytes)
    begins = [0, *accumulate(len(text) for text in texts)]
    held = sum(begin < HELD_OUT * begins[-1] for begin in begins[:-1])
    if len(texts) < 2 or held == len(texts):
        raise LayoutError(
            f"text: {root} gives {len(texts)} file(s), {begins[-1]} bytes, under a cap of "
            f"{cap_bytes} bytes; training and validation need at least one file each.",
            cause="no such folder, a folder without *.py files (a Python installed without "
            "sources), or a cap smaller than its first file.",
            fix="pass a folder of Python files with --text, or a larger --text-mb.",
        )
    train, valid = b"".join(texts[held:]), b"".join(texts[:held])
    return Corpus(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        valid=torch.frombuffer(bytearray(valid), dtype=torch.uint8),
        files=len(texts),
        sha256=hashlib.sha256(hashlib.sha256(train).digest() + valid).hexdigest(),
    )


def _sources(root: Path) -> list[Path]:
    """`*.py` files under `root`, ordered by the digest of their path relative to it."""
    found = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [path for path in found if not SKIPPED.intersection(path.parts)]
    kept.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    return [root / path for path in kept]


def _first_bytes(paths: list[Path], cap_bytes: int) -> list[bytes]:
    """Contents of `paths` in order, without empty files, cut at `cap_bytes` in all."""
    texts: list[bytes] = []
    left = cap_bytes
    for path in paths:
        if left <= 0:
            break
        text = path.read_bytes()[:left]
        left -= len(text)
        if text:
            texts.append(text)
    return texts
