"""One rank as a protocol record: what its performer does, its values, gradients and collectives."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fzero.state import rounds
from fzero.state.effects import (
    Discard,
    Drop,
    Effect,
    Exchange,
    Free,
    Gather,
    Look,
    Post,
    Raise,
    Read,
    Receive,
    Reduce,
    TakePart,
    Wait,
    WaitForReductions,
)
from fzero.state.protocol import Answer, Broke, Join, Protocol, ProtocolEvent, advance
from fzero.state.rounds import Message, MessageKind, Round, row_of
from tests.state.world import Dead, Fault, OwnError, PeersFailed, Steps, World

IN_FLIGHT = 1  # reduce-scatters at once, as of a Reducer

ASTRAY = Post | Read | Exchange | Raise
"""Effects whose errors are those of the communication: a rank does not raise in them alone."""


@dataclass(frozen=True)
class Value:
    """Gathered values of a unit: whether they are exact, and of which update."""

    exact: bool
    version: int


class Rank:
    """One rank: its record, and what its performer does."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.protocol = Protocol()
        for model, units in enumerate(world.units):
            self.protocol, _ = advance(self.protocol, Join(model, units))
        self.version = 0
        self.here: dict[tuple[int, int], Value] = {}
        self.flights: dict[tuple[int, int], tuple[int, Value]] = {}
        self.reductions: deque[tuple[int, int, int]] = deque()  # (model, unit, k)
        self.crossing: deque[tuple[int, int]] = deque()
        self.gradients: dict[tuple[int, int], set[str]] = {}
        self.sums: list[Counter[str]] = [Counter() for _ in world.units]
        self.reduced: list[Counter[str]] = [Counter() for _ in world.units]  # in the states
        self.round = -1
        self.unread = False  # the last round
        self.asks = 0  # rounds with a question of this rank and exchanges, since the last update
        self.breaks_in, self.breaks = -1, ""  # effects of this kind until one raises

    # Events.

    def send(self, event: ProtocolEvent) -> Steps:
        """As a performer: do what follows from an event."""
        todo: deque[Effect] = deque()
        try:
            self._advance(event, todo)
            while todo:
                effect = todo.popleft()
                answer = yield from self._perform(effect)
                self._break_if_due(effect)
                if answer is not None:
                    self._advance(answer, todo)
            if self.protocol.agenda:
                raise Fault("an event ends", f"{event} leaves {self.protocol.agenda}")
        except Exception:
            self._advance(Broke(tuple(todo)), todo)
            raise
        self._require_record()

    def _advance(self, event: ProtocolEvent, todo: deque[Effect]) -> None:
        todo.extend(self._effects(event))

    def _effects(self, event: ProtocolEvent) -> tuple[Effect, ...]:
        self.protocol, effects = advance(self.protocol, event)
        return effects

    def _break_if_due(self, effect: Effect) -> None:
        """Raise behind an effect, as where memory runs out while values are unpacked."""
        if self.breaks_in < 0 or not self.protocol.running or isinstance(effect, ASTRAY):
            return
        if self.breaks not in ("", type(effect).__name__):
            return
        self.breaks_in -= 1
        if self.breaks_in < 0:
            raise OwnError

    def _require_record(self) -> None:
        """What the record says of this rank is so; only a pass has an announcement to read."""
        if self.protocol.open is not None and self.protocol.open not in self.protocol.running:
            raise Fault("the record is right", f"rank {self.number} is to read an old announcement")
        for number, model in self.protocol.models.items():
            resident = model.residency
            here = {unit for one, unit in self.here if one == number}
            flying = {unit for one, unit in self.flights if one == number}
            if here != {*resident.gathered} or flying != {*resident.flying}:
                seen = f"rank {self.number} has {here}, {flying} in flight: {resident}"
                raise Fault("the record is right", seen)

    def _perform(self, effect: Effect) -> Steps:
        match effect:
            case Post(message):
                yield self._all_posted
                self._post(message)
            case Read(waits):
                if not waits and not self._all_posted():
                    return Answer(None)
                yield self._all_posted
                if not self.unread:
                    raise Fault("each round is read once", f"rank {self.number}, {self.round}")
                self.unread = False
                rows = [self.world.rows[r, self.round] for r in range(self.world.size)]
                return Answer(Round(rows))
            case Exchange(value):
                values = yield from self._exchange(value)
                return None if value is None else Answer(values)
            case Raise(failed):
                if self.reductions or self.crossing:
                    raise Fault("one place", f"rank {self.number} raises and has not waited")
                if not failed:
                    yield from self._exchange("differ")
                raise PeersFailed(failed)
            case WaitForReductions():
                yield from self._wait_for_reductions()
            case Look(model):
                return Answer(() if self._starts_at_once() else None)
            case Reduce(model, unit, mine):
                yield from self._reduce(model, unit, mine)
            case Receive(model):
                record = self.protocol.models.get(model)
                if model in self.protocol.running and record and record.course.in_backward:
                    raise Fault("a backward takes its own sums", f"rank {self.number}: {effect}")
                self.receive(model)
            case Drop(model):
                self._drop(model)
            case Discard(model):
                yield from self._discard(model)
            case Gather() | TakePart() | Wait() | Free():
                yield from self._gather(effect)
        return None

    def receive(self, model: int) -> None:
        """Take what was reduced of a model into its state."""
        self.reduced[model] += self.sums[model]
        self.sums[model] = Counter()

    # Gathers.

    def _gather(self, effect: Gather | TakePart | Wait | Free) -> Steps:
        group, rank = self.world.shards[self.number], self.number
        place = effect.model, effect.unit
        match effect:
            case Gather(_, _, exact):
                if place in self.here or place in self.flights:
                    raise Fault("gathered once", f"rank {rank} does {effect} again")
                k = group.start(rank, ("gather", *place, exact))
                self.flights[place] = k, Value(exact, self.version)
            case TakePart(_, _, exact):
                k = group.start(rank, ("gather", *place, exact))
                yield lambda: group.is_over(k)
            case Wait():
                if place not in self.flights:
                    raise Fault("what is waited for flies", f"rank {rank} does {effect}")
                k, value = self.flights.pop(place)
                yield lambda: group.is_over(k)
                self.here[place] = value
            case Free():
                if place not in self.here and place not in self.flights:
                    raise Fault("what is freed is here", f"rank {rank} does {effect}")
                self.here.pop(place, None)
                if place in self.flights:
                    k, _ = self.flights.pop(place)
                    yield lambda: group.is_over(k)

    # Rounds.

    def _post(self, message: Message) -> None:
        self.round = self.world.channel.start(self.number, "round")
        self.unread = True
        row, width = row_of(message), 4 + rounds.CODES
        if len(row) > width:
            raise Fault("a message has room", f"rank {self.number}: {row} of {width} numbers")
        self.world.rows[self.number, self.round] = [*row, *[0] * (width - len(row))]
        self.asks += message.kind is MessageKind.ASK

    def _all_posted(self) -> bool:
        return self.round < 0 or self.world.channel.is_over(self.round)

    def _exchange(self, value: Any) -> Steps:
        world, rank = self.world, self.number
        k = world.channel.start(rank, "exchange")
        self.asks += 1
        world.rows[rank, k] = value
        yield lambda: world.channel.is_over(k)
        found: list[Any] = []
        for other in range(world.size):
            if world.rows[other, k] not in found:
                found.append(world.rows[other, k])
        return tuple(found)

    # Reductions, as of a Reducer.

    def _reduce(self, model: int, unit: int, mine: bool) -> Steps:
        world, rank = self.world, self.number
        bounded = unit in world.units[model].bounded
        while bounded and len(self.reductions) >= IN_FLIGHT:
            yield from self._wait_for_oldest()
        brings = frozenset(self.gradients.pop((model, unit), ())) if mine else frozenset[str]()
        k = world.sums[rank].start(rank, ("reduce", model, unit), brings)
        self.reductions.append((model, unit, k))

    def _starts_at_once(self) -> bool:
        """Whether the reductions before are over; what goes on across replicas is waited for."""
        world, rank = self.world, self.number
        return all(world.sums[rank].is_over(k) for _, _, k in self.reductions) and all(
            world.across[rank].is_over(k) for _, k in self.crossing
        )

    def _wait_for_oldest(self) -> Steps:
        world, rank = self.world, self.number
        yield from self._wait_across()
        model, unit, k = self.reductions.popleft()
        yield lambda: world.sums[rank].is_over(k)
        got = world.sums[rank].sum(k)
        if any(count > 1 for count in got.values()):
            raise Fault("one sum", f"rank {rank} gets {got} of unit {unit}")
        if world.replicas == 1:
            self.sums[model] += got
            return
        k = world.across[rank].start(rank, ("across", model, unit), frozenset(got))
        self.crossing.append((model, k))

    def _wait_across(self) -> Steps:
        world, rank = self.world, self.number
        while self.crossing:
            model, k = self.crossing.popleft()
            yield lambda k=k: world.across[rank].is_over(k)
            self.sums[model] += world.across[rank].sum(k)

    def _wait_for_reductions(self) -> Steps:
        while self.reductions:
            yield from self._wait_for_oldest()
        yield from self._wait_across()

    def _discard(self, model: int) -> Steps:
        self._drop(model)
        while self.reductions or self.crossing:
            with suppress(Dead):
                yield from self._wait_for_reductions()
        self.sums[model].clear()

    def _drop(self, model: int) -> None:
        for key in [key for key in self.gradients if key[0] == model]:
            del self.gradients[key]
