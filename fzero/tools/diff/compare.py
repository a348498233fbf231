"""Where two runs differ first: `Difference`, and the comparison of an update of both.

In an update are compared, in this order: what a rank gathered with what ranks hold, the loss, the
gradients before they are reduced, and where one of these two differs the modules of the forward;
what the update begins with, its norm, what the optimizer is given; slots, parameters, counters.
Bounds are those of fzero/tools/rounding.py: `twin` is run a from values that are a little apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fzero.state import Setup, TrainState
from fzero.state.setup import MASTERS
from fzero.tools.diff import record
from fzero.tools.rounding import (
    MARGIN,
    TERMS,
    Copy,
    Found,
    Spread,
    disturbed_bound,
    eps_of,
    first_apart,
    largest,
    of_ranks,
    of_terms,
    replicas_apart,
    shift,
    whole_leaf,
)

START, GATHER, MODULE, LOSS, GRADIENT = "start", "gather", "module", "loss", "gradient"
REDUCTION, NORM, CLIP, SLOT, UPDATE = "reduction", "norm", "clip", "optimizer state", "update"
COUNTER, SCALE, STATE, REPLICA = "counter", "loss scale", "state", "replica"

# In the order in which a step makes them: (what is compared, what else makes it differ).
OPERATIONS = {
    START: (
        "the parameters that a run starts from",
        "another seed, or another version of the model.",
    ),
    GATHER: (
        "the full values that a loss reads, and those that the ranks hold",
        "a shard in the place of another one, or values from before an update.",
    ),
    MODULE: (
        "what the modules of a forward are given and return, as losses or gradients differ",
        "in the forward of this module, or in what it reads: a weight that is transposed, another "
        "constant (the theta of rope, an eps), another precision of an op, other dropout masks.",
    ),
    LOSS: (
        "the loss, summed as its gradients are",
        "another model or loss; batches that are missing, counted twice or another rank's; a "
        "factor or a divisor (of micro-batches, of ranks) too much; other dropout masks.",
    ),
    GRADIENT: (
        "the gradient by a parameter, before it is reduced",
        "a detached or frozen parameter, a gradient that is changed or zeroed on its way, or a "
        "micro-batch whose loss was computed and not differentiated.",
    ),
    REDUCTION: (
        "the gradient by a parameter that an update begins with",
        "a reduction that is missing or was made twice, another divisor, a shard in the place of "
        "another one, gradients of an earlier step, or a state that was thrown away.",
    ),
    NORM: ("the norm of the gradients", "a norm of one rank's shard, or with the loss scale."),
    CLIP: (
        "the gradient that the optimizer is given",
        "another bound of the norm, clipping on one side only, or gradients that were clipped "
        "before they were reduced, or not divided by the loss scale.",
    ),
    SLOT: (
        "the state that the optimizer keeps for a parameter",
        "other betas or momentum, weight decay inside of the gradient, or masters that are stale.",
    ),
    UPDATE: (
        "what an update adds to a parameter",
        "another learning rate, schedule, eps or weight decay, a parameter group that holds other "
        "parameters, or an update that a rank skips.",
    ),
    COUNTER: (
        "a counter: of updates, of backwards that wait",
        "an update that is made twice or not at all, or a counter that starts elsewhere.",
    ),
    SCALE: ("the loss scale after the update", "another policy, or an overflow on one side only."),
    STATE: (
        "the state that the step returns, and that of its last update",
        "a step that returns an older state, or changes it after the update.",
    ),
    REPLICA: (
        "a number that several ranks of one run must have alike",
        "a rank that took another branch, or computed from data of its own.",
    ),
}


class Moment(NamedTuple):
    """The call, update and backward of a difference, counted from 1."""

    step: int  # which call of the step
    update: int  # which update in it
    backward: int | None  # which backward before it; None where all of them are summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first number of two runs that differs by more than another order of sums explains.

    In a `replica`, a and b are of one run: of the lowest rank that has the number, and of another.
    """

    at: Moment
    operation: str  # one of `OPERATIONS`; of a slot with its name: "optimizer state exp_avg"
    path: str  # of the parameter, or of the module; "" for what belongs to none
    ranks: tuple[int, ...]  # that have another number; empty for a sum over ranks
    index: tuple[int, ...]  # of the element that differs most, on the first of these ranks
    a: float
    b: float
    bound: float  # what rounding may explain of |a - b|
    compared_in: torch.dtype  # of the parameters while the two were compared
    _kinds: ClassVar[Sequence[str]] = tuple(OPERATIONS)  # what is compared, in order

    def placed(self, at: Moment, compared_in: torch.dtype, prefix: str = "") -> Self:
        """Return it at a moment, with the path of its state before those in it."""

        def named(path: str) -> str:
            return ".".join(filter(None, (prefix, path)))

        found = replace(self, at=at, compared_in=compared_in, path=named(self.path))
        if not isinstance(found, GradientDifference):
            return found
        agree, differ = (tuple(map(named, paths)) for paths in (found.agree, found.differ))
        return replace(found, agree=agree, differ=differ)

    def beside(
        self, kind: type[GradientDifference], order: Iterable[str] = (), differ: Iterable[str] = ()
    ) -> GradientDifference:
        """Return it with all gradients of its update, in the order of a backward."""
        values = {one.name: getattr(self, one.name) for one in fields(Difference)}
        some = tuple(differ)
        agree = tuple(path for path in order if path not in some)
        return kind(**values, agree=agree, differ=some)

    @property
    def rank(self) -> int | None:
        """The first rank that has another number; None for a sum over ranks."""
        return self.ranks[0] if self.ranks else None

    @property
    def kind(self) -> str:
        """The operation, without the name of a slot or counter."""
        return max((kind for kind in OPERATIONS if self.operation.startswith(kind)), key=len)

    def __str__(self) -> str:
        (step, update, backward), ranks = self.at, ", ".join(map(str, self.ranks))
        compared, cause = OPERATIONS[self.kind]
        earlier = itertools.takewhile(lambda kind: kind != self.kind, self._kinds)
        before = [OPERATIONS[kind][0] for kind in earlier if kind != MODULE]
        agree = [f"all of steps 1 to {step - 1}"] if step > 1 else []
        agree += [f"in step {step}: {'; '.join(before)}"] if before else []
        is_module = self.kind == MODULE
        what = self.operation.removeprefix(MODULE) if is_module else f" of {self.operation}"
        where = [
            f"step {step}" if step else "the start",
            f"update {update}" * (update > 1),
            f"backward {backward}" if backward else "",
            f"rank{'s' * (len(self.ranks) > 1)} {ranks}" if ranks else "",
            f"{'module' if is_module else 'parameter'} {self.path}" * bool(self.path),
        ]
        index = f"{list(self.index)}" if self.path and self.index else ""
        lines = [
            f"{', '.join(filter(None, where))}{index}{what}: "
            f"{self.a:.9g} in run a, {self.b:.9g} in run b, "
            f"{abs(self.a - self.b):.2e} apart; rounding explains at most {self.bound:.1e} "
            f"(compared in {str(self.compared_in).removeprefix('torch.')}).",
            f"Compared here: {compared}.",
        ]
        if self.kind == REPLICA:
            lines[0] = lines[0].replace("in run a", "on the lowest rank")
            lines[0] = lines[0].replace("in run b", "here")
        if isinstance(self, GradientDifference) and self.differ:
            same, more = _some(self.agree), _some(self.differ[1:])
            others = f"The gradients by {same} agree" if same else "No other agrees"
            others += f"; those by {more} differ, too" if more else ""
            lines.append(f"It is the first that the backward makes differently. {others}.")
        until = ", and ".join(agree) or "nothing was compared before"
        return "\n".join([*lines, f"Equal until then: {until}.", f"Usual cause: {cause}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDifference(Difference):
    """The first gradient that differs, in the order in which the backward makes them.

    All before it in that order agree, so the fault is in what the backward does between.
    """

    agree: tuple[str, ...]  # the parameters whose gradients are equal, in that order
    differ: tuple[str, ...]  # the others, `path` first


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDifference(GradientDifference):
    """The first difference of what two training loops tell; without `agree` if of no gradient."""

    _kinds: ClassVar[Sequence[str]] = (START, LOSS, GRADIENT, UPDATE)


def _some(paths: Sequence[str], most: int = 6) -> str:
    rest = f", ... ({len(paths)} of them)" if len(paths) > most else ""
    return ", ".join(paths[:most]) + rest


def difference(operation: str, path: str, found: Found, backward: int | None = None) -> Difference:
    """Return a difference in float64, whose update is known to who compares several."""
    known = {"at": Moment(0, 0, backward), "compared_in": torch.float64, **found._asdict()}
    return Difference(operation=operation, path=path, **known)


# Two runs up to one update.

Rows = Sequence[Sequence[TrainState]]  # each state of a tree of them, as each rank has it
Numbers = Iterator[tuple[str, str, Spread, Spread, Any]]  # operation, path, of a, of b, bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Called:
    """One call of a step: the states before it, the recorded updates, the states after it."""

    before: Rows
    seen: record.CallRecord
    after: Rows

    def sides(self, state: int) -> list[Side]:
        """Return the updates of a state, and last the part after them."""
        rows, found = self.before[state], list[Side]()
        by_rank = [self.seen.updates[state][rank] for rank in range(len(rows))]
        averages = rows[0].setup.reduction.reduce_op == "mean"
        for seen in itertools.zip_longest(*by_rank, fillvalue=record.RankUpdate()):
            found.append(Side(before=rows, seen=seen, averages=averages))
            rows = [x.onward or x.after or row for x, row in zip(seen, rows, strict=True)]
        return found

    def leads(self) -> list[list[record.Values | None]]:
        """Return the gradients and results of each update that all ranks make, for each state."""
        return [[side.lead for side in self.sides(state)] for state in range(len(self.before))]


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots, for cached properties
class Side:
    """One run up to one update of one state: the state before, and the record of each rank."""

    before: Sequence[TrainState]
    seen: Sequence[record.RankUpdate]
    averages: bool  # losses and gradients over ranks; else they are summed

    @property
    def setup(self) -> Setup:
        """The setup of the state."""
        return self.before[0].setup

    @cached_property
    def divisor(self) -> float:
        """The divisor of a sum over ranks: their number, or the sum of all weights.

        With logical ranks the terms are those of logical ranks, whatever ranks carry them.
        """
        counts = [one.counts for seen in self.seen for one in seen.backwards]
        if weights := [count for count in counts if count is not None]:
            return sum(weights) or 1.0
        logical = self.setup.logical
        count = len(self.seen) if logical is None else logical.ranks
        return count if self.averages else 1

    @cached_property
    def terms(self) -> dict[str, list[Tensor]]:
        """For each leaf the flat terms of its gradient, of "" those of the differentiated loss.

        Of all ranks and backwards, weighted.
        """
        found: dict[str, list[Tensor]] = {}
        for one in (one for seen in self.seen for one in seen.backwards):
            for leaf, term in one.terms.items():
                path = "" if leaf == record.LOSS_TERM else self.setup.layout.names[leaf]
                flat = term if leaf == record.LOSS_TERM else term.reshape(-1)
                found.setdefault(path, []).append(flat / self.divisor)
        return found

    def terms_at(self, path: str, backward: int) -> list[Tensor]:
        """Each rank's term of the loss, or of a leaf's gradient, in one backward; 0 if none."""
        layout = self.setup.layout
        leaf = layout.names.index(path) if path else record.LOSS_TERM
        zeros = torch.zeros(layout.leaves[leaf].stored_shape if path else (), dtype=torch.float64)
        made = [seen.backwards[backward : backward + 1] for seen in self.seen]
        return [some[0].terms.get(leaf, zeros) if some else zeros for some in made]

    def gradients(self, given: bool) -> dict[str, Spread]:
        """Return the gradients of the update: as reduced, or if `given` as the optimizer got it."""
        setup = self.setup
        flats = [seen.given if given else seen.reduced for seen in self.seen]
        return record.spread(setup, setup.layout.trainable, flats, setup.gradients)

    @cached_property
    def after(self) -> list[TrainState]:
        """The state after the update, of the ranks that made one."""
        return [seen.after for seen in self.seen if seen.after is not None]

    @property
    def lead(self) -> record.Values | None:
        """The result of the update, and what the optimizer was given, if all ranks make it."""
        if len(self.after) < len(self.seen):
            return None
        given = {path: one.full for path, one in self.gradients(True).items()}
        return replace(record.values_of(self.after), gradients=given)

    @cached_property
    def corners(self) -> list[dict[record.Key, Spread]]:
        """For each perturbation of gradients and slots: what is added by path, the new slots."""
        setup, found = self.setup, list[dict[record.Key, Spread]]()
        for same in zip(*(seen.corners for seen in self.seen), strict=True):
            made: dict[record.Key, Spread] = {}
            for name, group in same[0]:
                flats = [[corner[name, group]] for corner in same]
                cut = record.spread(setup, [group], flats, setup.optimizer_state)
                made |= {(name, path) if name else path: one for path, one in cut.items()}
            found.append(made)
        return found

    @cached_property
    def leaves(self) -> tuple[dict[record.Key, Spread], dict[record.Key, Spread]]:
        """The parameters and the slots of the optimizer before the update, and after it."""
        return record.leaves_of(self.before), record.leaves_of(self.after) if self.after else {}


class Spacing(NamedTuple):
    """The relative spacing of numbers in the coarsest dtype."""

    passes: float  # of forwards, backwards and reductions
    updates: float  # of the optimizer


@dataclass(frozen=True, slots=True, eq=False)
class SidePair:
    """Two runs up to one update of one state; `twin` is run a, perturbed."""

    a: Side
    b: Side
    twin: Side
    units: Spacing

    @property
    def sides(self) -> tuple[Side, Side, Side]:
        """The three, in this order."""
        return self.a, self.b, self.twin

    def learning(self) -> dict[str, tuple[int, ...]]:
        """The leaves that are trainable in either run, with their shapes."""
        return {
            path: leaf.stored_shape
            for layout in (self.a.setup.layout, self.b.setup.layout)
            for path, leaf in zip(layout.names, layout.leaves, strict=True)
            if leaf.trainable and leaf.numel
        }

    def of_terms(self, terms: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Return (n + 4) u sum(|terms|), the bound for another order of a sum."""
        sizes = _summed([term.abs() for term in terms], shape)
        return of_terms(sizes, len(terms), self.units.passes)

    def of_sum(self, path: str, numel: int) -> Tensor:
        """Return this bound for the gradient of a leaf, flat, in both runs."""
        sides = (self.a, self.b)
        terms = [x for side in sides for x in side.terms.get(path, [])]
        bound = self.of_terms(terms, (numel,)).reshape(-1)
        if any(side.setup.encodes_gradients for side in sides):
            # of the largest element of a block, which may be of another leaf
            leaves = [*self.learning()]
            every = [x for side in sides for path in leaves for x in side.terms.get(path, [])]
            bound = bound + TERMS * self.units.passes * largest(every)
        return bound


def compare(
    a: Called, b: Called, twin: Called, state: int, units: Spacing
) -> tuple[int, Difference] | None:
    """Return the first difference in a state, and the number of its update, from 1."""
    runs = (a, b, twin)
    columns = [run.sides(state) for run in runs]
    ends = [
        replace(sides[-1], seen=[record.RankUpdate() for _ in sides[-1].seen]) for sides in columns
    ]
    for number, some in enumerate(itertools.zip_longest(*columns), 1):
        sides = [side or end for side, end in zip(some, ends, strict=True)]
        found = _in_update(SidePair(*sides, units=units))
        is_pass = found is not None and found.kind in (LOSS, MODULE, GRADIENT)
        if is_pass and sides[0].averages != sides[1].averages:
            # Losses for another `reduce_op` may differ; what is reduced may not.
            means = [replace(side, averages=True) for side in sides]
            found = _in_update(SidePair(*means, units=units))
        if found is not None:
            return number, found
    found = _first_of(_returned(SidePair(*ends, units=units), [run.after[state] for run in runs]))
    return found and (max(*map(len, columns), 2) - 1, found)


def _in_update(pair: SidePair) -> Difference | None:
    return (
        _gathered(pair)
        or _loss(pair)
        or _gradient(pair)
        or _first_of(_updated(pair))
        or _left_out(pair)
    )


def _first_of(numbers: Numbers) -> Difference | None:
    """Return where a number differs between the runs, or a leaf between replicas of one run."""
    for operation, path, a, b, bound in numbers:
        if (found := first_apart(a, b, bound)) is not None:
            return difference(operation, path, found)
        for drifted in map(replicas_apart, (a, b) if path else ()):
            if drifted is not None:
                return difference(f"{REPLICA} {operation}", path, drifted)
    return None


def _summed(terms: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the sum in float64; zeros of `shape` if there is no term."""
    if not terms:
        return torch.zeros(tuple(shape), dtype=torch.float64)
    return torch.stack([term.double() for term in terms]).sum(0)


# Forward and backward.


def _gathered(pair: SidePair) -> Difference | None:
    """Compare the full values that a rank gathered with the shards of the same run."""
    for side in (pair.b, pair.a):
        layout = side.setup.layout
        every = ((rank, *one) for rank, seen in enumerate(side.seen) for one in seen.gathered)
        for rank, backward, index, flat in every:
            group = layout.groups[index]
            for leaf, offset in zip(group.leaves, group.offsets, strict=True):
                if not layout.leaves[leaf].numel:
                    continue
                wanted = side.leaves[0][layout.names[leaf]]
                own = flat[offset : offset + layout.leaves[leaf].numel].cpu()
                read = Spread(wanted.shape, (Copy(rank, 0, own),))
                bound = TERMS * pair.units.passes * wanted.full.double().abs().max()
                if (found := first_apart(wanted, read, bound)) is not None:
                    found = _turned(found) if side is pair.a else found
                    found = found._replace(ranks=(rank,))
                    return difference(GATHER, layout.names[leaf], found, backward + 1)
    return None


def _loss(pair: SidePair) -> Difference | None:
    """Compare the sums of the losses that are differentiated."""
    mine, other, twin = (side.terms.get("", []) for side in pair.sides)
    every = [seen.backwards for side in (pair.a, pair.b) for seen in side.seen]
    if any(one.loss is None for backwards in every for one in backwards):
        return None  # gradients by hand: they are compared alone
    a, b, c = (_summed(terms, ()) for terms in (mine, other, twin))
    bound = disturbed_bound(a, c) + pair.of_terms([*mine, *other], ())
    found = first_apart(whole_leaf(a), whole_leaf(b), bound)
    return found and _blamed(pair, difference(LOSS, "", found))


def _gradient(pair: SidePair) -> Difference | None:
    """Compare the sums of the ranks' local gradients, in the order of the backward."""
    learning, names = pair.learning(), pair.a.setup.layout.names
    made = [leaf for seen in pair.a.seen for one in seen.backwards for leaf in one.terms]
    paths = [names[leaf] for leaf in made if leaf != record.LOSS_TERM]
    order = [path for path in dict.fromkeys([*paths, *learning]) if path in learning]
    differ = dict[str, Found]()
    for path in order:
        shape, numel = learning[path], torch.Size(learning[path]).numel()
        a, b, c = (_summed(side.terms.get(path, []), (numel,)) for side in pair.sides)
        bound = disturbed_bound(a, c) + pair.of_sum(path, numel)
        if found := first_apart(whole_leaf(a.view(shape)), whole_leaf(b.view(shape)), bound):
            differ[path] = found
    if not differ:
        return None
    first = next(iter(differ))
    blamed = _blamed(pair, difference(GRADIENT, first, differ[first]))
    if blamed.kind == MODULE:
        return blamed
    return blamed.beside(GradientDifference, order, differ)


def _blamed(pair: SidePair, whole: Difference) -> Difference:
    """Return the difference with module, backward and ranks, if both runs have the same ones."""
    counts = [[len(seen.backwards) for seen in side.seen] for side in (pair.a, pair.b)]
    if len(counts[0]) != len(counts[1]) or pair.a.divisor != pair.b.divisor:
        return whole
    both = [min(two) for two in zip(*counts, strict=True)]
    for backward in range(max(map(max, counts))):
        apart: dict[int, Found] = {}
        terms = [side.terms_at(whole.path, backward) for side in pair.sides]
        for rank, (a, b, c) in enumerate(zip(*terms, strict=True)):
            bound = disturbed_bound(a, c) + pair.of_terms([a, b], a.shape).reshape(-1)
            if found := first_apart(whole_leaf(a), whole_leaf(b), bound):
                apart[rank] = found
        if not apart:
            continue
        first = min(apart)
        if counts[0] != counts[1] and backward < both[first]:
            break  # they go through the data in other parts
        on_ranks = apart[first]._replace(ranks=tuple(apart))
        named = difference(whole.operation, whole.path, on_ranks, backward + 1)
        return _module(pair, named) or named
    return whole


def _module(pair: SidePair, named: Difference) -> Difference | None:
    """Return the first module whose output differs, if a loss or a gradient differs."""
    number, events = named.at.backward or 0, dict[int, tuple[int, Difference]]()
    for rank in named.ranks:
        backwards = [side.seen[rank].backwards for side in pair.sides]
        if all(len(some) >= number for some in backwards):
            trails = [some[number - 1].trail for some in backwards]
            event = _first_event(trails[0], trails[1], trails[2], pair.units.passes)
            events |= {rank: event} if event else {}
    if not events:
        return None
    place, first = min(events.values(), key=lambda event: event[0])
    ranks = tuple(rank for rank, event in events.items() if event[0] == place)
    return replace(first, ranks=ranks, at=named.at)


def _first_event(
    a: record.Trail, b: record.Trail, twin: record.Trail, unit: float
) -> tuple[int, Difference] | None:
    """Return the first event in which two forwards differ: the module that makes it is to blame.

    That is the one that returns what differs, or, if a module is given another input, the one that
    calls it. None if the input of the outermost module differs: the difference is older.
    """
    for place, (key, event) in enumerate(a.items()):
        if key not in b or key not in twin:
            continue
        for x, y, z in zip(event.tensors, b[key].tensors, twin[key].tensors):  # noqa: B905
            if x is None or y is None or z is None or not x.shape == y.shape == z.shape:
                continue
            bound = disturbed_bound(x, z) + TERMS * unit * largest([x.double()])
            if found := first_apart(whole_leaf(x), whole_leaf(y), bound):
                if key.returns:
                    return place, difference(MODULE, key.path, found)
                into = f"{MODULE}, where it calls {key.path}"
                return (place, difference(into, event.caller, found)) if event.caller else None
    return None


# The update.


def _updated(pair: SidePair) -> Numbers:
    """Yield the numbers of an update that all ranks of both runs make."""
    if any(len(side.after) < len(side.seen) for side in (pair.a, pair.b)):
        return
    yield from _gradients(pair, REDUCTION)
    norms = [of_ranks([x.norm for x in side.seen if x.norm is not None]) for side in pair.sides]
    if all(norm.copies for norm in norms):
        a, b, c = norms
        numel = sum(leaf.numel for leaf in pair.a.setup.layout.leaves)
        rounding = (TERMS + numel**0.5) * pair.units.passes * float(a.full.abs().max())
        yield NORM, "", a, b, disturbed_bound(a.full, c.full) + rounding
    yield from _gradients(pair, CLIP)

    befores, afters = ([side.leaves[k] for side in pair.sides] for k in (0, 1))
    for key in afters[0]:
        is_slot = not isinstance(key, str) and key[0] != MASTERS
        if is_slot and all(key in found for found in (*afters, befores[0])):
            a, b = (found[key] for found in afters[:2])
            size = a.full.double().abs() + befores[0][key].full.double().abs()
            bound = _reach(pair, a.full, key) + TERMS * pair.units.updates * size
            yield f"{SLOT} {key[0]}", key[1], a, b, bound
    changed = [key for key in befores[0] if isinstance(key, str) or key[0] == MASTERS]
    yield from _changes(pair, (UPDATE, SLOT), befores, afters, by_update=changed)

    mine, other = ([record.counters(state) for state in side.after] for side in (pair.a, pair.b))
    yield from _counted(COUNTER, mine, other)
    scales = [[x.scale for x in side.after if x.scale is not None] for side in (pair.a, pair.b)]
    if all(scales) and scales[0][0].policy == scales[1][0].policy:
        a, b = (of_ranks([float(x.scale) for x in some]) for some in scales)
        yield SCALE, "", a, b, 0.0


def _gradients(pair: SidePair, operation: str) -> Numbers:
    parts = [side.gradients(operation == CLIP) for side in pair.sides]
    for path, shape in pair.learning().items():
        nothing = whole_leaf(torch.zeros(shape, dtype=torch.float64))
        a, b, c = (found.get(path, nothing) for found in parts)
        bound = disturbed_bound(a.full, c.full) + pair.of_sum(path, a.full.numel())
        if operation == CLIP:
            bound = bound + TERMS * pair.units.passes * a.full.abs()
        yield operation, path, a, b, bound


def _left_out(pair: SidePair) -> Difference | None:
    """Return who makes no update, of those that some ranks make."""
    made = [[float(seen.after is not None) for seen in side.seen] for side in (pair.a, pair.b)]
    is_a = len(set(made[0])) > 1
    wanted = whole_leaf(torch.tensor(max(made[0])))
    found = first_apart(wanted, of_ranks(made[0] if is_a else made[1]), 0.0)
    return found and difference(UPDATE, "", _turned(found) if is_a else found)


def _turned(found: Found) -> Found:
    return found._replace(a=found.b, b=found.a)


def _returned(pair: SidePair, rows: Rows) -> Numbers:
    """Yield the states that the step returns, after its last update.

    pair: of the states after that update. rows: what each of the three returned.
    """
    befores, afters = [side.leaves[0] for side in pair.sides], [record.leaves_of(x) for x in rows]
    yield from _changes(pair, (STATE, STATE), befores, afters)

    def added(side: Side, row: Sequence[TrainState]) -> list[dict[str, float]]:
        both = [map(record.counters, two) for two in zip(side.before, row, strict=True)]
        return [{name: y[name] - x.get(name, 0.0) for name in y} for x, y in both]

    yield from _counted(STATE, added(pair.a, rows[0]), added(pair.b, rows[1]))


def _reach(pair: SidePair, a: Tensor, key: record.Key) -> Tensor:
    """Return the bound of each element for rounding inside of the optimizer."""
    found = torch.zeros(a.shape, dtype=torch.float64)
    for corner in pair.a.corners:
        if key in corner:
            found = torch.maximum(found, shift(a, corner[key].full))
    return MARGIN * found


def _changes(
    pair: SidePair,
    operations: tuple[str, str],
    befores: Sequence[Mapping[record.Key, Spread]],
    afters: Sequence[Mapping[record.Key, Spread]],
    *,
    by_update: Collection[record.Key] = (),
) -> Numbers:
    """Yield the changes of what all three have; if some are made by an update, of these alone.

    operations: of parameters, of slots.
    """
    for key in by_update or befores[0]:
        if not all(key in found for found in (*befores, *afters)):
            continue
        after = [found[key] for found in afters]
        a, b, c = (_minus(x, found[key]) for x, found in zip(after, befores, strict=True))
        moved = a.full
        if moved.numel():
            stored = [2 * eps_of(x.full.dtype) * x.full.double().abs() for x in after[:2]]
            bound = torch.maximum(*stored) + TERMS * pair.units.updates * moved.abs()
            inside = _reach(pair, moved, key) if by_update else disturbed_bound(moved, c.full)
            yield *_named(operations, key), a, b, bound + inside


def _named(operations: tuple[str, str], key: record.Key) -> tuple[str, str]:
    """Return the operation and the path of a parameter, or of a slot."""
    return (operations[0], key) if isinstance(key, str) else (f"{operations[1]} {key[0]}", key[1])


def _minus(after: Spread, before: Spread) -> Spread:
    full = before.full.double()
    copies = [
        Copy(rank, start, x.double() - full[start : start + x.numel()])
        for rank, start, x in after.copies
    ]
    return Spread(after.shape, tuple(copies))


def _counted(
    operation: str, mine: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]
) -> Numbers:
    """Yield the counters that both runs have."""
    for name in mine[0]:
        if name in other[0]:
            a, b = (of_ranks([x[name] for x in some]) for some in (mine, other))
            yield f"{operation} {name}", "", a, b, 0.0


# Two runs of the same logical ranks, each by itself: the first number that has other bits.


def bits_apart(a: Called, b: Called, state: int) -> tuple[int, Difference] | None:
    """Return the first number of a state that has other bits in b, and its update."""
    sides = [run.sides(state) for run in (a, b)]
    for update, (mine, other) in enumerate(zip(*sides), 1):  # noqa: B905
        for (kind, x), (_, y) in zip(_kept(mine), _kept(other)):  # noqa: B905
            if (found := _other_bits(kind, x, y)) is not None:
                return update, found
    x, y = (record.leaves_of(run.after[state]) for run in (a, b))
    found = _other_bits((STATE, f"{STATE} {SLOT}"), x, y)
    return found and (max(max(map(len, sides)) - 1, 1), found)


def _kept(side: Side) -> Iterator[tuple[tuple[str, str], Mapping[record.Key, Spread]]]:
    # Ranks run the calls of their logical ranks in another order: losses are compared as a set.
    losses = [x.loss for seen in side.seen for x in seen.backwards if x.loss is not None]
    yield (LOSS, LOSS), {"": whole_leaf(torch.stack(losses).sort().values)} if losses else {}
    if side.after:
        yield (REDUCTION, REDUCTION), {**side.gradients(False)}
        yield (CLIP, CLIP), {**side.gradients(True)}
        yield (UPDATE, SLOT), side.leaves[1]


def _other_bits(
    operations: tuple[str, str], a: Mapping[record.Key, Spread], b: Mapping[record.Key, Spread]
) -> Difference | None:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for key in sorted(a.keys(), key=lambda key: isinstance(key, str)):  # slots first
        x, y = a[key].full, b[key].full if key in b else torch.zeros(0)
        if x.dtype != y.dtype or x.shape != y.shape:  # of runs that keep it in other dtypes
            continue
        off = (x.view(integers[x.itemsize]) != y.view(integers[x.itemsize])).nonzero()
        if len(off):
            operation, path = _named(operations, key)
            at = torch.unravel_index(off[0, 0], a[key].shape) if path and a[key].shape else ()
            index = tuple(int(i) for i in at)
            found = Found((), index, float(x[off[0, 0]]), float(y[off[0, 0]]), 0.0)
            return difference(operation, path, found)
    return None
