"""`Trace`: the program of one rank in a step, printable, countable, comparable."""

from __future__ import annotations

import html
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from fzero.collectives import CollectiveLog
from fzero.errors import LayoutError
from fzero.tools.trace._calls import CalledOp
from fzero.tools.trace._diff import ComparedProgram, TraceDiff, collectives_of, compare_ops
from fzero.tools.trace._record import Op, Value
from fzero.tools.trace._text import text


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The program of one rank in one step.

    `graph` is the same as a torch.fx.GraphModule, from the tensors of the arguments to those of the
    result. `title` says of which step, on which rank.
    """

    title: str
    rank: int
    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]  # with the name of the value that comes out, and its path
    log: CollectiveLog = field(repr=False)
    graph: fx.GraphModule = field(repr=False, compare=False)
    calls: tuple[CalledOp, ...] = ()  # of each op with its arguments; then of each output

    @property
    def collectives(self) -> dict[str, int]:
        """How many buffers go through each kind of collective."""
        counts = Counter(self.log.counts(self.rank))
        counts.pop("agree", None)
        return dict(counts)

    @property
    def exchanges(self) -> int:
        """How many rounds there are, in which ranks announce what comes next, in a few bytes."""
        return self.log.counts(self.rank).get("agree", 0)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in collectives, on the ring bound; without exchanges."""
        return sum(op.wire_bytes for op in self.ops)

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention."""
        return sum(op.flops for op in self.ops)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes alive while each op runs, if every tensor is freed after its last use."""
        return tuple(op.live_bytes for op in self.ops)

    @property
    def peak_bytes(self) -> int:
        """The most of `live_bytes`: the arguments are among them, for the step is pure."""
        return max(self.live_bytes, default=0)

    def diff(self, other: Trace, *, only: Literal["collectives"] | None = None) -> TraceDiff:
        """Return the ops in which `other` differs: with constants, views and what they read.

        Numbers, tensors that are no arguments of the step (by their values), learning rates that
        are functions (by their code), the options of the optimizer, and which elements of which
        value an op reads, are parts of a program; so is what it returns. Names of values and of
        modules do not count, nor does by which views elements were reached.

        Args:
            other: the trace of another rank, stage or version of the step.
            only: "collectives" compares those alone, in their order: the kind, the axis, the
                parameters that they are about, what they give, and their constants.

        Raises:
            LayoutError: for an `other` that is no trace, and another word for `only`.

        Example:
            >>> import torch, fzero
            >>> from fzero.trace import trace
            >>> def step_fn(state, x):
            ...     return state, x.relu()
            >>> state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=0)
            >>> two, three = (trace(step_fn)(state, torch.ones(n)) for n in (2, 3))
            >>> two.diff(two).equal, two.diff(three).equal
            (True, False)
            >>> two.diff(three, only="collectives")  # neither has one
            the same
        """
        if not isinstance(other, Trace) or only not in (None, "collectives"):
            raise LayoutError(
                f"trace.diff was given a {type(other).__name__}, only={only!r}.",
                cause="the step, or its result, in the place of its trace; or another word.",
                fix='trace.diff(other), or trace.diff(other, only="collectives"), with another '
                "trace of fzero.trace(step)(state, *args).",
            )
        a, b = (ComparedProgram(one.title, one.ops, one.calls) for one in (self, other))
        return compare_ops(collectives_of(a), collectives_of(b)) if only else compare_ops(a, b)

    def __str__(self) -> str:
        return text(self.title, self.inputs, self.ops, self.outputs, self.calls)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = []
        for line in map(html.escape, str(self).splitlines()):
            head = line and not line.startswith(" ")
            lines.append(f"<b>{line}</b>" if head else _marked(line))
        return "<pre style='line-height:1.3'>" + "\n".join(lines) + "</pre>"


def _marked(line: str) -> str:
    return f"<mark>{line}</mark>" if line.startswith("  * ") else line
