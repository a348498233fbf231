"""Full values of a state from the shards of all ranks, and a state with other full values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.elements import RuleSlot, counters_of, slots_across, with_counters
from fzero.errors import LayoutError
from fzero.machine.by_path import leaf_paths
from fzero.machine.packing import leaf_ranges, pack, part_of
from fzero.state import Buffers, Part, Placement, Setup, TrainState
from fzero.state.scale import with_slot
from fzero.state.setup import MASTERS
from fzero.tools.compare import Copy, Spread, perturbed, signs_like

Slots = dict[tuple[str, str], Tensor]  # (name of the slot, path)


def spread(
    setup: Setup, groups: Sequence[int], flats: Sequence[Sequence[Tensor]], placement: Placement
) -> dict[str, Spread]:
    """Split the ranks' parts of some groups, flats[rank][k], into leaves: {path: copies}."""
    layout, names = setup.layout, leaf_paths(setup.layout)
    copies: dict[int, list[Copy]] = {}
    for k, index in enumerate(groups):
        for rank, some in enumerate(flats):
            if k < len(some) and some[k].numel():
                for found in leaf_ranges(layout, index, setup.part(placement, rank)):
                    values = found.of(some[k]).detach().cpu()
                    copies.setdefault(found.leaf, []).append(Copy(rank, found.start, values))
    return {
        names[leaf]: Spread(shape=layout.leaves[leaf].stored_shape, copies=tuple(some))
        for leaf, some in copies.items()
    }


def params_of(states: Sequence[TrainState]) -> dict[str, Spread]:
    """Return the parameters of a state, from all of its ranks."""
    setup = states[0].setup
    flats = [state.params.flats for state in states]
    return spread(setup, range(len(setup.layout.groups)), flats, setup.params)


def slots_of_ranks(states: Sequence[TrainState]) -> dict[tuple[str, str], Spread]:
    """Return the optimizer's slots, masters among them, from all ranks of a state."""
    setup = states[0].setup
    found: dict[tuple[str, str], Spread] = {}
    for name, group, flats in slots_across(states):
        cut = spread(setup, [group], [[flat] for flat in flats], setup.optimizer_state)
        found.update({(name, path): one for path, one in cut.items()})
    return found


def counters(state: TrainState) -> dict[str, float]:
    """Return the counters of one rank's state."""
    own: dict[str, float] = {}
    for name, value in counters_of(state).items():
        by_leaf = value if isinstance(value, dict) else {"": value}
        own |= {f"{name} of {leaf}" if leaf else name: float(x) for leaf, x in by_leaf.items()}
    waiting = state.progress.backwards
    return {"updates": float(state.step), **own, "backwards since the update": float(waiting)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Values:
    """The full values of a state, from which a run on any number of ranks can continue."""

    params: dict[str, Tensor]
    slots: Slots
    state: TrainState  # of one rank: its counters and its loss scale


def values_of(states: Sequence[TrainState]) -> Values:
    """Return the full values of a state, from the states of all ranks."""
    for leaf in states[0].setup.layout.leaves:
        if leaf.codec is not None:
            raise LayoutError(
                f"diff: {leaf.title} is stored encoded, by {leaf.codec}.",
                cause="a run with frozen=: what rounding explains is asked of values that are a "
                "little apart, which an encoding does not keep.",
                fix="leave frozen= out, and give both runs the decoded parameters, "
                "fzero.full_params(state): training with them has the same bits.",
            )
    return Values(
        params={path: one.full.view(one.shape) for path, one in params_of(states).items()},
        slots={key: one.full.view(one.shape) for key, one in slots_of_ranks(states).items()},
        state=states[0],
    )


def with_whole(state: TrainState, rank: int, values: Values) -> TrainState:
    """Return a rank's state with these values; slots that they lack are unchanged."""
    setup = state.setup
    params = [
        flat_of(setup, i, setup.params, rank, lambda path, old: _param(values, path, old), flat)
        for i, flat in enumerate(state.params.flats)
    ]

    def made(slot: RuleSlot) -> Tensor:
        def of(path: str, old: Tensor) -> Tensor:
            found = values.slots.get((slot.name, path))
            if found is None and slot.name == MASTERS:
                found = values.params[path]
            return old if found is None else found.to(old.dtype)

        return flat_of(setup, slot.group, setup.optimizer_state, rank, of, slot.numbers)

    counted = counters_of(state) | counters_of(values.state)
    theirs = values.state.scale
    scale = theirs if theirs is not None and _same_policy(state, values.state) else state.scale
    return state.replace(
        params=Buffers(flats=tuple(params), placement=setup.params),
        optimizer=with_counters(state, made, counted),
        step=values.state.step.to(state.step, copy=True),
        slots=with_slot(state.slots, scale),
    )


def _same_policy(a: TrainState, b: TrainState) -> bool:
    return a.scale is not None and b.scale is not None and a.scale.policy == b.scale.policy


def _param(values: Values, path: str, old: Tensor) -> Tensor:
    """Return a parameter in the dtype of `old`, from its master if that is more exact."""
    found = values.params[path]
    master = values.slots.get((MASTERS, path))
    if master is not None and old.dtype != found.dtype:
        found = master
    return found.to(old.dtype)


def flat_of(
    setup: Setup, index: int, placement: Placement, rank: int, of: Any, like: Tensor
) -> Tensor:
    """Return a rank's part of a flat with leaves of(path, old); `like` if one returns `old`."""
    layout, names = setup.layout, leaf_paths(setup.layout)
    group = layout.groups[index]
    old = like.new_empty(0)
    leaves = [of(names[i], old) for i in group.leaves]
    if any(leaf is old for leaf in leaves):
        return like.clone()
    whole_flat = pack(layout, index, [x.to(like) for x in leaves])
    return part_of(whole_flat, Part(1, 0), setup.part(placement, rank)).clone()


def disturbed(values: Values, size: float, seed: int) -> Values:
    """Return the values with each element changed by `size` of itself; masters alike."""
    source = torch.Generator().manual_seed(seed)
    signs = {path: signs_like(p, source) for path, p in values.params.items()}
    params = {path: perturbed(p, size, signs[path]) for path, p in values.params.items()}
    slots = {
        (name, path): perturbed(x, size, signs[path]) if name == MASTERS else x
        for (name, path), x in values.slots.items()
    }
    return replace(values, params=params, slots=slots)
