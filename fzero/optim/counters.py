"""What an optimizer counts, as a checkpoint has it: a number, or one for each leaf. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from fzero.errors.json_form import DictForm, amount, number
from fzero.machine.named_shards import leaf_paths
from fzero.optim.entries import RuleSlot, counters_in, number_like, optimizer_with
from fzero.state import TrainState

COUNT, STEP = "count", "step"  # updates made; what Adam counts: the same number, unless it was set
UNSTEPPED = "unstepped"  # the names of leaves that took no step yet, where others did

COUNTERS = DictForm(
    may={"step": lambda x: _each(amount, x), "count": amount}, others=lambda x: _each(number, x)
)
"""What `counters_of` gives, as a file has it."""

Number = int | float | bool
Count = Number | dict[str, Number]
"""A number for all leaves; or where they differ, {name of the leaf: its own}."""


def counters_of(state: TrainState) -> dict[str, Count]:
    """Return the value of every counter.

    Raises `LayoutError` if a foreign state has two of one name that differ.
    """
    rule, names = state.setup.optimizer, _learning(state)
    if not rule.counts_by_leaf:
        return dict(counters_in(state))
    found: dict[str, Count] = {COUNT: int(state.optimizer.count)}
    for counter, some in rule.counted(state.optimizer, [*names.values()]).items():
        own: dict[str, Number] = {
            name: some[path].item() for name, path in names.items() if path in some
        }
        values = set(own.values())
        if values:
            found[counter] = own if len(values) > 1 else next(iter(values))
    return found


def unstepped_of(state: TrainState) -> list[str]:
    """Return the names of the leaves that took no step yet, where others did."""
    fresh = set(state.setup.optimizer.unstepped(state.optimizer))
    return [name for name, path in _learning(state).items() if path in fresh]


def counter_misfits(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], stepped: Collection[str]
) -> Iterator[str]:
    """Say what two records of counters do not have in common: of a saved state, and of this one.

    A step is implied by a count: without one, each leaf took every update. stepped: the leaves of
    which a rule keeps something.
    """
    implied = COUNT in theirs and COUNT in ours
    left = {STEP} if implied else set[str]()
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in left and (name in theirs) != (name in ours):
            there, here = ("a number" if name in one else "nothing" for one in (theirs, ours))
            yield f"optimizer/{name}: {there} in the checkpoint, {here} in the state"
    for name, count in theirs.items():
        if isinstance(count, dict) and name in ours:
            for leaf in ours[name] if isinstance(ours[name], dict) else stepped:
                if leaf not in count:
                    yield f"optimizer/{name} of {leaf}: nothing in the checkpoint"


def with_counters(
    state: TrainState,
    made: Callable[[RuleSlot], Tensor],
    counters: Mapping[str, Any] | None = None,
    unstepped: Collection[str] = (),
) -> Any:
    """Return the optimizer state with made(slot) for each slot, and these counters; None: its own.

    counters: as `counters_of` gives them. unstepped: as `unstepped_of`.

    Raises `CheckpointError` for a counter that the state cannot hold.
    """
    rule, names = state.setup.optimizer, _learning(state)
    if counters is None or not rule.counts_by_leaf:
        return optimizer_with(state, made, counters)
    held, paths = optimizer_with(state, made), [*names.values()]
    by_leaf: dict[str, dict[str, Tensor]] = {}
    for counter, some in rule.counted(held, paths).items():
        own, given = dict[str, Tensor](), counters[counter]
        for name, path in names.items():
            if path in some:
                value: Any = given.get(name) if isinstance(given, dict) else given
                whole = isinstance(value, float) and value.is_integer()
                if whole and not some[path].is_floating_point():  # another rule counts in floats
                    value = int(value)
                own[path] = number_like(f"the optimizer's {counter}", some[path], value)
        by_leaf[counter] = own
    count = number_like(f"the optimizer's {COUNT}", state.optimizer.count, counters[COUNT])
    fresh = [names[name] for name in unstepped if name in names]
    return rule.recounted(held, paths, by_leaf, count=int(count), unstepped=fresh)


def _learning(state: TrainState) -> dict[str, str]:
    """Return {its name in a checkpoint: its path} of each leaf that learns."""
    layout = state.setup.layout
    pairs = zip(leaf_paths(layout), layout.leaves, strict=True)
    return {name: leaf.path for name, leaf in pairs if leaf.trainable}


def _each(good: Callable[[Any], bool], value: Any) -> bool:
    """Whether a number for all leaves, or that of each leaf by its name, is good."""
    return all(map(good, value.values())) if type(value) is dict else good(value)
