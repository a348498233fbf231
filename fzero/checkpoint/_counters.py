"""What an optimizer counts, as a checkpoint has it: a number, or one for each leaf. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from fzero.checkpoint._pieces import leaf_names
from fzero.checkpoint._slots import Slot, counters_in, number_like, optimizer_with
from fzero.state import TrainState

COUNT, STEP = "count", "step"  # updates made; what Adam counts: the same number, unless it was set
UNSTEPPED = "unstepped"  # the names of leaves that took no step yet, where others did

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


def with_counters(
    state: TrainState,
    made: Callable[[Slot], Tensor],
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
        what = f"the optimizer's {counter}"
        by_leaf[counter] = {
            path: number_like(what, some[path], _of_leaf(counters[counter], name, some[path]))
            for name, path in names.items()
            if path in some
        }
    count = number_like(f"the optimizer's {COUNT}", state.optimizer.count, counters[COUNT])
    fresh = [names[name] for name in unstepped if name in names]
    return rule.recounted(held, paths, by_leaf, count=int(count), unstepped=fresh)


def _of_leaf(count: Any, name: str, like: Tensor) -> Any:
    """Return the update count of one leaf, whether its rule counts in floats or in ints."""
    own: Any = count.get(name) if isinstance(count, dict) else count
    whole = isinstance(own, float) and own.is_integer() and not like.is_floating_point()
    return int(own) if whole else own


def _learning(state: TrainState) -> dict[str, str]:
    """Return {its name in a checkpoint: its path} of each leaf that learns."""
    layout = state.setup.layout
    pairs = zip(leaf_names(layout), layout.leaves, strict=True)
    return {name: leaf.path for name, leaf in pairs if leaf.trainable}
