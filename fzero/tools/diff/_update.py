"""Compare an update of two runs: reduced gradient, clipping, optimizer, counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.state import TrainState
from fzero.state.setup import MASTERS
from fzero.tools.compare import (
    MARGIN,
    TERMS,
    Copy,
    Spread,
    disturbed_bound,
    eps_of,
    first_apart,
    of_ranks,
    shift,
    whole_leaf,
)
from fzero.tools.diff._difference import CLIP, COUNTER, NORM, REDUCTION, SCALE, SLOT, STATE, UPDATE
from fzero.tools.diff._pair import SidePair, of_leaf
from fzero.tools.diff._side import Apart, Side
from fzero.tools.diff._values import counters, params_of, slots_of_ranks


def updates(pair: SidePair) -> Iterator[Apart]:
    """Compare an update that all ranks of both runs make; else report who makes none."""
    made = [[float(seen.after is not None) for seen in side.seen] for side in (pair.a, pair.b)]
    if {*made[0], *made[1]} == {1.0}:
        yield from _gradients(pair, REDUCTION, given=False)
        yield from _norms(pair)
        yield from _gradients(pair, CLIP, given=True)
        yield from _slots(pair)
        yield from _params(pair)
        yield from _counters(pair)
    elif {*made[0], *made[1]} != {0.0}:
        is_a = len(set(made[0])) > 1
        wanted = whole_leaf(torch.tensor([max(made[0])]).double())
        for apart in _of_numbers(UPDATE, wanted, of_ranks(made[0] if is_a else made[1])):
            found = apart.found
            yield apart._replace(found=found._replace(a=found.b, b=found.a)) if is_a else apart


def returned(pair: SidePair, rows: Sequence[Sequence[TrainState]]) -> Iterator[Apart]:
    """Compare the states that the step returns, after its last update.

    pair: of the states after that update. rows: what each of the three returned.
    """
    befores, afters = [side.params[0] for side in pair.sides], [params_of(x) for x in rows]
    yield from _changes(pair, STATE, befores, afters)
    befores, afters = [side.slots[0] for side in pair.sides], [slots_of_ranks(x) for x in rows]
    yield from _changes(pair, STATE, befores, afters)
    added = [_added(side.before, row) for side, row in zip(pair.sides, rows, strict=True)]
    yield from _of_counters(STATE, added[0], added[1])


def _gradients(pair: SidePair, operation: str, *, given: bool) -> Iterator[Apart]:
    parts = [side.gradients(given) for side in pair.sides]
    for path, shape in pair.learning().items():
        nothing = whole_leaf(torch.zeros(shape, dtype=torch.float64))
        a, b, c = (found.get(path, nothing) for found in parts)
        bound = disturbed_bound(a.full, c.full) + pair.of_sum(path, a.full.shape)
        if given:
            bound = bound + TERMS * pair.units.passes * a.full.abs()
        yield from of_leaf(operation, path, a, b, bound)


def _norms(pair: SidePair) -> Iterator[Apart]:
    a, b, c = (_norm(side) for side in pair.sides)
    if a.copies and b.copies and c.copies:
        numel = sum(leaf.numel for leaf in pair.a.setup.layout.leaves)
        rounding = (TERMS + numel**0.5) * pair.units.passes * float(a.full.abs().max())
        yield from _of_numbers(NORM, a, b, disturbed_bound(a.full, c.full) + rounding)


def _norm(side: Side) -> Spread:
    return of_ranks([seen.norm for seen in side.seen if seen.norm is not None])


def _slots(pair: SidePair) -> Iterator[Apart]:
    """Compare the slots that both optimizers have, after the update."""
    before, after = pair.a.slots[0], [side.slots[1] for side in pair.sides]
    for name, path in after[0]:
        if name == MASTERS or any((name, path) not in found for found in after):
            continue
        a, b = (found[name, path] for found in after[:2])
        size = a.full.double().abs() + before[name, path].full.double().abs()
        bound = _reach(pair, a.full, (name, path)) + TERMS * pair.units.updates * size
        yield from of_leaf(f"{SLOT} {name}", path, a, b, bound)


def _params(pair: SidePair) -> Iterator[Apart]:
    """Compare the values that the update adds to the parameters, then to their masters."""
    befores, afters = ([side.params[k] for side in pair.sides] for k in (0, 1))
    yield from _changes(pair, UPDATE, befores, afters, by_update=True)
    befores, afters = ([_masters(side.slots[k]) for side in pair.sides] for k in (0, 1))
    yield from _changes(pair, SLOT, befores, afters, by_update=True)


def _masters(slots: Mapping[Any, Spread]) -> dict[Any, Spread]:
    return {key: one for key, one in slots.items() if key[0] == MASTERS}


def _reach(pair: SidePair, a: Tensor, key: Any) -> Tensor:
    """Return the bound of each element for rounding inside of the optimizer.

    key: (name, path) of a slot; or the path of a parameter, for its change.
    """
    found = torch.zeros(a.shape, dtype=torch.float64)
    for moved, slots in pair.a.corners:
        corner: Spread | None = {**moved, **slots}.get(key)
        if corner is not None:
            found = torch.maximum(found, shift(a, corner.full))
    return MARGIN * found


def _changes(
    pair: SidePair,
    operation: str,
    befores: Sequence[Mapping[Any, Spread]],
    afters: Sequence[Mapping[Any, Spread]],
    *,
    by_update: bool = False,
) -> Iterator[Apart]:
    """Compare the changes of what all three have: of parameters by path, or of slots by name."""
    for key in befores[0]:
        if not all(key in found for found in (*befores, *afters)):
            continue
        name, path = ("", key) if isinstance(key, str) else key
        after = [found[key] for found in afters]
        a, b, c = (_minus(x, found[key]) for x, found in zip(after, befores, strict=True))
        moved = a.full
        if not moved.numel():
            continue
        stored = [2 * eps_of(x.full.dtype) * x.full.double().abs() for x in after[:2]]
        bound = torch.maximum(*stored) + TERMS * pair.units.updates * moved.abs()
        off = _reach(pair, moved, key) if by_update else disturbed_bound(moved, c.full)
        yield from of_leaf(f"{operation} {name}".rstrip(), path, a, b, bound + off)


def _minus(after: Spread, before: Spread) -> Spread:
    full = before.full.double()
    copies = [
        Copy(rank, start, x.double() - full[start : start + x.numel()])
        for rank, start, x in after.copies
    ]
    return Spread(shape=after.shape, copies=tuple(copies))


def _counters(pair: SidePair) -> Iterator[Apart]:
    mine, other = ([counters(state) for state in side.after] for side in (pair.a, pair.b))
    yield from _of_counters(COUNTER, mine, other)
    scales = [[x.scale for x in side.after if x.scale is not None] for side in (pair.a, pair.b)]
    if all(scales) and scales[0][0].policy == scales[1][0].policy:
        a, b = (of_ranks([float(x.scale) for x in some]) for some in scales)
        yield from _of_numbers(SCALE, a, b)


def _of_counters(
    operation: str, mine: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]
) -> Iterator[Apart]:
    """Compare the counters that both runs have."""
    for name in mine[0]:
        if name in other[0]:
            a, b = (of_ranks([x[name] for x in some]) for some in (mine, other))
            yield from _of_numbers(f"{operation} {name}", a, b)


def _of_numbers(operation: str, a: Spread, b: Spread, bound: float = 0.0) -> Iterator[Apart]:
    """Compare one number of each rank."""
    found = first_apart(a, b, bound)
    if found is not None:
        yield Apart(operation, "", found._replace(index=()))


def _added(before: Sequence[TrainState], after: Sequence[TrainState]) -> list[dict[str, float]]:
    """Return the change of each counter on each rank; "gradients wait" is a counter, too."""
    pairs = [(counters(x), counters(y)) for x, y in zip(before, after, strict=True)]
    return [{name: y[name] - x.get(name, 0.0) for name in y} for x, y in pairs]
