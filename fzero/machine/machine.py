"""The machine of one model on one rank: its gatherer, its reducer, its placeholders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fzero.collectives import Channel, Performer, performer_of
from fzero.context.current_rank import is_abstract
from fzero.machine.reader import Reader
from fzero.machine.reduce import Reducer, ReductionPlan, waits_in_step
from fzero.machine.unshard import Gatherer, ModelLine, UnitTable
from fzero.ranks.mesh import Axis
from fzero.state import Setup
from fzero.state.effects import (
    Discard,
    Drop,
    Free,
    Gather,
    ModelEffect,
    Receive,
    Reduce,
    TakePart,
    Wait,
)
from fzero.state.protocol import Units
from fzero.state.setup import Gathering


class Machine:
    """The units and gradients of some states on the same ranks, each on a mesh of its own.

    number: of the model among those of the ranks. gathering: how units are gathered and planned.
    on_gathered: is told of each group that was gathered. on_written: is told which units a
    `gathered` block has written. drop_raised: drops a backward that raised without a word.
    on_served: is called when passes of other ranks are over, of which this rank has reductions.
    """

    def __init__(
        self,
        number: int,
        setups: Sequence[Setup],
        devices: Sequence[torch.device],
        gathering: Gathering,
        *,
        on_gathered: Callable[[int, Tensor], None] | None = None,
        on_written: Callable[[Sequence[int]], None] | None = None,
        drop_raised: Callable[[], None] | None = None,
        on_served: Callable[[], None] | None = None,
    ) -> None:
        shared = performer_of(setups[0].axis)
        performer = shared or Performer(Channel(setups[0].axis, setups[0].axis))
        axes = [one.axis if shared is None else shared.over(one.axis) for one in setups]
        kept = setups[0].recipes if len(setups) == 1 else {}
        key = "machine", *axes, is_abstract()
        found: tuple[UnitTable, ReductionPlan, Units] | None = kept.get(key)
        if found is None:
            found = kept[key] = _planned(setups, axes, gathering)
        table, plan, self.units = found
        self.line = ModelLine(performer, number)
        self.reducer = Reducer(plan, devices, self.line.ready)
        self.gatherer = Gatherer(table, on_gathered)
        self.reader = Reader(self.gatherer, self.line, on_written)
        self._drop_raised, self._on_served = drop_raised, on_served

    def join(self, gathered: tuple[int, ...] = ()) -> None:
        """Begin, with these units that a window has gathered."""
        self.line.performer.join(self, self.units, self.line.number, gathered)

    def perform(self, effect: ModelEffect) -> None:
        """Do what the protocol asks for."""
        match effect:
            case Gather(_, unit, exact):
                self.gatherer.start(unit, exact=exact)
            case TakePart(_, unit, exact):
                self.gatherer.take_part(unit, exact=exact)
            case Wait(_, unit):
                self.gatherer.wait(unit)
            case Free(_, unit):
                self.gatherer.free(unit)
            case Reduce(_, unit, mine):
                self.reducer.start(unit, mine=mine)
            case Receive():
                if self._on_served is not None:
                    self._on_served()
            case Drop():
                self.reducer.discard_local()
            case Discard():
                self.reducer.discard()

    def wait_for_reductions(self) -> None:
        """Wait for the reductions that were started."""
        self.reducer.wait_all()

    def starts_at_once(self) -> bool:
        """Whether a reduction would start without a wait for one before."""
        return self.reducer.starts_at_once

    def drop_raised(self) -> None:
        """Drop a backward that raised on this rank before the other ranks heard of it."""
        if self._drop_raised is not None:
            self._drop_raised()


def _planned(
    setups: Sequence[Setup], axes: Sequence[Axis], gathering: Gathering
) -> tuple[UnitTable, ReductionPlan, Units]:
    """Return what never changes of the machine of some states."""
    table = UnitTable([setup.layout for setup in setups], axes)
    plan = ReductionPlan(setups, axes)
    waits = waits_in_step(plan)
    units = Units(
        numels=table.numels,
        persistent=gathering.persistent,
        rounds=table.rounds,
        bounded=frozenset(n for n in range(len(table.units)) if plan.bounded[n] or waits),
        limits=gathering.limits,
        gathers=any(setup.gathers_by_unit for setup in setups),
    )
    return table, plan, units
