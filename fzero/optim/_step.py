"""One step of a torch.optim optimizer on tensors that are lent to it for that time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.errors import LayoutError
from fzero.optim._bind import Bound
from fzero.optim._elementwise import not_streamed
from fzero.optim._rules import UNSCALED, Scaled
from fzero.optim._small import fuses
from fzero.optim._stream import Portion
from fzero.optim._trial import Kept, as_kept, as_tensor, state_of, unread_of


class Unit(NamedTuple):
    """What torch.optim sees as one parameter: a flat, or a whole leaf of a flat."""

    index: int  # of the flat; -1: of none, see `_idle`
    group: int  # the param group, with whose others it shares its counters
    span: tuple[int, int] | None  # None: all of the flat
    shape: tuple[int, ...]
    kept: Kept

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of a tensor that is as long as its flat."""
        return flat if self.span is None else flat[slice(*self.span)].view(self.shape)


class _Loan(NamedTuple):
    unit: Unit
    values: Tensor
    parameter: nn.Parameter
    given: dict[str, Any]


Slots = Mapping[str, Sequence[Tensor]]
Counters = Mapping[str, tuple[Tensor, ...]]


class Portions:
    """One `step()` of the optimizer for each portion; `counters` are those after all of them."""

    def __init__(
        self, bound: Bound, units: Sequence[Unit], counters: Counters, *, count: Tensor, flats: int
    ) -> None:
        self._bound, self._units, self._before, self._flats = bound, units, counters, flats
        self._idle = _idle(bound, units)  # stepped with the first portion
        self._fresh = _makes_state_later(bound) and not int(count)
        self.counters: Counters = counters

    def __call__(self, portion: Portion) -> Slots:
        """Step one portion."""
        number = {index: k for k, index in enumerate(portion.indices)}
        own = [u._replace(index=number[u.index]) for u in self._units if u.index in number]
        own, self._idle = [*own, *self._idle], []
        counters = self._before
        if len(portion.indices) < self._flats:
            if not self._bound.leafwise:
                raise not_streamed(self._bound.instance)
            # Flats share the counters of their group: each portion counts on from there.
            counters = {name: tuple(x.clone() for x in some) for name, some in counters.items()}
        held = (portion.work, portion.grads, portion.slots, counters)
        slots = _step(self._bound, own, *held, fresh=self._fresh, scaled=portion.scaled)
        for name, some in counters.items():
            counted = _counting(self._bound, own, name)
            pairs = enumerate(zip(self.counters[name], some, strict=True))
            after = tuple(new if g in counted else old for g, (old, new) in pairs)
            self.counters = {**self.counters, name: after}
        return slots


def _step(
    bound: Bound,
    units: Sequence[Unit],
    work: Sequence[Tensor],
    grads: Sequence[Tensor],
    slots: Slots,
    counters: Counters,
    *,
    fresh: bool,
    scaled: Scaled = UNSCALED,
) -> dict[str, tuple[Tensor, ...]]:
    """Step `work` in place, with its slots and counters; return the slots.

    fresh: it is the first step, before which a rule gets only what it does not make itself.
    scaled: what the optimizer has in its attributes for this time, if it `skips`.
    """
    own_counters = _spread(units, counters)
    loans = []
    for unit in units:
        names = unit.kept.given if fresh else None
        if unit.index < 0:
            device = bound.devices[unit.group]
            values = torch.zeros(unit.shape, dtype=unit.kept.dtype, device=device)
            given = state_of(unit.kept, values, names)
            gradient = torch.zeros_like(values)
        else:
            values, gradient = unit.of(work[unit.index]), unit.of(grads[unit.index])
            given = _slots_of(unit, slots, names)
        for name in unit.kept.counters:
            if names is None or name in names:
                counter = next(own_counters[name][unit.group])
                given[name] = as_kept(unit.kept.numbers, name, counter)
        parameter = nn.Parameter(values)
        parameter.grad = gradient
        loans.append(_Loan(unit, values, parameter, given))
    numbered = _numbered(bound, counters, fresh=fresh)
    with _lent(bound.instance, bound.groups, loans), _told(bound.instance, scaled), numbered:
        bound.instance.step()
        for group in {unit.group for unit in units}:
            for name in bound.shared[group].begin:
                _write(counters[name][group], bound.instance.param_groups[group][name])
        return _taken(bound.instance, loans, slots, counters)


def _makes_state_later(bound: Bound) -> bool:
    """Whether a rule gets less before its first step than it keeps after it."""
    late = any(shared.late for shared in bound.shared)
    return late or any(
        kept.odd or kept.given != {*kept.slots, *kept.counters} for kept in bound.kept.values()
    )


def skips(bound: Bound, work: Sequence[Tensor]) -> bool:
    """Whether the optimizer's own `step()` takes `found_inf` and `grad_scale`.

    One of torch.optim does if it is fused. It must not have state to make in that step: fused SGD
    leaves a momentum that a skipped first step has made as the memory was. Another class says it
    by `_step_supports_amp_scaling`, as to `torch.amp.GradScaler`.
    """
    instance = bound.instance
    if _makes_state_later(bound):
        return False
    if not type(instance).__module__.startswith("torch.optim."):
        return bool(getattr(instance, "_step_supports_amp_scaling", False))
    return all(bool(g.get("fused")) or fuses(instance, g, work) for g in instance.param_groups)


