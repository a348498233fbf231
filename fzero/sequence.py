"""In which order ranks gather and reduce: by a program that all of them expect, or by asking.

All ranks that announce the same program run its collectives in its order, whatever they use
themselves (see `Replay`). A rank that needs what the rest of the plan does not have runs the plan
to its end, and asks there: every rank takes part in what any rank asks for.

At stage 3 a program is recorded: what the ranks did before. Below stage 3 it is known: every bucket
is reduced once, the last one first.

A collective of the user's inside the pass is a sync point of the plan, where ranks wait: one that
needs what the plan does not have before it goes there, and asks; the others serve it.

One plan runs at a time on the same ranks. Where a pass of another model begins in the middle of a
pass, or asks, the plan of this one is run to its end first, and what it lacks is asked for.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from fzero.collectives import Channel, What
from fzero.errors import AxisError
from fzero.gather import Gatherer
from fzero.reduce import Reducer
from fzero.state import replay
from fzero.state.effects import FreeUnit, GatherUnit, ReduceUnit, ReplayEffect
from fzero.state.schedule import Phases, Place, Program, joined
from fzero.state.setup import Gathering

_LIVE = 2
"""Units whole at once while a rank asks: the one in use, and the one before it."""


class Sequencer:
    """Drives one gatherer and one reducer through passes, in step with the other ranks.

    gathers: whether it has units to gather (stage 3). Below stage 3 it only reduces.
    """

    def __init__(
        self,
        channel: Channel,
        gatherer: Gatherer,
        reducer: Reducer,
        gathering: Gathering,
        *,
        gathers: bool,
        number: int | None,
    ) -> None:
        self.channel, self.gatherer, self.reducer = channel, gatherer, reducer
        self._limits, self._numels = gathering.limits, gatherer.numels
        self._persistent, self._gathers = gathering.persistent, gathers
        self.stays = False  # what `Limits.keeps` keeps stays beyond the backward, until `changed`
        self.number = channel.join(self, number)
        self._sync_point = len(gatherer.units)  # the event of a collective of the user's
        self._phases: dict[Place, list[int]] = {}  # what this rank does in each
        self._events: list[int] = []  # of the phase that runs
        self._asked = False  # since the last `finish`
        self._program: Program | None = None
        self._replay: replay.Replay | None = None
        self._effects: deque[ReplayEffect] = deque()  # not performed yet
        self._due: list[int] = []  # complete, and not reduced yet
        self._seen: set[int] = set()  # units that stay, and are here or were used in this pass
        self._mine: frozenset[tuple[What, int]] = frozenset()  # what this rank asks for now
        self._current = -1
        self._open = False  # announced, and not known yet what the others announce
        self.drop_if_raised: Callable[[], None] | None = None  # see `Channel.drop_raised`
        gatherer.use, gatherer.keeps = self.use, self._limits.keeps
        gatherer.on_hold = self.hold
        self.wait_all = reducer.wait_all  # what the channel calls where all ranks are at one place
        reducer.on_full = self.full

    def close(self) -> None:
        """No pass will follow."""
        self.channel.leave(self.number)

    # A pass.

    def begin(self, text: str, place: Place, program: Program | None, *, served: bool) -> None:
        """Announce a phase of a pass, which is expected to do `program`."""
        self._end_other_plans()
        self._events = self._phases[place] = []
        self._replay, self._current = None, -1
        self._program = program
        self._open = True
        self._run(True)
        self.gatherer.release()
        # What is here already is part of what ranks must have in common to follow one plan.
        facts = self._program and (self._program.digest, sorted(self.gatherer.kept))
        hint = zlib.crc32(repr(facts).encode())
        self.channel.announce(f"{text}\nphase {place[1]}", hint=hint, served=served)

    def adopt(self, gathered: Sequence[Sequence[Tensor]]) -> None:
        """Go on with what a window has gathered: it is used without a gather."""
        self.gatherer.adopt(gathered)
        self._seen = set(self.gatherer.kept)

    def use(self, unit: int) -> None:
        """Make sure that a unit is whole: a kernel reads it."""
        if unit == self._current and unit in self.gatherer.held:
            return
        self._read_announced()
        self.gatherer.drop_rounded([unit])
        held, self._current = self.gatherer.touch(unit), unit
        if unit not in self._seen:
            self._events.append(unit)
            if self._limits.keeps:
                self._seen.add(unit)
        if self._replay is not None and not self._replay.waits:
            here = replay.complete(self._replay, self._due)  # they start behind what this use frees
            self._due, there = [], replay.use(here, unit, held=held)
            self._go_on(there or (here, ()))
            if there is None and not self.gatherer.has(unit):
                self._asked = True  # at the next sync point, or at its end
                self._run_plan()
        self._reduce_due()
        if self._asks and not self.gatherer.has(unit):
            self._ask_for(unit)
        self.gatherer.wait(unit)

    def sync(self) -> None:
        """A collective of the user's begins: run the plan to its sync point, and wait for ranks.

        It is recorded like the use of a unit that is always whole. Ranks serve each other until all
        have come. Below stage 3 reductions start in one order, over a group of their own.
        """
        if not self._gathers:
            return
        self._read_announced()
        self._current = -1
        self._events.append(self._sync_point)
        self._asked |= self._run_plan()
        self._reduce_due()
        self._end_other_plans()
        self.channel.call("a collective in a loss")
        if self._replay is not None:  # what it does from here on is the same on every rank again
            self._go_on(replay.leave_sync_point(self._replay))

    def full(self, unit: int) -> None:
        """The gradient of a unit, or of a bucket, is complete on this rank: reduce it.

        Below stage 3, while another rank has not begun its backward, this one goes on with its own,
        with one bucket to scatter at most.
        """
        self._events.append(~unit)
        self._due.append(unit)
        waits = not self._gathers and self._open and not self.channel.is_answered
        if waits and sum(map(self.reducer.is_bounded, self._due)) <= 1:
            return
        self._read_announced()
        self._reduce_due()

    def _reduce_due(self) -> None:
        due, self._due = self._due, []
        if due and self._asks:
            self._ask(What.REDUCE, due)
        elif self._replay is not None:
            self._go_on(replay.start_ready(replay.complete(self._replay, due)))

    def end_forward(self) -> None:
        """The forward is over: finish its plan, and let go of what was gathered."""
        self.end_plan()
        self._current = -1
        self._events = []  # what is read between is no part of the pass
        self._run(False)
        self.gatherer.release()

    def finish(self) -> dict[Place, Program]:
        """End the pass on every rank; return what its phases do from now on, if new.

        Serves the others until none is in the pass. What is left here is reduced on the way. If any
        rank has asked, the programs become the union of what the ranks did.
        """
        self.end_plan()
        if left := self.reducer.unreduced():
            self._events += [~unit for unit in left if not self.reducer.is_complete(unit)]
            self._asked = True
            self._ask(What.REDUCE, left)
        self._end_other_plans()
        asked = self.channel.finish(asked=self._asked)
        did, self._asked, self._current = self._take_phases(), False, -1
        self._run(False)
        self.let_go()
        if not asked:
            return {}
        told = filter(None, self.channel.tell_each_once((self.number, did)))  # None: in no pass
        mine = [phases for number, phases in told if number == self.number]
        return joined(mine, self._sync_point)

    def _take_phases(self) -> Phases:
        """Return, and forget, what this rank did."""
        phases, self._phases, self._events = self._phases, {}, []
        return {place: tuple(events) for place, events in phases.items()}

    def fail(self, *, in_step: bool, tell: bool) -> None:
        """The pass is given up. `in_step`: run what is left of its plan; `tell` the others."""
        self._due = []
        self.reducer.discard_local()
        with suppress(AxisError):  # the others know of it already
            if in_step:
                self.end_plan()
            if tell:
                self._end_other_plans()
                self.channel.fail()
        self._open, self._asked, self._replay, self._current = False, False, None, -1
        self._effects.clear()
        self._run(False)
        self._take_phases()
        self.reducer.discard()
        self.gatherer.release(all_of_them=True)
        self._seen = set()

    def hold(self, units: Sequence[int]) -> None:
        """Gather units that stay for a while, outside of a pass. All ranks make this call."""
        self._end_other_plans()
        self.gatherer.drop_rounded(units)
        missing = any(unit not in self.gatherer.held for unit in units)
        name = f"gathered(...) of units {list(units)} of model {self.number}"
        if any(self.channel.call(name, int(missing))):
            for unit in units:
                self.gatherer.take_part(unit, keep=True, exact=True)

    def let_go(self) -> None:
        """The backward is over: what is kept for it alone goes."""
        if not self.stays:
            stay = {*self._persistent, *(+self.gatherer.holds)}
            self.gatherer.kept.intersection_update(stay)
            self._seen.intersection_update(stay)
        self.gatherer.release()

    def changed(self) -> None:
        """The parameters changed: what was gathered of them is stale."""
        self.gatherer.changes += 1
        self.gatherer.release(all_of_them=True)
        self._seen = set()

    def _run(self, runs: bool) -> None:
        """Be among those that are in a pass, or not."""
        self.channel.running = [one for one in self.channel.running if one is not self]
        self.channel.running += [self] if runs else []
        self.drop_if_raised = self.drop_if_raised if runs else None  # no way to the pass's owner

    # The plan.

    def _read_announced(self) -> None:
        """Learn what the other ranks announced: the plan counts if all have the same."""
        if not self._open:
            return
        self._open = False
        same = self.channel.answer()
        if same and self._program is not None:
            self.gatherer.keep(self._persistent)
            held = frozenset(self.gatherer.kept)
            self._replay = replay.begin(self._program, self._numels, held, self._limits)
        else:
            self._asked = True
            if missing := [unit for unit in self._persistent if unit not in self.gatherer.held]:
                self._ask(What.GATHER, missing)
            self.gatherer.keep(self._persistent)
        self._seen.update(self._persistent)

    def _run_plan(self) -> bool:
        """Run what is left of the plan, up to a sync point; return whether that ended it."""
        self._reduce_due()
        before = self._replay
        self._go_on((None, ()) if before is None else replay.run(before))
        return before is not None and self._replay is None

    def _go_on(self, to: tuple[replay.Replay | None, Sequence[ReplayEffect]]) -> None:
        """Be there in the plan, and start what this asks for; what an error left over, first."""
        self._replay = to[0]
        self._effects += to[1]
        while self._effects:
            match self._effects.popleft():
                case GatherUnit(unit):
                    self.gatherer.start(unit)
                case FreeUnit(unit):
                    self.gatherer.free(unit)
                case ReduceUnit(unit):
                    self.reducer.start(unit)

    def end_plan(self) -> None:
        """Run the plan, but not beyond a sync point that never came: its phase is over."""
        self._read_announced()
        self._run_plan()
        if self._replay is not None:
            self._replay, self._asked = None, True

    def _end_other_plans(self) -> None:
        """This pass begins, or asks, in the middle of others: their plans end here."""
        for other in self.channel.running:
            if other is not self:
                other.end_plan()

    @property
    def _asks(self) -> bool:
        """Whether the other ranks come to a round before the plan goes on."""
        return self._replay is None or self._replay.waits

    # Asking.

    def _ask_for(self, unit: int) -> None:
        if self._replay is None:
            here = [u for u in self.gatherer.held if u not in self.gatherer.kept]
            for old in here[: max(0, len(here) - _LIVE + 1)]:  # those that were used first
                self.gatherer.free(old)
        else:  # what is here belongs to the plan
            self._replay = replay.gathered(self._replay, unit)
        self._ask(What.GATHER if self.gatherer.rounds else What.GATHER_EXACT, [unit])

    def _ask(self, what: What, units: list[int]) -> None:
        self._end_other_plans()
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
        else:
            self.gatherer.take_part(unit, keep=mine, exact=what is What.GATHER_EXACT)
