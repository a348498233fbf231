"""One update of a torch.optim optimizer: even flats where they are, whole parameters by owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fzero.machine.owners import Owners, Wholes
from fzero.machine.threads import even_spans
from fzero.optim._apart import Parted, parted
from fzero.optim._bind import Bound
from fzero.optim._encoded import CodecOf, in_portions
from fzero.optim._piece import Piece
from fzero.optim._rules import Scaled
from fzero.optim._step import Portions, Turn, Unit, makes_state_later
from fzero.optim._stream import Flats, Slots, counted, step_flats, written_back
from fzero.optim._torch_state import Owned, TorchState
from fzero.optim.masters import work_tensors


def updated(
    bound: Bound,
    flats: Flats,
    state: TorchState,
    pieces: Sequence[Piece],
    *,
    codec_of: CodecOf | None,
    owners: Owners | None,
    unused: frozenset[str],
    device: torch.device | None,
    scaled: Scaled,
    threads: int,
) -> TorchState:
    """Step the flats in place, and what the state has; return the state after it.

    codec_of: what slots are encoded by, if some are.
    threads: of which each is to step whole blocks of a flat.

    A portion has flats of this rank, or whole parameters that it owns. These are numbered behind
    the flats.
    """
    if codec_of is not None:
        flats, pieces = in_portions(flats, pieces, codec_of, unused)
    whole = frozenset[int]() if owners is None else owners.positions
    even = [i for i in range(len(flats.params)) if i not in whole]
    own = [] if owners is None else owned_pieces(owners, len(flats.params))
    turn = turn_of(bound, state, unused)
    every = [*(p for p in pieces if p.index not in whole), *own]
    units = units_of(bound, every, turn.now, threads)
    steps = Portions(bound, units, state.counters, turn, flats=len(flats.params))
    step = partial(
        step_flats,
        run=steps,
        precision=bound.precision,
        device=device,
        scaled=scaled,
        owned=True,  # they are, or copies
        pieces=[*pieces, *own],
        count=state.count,
    )
    made, owned = step(subset(flats, even)), state.owned
    if owners is not None:
        owned = step_owned(step, owners, flats, owned)
    slots = {name: list(some) for name, some in state.slots.items()}
    for name, some in made.items() if codec_of is None else ():  # portions are written in place
        for i, x in zip(even, some, strict=True):
            slots[name][i] = x
    return TorchState(
        count=counted(state.count, scaled.found_inf),
        slots={name: tuple(some) for name, some in slots.items()},
        counters=dict(steps.counters),
        masters=state.masters,
        owned=owned,
        apart=turn.now.apart,
        unstepped=turn.unstepped,
    )


def turn_of(bound: Bound, state: TorchState, unused: frozenset[str]) -> Turn:
    """Return which leaves are stepped together in an update that leaves `unused` leaves out."""
    left = frozenset(path for path in unused if bound.group_at.get(path, -1) >= 0)
    size = 1 + max((len(bound.shared) - 1, *(number for _, number in state.apart)))
    now = parted(state.apart, left, lambda path: bound.group_at[path], size)
    if not makes_state_later(bound):
        return Turn(now)
    if not int(state.count):
        return Turn(now, first=True, unstepped=tuple(sorted(left)))
    numbers = dict(now.apart)
    fresh = frozenset(numbers.get(path, bound.group_at[path]) for path in state.unstepped)
    return Turn(now, fresh=fresh, unstepped=tuple(x for x in state.unstepped if x in left))


def units_of(bound: Bound, pieces: Sequence[Piece], now: Parted, threads: int = 1) -> list[Unit]:
    """Return the units of a step, each one parameter to the optimizer: a flat, or a leaf in it.

    A flat with leaves that count apart from each other, or are not stepped, is cut at them; and so
    that each of several threads steps whole blocks.
    """
    units: list[Unit] = []
    ends = {piece.index: piece.stop for piece in pieces}  # the last one ends with the flat
    numbers, seen, cuts = dict(now.apart), set[int](), _cuts(pieces, now)
    for index, leaf, start, stop, first in pieces:
        kept = bound.kept_for(leaf)
        if kept is None or start >= stop:
            continue
        group = bound.group_at[leaf.path]
        number = numbers.get(leaf.path, group)
        if number in now.still:
            continue
        if not bound.elementwise[group]:
            if first < leaf.numel:  # else it is padding behind the leaf
                span = (start, start + leaf.numel)
                units.append(Unit(index, group, number, span, leaf.shape, kept))
        elif index in cuts or (index not in seen and threads > 1):
            whole = (start, stop) if index in cuts else (0, ends[index])
            for span in even_spans(*whole, threads):
                units.append(Unit(index, group, number, span, (span[1] - span[0],), kept))
        elif index not in seen:
            units.append(Unit(index, group, number, None, (), kept))
        seen.add(index)
    return units


def _cuts(pieces: Sequence[Piece], now: Parted) -> set[int]:
    """Return the flats whose leaves do not all count together."""
    if not now.apart:
        return set()
    numbers, found = dict(now.apart), dict[int, set[int]]()
    for piece in pieces:
        found.setdefault(piece.index, set()).add(numbers.get(piece.leaf.path, -1))
    return {index for index, some in found.items() if len(some) > 1}


def owned_pieces(owners: Owners, first: int) -> list[Piece]:
    """Return a piece for each parameter that this rank owns, numbered from `first` on."""
    found = ((k, owners.leaves[k].leaf) for k in owners.mine)
    return [Piece(first + k, leaf, 0, leaf.numel) for k, leaf in found]


def step_owned(step: Callable[[Flats], Slots], owners: Owners, flats: Flats, owned: Owned) -> Owned:
    """Step the parameters that have owners, numbered behind the flats; return the new slots.

    step: steps flats in place. flats: this rank's shards, which get the new parameters.
    """
    made = {name: list(some) for name, some in owned.items()}
    work, first = work_tensors(flats.params, flats.masters), len(flats.params)

    def compute(mine: list[int], wholes: Wholes) -> Mapping[int, Tensor]:
        if not mine:
            return {}
        params, grads = ([wholes[k][j] for k in mine] for j in (0, 1))
        slots = {name: [some[k] for k in mine] for name, some in made.items()}
        none = [p.new_empty(0) for p in params]
        after = step(Flats(params, grads, none, slots, [first + k for k in mine]))
        for name, some in after.items():
            for k, x in zip(mine, some, strict=True):
                made[name][k] = x
        return dict(zip(mine, params, strict=True))

    owners.run([work, flats.grads], compute, work)
    for position in owners.positions:
        written_back(flats, position, work[position])
    mine = set(owners.mine)
    return {
        name: tuple(x if k in mine else x.new_empty(0) for k, x in enumerate(some))
        for name, some in made.items()
    }


def subset(flats: Flats, indices: Sequence[int]) -> Flats:
    """Return some of the flats, by their numbers."""

    def own(some: Sequence[Tensor]) -> list[Tensor]:
        return [some[i] for i in indices]

    slots = {name: own(some) for name, some in flats.slots.items()}
    codecs = [flats.codecs[i] for i in indices] if flats.codecs else ()
    return Flats(own(flats.params), own(flats.grads), own(flats.masters), slots, indices, codecs)