@contextmanager
def _told(instance: Any, scaled: Scaled) -> Iterator[None]:
    """The optimizer has the attributes that `torch.amp.GradScaler` would give it."""
    if scaled.found_inf is None:
        yield
        return
    instance.found_inf, instance.grad_scale = scaled.found_inf, scaled.grad_scale
    try:
        yield
    finally:
        del instance.grad_scale, instance.found_inf


@contextmanager
def _lent(instance: Optimizer, groups: int, loans: Sequence[_Loan]) -> Iterator[None]:
    """The optimizer has the loans' parameters and state; afterwards all is as it was."""
    lent: list[list[Tensor]] = [[] for _ in range(groups)]
    for loan in loans:
        lent[loan.unit.group].append(loan.parameter)
    owners = list(instance.param_groups)
    users = [group["params"] for group in owners]
    pairs = zip(owners, lent, strict=True)
    fused = [group for group, params in pairs if fuses(instance, group, params)]
    try:
        for group, params in zip(owners, lent, strict=True):
            group["params"] = params
        for group in fused:
            group["fused"] = True
        instance.state.update({loan.parameter: loan.given for loan in loans if loan.given})
        yield
    finally:
        instance.state.clear()
        for group in fused:
            group["fused"] = None
        for group, params in zip(owners, users, strict=True):
            group["params"] = params


@contextmanager
def _numbered(bound: Bound, counters: Counters, *, fresh: bool) -> Iterator[None]:
    """Param groups have their rule's own numbers among the options, and then what they had."""
    groups = [*enumerate(zip(bound.instance.param_groups, bound.shared, strict=True))]
    before = [{name: x for name, x in own.items() if name in s.begin} for _, (own, s) in groups]
    try:
        for number, (group, shared) in groups:
            if not (fresh and shared.late):
                for name in shared.begin:
                    counter = counters[name][number].clone()
                    group[name] = as_kept(shared.numbers, name, counter)
        yield
    finally:
        for (_, (group, shared)), had in zip(groups, before, strict=True):
            for name in shared.begin:
                group.pop(name, None)
            group.update(had)


def _taken(
    instance: Optimizer, loans: Sequence[_Loan], slots: Slots, counters: Counters
) -> dict[str, tuple[Tensor, ...]]:
    """Write what the step made anew into the tensors that hold it."""
    held = {name: list(flats) for name, flats in slots.items()}
    counted: set[tuple[int, str]] = set()
    for unit, values, parameter, _ in loans:
        kept, state = unit.kept, instance.state.get(parameter, {})
        if state.keys() != kept.names:
            raise _other_state(instance, state, kept)
        for name in kept.counters:
            if (unit.group, name) not in counted:
                counted.add((unit.group, name))
                _write(counters[name][unit.group], state[name])
        if unit.index < 0:
            continue
        if parameter.untyped_storage() is not values.untyped_storage():  # `p.data = ...` in it
            values.copy_(parameter.detach())
        for name in kept.slots:
            home = held[name][unit.index]
            if (made := state[name]) is not home:
                unit.of(home).copy_(made)
        for name in kept.odd:
            held[name][unit.index] = as_tensor(state[name])
    return {name: tuple(flats) for name, flats in held.items()}


def _slots_of(unit: Unit, slots: Slots, names: frozenset[str] | None) -> dict[str, Any]:
    given = {
        name: unit.of(slots[name][unit.index])
        for name in unit.kept.slots
        if names is None or name in names
    }
    if names is None:
        odd = {name: slots[name][unit.index] for name in unit.kept.odd}
        given |= {name: as_kept(unit.kept.numbers, name, x) for name, x in odd.items()}
    return given | unread_of(unit.kept, names)


def _spread(units: Sequence[Unit], counters: Counters) -> dict[str, dict[int, Iterator[Tensor]]]:
    """A counter of its own for each unit, by name and param group: rules count in place."""
    sizes = Counter(unit.group for unit in units)
    return {
        name: {k: iter(own[k].expand(n, *own[k].shape).clone().unbind()) for k, n in sizes.items()}
        for name, own in counters.items()
    }


def _idle(bound: Bound, units: Sequence[Unit]) -> list[Unit]:
    """One element for each param group whose counters no unit of this rank has: they go on too."""
    here = {unit.group for unit in units}
    counting = {unit.group for unit in units if unit.kept.counters}
    found: dict[int, Unit] = {}
    for (group, _, shape), kept in bound.kept.items():
        missing = group not in (counting if kept.counters else here)
        if missing and bound.begin_of(group) and not kept.odd:
            found[group] = Unit(-1, group, None, shape, kept)
    return list(found.values())


def _counting(bound: Bound, units: Sequence[Unit], name: str) -> set[int]:
    """Return the param groups whose counter of that name a step of these units counts on."""
    kept = {unit.group for unit in units if name in unit.kept.counters}
    return kept | {unit.group for unit in units if name in bound.shared[unit.group].begin}


def _write(home: Tensor, value: Any) -> None:
    if isinstance(value, Tensor):
        home.copy_(value)
    else:
        home.fill_(value)


def _other_state(instance: Optimizer, state: Mapping[str, Any], kept: Kept) -> LayoutError:
    known = sorted(kept.names)
    return LayoutError(
        f"{type(instance).__name__} now keeps {sorted(state)} for a parameter; when the state "
        f"was made it kept {known}.",
        cause="an option that adds state (momentum, amsgrad) was set later, or a rule that "
        "begins to keep something after some steps.",
        fix="set the option before the state is made; leave out what works every k steps "
        "(Lookahead), or do it in your own step.",
    )
