"""Compare what two programs make of a state: that of one rank alone, and that of ranks among W."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from torch import fx

from fzero.tools.prove._blame import Explained, first_unexplained
from fzero.tools.prove._budget import Budget
from fzero.tools.prove._gradient import GRADIENT
from fzero.tools.prove._programs import (
    BufferPlace,
    Key,
    input_value,
    outputs_by_leaf,
    places_of,
)
from fzero.tools.prove._proof import Claim, Proof, line_of
from fzero.tools.prove._read import ProgramRead, read
from fzero.tools.prove._reading import Interpretation
from fzero.tools.prove._same import ProgramComparison
from fzero.tools.prove._terms import Symbolic, Terms, exact, text_of
from fzero.tools.trace.program import RecordedStep


class _Side(NamedTuple):
    """One of the two programs, read."""

    ops: int
    inputs: Sequence[BufferPlace]
    read: ProgramRead
    outputs: Mapping[Key, Symbolic | None]
    makers: Mapping[Key, fx.Node]  # what makes the outputs


def prove_programs(
    step: str,
    one_rank: RecordedStep,
    ranks: Iterable[RecordedStep],
    world: int,
    *,
    budget: Budget | None = None,
) -> Proof:
    """Return a proof that the programs of ranks among `world` update as that of one rank alone.

    step: its name in the text. ranks: compared one by one, and only the first of them is kept.
    """
    rest = iter(ranks)
    first = next(rest)
    comparison, seen = ProgramComparison(first), [first.rank]
    for one in rest:
        comparison.add(one)
        seen.append(one.rank)
    terms, axis = Terms(), first.states[0].setup.axis
    alone = Interpretation(terms=terms, world=world, one_rank=True)
    named, own = (axis.name, axis.group_name), comparison.own_parts()
    together = Interpretation(terms=terms, world=world, one_rank=False, axis=named, own_parts=own)
    budget = Budget() if budget is None else budget
    wanted = _side(one_rank, alone, budget.of_one())
    found = _side(first, together, budget.of_one())
    wrong, line = dict(_differences(wanted.outputs, found.outputs, varies=world == 1)), ""
    differs, stopped = comparison.differs, found.read.stopped or wanted.read.stopped
    if differs is not None:
        line, wrong = line_of(differs), dict.fromkeys(found.makers, comparison.why)
    elif stopped is not None:
        node, why = stopped
        ends = [node] if found.read.stopped else []
        line = _where(alone, wanted, found, ends) if "budget" not in why else ""
        wrong = dict.fromkeys(found.makers, f"nothing is known of {node.name}: {why}")
        line = line or line_of(node)
    elif wrong:
        line = _where(alone, wanted, found, [found.makers[k] for k in wrong if k in found.makers])
    claims = [
        Claim(tensor=key[0], leaf=key[1], why=wrong.get(key, ""), line=line if key in wrong else "")
        for key in {**found.makers, **wanted.makers}
        if key[0].startswith("state")
    ]
    ops = wanted.ops, found.ops
    return Proof(step=step, world=world, ranks=tuple(seen), ops=ops, claims=tuple(claims))


def _side(program: RecordedStep, reading: Interpretation, budget: Budget) -> _Side:
    nodes = list(program.graph.graph.nodes)
    given, ends = [n for n in nodes if n.op == "placeholder"], list(nodes[-1].args[0])
    inputs, ends_at = (
        places_of(program, *x) for x in ((program.inputs, given), (program.outputs, ends))
    )
    values = [input_value(reading.terms, *pair) for pair in zip(inputs, given, strict=True)]
    made = read(program.graph, values, reading, budget)
    makers = {
        key: node
        for place, node in zip(ends_at, ends, strict=True)
        for key in (place.keys if node.meta["val"].numel() else ())
    }
    ops = sum(node.op == "call_function" and node.target is not GRADIENT for node in nodes)
    return _Side(
        ops, inputs, made, outputs_by_leaf(ends_at if made.outputs else (), made.outputs), makers
    )


def _differences(
    wanted: Mapping[Key, Symbolic | None], found: Mapping[Key, Symbolic | None], *, varies: bool
) -> Iterator[tuple[Key, str]]:
    """Yield (key, why) for each tensor of the new state that is not shown."""
    for key in (key for key in {**wanted, **found} if key[0].startswith("state")):
        a, b = wanted.get(key), found.get(key)
        if a is None or b is None:
            yield key, "it is not on the same ranks as before, or not in both programs"
        elif any(x.term.varies for x in a.addends) and not varies:
            yield key, f"on one rank it depends on more of the batch than a gradient: {_brief(a)}"
        elif a.pieces != b.pieces or (any(x.term.varies for x in b.addends) and not varies):
            yield key, "it is made of {} and not of {}".format(*map(_brief, _inner(b, a)))


def _inner(a: Symbolic, b: Symbolic) -> tuple[Symbolic, Symbolic]:
    """Return the innermost operands in which two values differ, while one function makes both."""
    while True:
        pairs = zip(a.pieces, b.pieces, strict=False)
        sums = next(((p.sum, q.sum) for p, q in pairs if p.sum != q.sum), None)
        if sums is None or [len(one) for one in sums] != [1, 1]:
            return a, b
        (x,), (y,) = sums
        inner = zip(x.term.operands, y.term.operands, strict=False)
        other = next(((p, q) for p, q in inner if p != q), None)
        if x.term.head != y.term.head or x[1:] != y[1:] or other is None:
            return a, b
        a, b = other


def _brief(value: Symbolic) -> str:
    text = text_of(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _where(reading: Interpretation, wanted: _Side, found: _Side, ends: Sequence[fx.Node]) -> str:
    """Return the line at which what the ranks do begins to differ."""
    setups = [place.setup for place in found.inputs if place.setup is not None]
    by = {exact(one.reduction.gradient_predivide_factor) for one in setups}
    by |= {Fraction(reading.world), *(reading.world / x for x in by)}
    made = (value for values in wanted.read.made.values() for value in values)
    explained = Explained(reading, made, wanted.outputs.items(), by)
    node = first_unexplained(found.read, explained, found.inputs, ends)
    return line_of(node or ends[0]) if ends else ""
