"""Performs the effects of a rank's protocol, and sends answers of other ranks back as events.

    an event -> advance -> effects, one after another -> channel, gatherers, reducers
                  ^------- what the channel brings -------'

It decides nothing. The ranks of an axis share one: all models on them are in one record.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from fzero.collectives._channel import Channel, mismatch
from fzero.context.modes import for_training
from fzero.errors import AxisError, PeerFailedError, PhaseError
from fzero.ranks.mesh import Axis
from fzero.state import protocol as rank
from fzero.state.effects import (
    Effect,
    Exchange,
    Look,
    ModelEffect,
    Post,
    Raise,
    Read,
    WaitForReductions,
)
from fzero.state.protocol import (
    Answer,
    Begin,
    Broke,
    Call,
    Event,
    FirstGradient,
    GiveUp,
    Join,
    Leave,
    Raised,
    Units,
)

_TORCH: Any = torch  # what it has no types for

FUNCTIONAL = 2**29
"""The number of a functional pass; of one inside its loss, the next."""

EVALUATION = 2**30
"""The number of an evaluation, which may run inside a pass; of one inside it, the next."""


class Party(Protocol):
    """The owner of a model's values: it performs the effects on them."""

    def perform(self, effect: ModelEffect) -> None:
        """Do what an effect on the model's units or gradients says."""
        ...

    def wait_for_reductions(self) -> None:
        """Wait for the reductions that were started."""
        ...

    def starts_at_once(self) -> bool:
        """Whether a reduction would start without a wait for one before."""
        ...

    def drop_raised(self) -> None:
        """Drop a backward that raised on this rank without a word to the other ranks."""
        ...


_DEFERRING = (Begin, FirstGradient, GiveUp)
"""The events at which a backward is deferred, or is not any more."""

_BY = "_fzero_raised_by"
"""Of an error, the performer that raised it: a loss may have states on several sets of ranks."""


