"""What replicas that train apart keep for the outer update: anchors, the rule's state, what comes.

The rule's state is that of a state whose optimizer it is: see `transforms/outer_rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fzero.checkpoint._counters import COUNT, STEP, with_counters
from fzero.checkpoint._owned import Slots, free_slots, owned_pieces
from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint._room import zeros_where
from fzero.checkpoint._slots import slots_of
from fzero.machine.owners import owners_of
from fzero.state import Outer, TrainState
from fzero.state.setup import MASTERS
from fzero.transforms.outer_rule import as_inner, outer_state

RULE = "outer/"
"""Before the names of what owners keep for the outer rule."""


def outer_owned(state: TrainState, rank: int, *, saves: bool = False) -> list[TensorPiece]:
    """Return what a rank has of what owners keep for the outer rule; or what it `saves`."""
    if state.window.outer is None or (saves and rank >= state.setup.layout.ranks):
        return []
    rules = rule_states(state)
    return [piece for one in rules for piece in owned_pieces(one, rank, RULE)]


def slots_of_owner(state: TrainState, rank: int) -> Slots:
    """Return what a rank alone knows of the slots that it owns, also for the outer rule."""
    found = free_slots(state, rank)
    for one in () if state.window.outer is None else rule_states(state):
        for slot, forms in free_slots(one, rank).items():
            found.setdefault(RULE + slot, {}).update(forms)
    return found


def has_owners(state: TrainState) -> bool:
    """Whether anything is kept by the owners of whole parameters, the same on all ranks."""
    outer = state.window.outer is not None and owners_of(as_inner(state.setup)) is not None
    return outer or owners_of(state.setup) is not None


def rule_states(state: TrainState) -> list[TrainState]:
    """Return, for each fragment, a state whose optimizer is the outer rule."""
    outer = state.window.outer
    count = 0 if outer is None else outer.local.fragments
    return [outer_state(state, fragment) for fragment in range(count)]


def outer_slots(state: TrainState, held: Outer) -> Iterator[tuple[str, dict[int, Tensor]]]:
    """Yield (name, {number of a group that learns: flat}) of anchors, slots and what comes."""
    yield "anchors", dict(enumerate(held.anchors.flats))
    count = len(held.anchors.flats)
    number = {group: k for k, group in enumerate(state.setup.layout.trainable)}
    found: dict[str, dict[int, Tensor]] = {}
    for one in rule_states(state.replace(window=replace(state.window, outer=held))):
        for slot in slots_of(one):
            found.setdefault(slot.name, {})[number[slot.group]] = slot.flat
    yield from found.items()
    for fragment in coming_in(held):
        own = held.local.numbers_in(fragment, count)
        yield "coming", dict(zip(own, held.coming[fragment].flats, strict=True))


def outer_room(
    state: TrainState,
    local: dict[str, Any],
    coming: Sequence[int],
    zeros: Callable[[Tensor], Tensor],
) -> Outer:
    """Return the outer record to be filled, with the counters of a checkpoint."""
    outer = state.window.outer
    assert outer is not None
    old = [{COUNT: count, STEP: count} for count in local["outer_updates"]]
    counters = local.get("outer_counters", old)
    if len(counters) != outer.local.fragments:
        counters = [max(counters, key=lambda one: one[COUNT])] * outer.local.fragments
    made = [
        with_counters(one, lambda slot: zeros(slot.flat), some)
        for one, some in zip(rule_states(state), counters, strict=True)
    ]
    anchors = replace(outer.anchors, flats=tuple(map(zeros, outer.anchors.flats)))
    comes = [replace(anchors, flats=())] * outer.local.fragments
    for fragment in coming:
        own = outer.local.numbers_in(fragment, len(anchors.flats))
        flats = tuple(zeros_where(anchors.flats[k]) for k in own)  # beside the anchors
        comes[fragment] = replace(anchors, flats=flats)
    return replace(outer, anchors=anchors, optimizers=tuple(made), coming=tuple(comes), updates=0)


def named(state: TrainState) -> str:
    """Return what tells outer rules apart: what they keep; of one that needs a matrix its name."""
    rule: Any = state.setup.layout.options.outer
    one = rule_states(state)[0]
    slots = [name for name in rule.slots(one.optimizer) if name != MASTERS]
    name = "" if rule.elementwise else f"{rule.saved_names(one.optimizer, []).rule}: "
    return name + " ".join(["anchors", *slots])


def coming_in(outer: Outer) -> list[int]:
    """Return the fragments whose outer update is to come."""
    return [fragment for fragment, one in enumerate(outer.coming) if one.held]
