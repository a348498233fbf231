"""One step of a torch.optim optimizer on shards, which are its parameters for this step only."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.context.here import has_no_values
from fzero.errors import LayoutError
from fzero.optim._apart import Parted
from fzero.optim._bind import Bound
from fzero.optim._kept import KeptState, as_kept, as_tensor
from fzero.optim._silent import rule_step, swapped, told
from fzero.optim._small import fuses
from fzero.optim._stream import Portion
from fzero.optim._usable import not_streamed


class Unit(NamedTuple):
    """One parameter of the optimizer during a step: a flat, or a whole leaf in a flat."""

    index: int  # of the flat; -1: of none, see `_idle`
    group: int  # the param group
    number: int  # of its counters, which it shares with all units of this number
    span: tuple[int, int] | None  # None: all of the flat
    shape: tuple[int, ...]
    kept: KeptState

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of a tensor that is as long as its flat."""
        return flat if self.span is None else flat[slice(*self.span)].view(self.shape)


class _Loan(NamedTuple):
    unit: Unit
    values: Tensor
    parameter: nn.Parameter
    given: dict[str, Any]


class Turn(NamedTuple):
    """Which leaves are stepped together in one update, and which take their first step."""

    now: Parted
    first: bool = False  # the first update of a rule that makes its state in it
    fresh: frozenset[int] = frozenset()  # in a later one: the numbers of those that it is first for
    unstepped: tuple[str, ...] = ()  # paths of leaves that took no step yet, after this update


Slots = Mapping[str, Sequence[Tensor]]
Counters = Mapping[str, tuple[Tensor, ...]]


class Portions:
    """Steps each portion by the rule, unseen; `counters` are those after all of them."""

    def __init__(
        self, bound: Bound, units: Sequence[Unit], counters: Counters, turn: Turn, *, flats: int
    ) -> None:
        self._bound, self._units, self._flats, self._turn = bound, units, flats, turn
        self._idle = _idle(bound, units, turn.now)  # stepped with the first portion
        self._before: Counters = {
            name: (*some, *(some[source] for source in turn.now.sources))
            for name, some in counters.items()
        }
        # Flats share the counters of their group: each portion counts on from those before.
        self.counters: Counters = {
            name: tuple(x.clone() for x in some) for name, some in self._before.items()
        }

    def __call__(self, portion: Portion) -> Slots:
        """Step one portion."""
        bound = self._bound
        if len(portion.indices) < self._flats and not bound.leafwise:
            raise not_streamed(bound.instance)
        number = {index: k for k, index in enumerate(portion.indices)}
        units = [u._replace(index=number[u.index]) for u in self._units if u.index in number]
        units, self._idle = [*units, *self._idle], []
        loans = self._loans(units, portion)
        lent = _lent(bound, loans, self._before, fresh=self._turn.first)
        with lent, told(bound.instance, **portion.scaled._asdict()):
            if loans:  # many rules take no empty list
                rule_step(bound.instance)
            for group in {unit.group for unit in units}:
                for name in bound.shared[group].begin:
                    _write(self.counters[name][group], bound.instance.param_groups[group][name])
            return _taken(bound.instance, loans, portion.slots, self.counters)

    def _first(self, unit: Unit) -> bool:
        return self._turn.first or unit.number in self._turn.fresh

    def _loans(self, units: Sequence[Unit], portion: Portion) -> list[_Loan]:
        """Return the parameter and state of each unit; no state that the first step is to make."""
        counters = _spread(units, self._before)
        loans = []
        for unit in units:
            kept, here = unit.kept, unit.index >= 0
            if here:
                values = unit.of(portion.work[unit.index])
                gradient = unit.of(portion.grads[unit.index])
            else:
                device = self._bound.devices[unit.group]
                values = torch.zeros(unit.shape, dtype=kept.dtype, device=device)
                gradient = torch.zeros_like(values)
            parameter = nn.Parameter(values)
            parameter.grad = gradient
            given: dict[str, Any] = {}
            if not (kept.late and self._first(unit)):
                given = _slots_of(unit, portion.slots) if here else copy.deepcopy(kept.sample)
                for name in kept.counters:
                    given[name] = as_kept(kept.numbers, name, next(counters[name][unit.number]))
            loans.append(_Loan(unit, values, parameter, given))
        return loans


def makes_state_later(bound: Bound) -> bool:
    """Whether a rule gets less before its first step than it keeps after it."""
    return any(one.late for one in [*bound.shared, *bound.kept.values()])


def skips(bound: Bound, work: Sequence[Tensor]) -> bool:
    """Whether the optimizer's own `step()` takes `found_inf` and `grad_scale`.

    One of torch.optim does if it is fused. It must not have state to make in that step: fused SGD
    leaves a momentum that a skipped first step has made as the memory was.
    """
    instance = bound.instance
    if makes_state_later(bound) or not type(instance).__module__.startswith("torch.optim."):
        return False
    return all(bool(g.get("fused")) or fuses(instance, g, work) for g in instance.param_groups)


