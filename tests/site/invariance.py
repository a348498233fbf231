"""The tables of docs/invariance.md: the axes of the matrix, and what others do in it."""

from __future__ import annotations

from fzero.tools.certify import AXES, CertifyAxis
from tests.site.results import measured
from tests.site.tables import table


def tables() -> str:
    """Return all of them, in Markdown."""
    lines = ["## The axes", "", table(("axis", "values"), [_axis(axis) for axis in AXES])]
    lines += ["## On real ranks, beside DDP, FSDP2 and DeepSpeed", ""]
    for one in measured("matrix-"):
        lines += [f"### {one.heading}: {one.machine}, {one.date}", "", f"    {one.command}", ""]
        lines += [one.versions, "", table(one.head, one.rows)]
    return "\n".join(lines)


def _axis(axis: CertifyAxis) -> tuple[str, str]:
    values = ", ".join(value.name for value in axis.values)
    return f"`{axis.name}`", values + (", any number" if axis.counts else "")
