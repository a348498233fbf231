"""The record of one option: its name, default, type, check and help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fzero.errors.check import require

REQUIRED: Any = type("required", (), {"__repr__": lambda _: "required"})()
"""The default of an option that has none."""


class ValueCheck(NamedTuple):
    """Which values an option accepts: a predicate, its description, the usual cause of others."""

    good: Callable[[Any], bool]
    wanted: str
    cause: str = "a value of another kind or out of range."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """One entry of the table of options.

    Attributes:
        check: of its value alone; None: whoever uses it first checks it.
        stages: those at which it changes anything.
        instead: {driver: what to do there}, of the drivers that do not take it, with the reason.
        deepspeed: the key of DeepSpeed's config that sets it; "" for none.
        axis: the axis of `fzero.certify` that tries its values; "" where cells have the default.
    """

    name: str
    default: Any = None
    type: Any
    check: ValueCheck | None = None
    help: str
    stages: tuple[int, ...] = (0, 1, 2, 3)
    instead: Mapping[str, str] = field(default_factory=dict)
    deepspeed: str = ""
    axis: str = ""

    @property
    def only(self) -> str:
        """The prefix of its help that names its stages, as "stages 1 to 3: "; "" for all four."""
        if len(self.stages) == 4:
            return ""
        first, last = self.stages[0], self.stages[-1]
        return f"stage {last} only: " if first == last else f"stages {first} to {last}: "

    def require(self, value: Any, of: str = "") -> None:
        """Raise `LayoutError`, naming the option, for a value that it may not have."""
        if self.check is not None:
            good, wanted, cause = self.check
            require(of + self.name, value, good, wanted, cause=cause)
