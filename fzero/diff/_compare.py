"""One call of two steps: what they made, operation by operation, until the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint._pieces import leaf_names
from fzero.diff._bound import TERMS, Found, carried, carried_each, first_apart, replicas_apart
from fzero.diff._difference import (
    CLIP,
    COUNTER,
    GATHER,
    GRADIENT,
    LOSS,
    NORM,
    REDUCTION,
    REPLICA,
    SCALE,
    SLOT,
    STATE,
    UPDATE,
)
from fzero.diff._record import Seen
from fzero.diff._values import (
    MASTERS,
    Copy,
    Spread,
    counters,
    params_of,
    slots_of,
    spread,
    whole,
)
from fzero.state import Setup, TrainState


class Apart(NamedTuple):
    """What differs, of one update of one state."""

    operation: str
    path: str
    found: Found
    backward: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: what is derived is kept
class Side:
    """What one run made up to one update of one state: the state before it, and each rank's."""

    before: Sequence[TrainState]
    seen: Sequence[Seen]
    averages: bool  # losses and gradients over ranks; else they are summed

    @property
    def setup(self) -> Setup:
        """Of the state."""
        return self.before[0].setup

    @property
    def divisor(self) -> int:
        """What a sum over ranks is divided by."""
        return len(self.seen) if self.averages else 1

    def loss_terms(self) -> list[Tensor]:
        """The losses of all ranks and backwards, as they add up to what is differentiated."""
        return [
            one.loss.double() * one.weight / self.divisor
            for seen in self.seen
            for one in seen.backwards
            if one.loss is not None
        ]

    @cached_property
    def gradient_terms(self) -> dict[str, list[Tensor]]:
        """Of each leaf, the gradients of all ranks and backwards, flat: what is added up."""
        names = leaf_names(self.setup.layout)
        found: dict[str, list[Tensor]] = {}
        for seen in self.seen:
            for one in seen.backwards:
                for leaf, gradient in one.gradients.items():
                    found.setdefault(names[leaf], []).append(gradient.reshape(-1) / self.divisor)
        return found

    def gradients(self, given: bool) -> dict[str, Spread]:
        """The gradients of the update: as they were reduced, or as the optimizer was given them."""
        setup = self.setup
        flats = [seen.given if given else _flats(seen) for seen in self.seen]
        return spread(setup, setup.layout.trainable, flats, setup.gradients)

    def after(self) -> list[TrainState]:
        """The state after the update, where each rank made one."""
        return [seen.after for seen in self.seen if seen.after is not None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """One update of one state in both runs, and in run a disturbed."""

    a: Side
    b: Side
    twin: Side
    unit: float

    def first(self) -> Apart | None:
        """The first operation, parameter and rank at which they differ."""
        found = next(self._all(), None)
        if found and found.operation in (LOSS, GRADIENT) and self.a.averages != self.b.averages:
            # Losses that are made for another `reduce_op` may differ; what is reduced may not.
            sides = (replace(side, averages=True) for side in (self.a, self.b, self.twin))
            a, b, twin = sides
            return next(replace(self, a=a, b=b, twin=twin)._all(), None)
        return found

    def _all(self) -> Iterator[Apart]:
        yield from self._gathers()
        yield from self._losses()
        yield from self._gradients()
        made = [len(side.after()) for side in (self.a, self.b)]
        if any(len(side.after()) not in (0, len(side.seen)) for side in (self.a, self.b)) or (
            bool(made[0]) != bool(made[1])
        ):
            yield from self._updates_made()
        elif made[0]:
            yield from self._reductions()
            yield from self._norms()
            yield from self._slots()
            yield from self._params()
            yield from self._counters()

    def returned(self, rows: Sequence[Sequence[TrainState]]) -> Apart | None:
        """Where what a step makes of the state after its last update differs.

        rows: what each of the three returned; their sides have the state after the last update.
        """
        lasts = [side.before for side in (self.a, self.b, self.twin)]
        befores, afters = [params_of(x) for x in lasts], [params_of(x) for x in rows]
        for path in befores[0]:
            for found in self._moved(STATE, path, _at(befores, path), _at(afters, path)):
                return found
        befores, afters = [slots_of(x) for x in lasts], [slots_of(x) for x in rows]
        for key in befores[0]:
            if all(key in found for found in (*befores, *afters)):
                name, path = key
                pairs = _at(befores, key), _at(afters, key)
                for found in self._moved(f"{STATE} {name}", path, *pairs):
                    return found
        counted = [_added(last, row) for last, row in zip(lasts, rows, strict=True)]
        return next(_of_counters(STATE, counted[0], counted[1]), None)

    def _updates_made(self) -> Iterator[Apart]:
        """A rank, or all of a run, make an update that the other does not."""
        made = [
            [float(seen.after is not None) for seen in side.seen] for side in (self.a, self.b)
        ]
        is_a = len(set(made[0])) > 1
        wanted = torch.tensor([max(made[0])]).double()
        found = first_apart(whole(wanted), _of_ranks(made[0] if is_a else made[1]), 0.0)
        if found is not None:
            found = found._replace(a=found.b, b=found.a) if is_a else found
            yield Apart(UPDATE, "", found._replace(index=()))

    # What the losses read.

    def _gathers(self) -> Iterator[Apart]:
        for side, other in ((self.b, self.a), (self.a, self.b)):
            held = params_of(side.before)
            layout, names = side.setup.layout, leaf_names(side.setup.layout)
            for rank, seen in enumerate(side.seen):
                for backward, index, flat in seen.gathered:
                    group = layout.groups[index]
                    for leaf, offset in zip(group.leaves, group.offsets, strict=True):
                        numel, path = layout.leaves[leaf].numel, names[leaf]
                        if not numel:
                            continue
                        own = Copy(rank, 0, flat[offset : offset + numel])
                        read = Spread(shape=layout.leaves[leaf].shape, copies=(own,))
                        full = held[path].full.double().abs()
                        bound = TERMS * self.unit * full.max()
                        found = first_apart(held[path], read, bound)
                        if found is not None:
                            found = found._replace(ranks=(rank,))
                            if side is self.a:
                                found = found._replace(a=found.b, b=found.a)
                            yield Apart(GATHER, path, found, backward + 1)

    def _losses(self) -> Iterator[Apart]:
        made = [one for side in (self.a, self.b) for seen in side.seen for one in seen.backwards]
        if any(one.loss is None for one in made):  # gradients by hand: they are compared alone
            return
        mine, other, twin = (side.loss_terms() for side in (self.a, self.b, self.twin))
        a, b, c = (_sum(terms, ()) for terms in (mine, other, twin))
        bound = carried(a, c) + self._of_terms([*mine, *other], ())
        found = first_apart(whole(a), whole(b), bound)
        if found is not None:
            yield self._blamed(LOSS, "", found)

    def _gradients(self) -> Iterator[Apart]:
        mine, other, twin = (side.gradient_terms for side in (self.a, self.b, self.twin))
        for path, shape in self._learning().items():
            terms = [*mine.get(path, []), *other.get(path, [])]
            a, b, c = (_sum(some.get(path, []), shape) for some in (mine, other, twin))
            bound = carried(a, c) + self._of_terms(terms, shape)
            a, b = a.view(shape), b.view(shape)
            found = first_apart(whole(a), whole(b), bound.reshape(-1))
            if found is not None:
                yield self._blamed(GRADIENT, path, found)

    def _blamed(self, operation: str, path: str, found: Found) -> Apart:
        """Name the backward and the ranks, where both runs have the same ones."""
        sides = (self.a, self.b, self.twin)
        counts = [[len(seen.backwards) for seen in side.seen] for side in sides[:2]]
        if len(counts[0]) != len(counts[1]) or self.a.divisor != self.b.divisor:
            return Apart(operation, path, found)
        both = [min(pair) for pair in zip(*counts, strict=True)]
        for backward in range(max(map(max, counts))):
            terms = [self._terms_at(side, path, backward) for side in sides]
            some = []
            for rank, (a, b, c) in enumerate(zip(*terms, strict=True)):
                bound = carried(a, c) + self._of_terms([a, b], a.shape).reshape(-1)
                apart = first_apart(whole(a), whole(b), bound)
                if apart is not None:
                    some.append((rank, apart))
            if some and counts[0] != counts[1] and backward < both[some[0][0]]:
                break  # they go through the data in other parts
            if some:
                ranks = tuple(rank for rank, _ in some)
                return Apart(operation, path, some[0][1]._replace(ranks=ranks), backward + 1)
        return Apart(operation, path, found)

    def _terms_at(self, side: Side, path: str, backward: int) -> list[Tensor]:
        """One rank's term each: of the loss, or of the gradient of a leaf."""
        names = leaf_names(side.setup.layout)
        found = []
        for seen in side.seen:
            if backward >= len(seen.backwards):
                found.append(torch.zeros((), dtype=torch.float64))
                continue
            one = seen.backwards[backward]
            if not path:
                zero = torch.zeros((), dtype=torch.float64)
                found.append(zero if one.loss is None else one.loss * one.weight)
            else:
                leaf = names.index(path)
                shape = side.setup.layout.leaves[leaf].shape
                zeros = torch.zeros(shape, dtype=torch.float64)
                found.append(one.gradients.get(leaf, zeros))
        return found

    # The update.

    def _reductions(self) -> Iterator[Apart]:
        yield from self._gradients_of(REDUCTION, given=False)

    def _norms(self) -> Iterator[Apart]:
        a, b, c = (_norms(side) for side in (self.a, self.b, self.twin))
        if a.copies and b.copies and c.copies:
            size = float(a.full.abs().max())
            numel = sum(leaf.numel for leaf in self.a.setup.layout.leaves)
            bound = carried(a.full, c.full) + (TERMS + numel**0.5) * self.unit * size
            found = first_apart(a, b, bound)
            if found is not None:
                yield Apart(NORM, "", found._replace(index=()))
        yield from self._gradients_of(CLIP, given=True)

    def _gradients_of(self, operation: str, *, given: bool) -> Iterator[Apart]:
        sides = [side.gradients(given) for side in (self.a, self.b, self.twin)]
        for path, shape in self._learning().items():
            a, b, c = (found.get(path) or _zeros(shape) for found in sides)
            bound = carried(a.full, c.full) + self._of_sum(path, shape)
            if given:
                bound = bound + TERMS * self.unit * a.full.abs()
            yield from self._of_leaf(operation, path, a, b, bound)

    def _slots(self) -> Iterator[Apart]:
        before = slots_of(self.a.before)
        after = [slots_of(side.after()) for side in (self.a, self.b, self.twin)]
        shared = [key for key in after[0] if key in after[1] and key[0] != MASTERS]
        for name, path in shared:
            a, b, c = (found[name, path] for found in after)
            size = a.full.abs().max() + before[name, path].full.abs().max()
            bound = carried(a.full, c.full) + TERMS * self.unit * self._cancelled(path) * size
            bound = torch.where(self._unsure(path), torch.inf, bound.double())
            yield from self._of_leaf(f"{SLOT} {name}", path, a, b, bound)

    def _params(self) -> Iterator[Apart]:
        """What an update adds: to the parameters, then to their masters."""
        sides = (self.a, self.b, self.twin)
        befores = [params_of(side.before) for side in sides]
        afters = [params_of(side.after()) for side in sides]
        for path in befores[0]:
            yield from self._moved(UPDATE, path, _at(befores, path), _at(afters, path))
        befores = [slots_of(side.before) for side in sides]
        afters = [slots_of(side.after()) for side in sides]
        for name, path in befores[0]:
            if name == MASTERS and all((name, path) in x for x in (*befores, *afters)):
                pairs = _at(befores, (name, path)), _at(afters, (name, path))
                yield from self._moved(f"{SLOT} {MASTERS}", path, *pairs)

    def _moved(
        self, operation: str, path: str, before: Sequence[Spread], after: Sequence[Spread]
    ) -> Iterator[Apart]:
        moved = [y.full.double() - x.full.double() for x, y in zip(before, after, strict=True)]
        # a's and b's begin alike: what differs afterwards was added
        steps = [_minus(y, x.full) for x, y in zip(before[:2], after[:2], strict=True)]
        eps = max(_eps(x.full.dtype) for x in after[:2])
        size = max(float(x.full.double().abs().max()) for x in after[:2]) if moved[0].numel() else 0
        most = max(float(x.abs().max()) for x in moved[:1]) if moved[0].numel() else 0
        bound = carried_each(moved[0], moved[2]) + 2 * eps * size
        bound = bound + TERMS * self.unit * self._cancelled(path) * most
        allowed = torch.where(self._unsure(path), torch.inf, bound)
        yield from self._of_leaf(operation, path, steps[0], steps[1], allowed)

    def _counters(self) -> Iterator[Apart]:
        mine, other = ([counters(s) for s in side.after()] for side in (self.a, self.b))
        yield from _of_counters(COUNTER, mine, other)
        scales = [[s.scale for s in side.after() if s.scale] for side in (self.a, self.b)]
        if all(scales) and scales[0][0].policy == scales[1][0].policy:
            a, b = (_of_ranks([float(x.scale) for x in some]) for some in scales)
            found = first_apart(a, b, 0.0)
            if found is not None:
                yield Apart(SCALE, "", found._replace(index=()))

    # Bounds.

    def _learning(self) -> Mapping[str, tuple[int, ...]]:
        """The leaves that learn in either run, with their shapes."""
        found: dict[str, tuple[int, ...]] = {}
        for side in (self.a, self.b):
            layout = side.setup.layout
            for path, leaf in zip(leaf_names(layout), layout.leaves, strict=True):
                if leaf.trainable and leaf.numel:
                    found[path] = leaf.shape
        return found

    def _of_terms(self, terms: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        count = len(terms) + TERMS
        return count * self.unit * _sum([term.abs() for term in terms], shape)

    def _of_sum(self, path: str, shape: Sequence[int]) -> Tensor:
        terms = [x for side in (self.a, self.b) for x in side.gradient_terms.get(path, [])]
        bound = self._of_terms(terms, shape).reshape(-1)
        quantized = any(side.setup.quantizes_gradients for side in (self.a, self.b))
        if quantized:  # of the largest element of a block, which may be of another leaf
            bound = bound + self.unit * TERMS * max(
                float(x.abs().max())
                for side in (self.a, self.b)
                for some in side.gradient_terms.values()
                for x in some
            )
        return bound

    def _cancelled(self, path: str) -> float:
        """How much larger the terms of a gradient are than their sum."""
        terms = self.a.gradient_terms.get(path, [])
        if not terms:
            return 1.0
        size, total = _sum([x.abs() for x in terms], terms[0].shape), _sum(terms, terms[0].shape)
        return 1.0 + float(size.max() / total.abs().max().clamp(min=1e-300))

    def _unsure(self, path: str) -> Tensor:
        """Elements whose gradients differ, and are so small that rounding may give their sign."""
        sides = [side.gradients(True).get(path) for side in (self.a, self.b)]
        if any(side is None for side in sides):
            return torch.zeros((), dtype=torch.bool)
        a, b = (side.full for side in sides if side is not None)
        bound = self._of_sum(path, a.shape)
        return (a.abs() <= bound) & (a != b)

    def _of_leaf(
        self, operation: str, path: str, a: Spread, b: Spread, bound: Tensor | float
    ) -> Iterator[Apart]:
        found = first_apart(a, b, bound)
        if found is not None:
            yield Apart(operation, path, found)
        for side in (a, b):
            drifted = replicas_apart(side)
            if drifted is not None:
                yield Apart(f"{REPLICA} {operation}", path, drifted)


def _of_counters(
    operation: str, mine: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]
) -> Iterator[Apart]:
    """Counters of the ranks of both runs; of those that both have."""
    for name in mine[0]:
        if name in other[0]:
            a, b = (_of_ranks([x[name] for x in some]) for some in (mine, other))
            found = first_apart(a, b, 0.0)
            if found is not None:
                yield Apart(f"{operation} {name}", "", found._replace(index=()))


def _added(before: Sequence[TrainState], after: Sequence[TrainState]) -> list[dict[str, float]]:
    """What was added to the counters of each rank; whether gradients wait is a counter, too."""
    pairs = [(counters(x), counters(y)) for x, y in zip(before, after, strict=True)]
    return [{name: y[name] - x.get(name, 0.0) for name in y} for x, y in pairs]


def _at(found: Sequence[Mapping[Any, Spread]], key: Any) -> list[Spread]:
    return [one[key] for one in found]


def _flats(seen: Seen) -> tuple[Tensor, ...]:
    return () if seen.reduced is None else seen.reduced.flats


def _sum(terms: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    if not terms:
        return torch.zeros(tuple(shape), dtype=torch.float64)
    return torch.stack([term.double() for term in terms]).sum(0)


def _zeros(shape: Sequence[int]) -> Spread:
    return whole(torch.zeros(tuple(shape), dtype=torch.float64))


def _norms(side: Side) -> Spread:
    norms = [seen.norm for seen in side.seen]
    return _of_ranks([norm for norm in norms if norm is not None])


def _of_ranks(values: Sequence[float]) -> Spread:
    """One number that each rank has."""
    copies = [Copy(rank, 0, torch.tensor([float(x)]).double()) for rank, x in enumerate(values)]
    return Spread(shape=(1,), copies=tuple(copies))


def _minus(after: Spread, before: Tensor) -> Spread:
    copies = [
        Copy(rank, start, x.double() - before[start : start + x.numel()].double())
        for rank, start, x in after.copies
    ]
    return Spread(shape=after.shape, copies=tuple(copies))


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
