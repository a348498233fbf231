"""A driver of one rank of law 14: it sends the events of passes, blocks, windows and updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from fzero.state import schedule
from fzero.state.protocol import SYNC as USERS
from fzero.state.protocol import (
    Announcement,
    Begin,
    Call,
    Changed,
    EndForward,
    Failed,
    Finish,
    FirstGradient,
    GiveUp,
    Join,
    Leave,
    Met,
    Pin,
    Raised,
    Ready,
    SyncPoint,
    Unpin,
    Use,
)
from fzero.state.rounds import Served
from fzero.state.schedule import BACKWARD, FORWARD
from tests.state.rank import Rank, Value
from tests.state.world import AllAstray, Dead, Fault, OwnError, PeersFailed, Steps, Sync, World

MOST = 4
"""Units of a model that are here at once, where one is gathered early: of a plan the one in use and
the next one; where a rank asks at a sync point, the one that it asked for and the one before it."""


class Driver(Rank):
    """A rank whose driver sends events: an engine, or calls of `grad_and_reduce`."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        count = len(world.units)
        # Of each model: of its passes, and of what evaluates it, as `evaluate(fn, state)` has one.
        # An engine has one for all: it asks again where its forwards differ, which costs time only.
        self.schedules = [dict[Any, schedule.Schedule]() for _ in range(count)]
        self.evaluates: dict[int, Any] = {}
        self.pending: list[dict[int, set[str]]] = [{} for _ in range(count)]  # of an open window
        self.carried: list[dict[int, Value]] = [{} for _ in range(count)]  # by a window
        self.taken: list[list[Counter[str]] | None] = []  # by an update; None after a failure
        self.errors: list[BaseException | None] = [None]  # that ended a step
        self.alone = [False]  # whether an error in it concerned no other rank
        self.asked: list[int] = []  # rounds with a question, before each update
        self.brought: list[list[Counter[str]]] = [[Counter() for _ in range(count)]]
        self.complete: set[tuple[int, int]] = set()
        self.passes = [0] * count
        self.windows: set[int] = set()  # models with an open one
        self.blocks: list[tuple[int, tuple[int, ...]]] = []
        self.named = 0  # gradients that autograd has made
        self.bring: set[int] = set()  # models whose pass has some of this rank
        self.synced = 0  # collectives of the user's

    # A pass.

    def begin(self, model: int, phase: int, *, exact: bool = False) -> Steps:
        """Begin a phase, as a Pass does."""
        if self.world.functional[model] and phase == FORWARD:
            self._join_again(model)
        units, place = self.world.units[model], (self.passes[model], phase)
        in_window = model in self.windows
        program = schedule.backwards(len(units.numels))
        if units.gathers:
            program = schedule.expected(self._schedule(model), *place)
        text = f"model {model}, {'in a window' if in_window else 'at once'}"
        said = Announcement(
            text=text, place=place, program=program, served=Served(self.world.served)
        )
        silent = phase == BACKWARD and not units.gathers and self.world.served  # an engine
        self.bring.discard(model)
        if phase == BACKWARD and not silent:
            self._reduce_waiting(model)
        event = Begin(
            model,
            said,
            sums=not in_window,
            stays=in_window and self.world.stays,
            rounds=not exact,
            silent=silent,
        )
        yield from self.send(event)

    def _schedule(self, model: int) -> schedule.Schedule:
        return self.schedules[model].get(self.evaluates.get(model), schedule.Schedule())

    def _reduce_waiting(self, model: int) -> None:
        """Gradients of a window that was closed are reduced with those that come."""
        if model in self.windows:
            return
        for unit, names in self.pending[model].items():
            self.gradients.setdefault((model, unit), set()).update(names)
            self.brought[-1][model].update(names)
            self.bring.add(model)
        self.pending[model] = {}

    def _join_again(self, model: int) -> None:
        """Each call has a record of its own; a window carries what it has gathered."""
        self._at_once(Leave(model))
        for values in (self.here, self.flights):
            for place in [place for place in values if place[0] == model]:
                del values[place]
        carried = self.carried[model] if self.world.units[model].gathers else {}
        self.here |= {(model, unit): value for unit, value in carried.items()}
        self._at_once(Join(model, self.world.units[model], tuple(sorted(carried))))

    def _at_once(self, event: Join | Leave) -> None:
        todo = self._effects(event)
        if todo:
            raise Fault("an event ends", f"{event} asks for {todo}")

    def use(self, model: int, unit: int) -> Steps:
        """Read a unit."""
        if not self.world.units[model].gathers:
            return
        yield from self.send(Use(model, unit))
        self.require_values(model, [unit])
        self.require_room(model)

    def require_values(self, model: int, units: Iterable[int]) -> None:
        """What is read is here, of this update, and exact where it must be."""
        exact = not self.protocol.models[model].residency.rounds
        for unit in units:
            value = self.here.get((model, unit))
            if value is None:
                raise Fault("what is wanted is here", f"rank {self.number} reads unit {unit}")
            if value.version != self.version:
                raise Fault("nothing stale is read", f"rank {self.number} reads {unit}: {value}")
            if exact and not value.exact:
                raise Fault("nothing rounded is read", f"rank {self.number} reads {unit}: {value}")

    def require_room(self, model: int) -> None:
        """Without `keeps` there are few units here at once."""
        record = self.protocol.models[model]
        if record.units.limits.keeps:
            return
        if model in self.windows and self.world.stays:
            return
        kept = self._kept(model)
        loose = [u for m, u in [*self.here, *self.flights] if m == model and u not in kept]
        if len(loose) > MOST + max(0, record.units.limits.prefetch_numel - 1):
            raise Fault("memory", f"rank {self.number} holds units {loose}")

    def sync(self, one: Sync, *, backward: bool = False) -> Steps:
        """A collective of the user's: all ranks hear what each says of it, and those of it do it.

        It is started when all have come, and waited for at once, while gathers and reductions of
        fzero's own are in flight. A rank without a graph hears that others have one.
        """
        connects = backward or self.number in one.on
        yield from self.send(SyncPoint((self.number,), backward, connects))
        if not self.protocol.meeting:
            yield from self._start_together()
        elif self.protocol.heard != tuple((rank,) for rank in range(self.world.size)):
            raise Fault("all are heard", f"rank {self.number} hears {self.protocol.heard}")
        if one.on and not connects:
            yield from self.send(Met(connects=True))
        self.synced += 1
        group = self.world.users[one.axis][self.number]
        k = group.start(self.number, (one.axis, self.synced))
        yield lambda: group.is_over(k)

    def _start_together(self) -> Steps:
        """As `before_collective`: the call, and then what every rank can reduce."""
        yield from self.send(self._users_call())
        while not self.protocol.heard:
            yield from self.send(self._users_call())
        pairs = [divmod(values[0], self.world.size) for values in self.protocol.heard]
        if [rank for _, rank in pairs] != [*range(self.world.size)]:
            raise Fault("all are heard", f"rank {self.number} hears {self.protocol.heard}")
        yield from self.send(Met(tuple([reducible for reducible, _ in pairs])))

    def _users_call(self) -> Call:
        return Call(USERS, (self.number + self.world.size * self.protocol.reducible,))

    def end_forward(self, model: int) -> Steps:
        """The end of a forward that a backward may follow."""
        yield from self.send(EndForward(model))
        record = self.protocol.models[model]
        if record.residency.rounds or record.course.runs:
            raise Fault("a pass ends", f"rank {self.number}: {record}")

    def gradient(self, model: int, unit: int, *, complete: bool) -> Steps:
        """Autograd makes a gradient of a unit: the last one if it is `complete`."""
        if self.protocol.models[model].course.silent:
            self._reduce_waiting(model)
            yield from self.send(FirstGradient(model))
        name = f"{self.number}.{self.named}"
        self.named += 1
        self.bring.add(model)
        if model in self.windows:
            self.pending[model].setdefault(unit, set()).add(name)
            return
        self.gradients.setdefault((model, unit), set()).add(name)
        self.brought[-1][model][name] += 1
        if complete:
            self.complete.add((model, unit))
            yield from self.send(Ready(model, unit))

    def finish(self, model: int) -> Steps:
        """The end of a backward."""
        left = sorted(unit for m, unit in self.gradients if m == model)
        complete = tuple((unit, (model, unit) in self.complete) for unit in left)
        self.complete = {key for key in self.complete if key[0] != model}
        yield from self.send(Finish(model, complete, brings=model in self.bring))
        self._after_pass(model)

    def finish_forward(self, model: int) -> Steps:
        """The end of a forward that no backward follows."""
        yield from self.send(Finish(model))
        self._after_pass(model, counts=False)

    def _after_pass(self, model: int, *, counts: bool = True) -> None:
        learned = self.protocol.models[model].course.learned
        for (index, phase), program in learned.items():
            known = schedule.with_program(self._schedule(model), index, phase, program)
            self.schedules[model][self.evaluates.get(model)] = known
        if counts:
            self.receive(model)
            self.passes[model] += 1
        carries = self.world.functional[model] and self.world.stays
        if carries and counts and model in self.windows:
            pinned = self.protocol.models[model].residency.pinned
            units = sorted(pinned) if self.world.units[model].gathers else []
            self.carried[model] = {unit: self.here[model, unit] for unit in units}
        self._require_freed(model)

    def _require_freed(self, model: int) -> None:
        """Between passes there is what is persistent, what blocks hold, and what a window keeps."""
        record = self.protocol.models[model]
        course = record.course
        if record.residency.rounds or course.runs or course.announced or course.silent:
            raise Fault("a pass ends", f"rank {self.number}: {record}")
        if course.did or course.place or course.asked or course.replay or course.left:
            raise Fault("a pass ends", f"rank {self.number}: {course}")
        kept = self._kept(model)
        if model in self.windows and self.world.stays:
            return
        here = {unit for number, unit in self.here if number == model}
        if not here <= kept and model not in self.protocol.running:
            raise Fault("a pass frees", f"rank {self.number} keeps {here - kept} of model {model}")

    def _kept(self, model: int) -> set[int]:
        """Units that are persistent, and those that blocks hold."""
        kept = set(self.world.units[model].persistent)
        return kept.union(*(units for number, units in self.blocks if number == model))

    # Between passes.

    def open_block(self, model: int, units: Sequence[int]) -> Steps:
        """Gather units and keep them, as `with gathered(...):` does."""
        before = self.protocol.models[model].residency.blocks
        try:
            yield from self.send(Pin(model, tuple(units)))
        except Exception:
            if self.protocol.models[model].residency.blocks != before:
                yield from self.send(Unpin(model, tuple(units)))
            raise
        self.blocks.append((model, tuple(units)))
        self.require_blocks()

    def require_blocks(self) -> None:
        """All that blocks hold is here, exactly."""
        for model, units in self.blocks:
            for unit in units:
                value = self.here.get((model, unit))
                if value is None or not value.exact:
                    raise Fault("a block holds", f"rank {self.number} has {value} of {unit}")

    def close_block(self) -> Steps:
        """The end of a block."""
        model, units = self.blocks.pop()
        yield from self.send(Unpin(model, units))

    def open_window(self, model: int) -> None:
        """Gradients stay on this rank until it is closed."""
        self.windows.add(model)

    def close_window(self, model: int) -> Steps:
        """The window ends: on all ranks at one place."""
        self.windows.discard(model)
        self.carried[model] = {}
        if self.world.functional[model]:
            return
        yield from self.send(Unpin(model))
        self._require_freed(model)

    def call(self, text: str, *values: int) -> Steps:
        """A call of all ranks; what was served of gradients is here afterwards."""
        yield from self.send(Call(text, values))
        while not self.protocol.heard:
            yield from self.send(Call(text, values))
        heard = self.protocol.heard
        if len(heard) != self.world.size or heard[self.number] != values:
            raise Fault("all are heard", f"rank {self.number} hears {heard}")
        return heard

    def update(self) -> Steps:
        """An update takes what was summed, and changes the parameters."""
        self.version += 1
        for model, units in enumerate(self.world.units):
            self.carried[model] = {}
            if not self.world.functional[model]:
                self._require_freed(model)
            if units.gathers:
                yield from self.send(Changed(model))
                if any(number == model for number, _ in [*self.here, *self.flights]):
                    raise Fault("nothing stale is read", f"rank {self.number} has {self.here}")
        self._next_step(self.reduced)

    def _next_step(self, taken: list[Counter[str]] | None) -> None:
        self.taken.append(taken)
        self.errors.append(None)
        self.alone.append(False)
        self.asked.append(self.asks)
        self.asks = 0
        self.reduced = [Counter() for _ in self.world.units]
        self.brought.append([Counter() for _ in self.world.units])
        self.passes = [0 for _ in self.world.units]

    # Failures.

    def fail(self, models: Iterable[int], error: BaseException) -> Steps:
        """As a driver: keep in step, tell the others, forget the pass."""
        astray = isinstance(error, PeersFailed | Dead | AllAstray)
        models, self.breaks_in = list(models), -1
        for (model, _), names in self.gradients.items():
            if model in models:  # what no reduction has is dropped
                self.brought[-1][model].subtract(names)
                self.brought[-1][model] = +self.brought[-1][model]
        if isinstance(error, OwnError):
            crosses = any(self.protocol.models[model].course.crosses for model in models)
            error.crosses = error.crosses or crosses
        for model in models:
            with suppress(PeersFailed, Dead):
                yield from self.send(Failed(model, astray))
            yield from self.send(GiveUp(model))
            self.complete = {key for key in self.complete if key[0] != model}
            self._require_forgotten(model)

    def _require_forgotten(self, model: int) -> None:
        lasts = {key for key in [*self.here, *self.flights, *self.gradients] if key[0] == model}
        if lasts:
            raise Fault("a pass that is given up goes", f"rank {self.number} keeps {lasts}")

    def raised(self) -> Steps:
        """This rank raises before a call, and tells the others."""
        yield from self.send(Raised())

    def fails_alone(self) -> Steps:
        """An error that concerns no other rank was caught: go on to the next call."""
        self.alone[-1] = True
        yield from self._close_windows()

    def recover(self, error: BaseException) -> Steps:
        """After an error: the user throws the gradients away, and goes on with the next step."""
        self.errors[-1] = error
        yield from self._close_windows()
        self.gradients.clear()
        self._next_step(None)

    def _close_windows(self) -> Steps:
        for model in sorted(self.windows):
            yield from self.close_window(model)
        self.pending = [{} for _ in self.world.units]