@contextmanager
def _lent(
    bound: Bound, loans: Sequence[_Loan], counters: Counters, *, fresh: bool
) -> Iterator[None]:
    """Give the optimizer the loans' parameters and state inside the block; restore it afterwards.

    Counters that the rule keeps in its param groups are set there too.
    """
    instance: Any = bound.instance
    groups = instance.param_groups
    with ExitStack() as stack:
        for number, (group, shared) in enumerate(zip(groups, bound.shared, strict=True)):
            own = [loan for loan in loans if loan.unit.group == number]
            given: dict[str, Any] = {"params": [loan.parameter for loan in own]}
            # The fused SGD takes no list of which some have a momentum already, and others do not.
            alike = len({bool(loan.given) for loan in own}) < 2
            if alike and fuses(instance, group, given["params"]):
                given["fused"] = True
                # Which devices are right was asked above, also of a device that is planned for.
                instance._need_device_dtype_check_for_fused = False
            if not fresh:
                given |= numbers_of_group(bound, counters, number)
            stack.enter_context(swapped(group, given, shared.begin))
        stack.callback(instance.state.clear)
        instance.state.update({loan.parameter: loan.given for loan in loans if loan.given})
        yield


def numbers_of_group(bound: Bound, counters: Counters, number: int) -> dict[str, Any]:
    """Return the rule's own numbers of a param group, as it has them among its options."""
    shared = bound.shared[number]
    own = ((name, counters[name][number].clone()) for name in shared.begin)
    return {name: as_kept(shared.numbers, name, counter) for name, counter in own}


def _taken(
    instance: Optimizer, loans: Sequence[_Loan], slots: Slots, counters: Counters
) -> dict[str, tuple[Tensor, ...]]:
    """Copy parameters, slots and counters that the step replaced into the state's tensors."""
    held = {name: list(flats) for name, flats in slots.items()}
    counted: set[tuple[int, str]] = set()
    for unit, values, parameter, _ in loans:
        kept, state = unit.kept, instance.state.get(parameter, {})
        if state.keys() - kept.unread != kept.names:
            raise _other_state(instance, state, kept)
        for name in kept.counters:
            if (unit.number, name) not in counted:
                counted.add((unit.number, name))
                _write(counters[name][unit.number], state[name])
        if unit.index < 0:
            continue
        if parameter.untyped_storage() is not values.untyped_storage():  # `p.data = ...` in it
            values.copy_(parameter.detach())
        for name in kept.slots:
            home, made = held[name][unit.index], state[name]
            if made is not home and not _is_at(made, unit.of(home)):
                unit.of(home).copy_(made)
        for name in kept.odd:
            held[name][unit.index] = in_order(as_tensor(state[name]))
    return {name: tuple(flats) for name, flats in held.items()}


def in_order(x: Tensor) -> Tensor:
    """Return a tensor in the order of its dims: itself, if it is alone in its memory like that.

    Products of the same numbers in another order have other bits, and what is read from a file, or
    sent, has this order. So a run that goes on from a checkpoint has the bits of one that was not
    cut off.
    """
    plain = torch.empty(x.shape, device="meta").stride()
    if x.stride() == plain and not x.storage_offset():
        return x
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(x.shape)


def _slots_of(unit: Unit, slots: Slots) -> dict[str, Any]:
    given = {name: unit.of(slots[name][unit.index]) for name in unit.kept.slots}
    odd = {name: slots[name][unit.index] for name in unit.kept.odd}
    return given | {name: as_kept(unit.kept.numbers, name, x) for name, x in odd.items()}


def _spread(units: Sequence[Unit], counters: Counters) -> dict[str, dict[int, Iterator[Tensor]]]:
    """Return a copy of its counter for each unit, by name and number: rules count in place."""
    sizes = Counter(unit.number for unit in units)
    return {
        name: {k: iter(own[k].expand(n, *own[k].shape).clone().unbind()) for k, n in sizes.items()}
        for name, own in counters.items()
    }


def _idle(bound: Bound, units: Sequence[Unit], now: Parted) -> list[Unit]:
    """Return a unit of one element for each counter without a unit on this rank, to advance it."""
    here = {unit.number for unit in units}
    counting = {unit.number for unit in units if unit.kept.counters}
    apart = {bound.group_at[path]: set[int]() for path, _ in now.apart}
    for path, number in now.apart:
        apart[bound.group_at[path]].add(number)
    found: dict[int, Unit] = {}
    for (group, _, shape), kept in bound.kept.items():
        if not bound.begin_of(group):
            continue
        for number in {group} | apart.get(group, set()) - now.still:
            if number not in (counting if kept.counters else here):
                found[number] = Unit(-1, group, number, None, shape, kept)
    return list(found.values())


def _is_at(x: Tensor, home: Tensor) -> bool:
    """Whether a tensor is the memory of another, so that nothing is to be copied."""
    if has_no_values(x) or x.dtype is not home.dtype or x.shape != home.shape:
        return False
    return x.data_ptr() == home.data_ptr() and x.stride() == home.stride()


def _write(home: Tensor, value: Any) -> None:
    if isinstance(value, Tensor):
        if not has_no_values(value) or has_no_values(home):  # a plan does not count
            home.copy_(value)
    else:
        home.fill_(value)


def _other_state(instance: Optimizer, state: Mapping[str, Any], kept: KeptState) -> LayoutError:
    known = sorted(kept.names)
    return LayoutError(
        f"{type(instance).__name__} now keeps {sorted(state)} for a parameter; when the state "
        f"was made it kept {known}.",
        cause="an option that adds state (momentum, amsgrad) was set later, or a rule that "
        "begins to keep something after some steps.",
        fix="set the option before the state is made; leave out what works every k steps "
        "(Lookahead), or do it in your own step.",
    )