class Performer:
    """The protocol of one rank on an axis, and the parties that perform its effects."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.protocol = channel, rank.Protocol()
        self._parties: dict[int, weakref.ref[Party]] = {}
        self._running: dict[int, Party] = {}  # those in a pass live until it is over
        self._joined = 0

    @property
    def axis(self) -> Axis:
        """The ranks."""
        return self.channel.axis

    def over(self, axis: Axis) -> Axis:
        """Return the axis that gathers and reductions go over, see `Channel.over`."""
        return self.channel.over(axis)

    # Models.

    def number(self) -> int:
        """Return the next number, the same on every rank that makes the same engines. A collective.

        Models that are gone on all ranks, with a pass that nobody will end, leave.
        """
        gone = {n for n in self.protocol.inside if self._parties.get(n, lambda: None)() is None}
        for number in gone.intersection(*self.tell(gone)):
            self.leave(number)
        self._joined += 1
        return self._joined

    def nested(self, first: int) -> int:
        """Return the number of a pass that may run inside others of its kind.

        first: the number of the outermost, `FUNCTIONAL` or `EVALUATION`.
        """
        return first + sum(first <= number < 2 * first for number in self.protocol.models)

    def join(self, party: Party, units: Units, number: int, gathered: tuple[int, ...] = ()) -> None:
        """Add a model by its number, which is the same on every rank; see `Join`."""
        self._parties[number] = weakref.ref(party)
        self.send(Join(number, units, gathered))

    def leave(self, number: int) -> None:
        """Remove a model."""
        self._parties.pop(number, None)
        self.send(Leave(number))

    def _party(self, number: int) -> Party:
        party = self._parties.get(number, lambda: None)()
        if party is None:
            raise PhaseError(
                f"rank {self.axis.rank}: another rank uses model {number} of this axis, which "
                "is closed or gone here.",
                cause="close(), or the last reference to an engine or a state, on some ranks only.",
                fix="keep it on every rank for as long as any rank uses it.",
            )
        return party

    def drop_raised(self) -> None:
        """End the passes of backwards that raised here without a word to the other ranks.

        An engine does not see the exception of a plain loss.backward(). It may be gone before its
        pass is over, at another time on each rank.
        """
        for number in sorted(self._running):
            if number in self._running:
                self._running[number].drop_raised()

    # Events.

    def send(self, event: Event) -> None:
        """Tell the protocol of an event, and do what follows from it."""
        todo: deque[Effect] = deque()
        try:
            self._advance(event, todo)
            while todo:
                answer = self._perform(todo.popleft())
                if answer is not None:
                    self._advance(answer, todo)
        except BaseException as error:
            self._advance(Broke(tuple(todo)), todo)
            if not hasattr(error, _BY):
                setattr(error, _BY, self)
            raise

    def knows(self, error: BaseException) -> bool:
        """Whether all of these ranks have an error: not one that other ranks have made known."""
        return isinstance(error, AxisError) and getattr(error, _BY, self) is self

    def _advance(self, event: Event, todo: deque[Effect]) -> None:
        before = self.protocol
        self.protocol, effects = rank.advance(before, event)
        todo.extend(effects)
        if self.protocol.running is not before.running or isinstance(event, _DEFERRING):
            self._running = {number: self._party(number) for number in self.protocol.under_way}

    def _perform(self, effect: Effect) -> Answer | None:
        match effect:
            case WaitForReductions():
                # A reduction may communicate again when it is waited for. So no rank waits for one
                # alone, while another waits for it in a round.
                for number in sorted(self._parties):
                    party = self._parties[number]()
                    if party is not None:
                        party.wait_for_reductions()
            case Look(number):
                return Answer(() if self._party(number).starts_at_once() else None)
            case Post(message):
                self.channel.post(message)
            case Read(waits):
                is_here = waits or self.channel.is_answered
                return Answer(self.channel.read() if is_here else None)
            case Exchange(value):
                values = tuple(self.channel.tell_each_once(value))
                return None if value is None else Answer(values)
            case Raise(failed):
                raise self._error(failed)
            case _:
                with _TORCH._C._DisableFuncTorch():  # another rank asks, inside of a transform here
                    self._party(effect.model).perform(effect)
        return None

    def _error(self, failed: tuple[int, ...]) -> Exception:
        """What all ranks raise. A collective if they make different calls."""
        if not failed:
            posted = self.protocol.posted
            return mismatch(self.channel.tell("" if posted is None else posted.text))
        return PeerFailedError(
            f"rank {self.axis.rank}: the step raised on rank{'s' * (len(failed) > 1)} "
            f"{[*failed]}, so its gradients cannot be reduced.",
            cause="an error in the loss, the forward or the backward, on that rank only.",
            fix=f"see the error of rank {failed[0]}; here nothing was changed.",
        )

    # Calls that all ranks make.

    def call(self, text: str, value: int = 0) -> frozenset[int]:
        """Wait until every rank makes this call; return the values that they give, each once.

        Ranks that are in a pass are served until they come here. Raises `MismatchError` on every
        rank if the ranks make calls that differ, naming them.
        """
        each_once = frozenset(self.call_with(text, lambda: [value]))
        return frozenset(values[0] for values in each_once)

    def call_with(
        self, text: str, values: Callable[[], Sequence[int]]
    ) -> tuple[tuple[int, ...], ...]:
        """As `call`, with up to `CODES` numbers of 0 or more; return those of each rank.

        They are asked for before each round: what this rank holds changes while it serves others.
        """

        def until_all_are_heard() -> None:
            self.send(Call(text, tuple(values())))
            while not self.protocol.heard:
                self.send(Call(text, tuple(values())))

        self.drop_raised()
        for_training(until_all_are_heard)
        return self.protocol.heard

    def tell(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in rank order."""
        return self.channel.tell(value)

    def fail(self) -> None:
        """Say that this rank raised. The others raise where they read it."""
        with suppress(AxisError):
            self.send(Raised())
