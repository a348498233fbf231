"""Stage 3's full parameters: a kernel reads a placeholder -> coordinator events -> gathers.

The module's parameters are `LazyParam`s: autograd saves them, and each kernel that reads one gets
the full values from here. So no module hooks are needed: the reads themselves say which module
runs, in forward, backward and recompute, whoever reads (a tied head, a foreign weight), and the
coordinator's record decides what is gathered, prefetched and freed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fzero.adapter._exchange import Ask, Lockstep, Member
from fzero.adapter._plan import Plan
from fzero.collectives import InFlight, assert_same_everywhere, broadcast_from_first, start_gather
from fzero.errors import AxisError, LayoutError, explain
from fzero.packing import unpack
from fzero.partition import shard_rows
from fzero.placeholder import LazyParam, Unit
from fzero.state import coordinator as transitions
from fzero.state.coordinator import CoordinatorState, new_coordinator
from fzero.state.coordinator_effects import (
    Agree,
    Drain,
    Effect,
    Gather,
    Prefetch,
    Release,
    Wait,
    Warn,
)
from fzero.state.residency import Status
from fzero.state.units import Limits


class Source:
    """Runs the coordinator's effects, and hands out full leaves. Units are the layout's groups."""

    def __init__(self, plan: Plan, rows: Sequence[Tensor], limits: Limits) -> None:
        self.plan = plan
        self.exchange: Member | Lockstep
        layout = plan.layout
        self.units = [Unit(layout, i, shard, False) for i, shard in enumerate(rows)]
        names = [f"{group.name}#{i}" for i, group in enumerate(layout.groups)]
        modules = list(dict.fromkeys(group.name for group in layout.groups))
        self._module = [modules.index(group.name) for group in layout.groups]
        self.state: CoordinatorState = new_coordinator(
            {name: layout.full_numel(i) for i, name in enumerate(names)},
            {
                m: [n for n, g in zip(names, layout.groups, strict=True) if g.name == m]
                for m in modules
            },
            limits,
            small=[
                name
                for name, group in zip(names, layout.groups, strict=True)
                if max(layout.leaves[i].numel for i in group.leaves)
                <= limits.persistence_threshold_numel
            ],
        )
        self._flying: dict[int, InFlight] = {}
        self._flats: dict[int, Tensor] = {}
        self._leaves: dict[int, list[Tensor]] = {}
        self._current = -1  # the module in use, by the last kernel that read a parameter
        self._peeked: tuple[int, ...] = ()  # units held for reads outside of a step
        self._writable: frozenset[int] = frozenset()
        self.in_step = False

    # What the placeholders call.

    def leaf(self, unit: int, position: int) -> Tensor:
        """Return the full values of one parameter, gathering what its module needs."""
        leaves = self._leaves.get(unit)
        if leaves is None or not self._is_in_use(unit):
            self.exchange.look()
            if self.in_step:
                self._use(self._module[unit])
            else:
                self._peek(unit)
            leaves = self._leaves[unit]
        return leaves[position]

    def begin_write(self, placeholder: LazyParam, func: Any) -> None:
        """Refuse a write that would reach a gathered copy only."""
        if placeholder.where[0] not in self._writable:
            raise LayoutError(
                explain(
                    f"{placeholder!r} is written in place ({func}).",
                    cause="an in-place method or an initializer on a parameter of stage 3, of "
                    "which this rank holds a shard.",
                    fix="with fzero.adapter.gathered(module, modify=True): write to it.",
                )
            )

    def end_write(self, placeholder: LazyParam) -> None:
        """Nothing to do: what was written is scattered when its `gathered` context ends."""

    # What the engine calls.

    def begin_step(self) -> None:
        """A root forward starts."""
        self.exchange.look()
        self._leave()
        self.in_step = True
        self._do(transitions.begin_step)

    def end_step(self) -> None:
        """The outermost backward, or a forward without gradient, is over."""
        self._current = -1
        self.in_step = False
        self._do(transitions.end_step)

    def begin_window(self) -> None:
        """Parameters do not change until `end_window`."""
        self._do(transitions.begin_window)

    def end_window(self) -> None:
        """They may change again. A module that is in use, its backward still to come, stays so."""
        self._do(transitions.end_window)

    def updated(self, units: Collection[int]) -> None:
        """The shards of `units` changed."""
        self._leave()
        self._do(transitions.updated, tuple(units))

    def require_free(self) -> None:
        """Raise `PhaseError` if an update is not possible now: the same check, beforehand."""
        self._leave()
        transitions.updated(self.state, self.plan.layout.trainable)

    def abort(self) -> None:
        """An exception left modules in use. Starts no collective."""
        self._current, self.in_step = -1, False
        self._do(transitions.abort)

    def hold(self, units: Sequence[int], *, writable: bool) -> list[list[Tensor]]:
        """Gather `units` until `let_go`; return the full leaves of each."""
        self.exchange.look()
        self._do(transitions.hold, tuple(units))
        self._writable |= frozenset(units if writable else ())
        return [self._leaves[unit] for unit in units]

    def let_go(self, units: Sequence[int], *, written: bool) -> None:
        """End a `hold`. What was written is taken from rank 0, and each rank keeps its rows."""
        axis = self.plan.axis
        if written:
            self.exchange.meet(0)  # the broadcast is not asked for
            self._writable -= frozenset(units)
            flats = broadcast_from_first([self._flats[unit] for unit in units], axis)
            for unit, flat in zip(units, flats, strict=True):
                self._flats[unit].copy_(flat)
                self.units[unit].shard.copy_(shard_rows(flat, axis.size, axis.rank))
        self._do(transitions.let_go, tuple(units))

    def register_external(self, unit: int, other: int) -> None:
        """Gather unit `other` whenever the module of `unit` is used."""
        self._do(transitions.register_external, self._module[unit], [other])

    @property
    def flats(self) -> list[Tensor]:
        """The full parameters that are here."""
        return list(self._flats.values())

    # Events and effects.

    def _is_in_use(self, unit: int) -> bool:
        if self._module[unit] == self._current or unit in self.state.units.persistent:
            return True
        return unit in self._peeked or any(unit in held for held in self.state.held)

    def _use(self, module: int) -> None:
        """Another module than before reads: the one before has run."""
        self._leave()
        self._do(transitions.fetch, module)
        transitions.require_ready(self.state, module)
        self._current = module

    def _peek(self, unit: int) -> None:
        """A read outside of forward and backward (a norm that is logged): no trace sees it."""
        self._leave()
        self._peeked = (unit,)
        self._do(transitions.hold, self._peeked)

    def _leave(self) -> None:
        current, self._current = self._current, -1
        peeked, self._peeked = self._peeked, ()
        if current in self.state.active:
            self._do(transitions.release, current)
        if peeked in self.state.held:
            self._do(transitions.let_go, peeked)

    def _do(self, transition: Callable[..., Any], *event: Any) -> None:
        if torch.is_inference_mode_enabled():  # what is gathered here may be kept for training
            with torch.inference_mode(False), torch.no_grad():
                return self._do(transition, *event)
        self.state, effects = transition(self.state, *event)
        for effect in effects:
            self._run(effect)

    def _run(self, effect: Effect) -> None:
        match effect:
            case Gather(ids) | Prefetch(ids):
                self.exchange.ask(Ask.GATHER, ids)
                self.exchange.settle()  # a reduction may wait for the next call, a gather not
            case Wait(ids):
                for unit in ids:
                    self._arrive(unit)
                self.state, _ = transitions.gathered(self.state, ids)
            case Release(ids):
                for unit in ids:
                    self._forget(unit)
            case Drain(ids):
                for unit in ids:
                    flight = self._flying.pop(unit, None)  # None: its start has raised
                    with suppress(AxisError):  # it is not needed any more, come or not
                        if flight is not None:
                            flight.wait()
            case Agree(lines):
                if isinstance(self.exchange, Lockstep):
                    what = "the order in which modules use their parameters"
                    assert_same_everywhere(lines, self.plan.axis, what=what)
            case Warn(message):
                warnings.warn(message, UserWarning, stacklevel=2)

    def start(self, unit: int, mine: bool) -> None:
        """Take part in the gather of `unit`; keep the result if this rank asked for it."""
        flight = start_gather([self.units[unit].shard], self.plan.axis)
        if mine:
            self._flying[unit] = flight
        else:
            flight.wait()

    def _arrive(self, unit: int) -> None:
        flat = self._flying.pop(unit).wait()[0]
        self._flats[unit] = flat
        self._leaves[unit] = unpack(self.plan.layout, unit, flat)

    def _forget(self, unit: int) -> None:
        if self.state.residency.status(unit) is Status.NOT_AVAILABLE:
            self._flats.pop(unit, None)
            self._leaves.pop(unit, None)
