"""Compare what two programs make of a state: that of one rank alone, and that of ranks among W."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from torch import fx

from fzero.tools.prove._blame import Explained, first_unexplained
from fzero.tools.prove._programs import (
    BufferPlace,
    Key,
    compared,
    input_value,
    local_nodes,
    outputs_by_leaf,
    places_of,
)
from fzero.tools.prove._proof import Claim, Proof, line_of
from fzero.tools.prove._read import ProgramRead, read
from fzero.tools.prove._reading import Interpretation
from fzero.tools.prove._terms import Stretch, Symbolic, Terms, exact, text_of
from fzero.tools.trace.program import RecordedStep


class _Side(NamedTuple):
    """One of the two programs, read."""

    ops: int
    inputs: Sequence[BufferPlace]
    read: ProgramRead
    outputs: Mapping[Key, Symbolic | None]
    makers: Mapping[Key, fx.Node]  # what makes the outputs


def prove_programs(
    step: str, one_rank: RecordedStep, ranks: Sequence[RecordedStep], world: int
) -> Proof:
    """Return a proof that the programs of ranks among `world` update as that of one rank alone.

    step: its name in the text.
    """
    terms, axis = Terms(), ranks[0].states[0].setup.axis
    (own, differs), local = compared(ranks), local_nodes(one_rank.graph.graph)
    alone = Interpretation(terms=terms, world=world, one_rank=True, local=local)
    named = axis.name, axis.group_name
    together = Interpretation(terms=terms, world=world, one_rank=False, axis=named, own_parts=own)
    wanted, found = _side(one_rank, alone), _side(ranks[0], together)
    means = {
        key: value and value.on(Stretch(p.numel, alone.mean(p.sum)) for p in value.pieces)
        for key, value in wanted.outputs.items()
    }
    wrong, line = dict(_differences(means, found.outputs, varies=world == 1)), ""
    stopped = found.read.stopped or wanted.read.stopped
    if differs is not None:
        line, wrong = line_of(differs), dict.fromkeys(found.makers, "ranks run other programs")
    elif stopped is not None:
        node, why = stopped
        ends = [node] if found.read.stopped else []
        line = _where(alone, wanted, found, ends) or line_of(node)
        wrong = dict.fromkeys(found.makers, f"nothing is known of {node.name}: {why}")
    elif wrong:
        line = _where(alone, wanted, found, [found.makers[k] for k in wrong if k in found.makers])
    claims = [
        Claim(tensor=key[0], leaf=key[1], why=wrong.get(key, ""), line=line if key in wrong else "")
        for key in {**found.makers, **means}
        if key[0].startswith("state")
    ]
    seen = tuple(one.rank for one in ranks)
    ops = wanted.ops, found.ops
    return Proof(step=step, world=world, ranks=seen, ops=ops, claims=tuple(claims))


def _side(program: RecordedStep, reading: Interpretation) -> _Side:
    nodes = list(program.graph.graph.nodes)
    given, ends = [n for n in nodes if n.op == "placeholder"], list(nodes[-1].args[0])
    inputs, ends_at = (
        places_of(program, *x) for x in ((program.inputs, given), (program.outputs, ends))
    )
    values = [input_value(reading.terms, *pair) for pair in zip(inputs, given, strict=True)]
    made = read(program.graph, values, reading)
    makers = {
        key: node
        for place, node in zip(ends_at, ends, strict=True)
        for key in (place.keys if node.meta["val"].numel() else ())
    }
    ops = sum(node.op == "call_function" for node in nodes)
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
        elif a.pieces != b.pieces or (any(x.term.varies for x in b.addends) and not varies):
            yield key, "it is made of {} and not of {}".format(*map(_brief, _inner(b, a)))


def _inner(a: Symbolic, b: Symbolic) -> tuple[Symbolic, Symbolic]:
    """Return the innermost operands in which two values differ, while one function makes both."""
    pairs = zip(a.pieces, b.pieces, strict=False)
    sums = next(((p.sum, q.sum) for p, q in pairs if p.sum != q.sum), None)
    if sums is not None and [len(one) for one in sums] == [1, 1]:
        (x,), (y,) = sums
        if x.term.head == y.term.head and x[1:] == y[1:]:
            inner = zip(x.term.operands, y.term.operands, strict=False)
            return next((_inner(p, q) for p, q in inner if p != q), (a, b))
    return a, b


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
