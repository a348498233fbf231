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
