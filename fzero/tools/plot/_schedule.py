"""The collectives of two traces side by side: data and table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

from fzero.tools.plot._html import Table
from fzero.tools.plot._lanes import axis_and_parameters
from fzero.tools.plot._memory import PHASES, ops_of_trace
from fzero.tools.trace import Op, Trace

Mark = Literal["same", "differs", "only a", "only b"]
SIGNS: dict[Mark, str] = {"same": "", "differs": "!", "only a": "-", "only b": "+"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """A collective of one trace, or a pair: equal, or at least of the same kind and phase."""

    a: Op | None
    b: Op | None

    @property
    def mark(self) -> Mark:
        """What it is: "same", "differs", "only a" or "only b"."""
        if self.a is None or self.b is None:
            return "only b" if self.a is None else "only a"
        return "same" if _key(self.a) == _key(self.b) else "differs"

    @property
    def phase(self) -> str:
        """The phase in which it is issued."""
        op = self.a or self.b
        assert op is not None
        return op.phase

    def cells(self) -> tuple[str, str, str, str]:
        """Return the row as it is printed: sign, phase, a, b.

        At most two parameters and shapes of each; where both differ, from the first that does.
        """
        after = _common(self.a, self.b)
        return SIGNS[self.mark], self.phase, _said(self.a, 2, after), _said(self.b, 2, after)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ScheduleDiff(Table):
    """The collectives of traces `a` and `b`, in their order, equal ones in one row. Plain data.

    False if both have the same collectives. `wire_bytes`: that each of the two ranks sends.
    """

    titles: tuple[str, str]
    rows: tuple[ScheduleRow, ...]
    wire_bytes: tuple[int, int]

    @property
    def equal(self) -> bool:
        """Whether both make the same collectives, in the same order."""
        return all(row.mark == "same" for row in self.rows)

    def __bool__(self) -> bool:
        return not self.equal

    def to_dict(self) -> dict[str, Any]:
        """Return it as dicts, lists, strings and numbers: what JSON can hold."""
        rows = [
            {
                "mark": row.mark,
                "phase": row.phase,
                "a": _said(row.a) or None,
                "b": _said(row.b) or None,
            }
            for row in self.rows
        ]
        return {"titles": list(self.titles), "wire_bytes": list(self.wire_bytes), "rows": rows}

    def _heading(self) -> list[str]:
        """What a and b are, a line for each."""
        return [
            f"{name}: {title}; {sum(bool(op) for op in ops)} collectives, {sent:,} bytes sent"
            for name, title, ops, sent in (
                ("a", self.titles[0], [row.a for row in self.rows], self.wire_bytes[0]),
                ("b", self.titles[1], [row.b for row in self.rows], self.wire_bytes[1]),
            )
        ]

    def _cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each: "-" is only in a, "+" only in b, and "!" differs."""
        return ("", "phase", "a", "b"), [row.cells() for row in self.rows]


def schedule_diff(a: Trace, b: Trace) -> ScheduleDiff:
    """Return the collectives of two traces side by side: of two ranks, or of two stages.

    Two collectives are equal if they are in the same phase, of the same kind, over the same axis,
    about the same parameters, and give the same shapes and dtypes. Equal ones are aligned as in a
    diff of two texts; of the rest, those of one phase and kind are put beside each other.

    Args:
        a: what `fzero.trace(step)(state, *args)` gives.
        b: another one.

    Raises:
        LayoutError: for what is no trace.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (x @ p["w"]).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> def traced(stage):
        ...     step = fzero.simulate(fzero.shard(step_fn, stage=stage), world_size=2)
        ...     state = step.init({"w": torch.ones(8)}, fzero.optim.sgd(0.5))
        ...     return fzero.trace(step)(state, torch.ones(2, 8))
        >>> print(schedule_diff(traced(2), traced(3)))
        a: simulate(world_size=2) . shard(stage=2) . step_fn on rank 0 of 2; ...
        b: simulate(world_size=2) . shard(stage=3) . step_fn on rank 0 of 2; ...
           phase     a                                b
        +  forward                                    all_gather <dp: w> -> f32[8]
           backward  reduce_scatter <dp: w> -> f32[4] reduce_scatter <dp: w> -> f32[4]
        -  update    all_gather <dp: w> -> f32[8]
    """
    first, second = (
        [op for op in ops_of_trace(trace, "schedule_diff") if op.is_collective] for trace in (a, b)
    )
    return ScheduleDiff(
        titles=(a.title, b.title),
        rows=tuple(_rows(first, second)),
        wire_bytes=(a.wire_bytes, b.wire_bytes),
    )


def _rows(a: Sequence[Op], b: Sequence[Op]) -> Iterator[ScheduleRow]:
    for equal, some, others in _aligned(a, b, [_key(op) for op in a], [_key(op) for op in b]):
        if equal:
            yield from (ScheduleRow(a=x, b=y) for x, y in zip(some, others, strict=True))
            continue
        kinds = [[(op.phase, op.name) for op in ops] for ops in (some, others)]
        for alike, mine, theirs in _aligned(some, others, *kinds):
            if alike:
                yield from (ScheduleRow(a=x, b=y) for x, y in zip(mine, theirs, strict=True))
            else:
                yield from _alone(mine, theirs)


def _alone(a: Sequence[Op], b: Sequence[Op]) -> list[ScheduleRow]:
    """Return rows of one op each, ordered by phase, and in a phase by their traces."""
    rows = [*(ScheduleRow(a=op, b=None) for op in a), *(ScheduleRow(a=None, b=op) for op in b)]
    return sorted(rows, key=lambda row: PHASES.index(row.phase))


def _aligned(
    a: Sequence[Op], b: Sequence[Op], keys_a: Sequence[Any], keys_b: Sequence[Any]
) -> Iterator[tuple[bool, Sequence[Op], Sequence[Op]]]:
    """Yield stretches of both, and whether their keys are equal."""
    for tag, i, j, k, m in SequenceMatcher(None, keys_a, keys_b, autojunk=False).get_opcodes():
        yield tag == "equal", a[i:j], b[k:m]


def _key(op: Op) -> tuple[Any, ...]:
    gives = tuple((value.shape, value.dtype) for value in op.gives)
    return op.phase, op.name, op.detail, gives


def _said(op: Op | None, most: int | None = None, after: int = 0) -> str:
    """Return a collective as text, with at most `most` parameters and shapes."""
    if op is None:
        return ""
    gives = list(map(str, op.gives))
    shown = gives if most is None else gives[:most]
    more = f" +{len(gives) - len(shown)}" if len(shown) < len(gives) else ""
    detail = op.detail if most is None else axis_and_parameters(op.detail, most, after)
    return f"{op.name} <{detail}> -> {' '.join(shown)}{more}"


def _common(a: Op | None, b: Op | None) -> int:
    """Return the number of equal first parameters of two collectives; 0 if all are equal."""
    if a is None or b is None or a.detail == b.detail:
        return 0
    names = [op.detail.partition(": ")[2].split(", ") for op in (a, b)]
    pairs = enumerate(zip(*names, strict=False))
    same = next((i for i, (x, y) in pairs if x != y), min(map(len, names)))
    return min(same, *(len(some) - 1 for some in names))
