"""The state of an engine on its way: what the events of a module and of autograd lead to.

    a root forward begins     the pass announces its gathers (stage 3)
    a backward begins         the pass announces its reductions
    a parameter's gradient    goes into its bucket
    the epilogue              the state has what the backward brought

What all ranks make together (an update, the end of a window) is in `engine_step`.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fzero.adapter.gradients import StandIns
from fzero.adapter.hooks import Events, current_graph_task, in_backward, weakly
from fzero.adapter.logical_batches import Loops
from fzero.adapter.losses import Losses
from fzero.adapter.module import ModuleParameters
from fzero.adapter.optimizer_hooks import Guard, optimizer_of
from fzero.adapter.param_grad import ShardedGrad
from fzero.adapter.writes import Writes, masters_follow
from fzero.collectives import come_to, performer_of
from fzero.errors import PhaseError, explain
from fzero.machine.placeholder import placeholders
from fzero.ranks.mesh import Axis
from fzero.state import TrainState, progress
from fzero.state.layout import as_bits
from fzero.transforms.backward_pass import (
    Agreed,
    Pass,
    agree,
    of_engine,
    raises_together,
    reduce_agreed,
)
from fzero.transforms.init import begun_anew
from fzero.transforms.points import without_gradients
from fzero.transforms.recipe import begun

OWNERS: weakref.WeakValueDictionary[int, Driver] = weakref.WeakValueDictionary()
"""The open driver of each parameter object, by id: a parameter has one at a time."""


class Driver:
    """One state, one module, and the pass between them.

    params: of the module. Below stage 3 they have the memory of the state's buffers already.
    outside: inside of a window, the state before it.
    """

    def __init__(self, params: ModuleParameters, state: TrainState) -> None:
        self.params = params
        self.outside: TrainState | None = None
        self._dropped = ""  # what is to be said of a window that raised
        setup, performer = state.setup, performer_of(state.setup.axis)
        form = of_engine(performer.number() if performer is not None else 0)
        written = weakly(self._written)
        raised = lambda: self.events.backwards.drop_unfinished()  # noqa: E731
        self.running = Pass(form, [state], on_written=written, drop_raised=raised)
        held = None if setup.gathers_by_unit else self.running.held[0]
        reader = self.running.gatherer if held is None else held
        for index in filter(setup.is_read_lazily, range(len(setup.layout.groups))):
            self.params.place(index, placeholders(reader, index))
        self.params.remember()
        self.stand_ins = StandIns(self)
        self.events = Events(self)
        self.losses = Losses(self.running, weakly(self.events.backwards.watch))
        self.loops = Loops(self.running, self.module, params.own)
        self.writes = Writes(self.params, state, alone=performer is None)
        anew = weakref.WeakMethod(self.begin_anew)  # who has the optimizer holds no engine
        self.guard = Guard(optimizer_of(setup, self.params.at), anew)
        OWNERS.update((id(p), self) for p in self.params.all_objects)

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
    def closed(self) -> bool:
        """Whether the module and the optimizer were given back."""
        return self.running.client.is_over

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

    def published(self) -> None:
        """The parameters have new values, for the module too."""
        self.running.changed()
        # A graph from before the update must not be differentiated with the new values: autograd
        # then says so, as it does for an optimizer that writes to the parameters themselves.
        torch.autograd.graph.increment_version(self.params.all_objects)
        self.writes.published(self.state)
        self.losses.calls.tokens.clear()  # no graph from before it is differentiated any more

    def take_back(self) -> None:
        """Give what `p.data = x` has moved away a part of the engine's buffers again.

        A new one: that of before may be kept, to be put back by `p.data = kept`.
        """
        moved, state = self.params.moved_away(), self.state
        if not moved:
            return
        flats = list(state.params.flats)
        for index in moved:
            flats[index] = flats[index].clone()
            self.params.follow(state.setup, index, flats[index])
        held = replace(state.params, flats=tuple(flats))
        self.put_each(lambda one: one.replace(params=held))
        self.params.remember()

    def _written(self, units: Sequence[int]) -> None:
        """`gathered(modify=True)` has written these units of stage 3."""
        table = self.running.gatherer.table
        groups = [index for unit in units for index in table.units[unit]]
        masters_follow(self.state, groups)

    # What the events lead to.

    def forward_begins(self) -> None:
        """A root forward begins."""
        self.drop_unfinished()
        self.events.backwards.reset()
        self.writes.begin_forward()
        self.params.require_same_memory()
        self.running.begin_forward()
        self.losses.calls.set_in_loss(True)

    def forward_ends(self, *, trains: bool, raised: BaseException | None) -> None:
        """A root forward is over, or has `raised`: ranks that gather with this one are told.

        Raises `PhaseError`, after the other ranks were told, if it wrote to a parameter.
        """
        self.losses.calls.set_in_loss(False)
        error = self.writes.end_forward()
        if raised is not None and self.running.phase.announced:
            self.failed(raised)
            return
        if error is not None and raised is None:
            told = self.running.phase.crosses
            self.failed(error)
            if not told:  # in a window: the others hear it at its end
                self.running.performer.fail()
            raise error
        self.running.end_forward()
        if not (trains or self.losses.calls.tokens):  # a backward may come by another rank's loss
            self.running.finish_forward()

    def backward_begins(self, first: Tensor | None) -> None:
        """A backward starts."""
        if self._dropped:
            self.say_dropped()
        dropped = self.stand_ins.dropped(first)
        if dropped:
            self.require_not("p.grad = None", "loop")
            self.stand_ins.forget()
            self.clear()
        weighed = self.losses.begin(task := current_graph_task())
        # One that is made on all ranks alike is told to all, whether it brings gradients here or
        # not: its weight counts.
        silent = task != self.losses.task_of_all
        said = come_to(self.losses.calls)
        self.running.begin_backward(silent=silent, dropped=dropped, weighed=weighed, said=said)

    def received(
        self, leaf: int, p: Any, task: int, around: int | None, *, first: bool = False
    ) -> None:
        """A parameter got a gradient: it goes into its bucket, unless it must not be used.

        task: the graph task that brought it. around: the one that began the backward. first:
        it may be the first one of the backward.
        """
        try:
            self.losses.require(task, around)
            if first:
                self.require_not("a backward", "no loop")
                if self.running.phase.silent:
                    self.running.first_gradient()
            if isinstance(p.grad, ShardedGrad):
                p.grad = p.grad.arrived
                if p.grad is None:
                    return
            self.running.take(0, leaf, p)
        finally:
            self.stand_ins.stand_for(p, task)  # the user's hooks come after this one

    def backward_ends(self) -> None:
        """The epilogue: what the backward brought is in the state from here on."""
        before = self.state.progress.backwards
        try:
            self.running.finish(counts=False)  # torch.autograd.grad may have brought nothing
            if self.loops.open is not None:
                self.loops.open.took(before)
        except BaseException as error:
            self.running.fail(error)
            raise
        if self.loops.open is None:
            self.show_gradients()
        else:
            self.stand_ins.stand()

    def failed(self, error: BaseException) -> None:
        """A forward or a backward raised here; what it is part of comes here as well."""
        if not in_backward():
            self.running.fail(error)
            self.events.abandon()

    # Gradients.

    def show_gradients(self) -> None:
        """Let `p.grad` say that the engine holds gradients, if it does."""
        held = self.state.gradients.held or self.state.window.pending.held
        self.stand_ins.stand() if held else self.stand_ins.drop()

    def clear(self) -> None:
        """Forget every gradient, also what an open window adds to."""
        self._dropped = ""
        self.put_each(without_gradients)

    def note_dropped(self, name: str, backwards: int, error: str) -> None:
        """A window was left by an exception, and what so many backwards brought was dropped."""
        if backwards > 0:
            self._dropped = explain(
                f"{error} left a {name} block, and the gradients of its {backwards} backwards were "
                "dropped.",
                cause="a loader that ended in the block (StopIteration), an error that was caught "
                "outside of it, or a `break` out of a generator around it. What was there before "
                "the block stays. (DDP keeps what a no_sync() block has brought until then.)",
                fix="end the block before what may raise, or run the backwards again; "
                "engine.zero_grad() after the error says that they are not wanted.",
            )

    def say_dropped(self) -> None:
        """Warn, once, of what a window that raised has dropped."""
        text, self._dropped = self._dropped, ""
        if text:
            warnings.warn(text, UserWarning, stacklevel=4)

    def drop_if_user_did(self) -> None:
        """Forget every gradient if somebody has set `p.grad` to None."""
        if self.stand_ins.dropped():
            self.stand_ins.drop()
            self.clear()

    # What all ranks make together.

    def call(self, name: str) -> None:
        """Wait until every rank makes this call."""
        self.require_not(name, "loop")
        self.running.performer.call(f"{name} of engine {self.running.form.number}")

    def with_gradients(self, name: str, path: str = "", *, begins: bool = False) -> TrainState:
        """Reduce what waits on any rank; return the state, which holds all gradients then.

        `path`: of the parameter that it is about. Raises `PhaseError` if no rank holds any, unless
        this `begins` with gradients of zero.
        """
        if not self.reduced(name, path, begins=begins):
            raise PhaseError(
                f"{name}: there are no gradients; {int(self.state.step)} updates so far.",
                cause="no backward ran since the last step() or zero_grad(), or it ran on "
                "another model, or none of this model's parameters took part in the loss.",
                fix="run loss.backward() or engine.backward(loss) before it.",
            )
        return self.state

    def reduced(self, name: str, path: str = "", *, begins: bool = False) -> bool:
        """Reduce what waits on any rank; return whether a rank holds gradients, or this begins."""
        self.require_not(name, "loop", "window")
        self.drop_what_user_dropped()
        said = self.agreed(f"{name} {path}".strip())
        if begins and not said.held:
            self.put(begun(self.state))
        if said.held or begins:
            self.put(reduce_agreed(self.state, said, used=0))
        if begins and not self.stand_ins.standing:
            self.show_gradients()
        return said.held or begins

    def wrote_gradient(self, path: str, number: int) -> None:
        """The gradient of a leaf was given: an update steps it."""
        used = progress.saw_use(self.state.progress, as_bits([number]))
        self.put(self.state.replace(progress=used))
        self.stand_ins.gradients.changed()
        self.stand_ins.stand_again(path)

    def drop_what_user_dropped(self) -> None:
        """`drop_if_user_did`, and raise on every rank if one of them raises.

        What the user has put into `p.grad` is written to the gradients: a collective, then.
        """
        self.wait()
        if not self.stand_ins.touched:
            return
        given = self.stand_ins.taken()
        with raises_together(self.axis):
            self.drop_if_user_did()
        if given:
            self.with_gradients("p.grad = g", begins=True)
        for p, leaf in self.params.learning:
            if id(p) in given:
                self.wrote_gradient(self.state.setup.layout.leaves[leaf].path, leaf)
                self.stand_ins.write(p, given[id(p)])

    def agreed(self, name: str, *, updates: bool = False) -> Agreed:
        """Ask all ranks what they hold of gradients; for an update, also which leaves they used."""
        name = f"{name} of engine {self.running.form.number}{self.stand_ins.gradients.summary}"
        running, since = self.running, self.writes.since
        written = (lambda: since(self.state)) if updates else bool
        return agree(
            name,
            running.states,
            updates=updates,
            uses=updates,
            now=lambda: running.states,
            written=written,
        )[0]

    # Where it stands.

    def wait(self) -> None:
        """Before a call of all ranks: drop what raised, put aside what a forward brought."""
        self.require_not_closed()
        self.drop_unfinished()
        if not in_backward():
            self.running.put_aside()

    def drop_unfinished(self) -> None:
        """Drop a plain backward that raised, of any engine on these ranks."""
        self.events.backwards.drop_unfinished()
        self.running.performer.drop_raised()

    def require_not_closed(self) -> None:
        """Raise `PhaseError` for an engine that was closed."""
        if self.running.client.is_over:
            raise PhaseError(
                "a closed engine was used.",
                cause="engine.close() gave the module and the optimizer back.",
                fix="use those as ordinary ones, or make a new Engine of the module.",
            )

    def require_not(self, name: str, *places: Where) -> None:
        """Raise `PhaseError` for a call of a closed engine, or in one of these places."""
        self.require_not_closed()
        for where in places:
            place = PLACES[where]
            if place.is_here(self):
                raise PhaseError(f"{name} {place.seen}", cause=place.cause, fix=place.fix)

    def begin_anew(self) -> None:
        """Forget what the optimizer keeps, but for masters: no step was made. A collective."""
        self.wait()
        self.call("optimizer.state.clear()")
        self.put(begun_anew(self.state))

    def end(self) -> None:
        """The module and the optimizer were given back: no pass follows."""
        self.losses.end()
        self.running.close()
        for p in self.params.all_objects:
            OWNERS.pop(id(p), None)


# Where a call may not be made.


class Place(NamedTuple):
    """A place, whether a driver is there, and what to say of a call that is made in it."""

    is_here: Callable[[Driver], Any]
    seen: str
    cause: str
    fix: str


Where = Literal["backward", "forward", "window", "loop", "no loop", "left loop", "own buffers"]

PLACES: dict[Where, Place] = {
    "backward": Place(
        lambda _: in_backward(),
        "inside a backward.",
        cause="a hook on a tensor or parameter called it.",
        fix="call it after loss.backward() has returned.",
    ),
    "forward": Place(  # its graph is of these parameters
        lambda driver: driver.events.calls > 0,
        "inside a forward of the engine's module.",
        cause="a hook on the forward of the module, or of a part of it, called it.",
        fix="note there that it is due, and call it between steps: after engine.step().",
    ),
    "window": Place(
        lambda driver: driver.state.window.is_open,
        "inside a window (coalesce() or no_sync()).",
        cause="the window was left open around the whole step, or gradients were asked for before "
        "it has reduced them.",
        fix="leave the `with` block first; what it collected is reduced at the end of coalesce(), "
        "after no_sync() when p.grad is asked for, at the latest by step().",
    ),
    "loop": Place(
        lambda driver: driver.loops.open,
        "inside of a loop over engine.parts().",
        cause="a call that is made once for all logical ranks, or a second loop.",
        fix="make it after the loop, which must come to its end.",
    ),
    "no loop": Place(
        lambda driver: driver.loops.buffers is not None and driver.loops.open is None,
        "outside of engine.parts(), and the engine has logical ranks.",
        cause="engine(batch) with the batch of this rank, of which each logical rank has a part.",
        fix="write `for part in engine.parts(batch): engine.backward(engine(part))`.",
    ),
    "left loop": Place(
        lambda driver: driver.loops.left,
        "after a loop over engine.parts() that was left before its end.",
        cause="break, return, or an exception that was caught outside of the loop: some logical "
        "ranks have made no backward.",
        fix="call engine.zero_grad(), on every rank, and go on with the next batch.",
    ),
    "own buffers": Place(
        lambda driver: driver.loops.buffers is not None and driver.loops.buffers.held,
        "between a loop over engine.parts() and step().",
        cause="each logical rank has buffers of its own, until the update.",
        fix="call it after engine.step().",
    ),
}


# Functions of an engine's driver as methods of the engine.

P = ParamSpec("P")
R = TypeVar("R")


def as_method(function: Callable[Concatenate[Driver, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return the method of an engine that calls `function` with the engine's driver."""

    @functools.wraps(function)
    def method(engine: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(engine._driver, *args, **kwargs)

    return method
