"""A forward and a backward over states on some ranks: who gathers, reduces, in which order.

Both drivers use it: a functional step makes one for each gradient call, an engine one for its life.

    begin_forward -> reads of placeholders -> end_forward
    begin_backward -> gradients of leaves -> finish | fail
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor

from fzero.collectives import FUNCTIONAL, Channel, channel_of
from fzero.errors import AxisError
from fzero.gather import Gatherer
from fzero.reduce import Reducer
from fzero.sequence import Sequencer
from fzero.state import Placement, TrainState, pass_state, progress, schedule, window
from fzero.state.effects import AnnouncePhase, EndPhase
from fzero.state.pass_state import PassState
from fzero.transforms._finite import FiniteCheck, with_found
from fzero.transforms._observe import tell
from fzero.transforms._receive import (
    accumulate,
    feed_back,
    filled,
    part_of_update,
    put,
    receive,
    receive_local,
    with_lost,
)


class Pass:
    """The gatherer, the reducer and the sequencer of some states, and what they do in one pass.

    name: what the other ranks are told that runs. states: on the same ranks, each on a mesh of its
    own. number: of the sequencer among those of the channel; None for the next one. served: ranks
    that make a call while others are in this pass take part in it (stage 3). uses: note which
    leaves get a gradient; else all count as used.
    """

    def __init__(
        self,
        name: str,
        states: Sequence[TrainState],
        *,
        number: int | None = None,
        served: bool = False,
        uses: bool = False,
    ) -> None:
        self.states = list(states)
        self._name, self._served, self._uses = name, served, uses
        self._carries = number == FUNCTIONAL  # what a window keeps goes with the state
        setups = [state.setup for state in states]
        self.channel = channel_of(setups[0].axis)
        if self.channel is None and any(setup.streams for setup in setups):
            alone = setups[0].axis  # one rank: its units come and go all the same
            self.channel = Channel(alone, alone)
        channel = self.channel
        axes = [setup.axis if channel is None else channel.over(setup.axis) for setup in setups]
        devices = [state.device for state in states]
        self.reducer = Reducer(setups, axes, devices)
        self.finite = FiniteCheck(states)
        self.gatherer = Gatherer([setup.layout for setup in setups], axes)
        lazy = [i for i, setup in enumerate(setups) if setup.gathers_by_unit]
        differ = [i for i in lazy if setups[i].layout.trainable]  # others may be read elsewhere
        self._owner = [*differ, *lazy, 0][0]  # whose schedule has the programs of the pass
        self._lazy = bool(lazy)
        # Below stage 3 no program is recorded: every bucket is reduced, the last one first.
        self._fixed = schedule.Program(tuple(~unit for unit in self.reducer.backwards))
        self.sequencer: Sequencer | None = None
        if self.channel is not None:
            gathering, parts = setups[self._owner].gathering, (self.gatherer, self.reducer)
            self.sequencer = Sequencer(
                self.channel, *parts, gathering, gathers=self._lazy, number=number
            )
            if self._lazy:
                self._hold_shards()
                self.sequencer.adopt([state.window.gathered for state in states])
        self.phase = PassState()
        self.drop_if_raised: Callable[[], None] | None = None  # set by an engine

    def close(self) -> None:
        """No pass will follow."""
        if self.sequencer is not None:
            self.sequencer.close()

    # The pass, in its order.

    def begin_forward(self) -> None:
        """Below stage 3 nothing is gathered; at stage 3 announce what will be.

        Nothing is where all parameters are held: ranks may then run as many forwards as they like.
        """
        self.put_aside()
        self.finite.drop()  # a loss whose backward brought nothing
        if self.channel is not None:  # an error of the pass before does not concern this one
            self.channel.ended_in_error = False
        self.reducer.begin([True for _ in self.states])  # what comes inside of it is put aside
        self._go_on(pass_state.begin_forward(self.phase, **self._crossing()))

    def end_forward(self) -> None:
        """What the forward gathered is not kept for the backward, unless that is asked for."""
        if self.sequencer is not None and self.phase.gathered:
            self.sequencer.end_forward()
        self._go_on((pass_state.end_forward(self.phase), ()))

    def begin_backward(self, *, silent: bool = False, dropped: bool = False) -> None:
        """Announce that gradients will be reduced.

        `silent`: below stage 3, leave that to `first_gradient`. A backward that brings none, such
        as torch.autograd.grad by an input, then concerns no other rank. `dropped`: this rank has
        just thrown away what it held, which the others must have done, too.
        """
        self.put_aside()
        self.reducer.begin([state.window.is_open for state in self.states])
        silent = silent and not self._lazy
        begun = pass_state.begin_backward(
            self.phase, **self._crossing(), silent=silent, dropped=dropped
        )
        if not silent:
            self._reduce_waiting()
        self._go_on(begun)

    def first_gradient(self) -> None:
        """The backward brings gradients: what waits is reduced with them, and ranks are told."""
        self._reduce_waiting()
        self._go_on(pass_state.first_gradient(self.phase))

    def _reduce_waiting(self) -> None:
        """Let what waits in a closed window be reduced with the gradients that come."""
        for number, state in enumerate(self.states):
            pending, share = state.window.pending, state.setup.policy.grad_scale
            feed_back(state, self.reducer.feedback[number], share)
            if pending.held and not state.window.is_open:
                # `receive` multiplies all of it by the share
                flats = pending.flats if share == 1.0 else [x / share for x in pending.flats]
                waited = zip(state.setup.layout.trainable, flats, strict=True)
                self.reducer.add_waiting(number, dict(waited))

    def hook(self, state: int, leaf: int) -> Callable[[Tensor], None]:
        """Return a hook for a leaf: hands on its gradient as soon as autograd has made it."""
        put = self.reducer.hook(state, leaf)
        if not self.finite.looks_at(state):
            return put

        def on_gradient(p: Tensor) -> None:
            if p.grad is not None:
                self.finite.gradient(state, leaf, p.grad)
            put(p)

        return on_gradient

    def put_aside(self) -> None:
        """Let what came outside of a pass wait in the window.

        A backward that runs inside a forward brings gradients, and ranks do not agree on it.
        """
        if not self.reducer.received:
            return
        bad = self.finite.taken()
        for number, state in enumerate(self.states):
            found = self.reducer.pop_local(number)
            if found:
                flats = filled(state, found, Placement.PARTIAL)
                state = with_found(state, bad[number])
                used = progress.saw_use(state.progress, self._used(number))
                state = state.replace(progress=used)
                self.states[number] = put(state, part_of_update(state, flats))
        self.reducer.received = 0

    def finish(self, *, counts: bool = True) -> list[TrainState]:
        """The backward is over on every rank: return the states with its gradients.

        Unless it `counts`, one that brought no gradient to any rank changes nothing.
        """
        self._go_on(pass_state.finish(self.phase))
        new, bad = [], self.finite.taken()
        for number, state in enumerate(self.states):
            waits = state.window.is_open
            if waits:
                state = self._with_served(number)
            means = self.reducer.pop_means(number)
            if not (means or counts or self.reducer.has_local(number)):
                new.append(state)
                continue
            if state.window.pending.held and not waits:
                state = state.replace(window=window.pop(state.window)[0])
            state = with_lost(state, self.reducer.feedback[number])
            state, used = with_found(state, bad[number]), self._used(number)
            if means:
                flats = filled(state, means, state.setup.gradients)
                new.append(receive(state, flats, used=used))
            else:  # on one rank, or in a window
                new.append(receive_local(state, self.reducer, number, used=used))
        self.states = new
        self.reducer.received = 0
        return new

    def _used(self, number: int) -> int:
        """Return, and forget, which leaves of a state got a gradient, bit by bit."""
        used = self.reducer.pop_used(number)
        return used if self._uses else progress.ALL

    def take_served(self) -> None:
        """Add what other ranks reduced while this one served them: it is every rank's gradient."""
        self.states = [self._with_served(number) for number in range(len(self.states))]

    def _with_served(self, number: int) -> TrainState:
        state, means = self.states[number], self.reducer.pop_means(number)
        if not means:
            return state
        flats = filled(state, means, state.setup.gradients)
        return accumulate(state, part_of_update(state, flats))

    def finish_forward(self) -> list[TrainState]:
        """A forward is over that no backward follows: what is gathered goes."""
        self._go_on(pass_state.finish_forward(self.phase))
        return self.states

    def fail(self, error: BaseException) -> None:
        """The pass raised: keep in step with the other ranks, and tell those that do not know."""
        self.finite.drop()
        known = self.channel is not None and self.channel.ended_in_error
        astray = isinstance(error, AxisError)
        phase, in_step, tells = pass_state.fail(self.phase, known=known, astray=astray)
        if self.sequencer is None:
            self.reducer.discard()
        else:
            self.sequencer.fail(in_step=in_step, tell=tells)
        self._go_on((phase, ()))

    def changed(self) -> None:
        """The parameters changed: what was gathered of them is stale."""
        if self.sequencer is not None and self._lazy:
            self._hold_shards()
            self.sequencer.changed()

    def window_ends(self) -> None:
        """Nothing is kept any longer than a backward."""
        if self.sequencer is not None and self._lazy:
            self.sequencer.stays = False
            self.sequencer.let_go()

    # How.

    def _go_on(self, to: pass_state.Next) -> None:
        """Be there in the pass, and tell the other ranks what they must know."""
        self.phase = to[0]
        self.gatherer.rounds |= self.phase.runs
        for effect in to[1]:
            assert self.sequencer is not None  # without other ranks nothing crosses
            match effect:
                case AnnouncePhase(phase):
                    if phase == pass_state.FORWARD:
                        self._hold_shards()
                    self._announce(phase)
                case EndPhase():
                    programs = self.sequencer.finish()
                    if self._lazy:
                        self._learn(programs)
                    if self._lazy and self._carries and self.sequencer.stays:
                        self._keep_gathered()
        self.gatherer.rounds = self.phase.runs  # what is left of a plan is rounded as it began

    def _saw_gathered(self, group: int, flat: Tensor) -> None:
        numbered = ((s, i) for s in self.states for i in range(len(s.setup.layout.groups)))
        state, index = next(islice(numbered, group, None))
        tell("gathered", state, (index, flat))

    def _hold_shards(self) -> None:
        shards = [state.params.flats for state in self.states]
        self.gatherer.hold_shards(shards, [state.device for state in self.states])
        if any(state.setup.policy.observer for state in self.states):
            self.gatherer.on_gathered = self._saw_gathered

    def _crossing(self) -> dict[str, bool]:
        """What of the next phase crosses ranks: parameters that it reads, gradients to sum."""
        waits = [state.window.is_open for state in self.states]
        if self.sequencer is None:
            return {"reads": False, "sums": False}
        state = self.states[self._owner]
        reshard = state.setup.gathering.reshard_after_forward
        self.sequencer.stays = reshard == "window" and state.window.is_open
        return {"reads": self._lazy and not self.gatherer.has_everything, "sums": not all(waits)}

    def _announce(self, phase: int) -> None:
        assert self.sequencer is not None
        state = self.states[self._owner]
        index, program = state.progress.backwards, self._fixed
        if self._lazy:
            program = schedule.expected(state.schedule, index, phase)
        served = self._served and not self.phase.dropped
        self.sequencer.drop_if_raised = self.drop_if_raised
        self.sequencer.begin(self._text(), (index, phase), program, served=served)

    def _text(self) -> str:
        lines = [self._name, f"gradients dropped just before: {self.phase.dropped}"]
        for state in self.states:
            setup = state.setup
            place = "in a window" if state.window.is_open else "at once"
            lines.append(f"stage {setup.stage}, reduced {place}, {setup.policy.differentiates_as}")
            lines.append(f"loss scale {state.scale and state.scale.policy}")
            if not self._served:
                lines.append(f"after {state.progress.reductions} reductions since the update")
        return "\n".join(lines)

    def _learn(self, found: dict[schedule.Place, schedule.Program]) -> None:
        """Expect these programs from now on."""
        owner = self.states[self._owner]
        known = owner.schedule
        for (index, phase), program in found.items():
            known = schedule.record(known, index, phase, program)
        if known is not owner.schedule:
            self.states[self._owner] = owner.replace(schedule=known)

    def _keep_gathered(self) -> None:
        """Let what is whole go with the state, to the next pass of its window."""
        for number, gathered in enumerate(self.gatherer.kept_flats()):
            state = self.states[number]
            kept = replace(state.window, gathered=gathered)
            self.states[number] = state.replace(window=kept)
