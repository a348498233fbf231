"""Text in columns, for a terminal or a file."""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Sequence


class ShownAsText:
    """A record that prints as its table; so it does in a notebook."""

    __slots__ = ()

    def table(self) -> str:
        """Return it as text in columns."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table())}</pre>"


def columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Return rows as lines, in columns as wide as their widest cell.

    With `numbers`, all but the first are aligned to the right.

    Example:
        >>> columns([("rank", "n"), ("0", "12")], numbers=True)
        ['rank   n', '0     12']
    """
    padded = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        side = str.rjust if numbers and i else str.ljust
        padded.append([side(cell, width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def wants_color() -> bool:
    """Whether what is printed goes to a terminal whose user has not refused color."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


# Numbers as people read them: bytes and seconds with three digits and a prefix.

_BYTES = ("B", "KB", "MB", "GB", "TB", "PB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def in_bytes(count: float) -> str:
    """Return bytes with a decimal prefix, as 1 KB = 1000 B.

    Example:
        >>> in_bytes(0), in_bytes(999), in_bytes(17956), in_bytes(2.5e9)
        ('0 B', '999 B', '18 KB', '2.5 GB')
    """
    for unit in _BYTES:
        if count < 999.5 or unit == _BYTES[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def in_seconds(seconds: float) -> str:
    """Return a duration with a prefix.

    Example:
        >>> in_seconds(0), in_seconds(1.5), in_seconds(0.00012), in_seconds(2.5e-8)
        ('0 s', '1.5 s', '120 us', '25 ns')
    """
    size, unit = next((pair for pair in _SECONDS if seconds >= 0.9995 * pair[0]), _SECONDS[-1])
    return f"{seconds / size:.3g} {unit}" if seconds else "0 s"
