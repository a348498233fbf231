"""Compare two traces op by op: of two ranks, two stages, with and without a transform."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import unified_diff

from fzero.tools.trace._record import Op
from fzero.tools.trace._text import runs


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """The ops in which two programs differ. Empty, and false, if they do the same.

    Each line is an op with the shapes that it gives, as in a unified diff: "- " for the first
    program alone, "+ " for the second one alone.
    """

    lines: tuple[str, ...]
    first: tuple[Op | None, Op | None]  # that differ; None: the program ends there

    @property
    def equal(self) -> bool:
        """Whether both do the same."""
        return not self.lines

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __str__(self) -> str:
        return "\n".join(self.lines) or "the same"

    __repr__ = __str__


def compare_ops(a: tuple[str, Sequence[Op]], b: tuple[str, Sequence[Op]]) -> TraceDiff:
    """Compare two (title, ops), by names and result shapes of ops; views are left out."""
    ops = [list(runs([op for op in some if op.kind != "view"])) for _, some in (a, b)]
    lines = [list(map(_shown, some)) for some in ops]
    if lines[0] == lines[1]:
        return TraceDiff((), (None, None))
    at = next(
        (i for i, (x, y) in enumerate(zip(*lines, strict=False)) if x != y), min(map(len, lines))
    )
    first = tuple(some[at][0] if at < len(some) else None for some in ops)
    shown = unified_diff(lines[0], lines[1], a[0], b[0], lineterm="", n=1)
    return TraceDiff(tuple(shown), (first[0], first[1]))


def _shown(run: Sequence[Op]) -> str:
    op, given = run[0], [str(value) for op in run for value in op.gives]
    gives = " ".join(given)
    if len(run) > 1:
        counts = Counter(given)
        return f"  {len(run)} pointwise ops -> {' '.join(f'{n} x {x}' for x, n in counts.items())}"
    if op.is_collective:
        return f"* {op.name} -> {gives}   <{op.detail}>"
    return f"  {op.name} -> {gives}"
