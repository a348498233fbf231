"""A table as text and as HTML. No matplotlib."""

from __future__ import annotations

import html
from collections.abc import Sequence

from fzero._columns import columns

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
        """Return it as text in columns."""
        header, rows = self._cells()
        return "\n".join([*self._heading(), *columns([header, *rows])])

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        header, rows = self._cells()
        cells = [[html.escape(cell) for cell in row] for row in rows]
        lines = [f"<div><b>{html.escape(line)}</b></div>" for line in self._heading()]
        return "".join([*lines, html_table(header, cells)])


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
