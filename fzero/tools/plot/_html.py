"""Tables as text and as HTML, without matplotlib."""

from __future__ import annotations

import html
from collections.abc import Sequence

from fzero.tools._columns import columns

WIDTH = 120  # letters of a line of text
LEAST = 12  # letters of a column, if it has as many
_CELL = "style='text-align:left;white-space:nowrap'"


class Table:
    """A record that prints as text in columns, and is an HTML table in a notebook."""

    __slots__ = ()

    def _heading(self) -> list[str]:
        """The lines above the table."""
        return []

    def _cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """The header, and the rows below it."""
        raise NotImplementedError

    def table(self) -> str:
        """Return it as text in columns, at most 120 letters wide: long cells are cut by "..."."""
        header, rows = self._cells()
        heading = [_cut(line, WIDTH) for line in self._heading()]
        return "\n".join([*heading, *columns(_narrowed([header, *rows]))])

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        header, rows = self._cells()
        cells = [[html.escape(cell) for cell in row] for row in rows]
        lines = [f"<div><b>{html.escape(line)}</b></div>" for line in self._heading()]
        return "".join([*lines, html_table(header, cells)])


def _narrowed(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows with the widest columns cut, until a line has at most `WIDTH` letters."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    while over > 0 and max(widths) > LEAST:
        widest, *others = sorted(widths, reverse=True)
        less = max(1, min(over, widest - max([LEAST, *others[:1]])))
        widths[widths.index(widest)] -= less
        over -= less
    return [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table; cells are HTML already.

    Example:
        >>> html_table(("a",), []).count("<th")
        1
    """
    head = "".join(f"<th {_CELL}>{cell}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td {_CELL}>{cell}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
