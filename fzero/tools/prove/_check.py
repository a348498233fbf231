"""Compare what two programs make of a state: that of one rank alone, and that of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from torch import fx

from fzero.tools.prove._blame import Explained, first_unexplained, why_unknown
from fzero.tools.prove._programs import joined_programs, local_nodes
from fzero.tools.prove._proof import Claim, Proof, line_of
from fzero.tools.prove._read import Read, read
from fzero.tools.prove._reading import Reading
from fzero.tools.prove._state import Key, Place, input_value, keys_of, outputs_by_leaf, places_of
from fzero.tools.prove._terms import Terms, Value, exact, mapped, text_of
from fzero.tools.trace.ops import UPDATE, ran_by_autograd
from fzero.tools.trace.program import RecordedStep


class _Side(NamedTuple):
    """One of the two programs, read."""

    nodes: Sequence[fx.Node]
    inputs: Sequence[Place]
    read: Read
    outputs: Mapping[Key, Value | None]
    makers: Mapping[Key, fx.Node]  # what makes the outputs

    @property
    def ops(self) -> int:
        """How many ops the program has."""
        return sum(node.op == "call_function" for node in self.nodes)


def prove_programs(
    step: str, one_rank: RecordedStep, ranks: Sequence[RecordedStep], world: int
) -> Proof:
    """Return a proof that the programs of some ranks of `world` update as that of one rank alone.

    step: how the step is called in the text. Both are recorded of one step, from states of the same
    parameters.
    """
    programs, terms = joined_programs(ranks), Terms()
    graph = one_rank.graph.graph
    local = local_nodes(graph, ran_by_autograd, UPDATE)
    alone = Reading(terms=terms, world=world, one_rank=True, local=local)
    together = Reading(terms=terms, world=world, one_rank=False, own_parts=programs.own_parts)
    wanted, found = _side(one_rank, alone), _side(programs.program, together)
    means = {
        key: None if value is None else mapped(value, alone.mean)
        for key, value in wanted.outputs.items()
    }
    wrong = dict(_differences(means, found.outputs, world))
    line, known = "", {}
    if programs.differs is not None:
        line = line_of(programs.differs)
        known = dict.fromkeys([*means, *found.outputs], "ranks run other programs")
    elif wrong:
        line, reason = _where(alone, wanted, found, [key for key in wrong if key in found.makers])
        known = {key: f"{why}; {reason}" if reason else why for key, why in wrong.items()}
    claims = [
        Claim(tensor=key[0], leaf=key[1], why=known.get(key, ""), line=line if key in known else "")
        for key in dict.fromkeys([*means, *found.outputs])
        if key[0].startswith("state")
    ]
    return Proof(
        step=step, world=world, ranks=programs.ranks, ops=(wanted.ops, found.ops), claims=tuple(claims)
    )


def _side(program: RecordedStep, reading: Reading) -> _Side:
    nodes = list(program.graph.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    inputs = places_of(program, program.inputs, given)
    values = [
        input_value(reading.terms, place, node) for place, node in zip(inputs, given, strict=True)
    ]
    done, ends = read(program.graph, values, reading), list(nodes[-1].args[0])  # type: ignore
    places = places_of(program, program.outputs, ends)
    outputs = outputs_by_leaf(places, done.outputs)
    makers = {key: node for place, node in zip(places, ends, strict=True) for key in keys_of(place)}
    return _Side(nodes, inputs, done, outputs, makers)


def _differences(
    wanted: Mapping[Key, Value | None], found: Mapping[Key, Value | None], world: int
) -> Iterator[tuple[Key, str]]:
    """Yield (key, why) for each tensor of the new state that is not shown."""
    for key in dict.fromkeys([*wanted, *found]):
        if not key[0].startswith("state"):
            continue
        a, b = wanted.get(key), found.get(key)
        if a is None or b is None:
            yield key, "it is not on the same ranks as before the step, or not in both programs"
        elif a.pieces != b.pieces or (b.varies and world > 1):
            found_, wanted_ = _innermost(b, a)
            yield key, f"it is made of {_brief(found_)} and not of {_brief(wanted_)}"


def _innermost(a: Value, b: Value) -> tuple[Value, Value]:
    """Return the innermost operands in which two values differ, while one function makes both."""
    pairs = zip(a.pieces, b.pieces, strict=False)
    one, other = next(((x.sum, y.sum) for x, y in pairs if x.sum != y.sum), ((), ()))
    only = [x for x in one if x not in other], [x for x in other if x not in one]
    if len(only[0]) == len(only[1]) == 1:
        x, y = only[0][0], only[1][0]
        if x.term.head == y.term.head and (x.start, x.by) == (y.start, y.by):
            inner = zip(x.term.operands, y.term.operands, strict=False)
            found = next(((p, q) for p, q in inner if p != q), None)
            return (a, b) if found is None else _innermost(*found)
    return a, b


def _brief(value: Value) -> str:
    text = text_of(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _where(
    reading: Reading, wanted: _Side, found: _Side, keys: Sequence[Key]
) -> tuple[str, str]:
    """Return the line at which what the ranks do begins to differ, and what is known of it."""
    setups = [place.setup for place in found.inputs if place.setup is not None]
    divisors = {exact(one.reduction.gradient_predivide_factor) for one in setups}
    divisors |= {Fraction(reading.world), *(reading.world / one for one in divisors)}
    explained = Explained(reading, wanted.read.made.values(), wanted.outputs, divisors)
    ends = [found.makers[key] for key in keys]
    node = first_unexplained(found.read, explained, found.inputs, ends)
    if node is None:
        return (line_of(ends[0]) if ends else ""), ""
    values = found.read.made[node]
    return line_of(node), why_unknown(node, values)
