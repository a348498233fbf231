"""In which order stage 3 gathers and reduces: by a recorded program, or by asking the other ranks.

    begin(...)             announce a pass to the other ranks; nobody waits yet
    use(unit)              a kernel reads a unit: go on to it in the plan, or ask for it
    full(unit)             a gradient is complete: reduce it where the plan has it, or ask
    end_forward, finish    the phase, or the pass, is over

All ranks that announce the same program run its collectives in its order, whatever they use
themselves: a rank that does not need a unit takes part and drops it; one that reads a unit that
lies further on goes there, taking part on the way. A rank that needs what the rest of the plan does
not have runs the plan to its end, with zeros where it has nothing (a sum is linear: what it has
later is reduced later), and asks there.

A collective of the user's inside the pass is a place in the plan where all ranks meet, in a round
of its own: a rank that needs what the plan does not have before it goes there, and asks; the others
serve it while they wait.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from contextlib import suppress

from fzero.collectives import Channel, What
from fzero.errors import AxisError
from fzero.gather import Gatherer
from fzero.reduce import Reducer
from fzero.state.schedule import Limits, Plan, Program, Schedule, expected, plan, union

_LIVE = 2
"""Units whole at once while a rank asks: the one in use, and the one before it."""


class Sequencer:
    """Drives one gatherer and one reducer through passes, in step with the other ranks."""

    def __init__(
        self,
        channel: Channel,
        gatherer: Gatherer,
        reducer: Reducer,
        limits: Limits,
        persistent: Collection[int] = (),
        *,
        number: int | None = None,
    ) -> None:
        self.channel, self.gatherer, self.reducer = channel, gatherer, reducer
        self.limits, self._numels = limits, (*gatherer.numels, 0)  # the last one: see `meet`
        self._persistent = tuple(persistent)
        self.stays = False  # what `limits.keeps` keeps stays beyond the backward, until `changed`
        self.number = channel.join(self, number)
        self._recorded: dict[tuple[int, int], list[int]] = {}  # (pass, phase) -> what it did
        self._events: list[int] = []
        self._asked = False  # since the last `finish`
        self._program: Program | None = None
        self._plan: Plan | None = None
        self._at = self._reduced = 0
        self._meets = False  # stands at a place where ranks meet, and they have not all come
        self._asked_there: list[int] = []  # units that the plan does not have there
        self._ready: set[int] = set()
        self._due: list[int] = []  # complete, and not reduced yet
        self._seen: set[int] = set()  # units that stay, and are here or were used in this pass
        self._mine: frozenset[tuple[What, int]] = frozenset()  # what this rank asks for now
        self._current = -1
        self._open = False  # announced, and not known yet what the others announce
        gatherer.use, reducer.on_full = self.use, self.full
        gatherer.on_hold = self.hold

    def close(self) -> None:
        """No pass will follow."""
        self.channel.leave(self.number)

    # A pass.

    def begin(self, text: str, index: int, phase: int, schedule: Schedule, *, served: bool) -> None:
        """Announce pass `index` in `phase` (0 forward, 1 backward), expected by `schedule`."""
        self._events = self._recorded[index, phase] = []
        self._program, self._plan, self._current = expected(schedule, index, phase), None, -1
        self._at = self._reduced = 0
        self._meets, self._asked_there = False, []
        self._ready = set()
        self._open = True
        for other in self.channel.running:
            other.catch_up()
        self._run(True)
        self.gatherer.release()
        # What is here already is part of what ranks must have in common to follow one plan.
        facts = self._program and (self._program.digest, sorted(self.gatherer.kept))
        hint = zlib.crc32(repr(facts).encode())
        self.channel.announce(f"{text}\nphase {phase}", hint=hint, served=served)

    def adopted(self) -> None:
        """Some units were whole before: they are used without a gather."""
        self._seen = set(self.gatherer.kept)

    def use(self, unit: int) -> None:
        """Make sure that a unit is whole: a kernel reads it."""
        if unit == self._current and unit in self.gatherer.held:
            return
        self._settle()
        held, self._current = self.gatherer.touch(unit), unit
        if unit not in self._seen:
            self._events.append(unit)
            if self.limits.keeps:
                self._seen.add(unit)
        if self._plan is not None and not self._meets:
            place, meeting = self._plan.next_use(unit, self._at), self._next_meeting()
            if meeting is not None and place is not None and place > meeting:
                place = None
            if place is not None and (place == self._at + 1 or not held):
                self._go_to(place)
            elif not self.gatherer.has(unit):
                self._leave_plan()
        self._reduce_due()
        if self._asks and not self.gatherer.has(unit):
            self._ask_for(unit)
        self.gatherer.wait(unit)

    def meet(self) -> None:
        """A collective of the user's begins: all ranks run the plan as far as it stands there.

        It is recorded like the use of a unit that nobody holds. Ranks serve each other until all
        of them have come to it.
        """
        self._settle()
        self._current = -1
        self._events.append(self._meeting)
        if self._plan is not None and not self._meets:
            self._asked |= self._next_meeting() is None
            self._run_plan()
        self._reduce_due()
        self.channel.call("a collective in a loss")
        if self._meets:  # what the plan does from here on is the same on every rank again
            self._meets = False
            for unit in self._asked_there:
                self.gatherer.free(unit)
            self._asked_there = []
            self._start_ready()

    def full(self, unit: int) -> None:
        """The gradient of a unit is complete on this rank.

        Its reduction starts with what comes next: while a hook runs, autograd has the gradient,
        too, which would then be there twice.
        """
        self._settle()
        self._events.append(~unit)
        if self._due:
            self._reduce_due()
        self._due.append(unit)

    def catch_up(self) -> None:
        """Another pass begins in the middle of this one: start what is complete here before it."""
        if self._due:
            self._reduce_due()

    def _reduce_due(self) -> None:
        due, self._due = self._due, []
        if due and self._asks:
            self._ask(What.REDUCE, due)
        elif due:
            self._ready.update(due)
            self._start_ready()

    def end_forward(self) -> None:
        """The forward is over: finish its plan, and let go of what was gathered."""
        self._settle()
        self._end_plan()
        self._current, self._events = -1, []  # what is read between is no part of the pass
        self._run(False)
        if not self.limits.keeps:
            self.gatherer.release()

    def finish(self) -> list[tuple[int, int, Program]]:
        """End the pass on every rank; return what its phases are from now on, if that is new.

        Serves the others until none is in the pass. What is left here is reduced on the way. If any
        rank has asked, the programs become the union of what the ranks did.
        """
        self._settle()
        self._end_plan()
        left = self.reducer.left()
        if left:
            self._events += [~unit for unit in left]
            self._asked = True
            self._ask(What.REDUCE, left)
        asked = self.channel.finish(asked=self._asked)
        self.reducer.land()
        recorded, self._recorded, self._asked = self._recorded, {}, False
        self._current, self._events = -1, []
        self._run(False)
        self.let_go()
        if not asked:
            return []
        done = {key: tuple(events) for key, events in recorded.items()}
        everyone = [one for one in self.channel.tell(done) if one is not None]
        keys = sorted({key for one in everyone for key in one})
        done_by = {key: [one[key] for one in everyone if key in one] for key in keys}
        return [(*key, union(programs, self._meeting)) for key, programs in done_by.items()]

    def fail(self, *, in_step: bool, tell: bool) -> None:
        """The pass raised here. `in_step`: run what is left of its plan; `tell` the others."""
        self._due = []
        self.reducer.drop()
        with suppress(AxisError):  # the others know of it already
            if in_step:
                self._settle()
                self._end_plan()
            if tell:
                self.channel.fail()
        self.forget()

    def forget(self) -> None:
        """The pass is given up, on every rank. Starts nothing."""
        self._open, self._plan, self._current, self._due = False, None, -1, []
        self._run(False)
        self._recorded, self._asked = {}, False
        self.reducer.drop()
        self.gatherer.release(all_of_them=True)
        self._seen = set()

    def hold(self, units: Sequence[int]) -> None:
        """Gather units that are to stay for a while. Outside of a pass all ranks make this call."""
        if self in self.channel.running:
            for unit in units:
                self.use(unit)
                self.gatherer.kept.add(unit)
            return
        missing = any(unit not in self.gatherer.held for unit in units)
        name = f"gathered(...) of units {list(units)} of model {self.number}"
        if any(self.channel.call(name, int(missing))):
            for unit in units:
                self.gatherer.take_part(unit, keep=True)

    def let_go(self) -> None:
        """The backward is over: what is kept for it alone goes."""
        if not self.stays:
            self.gatherer.kept.intersection_update(self._persistent)
            self._seen.intersection_update(self._persistent)
        self.gatherer.release()

    def changed(self) -> None:
        """The parameters changed: what was gathered of them is stale."""
        self.gatherer.release(all_of_them=True)
        self._seen = set()

    def _run(self, runs: bool) -> None:
        """Be asked, or not, when a collective of the user's comes."""
        self.channel.running = [one for one in self.channel.running if one is not self]
        self.channel.running += [self] if runs else []

    # The plan.

    def _settle(self) -> None:
        """Learn what the other ranks announced: the plan counts if all have the same."""
        if not self._open:
            return
        same = self.channel.answer()
        self._open = False
        if same and self._program is not None:
            for unit in self._persistent:
                self.gatherer.start(unit)
            self._stay(self._persistent)
            held = frozenset({*self.gatherer.kept, self._meeting})  # nothing is gathered for it
            self._plan = plan(self._program, self._numels, held, self.limits)
            self._start_ready()
        else:
            self._asked = True
            missing = [unit for unit in self._persistent if unit not in self.gatherer.held]
            if missing:
                self._ask(What.GATHER, missing)
                self._stay(missing)

    def _stay(self, units: Collection[int]) -> None:
        self.gatherer.kept.update(units)
        self._seen.update(units)
        for unit in units:
            self.gatherer.wait(unit)

    def _go_to(self, place: int) -> None:
        assert self._plan is not None
        self._ready.update(self._due)
        self._due = []
        while self._at < place:
            step = self._plan.steps[self._at + 1]
            for unit in step.frees:  # first of all: the gradients of this step take room
                self.gatherer.free(unit)
            self._end_step()
            self._at += 1
            self._reduced = 0
            for unit in (*step.gathers, *step.ahead):
                self.gatherer.start(unit)
            if self.limits.keeps:
                self.gatherer.kept.update(step.gathers, step.ahead)
            self._meets = step.unit == self._meeting
            if not self._meets:
                self._start_ready()

    def _start_ready(self) -> None:
        """Start the reductions of this step that are ready, in its order."""
        assert self._plan is not None
        reduces = self._plan.steps[self._at].reduces
        while self._reduced < len(reduces) and reduces[self._reduced] in self._ready:
            self._ready.discard(reduces[self._reduced])
            self._reduced += 1
            self.reducer.start(reduces[self._reduced - 1])

    def _end_step(self) -> None:
        """Start the other reductions of this step, ready or not."""
        assert self._plan is not None
        reduces = self._plan.steps[self._at].reduces
        while self._reduced < len(reduces):
            self._ready.discard(reduces[self._reduced])
            self._reduced += 1
            self.reducer.start(reduces[self._reduced - 1])

    def _run_plan(self) -> None:
        """Run what is left of the plan, as far as ranks need not meet."""
        self._reduce_due()
        if self._plan is None or self._meets:
            return
        meeting = self._next_meeting()
        if meeting is not None:
            self._go_to(meeting)
            return
        self._go_to(len(self._plan.steps) - 1)
        self._end_step()
        self._plan = None

    def _leave_plan(self) -> None:
        """The plan lacks what is needed: ask for it where ranks meet next, or at its end."""
        self._asked = True
        self._run_plan()

    def _end_plan(self) -> None:
        """The phase is over: run the plan, but not what lies behind a meeting that never came."""
        self._run_plan()
        if self._plan is not None:
            self._plan, self._meets, self._asked = None, False, True

    @property
    def _meeting(self) -> int:
        """What stands in a program for a collective of the user's: one more than the last unit."""
        return len(self.gatherer.units)

    def _next_meeting(self) -> int | None:
        assert self._plan is not None
        return self._plan.next_use(self._meeting, self._at)

    @property
    def _asks(self) -> bool:
        """Whether the other ranks come to a round before the plan goes on."""
        return self._plan is None or self._meets

    # Asking.

    def _ask_for(self, unit: int) -> None:
        if self._plan is None:
            here = [u for u in self.gatherer.held if u not in self.gatherer.kept]
            for old in here[: max(0, len(here) - _LIVE + 1)]:  # those that were used first
                self.gatherer.free(old)
        else:  # what is here belongs to the plan
            self._asked_there.append(unit)
        self._ask(What.GATHER, [unit])

    def _ask(self, what: What, units: list[int]) -> None:
        self._mine = frozenset((what, unit) for unit in units)
        try:
            self.channel.ask(self.number, what, units)
        finally:
            self._mine = frozenset()

    def serve(self, what: What, unit: int) -> None:
        """Take part in a collective that this rank or another one asked for."""
        mine = (what, unit) in self._mine
        if what is What.REDUCE:
            self.reducer.start(unit, mine=mine)
            return
        self.gatherer.take_part(unit, keep=mine or self.limits.keeps)
        if self.limits.keeps:
            self.gatherer.kept.add(unit)
