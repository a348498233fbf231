"""Tables as text and as HTML, and the partition map as bars of HTML. No matplotlib."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fzero.plot._palette import ABSENT, EDGE, colour, ink

if TYPE_CHECKING:
    from fzero.plot._map import PartitionMap, Segment

_HATCH = "repeating-linear-gradient(45deg,#fff,#fff 3px,#9a9a9a 3px,#9a9a9a 4px)"
_CELL = "style='text-align:left;white-space:nowrap'"
_WIDTH_EM = 32
_CHARACTERS = 72  # that fit into a whole bar, at three quarters of the font size


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return `rows` under `header` in columns as wide as their widest cell.

    Example:
        >>> print(text_table(("rank", "n"), [("0", "12")]))
        rank  n
        0     12
    """
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


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


def map_as_html(partition: PartitionMap) -> str:
    """Return the map as a table with a coloured bar for each rank and kind of buffer."""
    rows = []
    for rank in partition.ranks:
        for i, (kind, placement) in enumerate(partition.kinds):
            row = partition.of(rank, kind)
            held = sum(s.stop - s.start for s in row)
            bar = _bar(partition, row, pale=placement == "partial")
            name = f"<b>rank {rank}</b>" if i == 0 else ""
            rows.append((name, kind, placement, f"{held:,}", bar))
    title = (
        f"<b>stage {partition.stage}</b>, {partition.world_size} ranks, "
        f"{partition.total:,} elements with padding"
    )
    return title + html_table(("", "buffer", "placement", "elements", "held"), rows)


def _bar(partition: PartitionMap, row: Sequence[Segment], *, pale: bool) -> str:
    """Return the whole axis as one bar: what is held in colour, the rest grey, padding hatched."""
    parts, end = [], 0
    for segment in row:
        parts.append(_piece(segment.start - end, partition.total, ABSENT, "", "not held"))
        label = html.escape(partition.label(segment), quote=True)
        length, shown = segment.stop - segment.start, ""
        fill = _HATCH if segment.leaf is None else colour(segment.leaf)
        if segment.leaf is not None:
            name = partition.leaves[segment.leaf]
            if len(name) <= length / partition.total * _CHARACTERS:
                shown = f"<span style='color:{ink(fill)}'>{html.escape(name)}</span>"
        fade = ";opacity:.55" if pale else ""
        parts.append(_piece(length, partition.total, fill + fade, shown, label))
        end = segment.stop
    parts.append(_piece(partition.total - end, partition.total, ABSENT, "", "not held"))
    style = f"display:flex;width:{_WIDTH_EM}em;border:1px solid {EDGE}"
    return f"<div style='{style}'>{''.join(parts)}</div>"


def _piece(length: int, total: int, fill: str, shown: str, title: str) -> str:
    if not length:
        return ""
    style = (
        f"width:{100 * length / total:.3f}%;height:1.4em;overflow:hidden;font-size:75%;"
        f"box-sizing:border-box;border-right:1px solid #fff;background:{fill}"
    )
    return f"<div title='{title}' style='{style}'>{shown}</div>"
