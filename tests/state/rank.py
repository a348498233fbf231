"""One rank as a protocol record: its collectives, its gradients, and a driver that sends events."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from fzero.state import schedule
from fzero.state.effects import (
    Discard,
    Drop,
    Effect,
    Exchange,
    Free,
    Gather,
    Post,
    Raise,
    Read,
    Reduce,
    TakePart,
    Wait,
    WaitForReductions,
)
from fzero.state.pass_state import BACKWARD
from fzero.state.protocol import (
    Announcement,
    Answer,
    Begin,
    Broke,
    Call,
    Changed,
    EndForward,
    Event,
    Failed,
    Finish,
    FirstGradient,
    GiveUp,
    Join,
    Protocol,
    Ready,
    SyncPoint,
    Told,
    Use,
    advance,
)
from fzero.state.rounds import CODES, Message, MessageKind, Round, row_of
from tests.state.world import SYNC, Dead, Fault, OwnError, PeersFailed, Steps, World

IN_FLIGHT = 1  # reduce-scatters at once, as of a Reducer

MOST = 4
"""Units of a model that are here at once, where one is gathered early: of a plan the one in use and
the next one; where a rank asks at a sync point, the one that it asked for and the one before it."""


class Rank:
    """One rank: its record, its collectives, and a driver that sends events."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.protocol = Protocol()
        for model, units in enumerate(world.units):
            self.protocol, _ = advance(self.protocol, Join(model, units))
        self.here: dict[tuple[int, int], bool] = {}  # gathered: whether exactly
        self.flights: dict[tuple[int, int], tuple[int, bool]] = {}
        self.reductions: deque[tuple[int, int, int]] = deque()  # (model, unit, k)
        self.crossing: deque[tuple[int, int]] = deque()
        self.gradients: dict[tuple[int, int], set[str]] = {}
        self.sums: list[Counter[str]] = [Counter() for _ in world.units]
        self.schedules = [schedule.Schedule() for _ in world.units]
        self.taken: list[list[Counter[str]]] = []  # by an update, of each model
        self.asked: list[int] = []  # rounds with a question, before each update
        self.brought: list[list[Counter[str]]] = [[Counter() for _ in world.units]]
        self.complete: set[tuple[int, int]] = set()
        self.passes = [0 for _ in world.units]
        self.round = -1
        self.asks = 0  # rounds since the last update in which this rank asked for a collective

    # Events.

    def send(self, event: Event) -> Steps:
        """As a performer: do what follows from an event."""
        todo: deque[Effect] = deque()
        try:
            self._advance(event, todo)
            while todo:
                answer = yield from self._perform(todo.popleft())
                if answer is not None:
                    self._advance(answer, todo)
            if self.protocol.agenda:
                raise Fault("an event ends", f"{event} leaves {self.protocol.agenda}")
        except Exception:
            self._advance(Broke(tuple(todo)), todo)
            raise

    def _advance(self, event: Event, todo: deque[Effect]) -> None:
        self.protocol, effects = advance(self.protocol, event)
        todo.extend(effects)

    def _perform(self, effect: Effect) -> Steps:
        match effect:
            case Post(message):
                yield self._all_posted
                self._post(message)
            case Read():
                yield self._all_posted
                rows = [self.world.rows[r, self.round] for r in range(self.world.size)]
                return Answer(Round(rows))
            case Exchange(value):
                return Told((yield from self._exchange(value)))
            case Raise(failed):
                if not failed:
                    yield from self._exchange("differ")
                raise PeersFailed(failed)
            case WaitForReductions():
                yield from self._wait_for_reductions()
            case Reduce(model, unit, mine):
                yield from self._reduce(model, unit, mine)
            case Drop(model):
                self._drop(model)
            case Discard(model):
                yield from self._discard(model)
            case Gather() | TakePart() | Wait() | Free():
                yield from self._gather(effect)
        return None

    # Gathers.

    def _gather(self, effect: Gather | TakePart | Wait | Free) -> Steps:
        group, rank = self.world.shards[self.number], self.number
        place = effect.model, effect.unit
        match effect:
            case Gather(_, _, exact):
                if place in self.here or place in self.flights:
                    raise Fault("gathered once", f"rank {rank} does {effect} again")
                self.flights[place] = group.start(rank, ("gather", *place, exact)), exact
            case TakePart(_, _, exact):
                k = group.start(rank, ("gather", *place, exact))
                yield lambda: group.is_over(k)
            case Wait():
                k, exact = self.flights.pop(place)
                yield lambda: group.is_over(k)
                self.here[place] = exact
            case Free():
                self.here.pop(place, None)
                if place in self.flights:
                    k, _ = self.flights.pop(place)
                    yield lambda: group.is_over(k)

    # Rounds.

    def _post(self, message: Message) -> None:
        codes = message.codes or ()
        self.round = self.world.channel.start(self.number, "round")
        row = [*row_of(message, codes), *[0] * (CODES - len(codes))]
        self.world.rows[self.number, self.round] = row
        self.asks += message.kind is MessageKind.ASK

    def _all_posted(self) -> bool:
        return self.round < 0 or self.world.channel.is_over(self.round)

    def _exchange(self, value: Any) -> Steps:
        world, rank = self.world, self.number
        k = world.channel.start(rank, "exchange")
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

    # A driver.

    def begin(self, model: int, phase: int) -> Steps:
        """Begin a phase, as a Pass does."""
        units, place = self.world.units[model], (self.passes[model], phase)
        program = schedule.backwards(len(units.numels))
        if units.gathers:
            program = schedule.expected(self.schedules[model], *place)
        said = Announcement(
            text=f"model {model}", place=place, program=program, served=self.world.served
        )
        silent = phase == BACKWARD and not units.gathers and self.world.served  # an engine
        yield from self.send(Begin(model, said, sums=True, silent=silent))

    def use(self, model: int, uses: Sequence[Any]) -> Steps:
        """Read units, and make the user's own collectives."""
        for unit in uses:
            if unit == SYNC:
                for number in self.protocol.running:
                    yield from self.send(SyncPoint(number))
                continue
            if not self.world.units[model].gathers:
                continue
            yield from self.send(Use(model, unit))
            if (model, unit) not in self.here:
                raise Fault("what is wanted is here", f"rank {self.number} reads unit {unit}")
            self.require_room(model)

    def require_room(self, model: int) -> None:
        """Without `keeps` there are few units here at once."""
        record = self.protocol.models[model]
        if record.units.limits.keeps:
            return
        loose = [u for m, u in [*self.here, *self.flights] if m == model]
        loose = [u for u in loose if u not in record.residency.pinned]
        if len(loose) > MOST + max(0, record.units.limits.prefetch_numel - 1):
            raise Fault("memory", f"rank {self.number} holds units {loose}")

    def end_forward(self, model: int) -> Steps:
        """The end of a forward that a backward may follow."""
        yield from self.send(EndForward(model))

    def gradient(self, model: int, unit: int, *, complete: bool) -> Steps:
        """Autograd makes a gradient of a unit: the last one if it is `complete`."""
        if self.protocol.models[model].phase.silent:
            yield from self.send(FirstGradient(model))
        name = f"{self.number}.{self.passes[model]}.{model}.{unit}"
        held = self.gradients.setdefault((model, unit), set())
        name = name + "'" * (name in held)
        held.add(name)
        self.brought[-1][model][name] += 1
        if complete:
            self.complete.add((model, unit))
            answered = self.protocol.open != model or self._all_posted()
            yield from self.send(Ready(model, unit, answered))

    def finish(self, model: int) -> Steps:
        """The end of a backward."""
        left = sorted(unit for m, unit in self.gradients if m == model)
        complete = tuple((unit, (model, unit) in self.complete) for unit in left)
        self.complete = {key for key in self.complete if key[0] != model}
        yield from self.send(Finish(model, complete))
        learned = self.protocol.models[model].course.learned
        for (index, phase), program in learned.items():
            known = self.schedules[model]
            self.schedules[model] = schedule.with_program(known, index, phase, program)
        self.passes[model] += 1

    def call(self, text: str) -> Steps:
        """A call of all ranks; what was served of gradients is here afterwards."""
        yield from self.send(Call(text))
        return self.protocol.heard

    def update(self) -> Steps:
        """An update takes what was summed, and changes the parameters."""
        for model, units in enumerate(self.world.units):
            if units.gathers:
                yield from self.send(Changed(model))
        self.taken.append(self.sums)
        self.asked.append(self.asks)
        self.asks = 0
        self.sums = [Counter() for _ in self.world.units]
        self.brought.append([Counter() for _ in self.world.units])
        self.passes = [0 for _ in self.world.units]

    def fail(self, models: Iterable[int], error: BaseException) -> Steps:
        """As a driver: keep in step, tell the others, forget the pass."""
        astray = isinstance(error, PeersFailed | Dead)
        models = list(models)
        if isinstance(error, OwnError):
            error.crosses = any(self.protocol.models[model].phase.crosses for model in models)
        for model in models:
            with suppress(PeersFailed, Dead):
                yield from self.send(Failed(model, astray))
            yield from self.send(GiveUp(model))
