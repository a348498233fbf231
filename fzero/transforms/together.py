"""What goes together: each transform says what it cannot stand beside, and here that is checked.

    options    `SharedOptions`                     both drivers, before anything else
    ranks      `Requested`                             a state is planned
    rule       (rule, `SharedOptions`)             its optimizer is known
    call       `Setup`                             a call of a loss is about to begin
    graph      what is encoded, or checked         the step is differentiated, mapped or traced
    write      the name of the call                a parameter of an engine is written

`docs/support.md` has a table of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fzero.errors import LayoutError
from fzero.ranks.mesh import Axis
from fzero.state.points import Builtin, Excludes, When


class Requested(NamedTuple):
    """A state that is planned: what was asked for, and on which ranks."""

    stage: int
    axis: Axis
    options: Any  # `SharedOptions`


def require_together(builtins: tuple[Builtin, ...], when: When, known: Any, name: str = "") -> None:
    """Raise `LayoutError` for the first two that do not go together.

    known: what the table above has for this moment. name: of the call, in front of the error.
    """
    for one in excluded(builtins, when):
        if seen := one.seen(known):
            raise LayoutError(f"{name}{seen}", cause=one.cause, fix=one.fix)


def excluded(builtins: tuple[Builtin, ...], when: When | None = None) -> Iterator[Excludes]:
    """Yield what some transforms cannot stand beside; of one moment, or of all."""
    for builtin in builtins:
        for one in builtin.excludes:
            if when in (None, one.when):
                yield one
