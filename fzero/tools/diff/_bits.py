"""Two runs of the same logical ranks, each by itself: the first number that has other bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fzero.state import TrainState
from fzero.tools.compare import Found, Spread
from fzero.tools.diff._compare import Called
from fzero.tools.diff._difference import CLIP, LOSS, REDUCTION, SLOT, STATE, UPDATE, Moment
from fzero.tools.diff._run import RunUnderWay
from fzero.tools.diff._side import Apart, Side
from fzero.tools.diff._values import params_of, slots_of_ranks
from fzero.transforms.states import flatten_states


def owes_bits(a: RunUnderWay, b: RunUnderWay) -> bool:
    """Whether the states of both runs have the same logical ranks and seed."""
    mine, other = (
        [one.setup.logical for one in flatten_states("diff", run.state)[0]] for run in (a, b)
    )
    return mine == other and None not in mine


def bits_apart(a: RunUnderWay, b: RunUnderWay, number: int) -> tuple[int, Moment, Apart] | None:
    """Make a call of both, each from its own state; return the first number of other bits."""
    rng = torch.get_rng_state()
    mine = a.go_on(number, a.state)
    torch.set_rng_state(rng)
    other = b.go_on(number, b.state)
    for state in range(len(mine.before)):
        for update, apart in _in_state(mine, other, state):
            return state, Moment(number + 1, update, apart.backward), apart
    return None


def _in_state(a: Called, b: Called, state: int) -> Iterator[tuple[int, Apart]]:
    sides = [run.sides(state) for run in (a, b)]
    for update, pair in enumerate(zip_longest(*sides), 1):
        if None not in pair:
            for apart in _in_update(*pair):
                yield update, apart
    last = max(max(map(len, sides)) - 1, 1)
    rows = [run.after[state] for run in (a, b)]
    for apart in _after(rows[0], rows[1], STATE, f"{STATE} {SLOT}"):
        yield last, apart


def _in_update(a: Side, b: Side) -> Iterator[Apart]:
    # Ranks run the calls of their logical ranks in another order: losses are compared as a set.
    losses = [_losses(side) for side in (a, b)]
    if losses[0].shape == losses[1].shape:
        found = _first(losses[0], losses[1])
        if found is not None:
            yield Apart(LOSS, "", found._replace(index=()))
    if not a.after or not b.after:
        return
    for operation, given in ((REDUCTION, False), (CLIP, True)):
        yield from _leaves(operation, a.gradients(given), b.gradients(given))
    yield from _after(a.after, b.after, UPDATE, SLOT)


def _after(
    a: Sequence[TrainState], b: Sequence[TrainState], of_params: str, of_slots: str
) -> Iterator[Apart]:
    yield from _leaves(of_slots, slots_of_ranks(a), slots_of_ranks(b))
    yield from _leaves(of_params, params_of(a), params_of(b))


def _losses(side: Side) -> Tensor:
    found = [one.loss for seen in side.seen for one in seen.backwards if one.loss is not None]
    return torch.stack(found).sort().values if found else torch.zeros(0)


def _leaves(operation: str, a: Mapping[Any, Spread], b: Mapping[Any, Spread]) -> Iterator[Apart]:
    for key, mine in a.items():
        if key in b:
            name, path = ("", key) if isinstance(key, str) else key
            found = _first(mine.full, b[key].full, mine.shape)
            if found is not None:
                yield Apart(f"{operation} {name}".rstrip(), path, found)


def _first(a: Tensor, b: Tensor, shape: Sequence[int] = ()) -> Found | None:
    x, y = a.reshape(-1), b.reshape(-1)
    if x.dtype != y.dtype:  # of runs that keep it in other dtypes
        return None
    off = (_bits(x) != _bits(y)).nonzero()
    if not len(off):
        return None
    at = torch.unravel_index(off[0, 0], tuple(shape)) if shape else ()
    first, second = float(x[off[0, 0]]), float(y[off[0, 0]])
    return Found((), tuple(int(i) for i in at), first, second, 0.0)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_INTEGERS[x.dtype.itemsize])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
