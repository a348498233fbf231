"""Compare what two programs make of a state: that of one rank alone, and that of ranks among W."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from torch import fx

from fzero.tools.prove._blame import Explained, first_unexplained
from fzero.tools.prove._budget import Budget
from fzero.tools.prove._gradient import AGAIN, GRADIENT
from fzero.tools.prove._programs import (
    BufferPlace,
    Key,
    input_value,
    outputs_by_leaf,
    places_of,
)
from fzero.tools.prove._proof import Claim, Proof, line_of
from fzero.tools.prove._read import ProgramRead, read_together
from fzero.tools.prove._reading import Interpretation
from fzero.tools.prove._same import ProgramComparison
from fzero.tools.prove._terms import Stretch, Symbolic, Terms, cut, exact, joined, text_of
from fzero.tools.trace.program import RecordedStep


class _Side(NamedTuple):
    """One of the two programs, read."""

    ops: int
    inputs: Sequence[BufferPlace]
    read: ProgramRead
    places: Sequence[BufferPlace]  # of what it returns
    count: int  # of those of this call; the next call's follow, if one keeps something for it
    makers: Mapping[Key, fx.Node]  # what makes the outputs
    values: Sequence[Symbolic]

    @property
    def outputs(self) -> Mapping[Key, Symbolic | None]:
        """What a call makes of the state."""
        return outputs_by_leaf(
            self.places[: len(self.values)][: self.count], self.values[: self.count]
        )

    @property
    def again(self) -> Mapping[Key, Symbolic | None]:
        """What the next call makes of the same state."""
        return outputs_by_leaf(
            self.places[: len(self.values)][self.count :], self.values[self.count :]
        )


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
    every = [next(rest)]
    comparison, seen = ProgramComparison(every[0]), [every[0].rank]
    for one in rest:
        comparison.add(one)
        seen.append(one.rank)
        every += [one] if len(seen) == len(every) + 1 and one.rank == len(every) else []
    terms, axis = Terms(), every[0].states[0].setup.axis
    alone = Interpretation(terms=terms, world=world, one_rank=True)
    named, own = (axis.name, axis.group_name), comparison.own_parts()
    differs = comparison.differs
    if differs is None or len(every) < world:  # one is read for all; else all beside each other
        every = every[:1]
    own = own if differs is None else frozenset()
    together = Interpretation(terms=terms, world=world, one_rank=False, axis=named, own_parts=own)
    budget = Budget() if budget is None else budget
    (wanted,) = _sides([one_rank], alone, budget.of_one())
    found = _joined(_sides(every, together, budget))
    wrong, line = dict(_differences(wanted.outputs, found.outputs, varies=world == 1)), ""
    for again in (wanted.again, found.again):
        apart = (k for k, x in again.items() if not _equal(x, wanted.outputs.get(k)))
        wrong = dict.fromkeys((k for k in apart if k[0].startswith("state")), _NEXT) | wrong
    stopped = found.read.stopped or wanted.read.stopped
    if differs is not None and (len(every) < world or stopped is not None or wrong):
        why = next(iter(wrong.values()), "") if stopped is None else stopped[1]
        why += _PIECES if stopped is None else ""
        why = f"{comparison.why}: {why}" if len(every) == world > 1 else comparison.why
        line, wrong = line_of(differs), dict.fromkeys(wrong or found.makers, why)
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
    return Proof(
        step=step,
        world=world,
        ranks=tuple(seen),
        ops=(wanted.ops, found.ops),
        claims=tuple(claims),
        beside=tuple(_beside(wanted.again, found.again, alone)),
    )


_NEXT = "the next call makes something else of it, by what this one has kept"
_PIECES = (
    ". Ranks have other pieces of leaves: what looks at more than an element of one is another "
    "function on each; ctx.sum and ctx.norm look at all"
)


def _sides(
    programs: Sequence[RecordedStep], reading: Interpretation, budget: Budget
) -> list[_Side]:
    """Read one program, or those of all ranks beside each other."""
    given, ends, counts, inputs = [], [], [], []
    for program in programs:
        nodes = list(program.graph.graph.nodes)
        ends_in: Any = nodes[-1].args[0]
        starts, outs = [n for n in nodes if n.op == "placeholder"], list(ends_in)
        paths = list(program.outputs)
        if any(node.target is AGAIN for node in nodes):
            paths = [re.sub("^aux", "state", path) for path in paths]
        counts.append(sum(path.startswith("state") for path in program.outputs))
        inputs.append(places_of(program, program.inputs, starts))
        ends.append([*zip(places_of(program, paths, outs), outs, strict=True)])
        values = (
            input_value(reading.terms, *pair) for pair in zip(inputs[-1], starts, strict=True)
        )
        given.append([_of_rank(x, program.rank, len(programs)) for x in values])
    every = read_together([one.graph for one in programs], given, reading, budget)
    return [_side(*each) for each in zip(programs, inputs, every, ends, counts, strict=True)]


def _of_rank(value: Symbolic, rank: int, ranks: int) -> Symbolic:
    """Return what a rank has; of one rank that stands for all, as it is."""
    if ranks == 1 or not value.spread:
        return value
    return Symbolic(value.shape, cut(value.pieces, rank * value.numel, value.numel))


def _side(
    program: RecordedStep,
    inputs: Sequence[BufferPlace],
    made: ProgramRead,
    ends: Sequence[tuple[BufferPlace, fx.Node]],
    count: int,
) -> _Side:
    makers = {
        key: node
        for place, node in ends[:count]
        for key in (place.keys if node.meta["val"].numel() else ())
    }
    nodes = program.graph.graph.nodes
    ops = sum(n.op == "call_function" and n.target not in (GRADIENT, AGAIN) for n in nodes)
    return _Side(ops, inputs, made, [place for place, _ in ends], count, makers, made.outputs)


def _joined(sides: Sequence[_Side]) -> _Side:
    """Return the sides of all ranks as one, with what they have together."""
    first, *_ = sides
    stopped = next((one.read.stopped for one in sides if one.read.stopped), None)
    first = first._replace(read=first.read._replace(stopped=stopped))
    if len(sides) == 1 or stopped is not None:
        return first
    values = []
    for place, *some in zip(first.places, *(one.values for one in sides), strict=True):
        if place.spread:
            pieces = joined(p for x in some for p in x.pieces)
            values.append(Symbolic(some[0].shape, pieces, spread=True))
        else:
            values.append(some[0] if len({*some}) == 1 else some[0]._replace(spread=True))
    return first._replace(values=values)


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


def _beside(
    wanted: Mapping[Key, Symbolic | None],
    found: Mapping[Key, Symbolic | None],
    alone: Interpretation,
) -> Iterator[str]:
    """Yield what is shown of each tensor that is returned beside the state, such as the loss."""
    for key in (key for key in {**wanted, **found} if not key[0].startswith("state")):
        one = wanted.get(key)
        ways = [("as on one rank", one)]
        for what, over in (("mean", alone.mean), ("sum", alone.over_ranks)):
            of_all = one and one.on(Stretch(p.numel, over(p.sum)) for p in one.pieces)
            ways.append((f"its {what} over ranks", of_all))
        shown = (what for what, value in ways if _equal(value, found.get(key)))
        yield f"{key[0]} ({next(shown, 'not shown')})"


def _equal(a: Symbolic | None, b: Symbolic | None) -> bool:
    return a is not None and b is not None and a.pieces == b.pieces


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
