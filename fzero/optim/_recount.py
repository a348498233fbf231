"""The counters of a torch.optim optimizer by leaf: read from a state, and written into one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fzero.errors import LayoutError
from fzero.optim._apart import settled
from fzero.optim._bind import Bound
from fzero.optim._step import makes_state_later
from fzero.optim._torch_state import TorchState

Counted = Mapping[str, Mapping[str, Tensor]]
"""{name: {path: counter}}."""


def counted_in(bound: Bound, state: TorchState, paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the counters of the leaves at `paths` that are stepped: the state's own tensors."""
    numbers, found = dict(state.apart), dict[str, dict[str, Tensor]]()
    begins = [bound.begin_of(group) for group in range(len(bound.shared))]
    for path in paths:
        group = bound.group_at.get(path, -1)
        for name in begins[group] if group >= 0 else ():
            shared = name in bound.shared[group].begin
            number = group if shared else numbers.get(path, group)
            found.setdefault(name, {})[path] = state.counters[name][number]
    return found


def recounted_as(
    bound: Bound,
    state: TorchState,
    paths: Sequence[str],
    counters: Counted,
    unstepped: Collection[str],
) -> TorchState:
    """Return the state with these counters, kept once where leaves of a group have the same."""
    fresh = set(unstepped) if makes_state_later(bound) else set()
    stepped = [path for path in paths if bound.group_at.get(path, -1) >= 0]

    def row(path: str) -> tuple[Any, ...]:
        shared = bound.shared[bound.group_at[path]].begin
        own = [(k, x[path].item()) for k, x in counters.items() if path in x and k not in shared]
        return path in fresh, *own

    groups = len(bound.shared)
    apart, rows = settled({path: row(path) for path in stepped}, bound.group_at.__getitem__, groups)
    home = {number: bound.group_at[path] for path, number in apart}
    of_groups = _of_groups(bound, stepped, counters)
    made: dict[str, tuple[Tensor, ...]] = {}
    for name, held in state.counters.items():
        some = [held[home.get(number, number)].clone() for number in range(groups + len(set(home)))]
        for number, (_, *own) in rows.items():
            some[number].fill_(dict(own).get(name, some[number].item()))
        for group, value in of_groups.get(name, {}).items():
            some[group].fill_(value)
        made[name] = tuple(some)
    kept = tuple(path for path in stepped if path in fresh)
    return replace(state, counters=made, apart=apart, unstepped=kept)


def anew_of(bound: Bound, state: TorchState, fresh: TorchState) -> TorchState:
    """Return `fresh`, a new state, with the counters that `state` has for whole param groups."""
    counters = {
        name: tuple(
            state.counters[name][group] if name in shared.begin else some[group]
            for group, shared in enumerate(bound.shared)
        )
        for name, some in fresh.counters.items()
    }
    return replace(fresh, counters=counters)


def _of_groups(
    bound: Bound, paths: Sequence[str], counters: Counted
) -> dict[str, dict[int, float]]:
    """Return {name: {param group: its counter}}; raise `LayoutError` if two leaves disagree."""
    found: dict[str, dict[int, float]] = {}
    for path in paths:
        group = bound.group_at[path]
        for name in bound.shared[group].begin.keys() & counters.keys():
            value = counters[name][path].item()
            other = found.setdefault(name, {}).setdefault(group, value)
            if other != value:
                raise LayoutError(
                    f"param group {group} of {type(bound.instance).__name__} has {name} = {other} "
                    f"for one of its parameters, and {value} for {path}.",
                    cause="param groups that are others than those of the run that was saved.",
                    fix="make the optimizer with the param groups of that run.",
                )
    return found
