"""The state of an engine on its way: what the events of a module and of autograd lead to.

    a root forward begins     the pass announces its gathers (stage 3)
    a backward begins         the pass announces its reductions
    a parameter's gradient    goes into its bucket
    the epilogue              the state has what the backward brought

The calls that all ranks make together (an update, the end of a window) are in `_boundary`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fzero.adapter._events import Events, in_backward
from fzero.adapter._gradient import Gradients
from fzero.adapter._guard import Guard, optimizer_of
from fzero.adapter._held import HeldGradient
from fzero.adapter._losses import Losses
from fzero.adapter._masters import Masters
from fzero.adapter._module import ModuleParameters, free_to_swap
from fzero.adapter._region import Region
from fzero.adapter._writes import Writes
from fzero.collectives import broadcast, performer_of
from fzero.errors import PhaseError
from fzero.machine.packing import unpack
from fzero.machine.placeholder import placeholders
from fzero.ranks.mesh import Axis
from fzero.state import Setup, TrainState
from fzero.state.scale import ScalePolicy
from fzero.transforms.announcement import of_engine
from fzero.transforms.init import begun_anew, filled_state
from fzero.transforms.pass_events import Pass
from fzero.transforms.scaled import with_policy

OWNERS: weakref.WeakValueDictionary[int, Driver] = weakref.WeakValueDictionary()
"""The open driver of each parameter object, by id: a parameter has one at a time."""


class Driver:
    """One state, one module, and the pass between them.

    outside: inside of a window, the state before it. norm: of the last update, if it clipped.
    reduced: (driver, name of a call) -> the state, with all gradients reduced: a collective.
    """

    def __init__(
        self,
        module: nn.Module,
        setup: Setup,
        scale: ScalePolicy | None,
        reduced: Callable[[Driver, str], TrainState],
    ) -> None:
        performer = performer_of(setup.axis)
        if performer is not None:  # the engines of an axis share one group: their order is one
            setup = replace(setup, axis=performer.over(setup.axis))
        self.params = ModuleParameters(module, setup.layout)
        self.closed = False
        self.outside: TrainState | None = None
        self.norm: Tensor | None = None
        state = with_policy(self._moved(setup), scale)
        form = of_engine(performer.number() if performer is not None else 0)
        on_written = self._hears_of_writes()
        self.running = Pass(form, [state], on_written=on_written, drop_raised=self._drop_raised)
        self.losses = Losses(self.running)
        sharded = setup.gathers_by_unit
        if sharded:
            with free_to_swap(module):
                for index in range(len(setup.layout.groups)):
                    self.params.place(index, placeholders(self.running.reader, index))
        self.params.remember()
        self._every = self.params.all_objects
        learning = self.params.learning
        self.gradients = Gradients(self, learning, reduced)
        self.events = Events(module, learning, self)
        lower, device = setup.policy.autocast, state.device
        self.region = Region(module, lower, device) if lower else None
        self.masters = Masters(self.params, setup)
        alone = performer is None
        self.writes = Writes(self.params, watched=not sharded, alone=alone)
        self.optimizer = optimizer_of(setup, self.params.at)
        # Who holds the optimizer does not hold the engine.
        self.guard = Guard(self.optimizer, weakref.WeakMethod(self.begin_anew))
        OWNERS.update((id(p), self) for p in self._every)

    @torch.no_grad()
    def _moved(self, setup: Setup) -> TrainState:
        """Everything was checked: move the module's values into the buffers of a state."""
        for buffer in self.module.buffers():
            buffer.copy_(broadcast([buffer], setup.axis, 0)[0])

        def done(index: int, flat: Tensor) -> None:
            if setup.gathers_by_unit:
                self.params.let_go(index)
            else:
                self.params.have(index, unpack(setup.layout, index, flat))

        return filled_state(setup, self.params.values, done)

    # What it is.

    @property
    def module(self) -> nn.Module:
        """The module that is trained."""
        return self.params.module

    @property
    def axis(self) -> Axis:
        """The ranks."""
        return self.state.setup.axis

    @property
    def sharded(self) -> bool:
        """Whether the module has placeholders (stage 3)."""
        return self.state.setup.gathers_by_unit

    @property
    def number(self) -> int:
        """The number of this engine, the same on every rank."""
        return self.running.form.number

    # The state.

    @property
    def state(self) -> TrainState:
        """What the engine holds now."""
        return self.running.states[0]

    def put(self, state: TrainState) -> None:
        """Go on with another state."""
        self.running.put(0, state)

    def put_each(self, change: Callable[[TrainState], TrainState]) -> None:
        """Change the state; inside of a window, also the one before it."""
        self.put(change(self.state))
        self.outside = None if self.outside is None else change(self.outside)

    def enter_window(self, opened: TrainState) -> None:
        """Go on in a window; what was before it is kept beside."""
        self.outside = self.state
        self.put(opened)

    def leave_window(self) -> TrainState:
        """Return the state from before the window."""
        before, self.outside = self.outside, None
        assert before is not None
        return before

    def stepped(self, state: TrainState, norm: Tensor | None) -> None:
        """Go on with an updated state. norm: of the gradients, if they were clipped."""
        self.norm = norm
        self.put(state)
        self.published()

    def forget_norm(self) -> None:
        """The gradients of the last update are of no interest any more."""
        self.norm = None

    def published(self) -> None:
        """The parameters have new values, for the module too."""
        self.running.changed()
        # A graph from before the update must not be differentiated with the new values: autograd
        # then says so, as it does for an optimizer that writes to the parameters themselves.
        torch.autograd.graph.increment_version(self._every)
        self.masters.published()
        self.writes.settle()

    def _hears_of_writes(self) -> Callable[[Sequence[int]], None]:
        """Return what stage 3 calls with the units that `gathered(modify=True)` has written."""
        # Autograd holds placeholders where the garbage collector does not look: from them no way
        # may lead to the driver, or an engine that nobody holds any more would never go.
        held = weakref.ref(self)

        def written(units: Sequence[int]) -> None:
            if (driver := held()) is not None:
                groups = [
                    index for unit in units for index in driver.running.gatherer.table.units[unit]
                ]
                driver.masters.take(driver.state, groups)

        return written

    # What the events lead to.

    def forward_begins(self) -> None:
        """A root forward begins."""
        self.writes.begin_forward()
        self.params.require_same_memory()
        self.running.begin_forward()

    def forward_ends(self, *, trains: bool, raised: BaseException | None) -> None:
        """A root forward is over, or has `raised`: ranks that gather with this one are told.

        Raises `PhaseError`, after the other ranks were told, if it wrote to a parameter.
        """
        error = self.writes.end_forward()
        if raised is not None and self.running.phase.gathered:
            self.failed(raised)
            return
        if error is not None and raised is None:
            told = self.running.phase.crosses
            self.failed(error)
            if not told:  # in a window: the others hear it at its end
                self.running.performer.fail()
            raise error
        self.running.end_forward()
        if not trains:
            self.running.finish_forward()

    def backward_begins(self, first: Tensor | None) -> None:
        """A backward starts."""
        dropped = self.gradients.dropped(first)
        if dropped:
            self.gradients.forget()
            self.clear()
        self.running.begin_backward(silent=True, dropped=dropped)

    def received(
        self, leaf: int, p: Any, task: int, outer_task: int | None, *, first: bool = False
    ) -> None:
        """A parameter got a gradient: it goes into its bucket, unless it must not be used.

        task: the graph task that brought it. outer_task: the one that began the backward. first:
        it may be the first one of the backward.
        """
        try:
            self.losses.require(task, outer_task)
            if first and self.running.phase.silent:
                self.running.first_gradient()
            if isinstance(p.grad, HeldGradient):
                p.grad = p.grad.taken()
            if p.grad is not None:
                self.running.take(0, leaf, p)
        finally:
            self.gradients.stand_for(p, task)  # the user's hooks come after this one

    def backward_ends(self) -> None:
        """The epilogue: what the backward brought is in the state from here on."""
        try:
            self.running.finish(counts=False)  # torch.autograd.grad may have brought nothing
        except BaseException as error:
            self.running.fail(error)
            raise
        self.show_gradients()

    def drop(self) -> None:
        """A plain backward raised, and no other rank was notified: its gradients are dropped."""
        self.running.fail(RuntimeError("a backward that raised"))

    def failed(self, error: BaseException) -> None:
        """A forward or a backward raised here; what it is part of comes here as well."""
        if not in_backward():
            self.running.fail(error)
            self.events.abandon()
            if self.region is not None:
                self.region.abandon()

    # Gradients.

    def show_gradients(self) -> None:
        """Let `p.grad` say that the engine holds gradients, if it does."""
        held = self.state.gradients.held or self.state.window.pending.held
        self.gradients.stand() if held else self.gradients.drop()

    def clear(self) -> None:
        """Forget every gradient, also what an open window adds to."""
        self.put_each(lambda state: state.without_gradients())

    def drop_if_user_did(self) -> None:
        """Forget every gradient if somebody has set `p.grad` to None."""
        if self.gradients.dropped():
            self.gradients.drop()
            self.clear()

    # Where it stands.

    def wait(self) -> None:
        """Before a call of all ranks: drop what raised, and put aside what a forward brought."""
        self.require_not_closed()
        self.drop_unfinished()
        if not in_backward():
            self.running.put_aside()

    def drop_unfinished(self) -> None:
        """Drop a plain backward that raised, of any engine on these ranks."""
        self.events.drop_unfinished()
        self.running.performer.drop_raised()

    def _drop_raised(self) -> None:
        self.events.drop_unfinished()

    def require_not_closed(self) -> None:
        """Raise `PhaseError` for an engine that was closed."""
        if self.closed:
            raise PhaseError(
                "a closed engine was used.",
                cause="engine.close() gave the module and the optimizer back.",
                fix="use those as ordinary ones, or make a new Engine of the module.",
            )

    def begin_anew(self) -> None:
        """Forget what the optimizer keeps, but for masters: no step was made. A collective."""
        self.wait()
        self.running.performer.call(f"optimizer.state.clear() of engine {self.number}", 0)
        self.running.take_served()
        self.put(begun_anew(self.state))

    def end(self) -> None:
        """The module and the optimizer were given back: no pass follows."""
        self.running.close()
        for p in self._every:
            OWNERS.pop(id(p), None)
        self.closed = True
