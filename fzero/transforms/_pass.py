"""One forward and backward over some states of one axis: who gathers, who reduces, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.collectives import FUNCTIONAL, Channel, Kind, channel_of
from fzero.errors import AxisError, FzeroError
from fzero.gather import Gatherer
from fzero.packing import unpack
from fzero.partition import assemble
from fzero.placeholder import placeholders
from fzero.reduce import Reducer
from fzero.sequence import Sequencer
from fzero.state import TrainState, schedule
from fzero.transforms._receive import receive


class Pass:
    """The states of one axis in one gradient call."""

    def __init__(self, states: Sequence[TrainState]) -> None:
        self.states = list(states)
        self._axis = states[0].setup.axis
        self._lazy = any(state.setup.gathers_by_unit for state in states)
        self._waits = [state.window.is_open for state in states]
        setups = [state.setup for state in states]
        self._channel: Channel | None = channel_of(self._axis)
        data = self._channel.data if self._channel is not None else self._axis
        self.reducer = Reducer(setups, data, [_device(state) for state in states])
        self.reducer.keeps = self._waits
        self._gatherer = Gatherer([setup.layout for setup in setups], data)
        self._sequencer = self._sequence() if self._lazy else None
        self._speaks = self._channel is not None and (self._lazy or not all(self._waits))

    def _sequence(self) -> Sequencer:
        """Units of all states have one order; the first that is gathered by unit says how early."""
        assert self._channel is not None
        lazy = next(state for state in self.states if state.setup.gathers_by_unit)
        gathering = lazy.setup.gathering
        self._gatherer.hold_shards([state.params.flats for state in self.states])
        made = Sequencer(
            self._channel, self._gatherer, self.reducer, gathering.limits, number=FUNCTIONAL
        )
        made.stays = gathering.reshard_after_forward == "window" and lazy.window.is_open
        self._owner = self.states.index(lazy)
        self._gatherer.adopt([state.window.gathered for state in self.states])
        return made

    # The call, in its order.

    def begin(self) -> None:
        """Announce the call to the other ranks."""
        if not self._speaks or self._channel is None:
            return
        if self._sequencer is not None:
            self._announce(0)
        else:
            self._channel.announce(self._text())
            self.reducer.before_first = self._agree

    def params(self, number: int) -> tuple[Any, list[Tensor]]:
        """Return the pytree of one state for the loss, and its leaves that are differentiated."""
        state = self.states[number]
        layout = state.setup.layout
        by_leaf: dict[int, Tensor] = {}
        first = sum(len(s.setup.layout.groups) for s in self.states[:number])
        for i, group in enumerate(layout.groups):
            if state.setup.gathers_by_unit:
                tensors: Sequence[Tensor] = placeholders(self._gatherer, first + i)
            else:
                tensors = unpack(layout, i, state.params.flats[i].detach())
            by_leaf.update(zip(group.leaves, tensors, strict=True))
        learning = []
        for index, leaf in enumerate(layout.leaves):
            if leaf.trainable:
                x = by_leaf[index].requires_grad_()
                x.register_post_accumulate_grad_hook(self.reducer.hook(number, index))
                learning.append(x)
        return assemble(layout, by_leaf), learning

    def end_forward(self) -> None:
        """The loss is made: what it gathered is not kept for the backward."""
        if self._sequencer is not None:
            self._sequencer.end_forward()
            self._announce(1)

    def finish(self) -> list[TrainState]:
        """The backward is over on every rank: return the states with its gradients."""
        states = self.states
        if self._sequencer is not None:
            states = self._with_programs(self._sequencer.finish())
        elif self._speaks:
            self._finish_in_turn()
        new = []
        for number, state in enumerate(states):
            rows = self.reducer.take_rows(number) or self.reducer.local(number)
            new.append(receive(state, rows))
        return new

    def fail(self, error: BaseException) -> None:
        """The call raised: keep in step with the other ranks, and tell those that do not know."""
        tell = self._speaks and not isinstance(error, AxisError)
        if self._sequencer is not None:
            self._sequencer.fail(tell=tell)
            return
        self.reducer.drop()
        if tell and self._channel is not None:
            with suppress(FzeroError):
                self._agree()
                self.reducer.flush()
            self._channel.fail()
            self.reducer.drop()

    # How.

    def _announce(self, phase: int) -> None:
        assert self._sequencer is not None
        owner = self.states[self._owner]
        self._sequencer.begin(
            self._text(), owner.progress.backwards, phase, owner.schedule, served=False
        )

    def _text(self) -> str:
        lines = ["grad_and_reduce"]
        for state in self.states:
            setup = state.setup
            place = "in a window" if state.window.is_open else "at once"
            lines.append(f"stage {setup.stage}, reduced {place}, {setup.policy.differentiates_as}")
        return "\n".join([*lines, f"gradient {self.states[0].progress.backwards} of this update"])

    def _agree(self) -> None:
        """Raise unless all ranks announced this call. Below stage 3 it has one order anyway."""
        if self._channel is not None and self.reducer.before_first is not None:
            self.reducer.before_first = None
            self._channel.answer()

    def _finish_in_turn(self) -> None:
        assert self._channel is not None
        late = True
        while late:
            self.reducer.flush()
            self._channel.post(Kind.DONE, hint=int(bool(self.reducer.left())))
            self.reducer.land()
            late = any(message.hint for message in self._channel.read())
            self.reducer.begin()

    def _with_programs(self, found: Sequence[tuple[int, int, Any]]) -> list[TrainState]:
        states = list(self.states)
        owner = states[self._owner]
        known = owner.schedule
        for index, phase, program in found:
            known = schedule.record(known, index, phase, program)
        states[self._owner] = owner.replace(schedule=known)
        if self._sequencer is not None and self._sequencer.stays:
            for number, gathered in enumerate(self._gatherer.kept_flats()):
                window = replace(states[number].window, gathered=gathered)
                states[number] = states[number].replace(window=window)
        return states


def _device(state: TrainState) -> torch.device:
    return next((flat.device for flat in state.params.flats), torch.device("cpu"))
