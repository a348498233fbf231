"""Compare one call of two steps, update by update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fzero.state import TrainState
from fzero.tools.diff._backward import gathers, losses, summed_gradients
from fzero.tools.diff._difference import GRADIENT, LOSS, MODULE
from fzero.tools.diff._lead import Lead
from fzero.tools.diff._pair import SidePair, Spacing
from fzero.tools.diff._record import CallRecord, RankUpdate
from fzero.tools.diff._side import Apart, Side
from fzero.tools.diff._update import returned, updates
from fzero.tools.diff._values import values_of

Rows = Sequence[Sequence[TrainState]]  # each state of a tree of them, as each rank has it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Called:
    """One call of a step: the states before it, the recorded updates, the states after it."""

    before: Rows
    seen: CallRecord
    after: Rows

    def sides(self, state: int) -> list[Side]:
        """Return the updates of a state, and last the part after them."""
        rows = self.before[state]
        by_rank = self.seen.updates(state, len(rows))
        averages = rows[0].setup.reduction.reduce_op == "mean"
        found = []
        for number in range(max(map(len, by_rank))):
            seen = [some[number] if number < len(some) else RankUpdate() for some in by_rank]
            found.append(Side(before=rows, seen=seen, averages=averages))
            rows = [x.onward or x.after or row for x, row in zip(seen, rows, strict=True)]
        return found

    def leads(self) -> list[list[Lead | None]]:
        """Return the `Lead` of each update that all ranks make, for each state."""
        return [[lead_of(side) for side in self.sides(i)] for i in range(len(self.before))]


def lead_of(side: Side) -> Lead | None:
    """Return the gradients and results of an update; None if some rank makes none."""
    if len(side.after) < len(side.seen):
        return None
    gradients = {path: one.full for path, one in side.gradients(True).items()}
    return Lead(gradients=gradients, after=values_of(side.after))


def compare(
    a: Called, b: Called, twin: Called, state: int, units: Spacing
) -> tuple[int, Apart] | None:
    """Return the first difference in a state, and the number of its update, from 1."""
    runs = (a, b, twin)
    columns = [run.sides(state) for run in runs]
    ends = [replace(sides[-1], seen=[RankUpdate() for _ in sides[-1].seen]) for sides in columns]
    last = max(map(len, columns))
    for number in range(last):
        a_side, b_side, twin_side = (
            some[number] if number < len(some) else end
            for some, end in zip(columns, ends, strict=True)
        )
        found = _first(SidePair(a_side, b_side, twin_side, units))
        if found is not None:
            return number + 1, found
    found = next(
        returned(SidePair(ends[0], ends[1], ends[2], units), [run.after[state] for run in runs]),
        None,
    )
    return found and (max(last - 1, 1), found)


def _first(pair: SidePair) -> Apart | None:
    found = next(_all(pair), None)
    differs = found is not None and found.operation in (LOSS, MODULE, GRADIENT)
    if differs and pair.a.averages != pair.b.averages:
        # Losses that are made for another `reduce_op` may differ; what is reduced may not.
        means = [replace(side, averages=True) for side in pair.sides]
        return next(_all(SidePair(means[0], means[1], means[2], pair.units)), None)
    return found


def _all(pair: SidePair) -> Iterator[Apart]:
    yield from gathers(pair)
    yield from losses(pair)
    yield from summed_gradients(pair)
    yield from updates(pair)
