"""Tables as text and as HTML, and bars of HTML. No matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fzero._columns import columns
from fzero.plot._palette import EDGE

HATCH = "repeating-linear-gradient(45deg,#fff,#fff 3px,#9a9a9a 3px,#9a9a9a 4px)"
Piece = tuple[int, str, str, str]  # of a bar: its length, fill, HTML inside, title
_CELL = "style='text-align:left;white-space:nowrap'"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return `rows` under `header`, in columns."""
    return "\n".join(columns([header, *rows]))


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


def bar(pieces: Iterable[Piece], total: int) -> str:
    """Return a bar of pieces whose lengths add up to `total`; those of length 0 are left out."""
    found = []
    for length, fill, shown, title in pieces:
        style = (
            f"width:{100 * length / max(total, 1):.3f}%;height:1.4em;overflow:hidden;font-size:75%;"
            f"box-sizing:border-box;border-right:1px solid #fff;background:{fill}"
        )
        if length:
            found.append(f"<div title='{title}' style='{style}'>{shown}</div>")
    style = f"display:flex;width:32em;border:1px solid {EDGE}"
    return f"<div style='{style}'>{''.join(found)}</div>"
