"""A fault: what is wrong in run b, and where `diff` is to find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fzero
from tests.tools.diff.runs import run, updated


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong in run b, where it is, and how the runs are made."""

    body: Callable[..., Any] = updated
    named: str  # the operation
    path: str | None = None  # None: any; "": of no parameter
    ranks: tuple[int, ...] | None = None  # None: any
    step: int = 1
    good: Callable[..., Any] = updated  # the step of run a
    options: dict[str, Any] = field(default_factory=dict)  # of run b
    both: dict[str, Any] = field(default_factory=dict)  # of both runs
    at: tuple[int, int] = (2, 2)  # stage and ranks of run b; run a is at stage 0 on one rank

    def runs(self) -> tuple[fzero.tools.Run, fzero.tools.Run]:
        sizes = {"stage": self.at[0], "world_size": self.at[1]}
        a = run(self.good, **{"calls": self.step, **self.both})
        body = self.body() if self.step > 1 else self.body  # one that keeps something
        return a, run(body, **{"calls": self.step, **sizes, **self.both, **self.options})


def on_rank(rank: int, wrong: Any, right: Any) -> Any:
    return wrong if fzero.axis_index() == rank else right
