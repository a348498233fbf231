"""A pass (one forward and backward) of some states: turns a driver's calls into protocol events.

Both drivers use it: a functional step makes one for each gradient call, an engine one for its life.

    begin_forward -> reads of placeholders -> end_forward
    begin_backward -> gradients of leaves -> finish | fail
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fzero.collectives import FUNCTIONAL, PULLS, Performer, note_call, performer_of
from fzero.context.current_rank import is_abstract
from fzero.context.modes import needs_func, wants_graph
from fzero.errors import AxisError, MismatchError, PhaseError
from fzero.machine import Gatherer, ProtocolClient, Reducer, UnitTable
from fzero.machine.packing import unpack
from fzero.machine.placeholder import placeholders
from fzero.machine.reduce import ReductionPlan, waits_in_step
from fzero.machine.unshard import HeldReader, WritableReader
from fzero.optim.recorded import lacks_value
from fzero.ranks.mesh import Axis, Runtime
from fzero.state import Placement, Policy, Progress, TrainState, progress, schedule
from fzero.state.effects import (
    Discard,
    Drop,
    Free,
    Gather,
    Look,
    ModelEffect,
    Receive,
    Reduce,
    TakePart,
    Wait,
    WaitForReductions,
)
from fzero.state.layout import Layout, from_bits
from fzero.state.protocol import (
    Announcement,
    Begin,
    Course,
    EndForward,
    Failed,
    Finish,
    FirstGradient,
    GiveUp,
    Noted,
    Units,
    Unpin,
)
from fzero.state.rounds import CODES, PLACES, Served
from fzero.state.train_state import Weighed
from fzero.transforms.accumulate_grad import (
    accumulated,
    filled,
    part_of_update,
    receive,
    receive_local,
    reduce_window,
    waiting,
)
from fzero.transforms.points import CallPart, Changed, changed_by
from fzero.transforms.recipe import BUILTINS, facts, parts_in, recipe_of


def passes_of(
    states: Sequence[TrainState], form: PassForm, before: Sequence[Pass] = ()
) -> tuple[list[Pass], list[tuple[int, int]]]:
    """One pass for each set of ranks; and for each state its pass, and its place in it.

    form: of each, with the number of one that runs inside of no other. before: passes over the same
    parameters, whose placeholders these go on with.
    """
    performers = [performer_of(state.setup.axis) for state in states]
    # What gathers comes first: a rank that waits elsewhere, for the end of a backward, would not
    # serve those of its ranks that still read what it has left out.
    by_ranks = {
        performers[i]: list[TrainState]()
        for gathers in (True, False)
        for i, state in enumerate(states)
        if state.setup.gathers_by_unit is gathers
    }
    places = []
    for performer, state in zip(performers, states, strict=True):
        places.append((list(by_ranks).index(performer), len(by_ranks[performer])))
        by_ranks[performer].append(state)
    made, first = list[Pass](), form.number
    for i, (performer, some) in enumerate(by_ranks.items()):
        known = () if performer is None else performer.protocol.models
        own = replace(form, number=first + sum(first <= other < 2 * first for other in known))
        if performer is not None and performer in form.pulls:
            place, layouts, forward = form.pulls[performer]
            waits = performer.pulls.get(place) is layouts  # else they were updated since
            served = Served.ALL << 1 + place if waits else form.served
            name = f"{form.name}, forward {forward}"
            own = replace(form, name=name, number=PULLS + place, served=served)
        made.append(Pass(own, some, before=before[i] if before else None))
    return made, places


def leaves_in_pass(one: Pass, number: int) -> dict[int, Tensor]:
    """The leaves of one state of a pass, by index: placeholders where they are gathered."""
    state = one.states[number]
    layout = state.setup.layout
    by_leaf: dict[int, Tensor] = {}
    groups = one.gatherer.table.groups[number]
    for i, group in enumerate(layout.groups):
        if state.setup.gathers_by_unit:
            tensors: Sequence[Tensor] = placeholders(one.gatherer, groups[i])
        elif (held := one.held[number]) is not None and (group.encoded or one.form.lazy):
            tensors = placeholders(held, i)
        else:
            # Else torch's refusal of a write would speak of the split that made the view.
            tensors = [x.detach() for x in unpack(layout, i, state.params.flats[i])]
        by_leaf.update(zip(group.leaves, tensors, strict=True))
    return by_leaf


class Pass:
    """Some states on the same ranks, what moves their values, and one pass of them after another.

    It does what the protocol says of it, as a party of the performer.

    on_written: is told which units a `gathered` block wrote; None where nobody writes parameters.
    drop_raised: drops a backward that raised without a word.
    before: a pass that rests, whose placeholders are read from this one.
    held: of each state what reads encoded leaves that are not gathered.
    parts: what acts in its backwards, from the outside in: nothing for plain states.
    """

    def __init__(
        self,
        form: PassForm,
        states: Sequence[TrainState],
        *,
        on_written: Callable[[Sequence[int]], None] | None = None,
        drop_raised: Callable[[], None] = lambda: None,
        before: Pass | None = None,
    ) -> None:
        self.form, self.states, self.drop_raised = form, list(states), drop_raised
        axis = states[0].setup.axis
        self.performer = performer_of(axis) or Performer(axis, axis)
        self.owner, table, reductions, self.units = _plan_of(states, self.performer)
        self.client = ProtocolClient(self.performer, form.number)
        # The full values of units; the gradients of leaves; what is behind the placeholders.
        looks = [on_gathered for one in states for on_gathered in recipe_of(one).gathered]
        looks = [looks[0](states, weakref.ref(self))] if looks else [None]
        self.reducer = Reducer(reductions, [one.device for one in states], self.client.ready)
        self._known = dict[Any, Any]() if before is None else before.learned
        self.learned: Mapping[Any, Any] = {}
        if before is not None:
            self.gatherer, self.held = before.gatherer, before.held
            self.gatherer.go_on(self.client, looks[0])
            for reader, one in zip(self.held, states, strict=True):
                if reader is not None:
                    reader.hold_now(one.params.flats)
        else:
            self.gatherer = Gatherer(table, self.client, looks[0], on_written)
            kind = HeldReader if on_written is None else WritableReader
            self.held = [
                kind(one.setup.layout, one.setup.axis, one.device, one.params.flats)
                if form.lazy or any(group.encoded for group in one.setup.layout.groups)
                else None
                for one in states
            ]
        self.parts: dict[str, CallPart] = parts_in(self.states, self.reducer, {})
        self._changes: list[list[Changed]] = [[] for _ in states]
        adopted: tuple[int, ...] = ()
        if self.units.gathers:
            self.gatherer.hold_shards(self.states)
            if any(state.window.gathered for state in states):
                adopted = self.gatherer.adopt([state.window.gathered for state in states])
        self.performer.join(self, self.units, form.number, adopted)

    def perform(self, effect: ModelEffect | Look | WaitForReductions) -> bool:
        """Do what the protocol asks for; of `Look` return whether a reduction starts at once."""
        match effect:
            case Gather(_, unit, exact):
                self.gatherer.start(unit, exact=exact)
            case TakePart(_, unit, exact):
                self.gatherer.start(unit, exact=exact, keeps=False)
            case Wait(_, unit):
                self.gatherer.wait(unit)
            case Free(_, unit):
                self.gatherer.free(unit)
            case Reduce(_, unit, mine):
                self.reducer.start(unit, mine=mine)
            case WaitForReductions():
                self.reducer.wait()
            case Look():
                return self.reducer.has_room
            case Receive():  # what other ranks reduced while this one served them is every rank's
                for number in range(len(self.states)):
                    self.put(number, self._with_served(number))
            case Drop():
                self.reducer.discard_own()
            case Discard():
                self.reducer.discard()
        return True

    @property
    def phase(self) -> Course:
        """Where this rank is in its forward and backward."""
        return self.client.record.course

    def close(self) -> None:
        """No pass will follow."""
        self.client.leave()

    def rest(self) -> None:
        """Let go of the states, and of all values: what is left is read by a pass that goes on."""
        self.states, self.parts = [], {}
        self.gatherer.rest()
        for reader in self.held:
            if reader is not None:
                reader.hold_now(())

    def put(self, number: int, state: TrainState) -> None:
        """Go on with another record of a state: the one place where states are assigned."""
        self.states[number] = state
        if (reader := self.held[number]) is not None:
            reader.hold_now(state.params.flats)

    # The pass, in its order.

    def begin_forward(self) -> None:
        """Below stage 3 nothing is gathered; at stage 3 announce what will be.

        Nothing is where all parameters are held: ranks may then run as many forwards as they like.
        """
        if self.reducer.received:
            self.put_aside()
        for part in self.parts.values():
            part.drop()  # a loss whose backward brought nothing
        self._begin_parts()
        # What comes inside of it is put aside.
        self.reducer.begin([(state.setup, True) for state in self.states])
        if self.units.gathers:
            self.gatherer.hold_shards(self.states)
        self.performer.send(self._begin(schedule.FORWARD))

    def end_forward(self) -> None:
        """End the forward: free its gathered units, unless the backward keeps them."""
        self.performer.send(EndForward(self.form.number))

    def begin_backward(
        self,
        *,
        silent: bool = False,
        dropped: bool = False,
        weighed: Weighed | None = None,
        said: str = "",
    ) -> None:
        """Announce that gradients will be reduced, of a weight if the states have weights.

        `silent`: below stage 3, leave that to `first_gradient`: a backward that brings none then
        concerns no other rank. `dropped`: this rank has just thrown away what it held. `said`: what
        else the ranks compare.
        """
        if self.reducer.received:
            self.put_aside()
        self._begin_parts(weighed)
        self.reducer.begin([(state.setup, state.window.is_open) for state in self.states])
        if not (silent := silent and not self.units.gathers):
            self._reduce_waiting()
        begun = self._begin(schedule.BACKWARD, dropped=dropped, said=said)
        self.performer.send(replace(begun, silent=silent))

    def first_gradient(self) -> None:
        """A silent backward has its first gradient: announce it, and reduce what waits with it."""
        self._reduce_waiting()
        self.performer.send(FirstGradient(self.form.number))

    def _reduce_waiting(self) -> None:
        """Add gradients that wait in a closed window to the coming reductions."""
        for number, state in enumerate(self.states):
            if state.window.pending.held and not state.window.is_open:
                self.reducer.add_waiting(number, waiting(state))

    def on_gradient(self, state: int, leaf: int, p: Tensor) -> None:
        """Hand on the gradient of a leaf as soon as autograd has made it."""
        if self.client.is_over:
            path = self.states[state].setup.layout.leaves[leaf].title
            raise PhaseError(
                f"a backward brings a gradient to {path} of a call of grad_and_reduce that is "
                "over.",
                cause="a parameter that a loss was given, and that was kept (in a list, an "
                "attribute) and read in another loss, or outside of one.",
                fix="use the params that each loss is given; of those of another call keep "
                "p.detach(), at stage 3 p.detach().clone().",
            )
        if p.grad is not None:
            self.take(state, leaf, p)

    def take(self, state: int, leaf: int, p: Tensor) -> None:
        """Look at `p.grad`, the gradient of a leaf, and move it into its bucket."""
        changes = self._changes[state]
        self.reducer.pop_grad(
            state, leaf, p, partial(changed_by, changes, leaf) if changes else None
        )

    def _begin_parts(self, weighed: Weighed | None = None) -> None:
        """A backward, or a forward, begins: look up what acts in it."""
        self.parts = parts_in(self.states, self.reducer, self.parts)
        for part in self.parts.values():
            for number, state in enumerate(self.states):
                self.put(number, part.begins(number, state, weighed))
        parts, numbers = self.parts.values(), range(len(self.states))
        changes = [[part.change(number) for part in parts] for number in numbers]
        self._changes = [[one for one in some if one is not None] for some in changes]

    def put_aside(self) -> None:
        """Move gradients that came outside of a pass into the window.

        A backward that runs inside a forward brings gradients, and ranks do not agree on it.
        """
        self.parts = parts_in(self.states, self.reducer, self.parts)
        for part in self.parts.values():
            part.settles()
        for number, state in enumerate(self.states):
            found = self.reducer.states[number].pop_local()
            if found:
                for part in self.parts.values():
                    state = part.put_aside(number, state)
                flats = filled(state, found, Placement.PARTIAL)
                if self.form.uses:
                    used = self.reducer.states[number].pop_used()
                    state = state.replace(progress=progress.saw_use(state.progress, used))
                own = part_of_update(state, flats)
                self.put(number, accumulated(state, own, waits=True))
        self.reducer.settle()

    def finish(self, *, counts: bool = True) -> list[TrainState]:
        """The backward is over on every rank: return the states with its gradients.

        Unless it `counts`, one that brought no gradient to any rank changes nothing.
        """
        waits = any(state.window.pending.held for state in self.states)
        brings = counts or waits or self.reducer.received > 0
        self.performer.send(Finish(self.form.number, self.reducer.unreduced(), brings))
        self._after_pass()
        for part in self.parts.values():
            part.settles()
        new: list[TrainState] = []
        for number, state in enumerate(self.states):
            waits = state.window.is_open
            if waits:
                state = self._with_served(number)
            means = self.reducer.states[number].pop_means()
            if not (means or counts or self.reducer.states[number].has_any):
                new.append(state)
                continue
            if state.window.pending.held and not waits:
                state = state.replace(window=progress.pop(state.window)[0])
            for part in self.parts.values():
                state = part.reduced(number, state)
            for part in self.parts.values():
                state = part.ends(number, state)
            used = self.reducer.states[number].pop_used() if self.form.uses else progress.ALL
            if means:
                state = receive(state, means, used=used, reduced=True)
            else:  # on one rank, or in a window
                state = receive_local(state, self.reducer, number, used=used)
            new.append(state)
        for number, state in enumerate(new):  # all of them, or none
            self.put(number, state)
        self.reducer.settle()
        return new

    def _with_served(self, number: int) -> TrainState:
        if not (means := self.reducer.states[number].pop_means()):
            return self.states[number]
        state = self.states[number]
        for part in self.parts.values():
            state = part.reduced(number, state)
        return accumulated(state, part_of_update(state, means, reduced=True))

    def finish_forward(self) -> list[TrainState]:
        """End a forward that no backward follows: free what it gathered."""
        self.performer.send(Finish(self.form.number))
        self._after_pass()
        return self.states

    def fail(self, error: BaseException) -> None:
        """The pass raised: end it in step with the other ranks, and tell them if they must know."""
        for part in self.parts.values():
            part.drop()
        with suppress(AxisError):  # the others know of it already
            astray = self.performer.knows(error)
            self.performer.send(Failed(self.form.number, astray=astray))
        self.performer.send(GiveUp(self.form.number))

    def changed(self) -> None:
        """The parameters changed: take the new shards, free the stale gathered units."""
        if self.units.gathers:
            self.gatherer.hold_shards(self.states)
            self.gatherer.changed()
            self.client.changed()

    def window_ends(self) -> None:
        """A window ended: free the units that it kept."""
        if self.units.gathers:
            self.performer.send(Unpin(self.form.number))

    # How.

    def _begin(self, phase: int, *, dropped: bool = False, said: str = "") -> Begin:
        """Return the event of a phase, with what must be equal on all ranks, and what is `said`.

        Where nothing is gathered no program is recorded: each bucket is reduced once, the last one
        first.
        """
        form, owner = self.form, self.states[self.owner]
        index = owner.progress.backwards
        _ = self.client.record  # raises after the model has left
        if self.units.gathers:
            # The states of another pass, beside which this one was, have other units.
            known = schedule.of_units(owner.schedule, self.units.numels)
            if known is not owner.schedule:
                self.put(self.owner, owner.replace(schedule=known))
            program = schedule.expected(known, index, phase)
        else:
            program = schedule.backwards(self.reducer.unit_count)
        lines = [form.name, f"gradients dropped just before: {dropped}"]
        crosses = False  # whether anything crosses ranks, or comes and goes as if it did
        for state in self.states:
            setup = state.setup
            place = "in a window" if state.window.is_open else "at once"
            lines.append(setup.layout.summary)
            lines.append(f"stage {setup.stage}, reduced {place}, {setup.differentiates_as}")
            lines += facts(state, "pass")
            if not form.served:
                lines.append(f"after {state.progress.reductions} reductions since the update")
            crosses = crosses or setup.streams or setup.axis.runtime is not Runtime.LOCAL
        in_window = [one.window.is_open for one in self.states]
        return Begin(
            form.number,
            announcement=Announcement(
                text="\n".join([*lines, *[said] * bool(said)]),
                place=(index, phase),
                program=program,
                served=Served.NOBODY if dropped else form.served,
            ),
            sums=crosses and not all(in_window),
            stays=owner.setup.gathering.reshard_after_forward == "window" and in_window[self.owner],
            rounds=not form.exact,
        )

    def _after_pass(self) -> None:
        """Put learned programs into the schedule, and gathered units that stay into the window."""
        if not self.units.gathers:
            return
        record, owner = self.client.record, self.states[self.owner]
        known = owner.schedule
        self.learned = record.course.learned
        for (index, phase), program in {**self._known, **self.learned}.items():
            known = schedule.with_program(known, index, phase, program)
        if known is not owner.schedule:
            self.put(self.owner, owner.replace(schedule=known))
        if self.form.carries and record.residency.stays:
            pinned = sorted(record.residency.pinned)
            for number, gathered in enumerate(self.gatherer.flats_of(pinned)):
                state = self.states[number]
                kept = replace(state.window, gathered=gathered)
                self.put(number, state.replace(window=kept))


def _plan_of(
    states: Sequence[TrainState], performer: Performer
) -> tuple[int, UnitTable, ReductionPlan, Units]:
    """What never changes of the passes of some states; that of one state is kept with its setup.

    The first is the state whose schedule has the programs of the pass.
    """
    setups = [state.setup for state in states]
    kept = setups[0].recipes if len(setups) == 1 else {}
    key = _plan_of, performer.data, is_abstract()
    found = kept.get(key)
    if found is None:
        lazy = [i for i, setup in enumerate(setups) if setup.gathers_by_unit]
        differ = [i for i in lazy if setups[i].layout.trainable]  # others may be read elsewhere
        owner = [*differ, *lazy, 0][0]
        alone = performer.axis.runtime is Runtime.LOCAL
        axes = [setup.axis if alone else performer.over(setup.axis) for setup in setups]
        table = UnitTable([setup.layout for setup in setups], axes)
        reductions = ReductionPlan(setups, axes)
        waits = waits_in_step(reductions)
        gathering = setups[owner].gathering
        units = Units(
            numels=table.numels,
            persistent=gathering.persistent,
            rounds=table.rounds,
            bounded=frozenset(n for n, one in enumerate(reductions.bounded) if one or waits),
            limits=gathering.limits,
            gathers=bool(lazy),
        )
        found = kept[key] = owner, table, reductions, units
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PassForm:
    """What a pass is, as its driver says.

    Attributes:
        name: what the other ranks are told that runs.
        number: of the model among those of the ranks.
        served: who takes part in it without being in it.
        uses: note which leaves get a gradient; else all count as used.
        exact: values are gathered exactly, also in a forward.
        carries: what a window keeps goes with the state, to the next pass of the window.
        lazy: what this rank holds whole is read by placeholders, too: no graph keeps any of it, nor
            a cast of it by autocast.
        pulls: of a pull, what each of its sets of ranks knows of it.
    """

    name: str
    number: int
    served: int = Served.NOBODY
    uses: bool = False
    exact: bool = False
    carries: bool = False
    lazy: bool = False
    pulls: Mapping[Performer, Expected] = field(default_factory=dict)


def functional_of(states: Sequence[TrainState], name: str) -> PassForm:
    """Return the form of a gradient call.

    Where ranks carry several logical ranks of these states, some make more passes than others.
    """
    several = any(one.setup.carries_several for one in states)
    served = Served.ALL if several else Served.NOBODY
    return PassForm(name=name, number=FUNCTIONAL, carries=True, served=served)


def of_engine(number: int) -> PassForm:
    """Return the form of an engine's passes."""
    name = f"a forward or backward of engine {number}"
    return PassForm(name=name, number=number, served=Served.ALL, uses=True)


# Pulls of `vjp`: backwards of forwards that the ranks have made before, and may leave out.


class Expected(NamedTuple):
    """What ranks know of the pulls of a forward: all of them make it.

    Attributes:
        place: of its states in `Performer.pulls`.
        layouts: those of its states. Equal ones of another model are others.
        forward: its number.
    """

    place: int
    layouts: tuple[Layout, ...]
    forward: int = 0


def pull_of(
    states: Sequence[TrainState], name: str, pulls: Mapping[Performer, Expected]
) -> PassForm:
    """Return the form of a pull; ranks that go on to a call without it give zeros."""
    return replace(functional_of(states, name), pulls=pulls)


def expect_pulls(states: Sequence[TrainState]) -> dict[Performer, Expected]:
    """Note a forward, which every rank makes; return what is known of its pulls."""
    found: dict[Performer, Expected] = {}
    for performer, chosen in _by_ranks(states).items():
        performer.forwards += 1
        layouts, known = tuple(states[i].setup.layout for i in chosen), performer.pulls
        same = (n for n, one in known.items() if [*map(id, one)] == [*map(id, layouts)])
        place = next(same, next((n for n in range(PLACES) if n not in known), PLACES))
        if place < PLACES:
            layouts = known.setdefault(place, layouts)
        found[performer] = Expected(place, layouts, performer.forwards)
    for axis in dict.fromkeys(state.setup.axis for state in states):
        tell_at_next_round(next(one for one in states if one.setup.axis == axis), "vjp")
    return found


@contextmanager
def serving_pulls(
    states: Sequence[TrainState], *, ends: bool = False
) -> Iterator[Callable[[], Sequence[TrainState]] | None]:
    """Take part, in this block, in pulls that other ranks make before they come to its call.

    ends: no pull comes after it, for the states are updated. Yields what returns the states, which
    change by what is served; None where no pull can come.
    """
    by_ranks = _by_ranks(states)
    found: dict[int, tuple[Pass, int]] = {}  # of a state: its pass, and its place in it
    for performer, chosen in by_ranks.items():
        layouts = [states[i].setup.layout for i in chosen]
        largest = sorted(performer.pulls.items(), key=lambda one: -len(one[1]))
        for place, wanted in largest:  # a pull of fewer states is not served beside it
            some = [chosen[k] for k in _places(wanted, layouts) or ()]
            if not some or not found.keys().isdisjoint(some):
                continue
            form = pull_of(states, "pull", {performer: Expected(place, wanted)})
            (one,), within = passes_of([states[i] for i in some], form)
            found |= {i: (one, k) for i, (_, k) in zip(some, within, strict=True)}

    def now() -> Sequence[TrainState]:
        kept = {i: one.states[place] for i, (one, place) in found.items()}
        return [kept.get(i, state) for i, state in enumerate(states)]

    try:
        with serving([*{id(one): one for one, _ in found.values()}.values()]):
            yield now if found else None
    finally:
        for performer, chosen in by_ranks.items():
            updated = {id(states[i].setup.layout) for i in chosen if ends}
            kept = performer.pulls.items()
            performer.pulls = {k: x for k, x in kept if updated.isdisjoint(map(id, x))}


@contextmanager
def serving(passes: Sequence[Pass]) -> Iterator[None]:
    """Take part, in this block, in those of other ranks with these passes, and close them."""
    for one in passes:
        one.performer.serves |= one.form.served
    try:
        yield
    finally:
        for one in passes:
            one.performer.serves = Served.ALL
            one.close()


def _by_ranks(states: Sequence[TrainState]) -> dict[Performer, list[int]]:
    """Return which states are on the ranks of each performer."""
    found: dict[Performer, list[int]] = {}
    for i, state in enumerate(states):
        if (performer := performer_of(state.setup.axis)) is not None:
            found.setdefault(performer, []).append(i)
    return found


def _places(wanted: Sequence[Layout], layouts: Sequence[Layout]) -> list[int] | None:
    """Return where each of some layouts is among others, by identity; None if one is not."""
    places = {id(layout): i for i, layout in enumerate(layouts)}
    found = [places.get(id(layout), -1) for layout in wanted]
    return None if -1 in found else found


# What all ranks say before they go on together with some states: one round, for both drivers.
#
#     as text      the call, and what must be equal: stage, options, and the facts of transforms;
#                  for an update also which one it is, the optimizer and its rates. Ranks that
#                  differ all raise
#     as numbers   what each rank holds of gradients, and the flags of transforms, which may
#                  differ: all ranks go on with what is true of any of them
#
# Whether something is reduced or updated is decided by `Agreed`, never by what one rank holds. What
# an update comes to depend on belongs into `_facts` or `_numbers`; what a transform says into the
# `facts` and the `flag` of its `Builtin`. Both drivers have it then.

Row = tuple[int, ...]
"""What one rank says: for each state (flags and backwards, digest of the leaves it left out)."""

_WAITS, _REDUCED, _WRITTEN = 1, 2, 4
_SAY = [(one.name, one.flag) for one in BUILTINS if one.flag is not None]
_FLAGS = [(8 << k, name, flag) for k, (name, flag) in enumerate(_SAY)]
_BACKWARDS = 8 << len(_FLAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What is true of the gradients of a state on all ranks together, whatever this one holds."""

    waits: bool  # some of any rank wait to be reduced
    reduced: bool  # reduced ones are held
    written: bool  # parameters of any rank were written since all ranks had them equal
    backwards: int  # of the rank that made the most
    flags: frozenset[str] = frozenset()  # the transforms whose flag any rank has
    unused: tuple[int, ...] = ()  # leaves that no rank has used, where that was asked for

    @property
    def held(self) -> bool:
        """Whether any rank has any."""
        return self.waits or self.reduced or self.backwards > 0


def agree(
    name: str,
    states: Sequence[TrainState],
    *,
    updates: bool = False,
    uses: bool = False,
    now: Callable[[], Sequence[TrainState]] | None = None,
    written: Callable[[], object] = bool,
) -> list[Agreed]:
    """Wait until every rank makes this call with the same options, on states in the same phase.

    Args:
        name: of the call.
        states: what it is about. Eight of them on the same ranks, or four if it `uses`, share a
            round.
        updates: optimizers, rates and the number of the update must be equal, too.
        uses: find the leaves that no rank has used since the last update.
        now: the states of an engine as they are now: they change while it serves other ranks.
        written: whether this rank's parameters were written, of an engine.

    Returns:
        What is true of each state on all ranks. On one rank, under a torch.func transform and in a
        trace nobody is asked: what is true here.

    Raises:
        MismatchError: on every rank, if they differ. Nothing was changed.
    """
    here = now or (lambda: states)
    by_axis: dict[Axis | None, list[int]] = {}  # those that share ranks; None: nobody is asked
    for i, state in enumerate(states):
        axis = state.setup.axis
        alone = axis.runtime is Runtime.LOCAL or needs_func(state.params.flats)
        by_axis.setdefault(None if alone else axis, []).append(i)
    found: dict[int, Agreed] = {}
    width = 1 + uses
    for axis, chosen in by_axis.items():
        performer = None if axis is None else performer_of(axis)
        lines = [name]
        for i in chosen if performer is not None else ():
            lines += _facts(states[i], updates=updates, counts=now is None)
        for begin in range(0, len(chosen), CODES // width):
            some = chosen[begin : begin + CODES // width]
            numbers = partial(_numbers, here, some, uses=uses, written=written)
            if performer is None:
                said: Sequence[Row] = [tuple(numbers())]
            else:
                said = performer.call_with("\n".join(lines), numbers)
            for k, i in enumerate(some):
                rows = [row[width * k : width * (k + 1)] for row in said]
                found[i] = _together(here()[i], rows, performer)
    return [found[i] for i in range(len(states))]


def tell_at_next_round(state: TrainState, text: str) -> None:
    """Let ranks compare a call in which nothing crosses them: the next round that there is does."""
    if is_abstract():
        note_call(text)
    elif not needs_func(state.params.flats) and (to := performer_of(state.setup.axis)) is not None:
        to.send(Noted(text))


def require_held(
    said: Sequence[Agreed], name: str, treespec: optree.PyTreeSpec | None = None
) -> None:
    """Raise `PhaseError`, on every rank, if no rank has gradients of one of the states."""
    held = [one.held for one in said]
    if any(held) and not all(held):
        paths: Any = [] if treespec is None else treespec.paths()
        names = [".".join(map(str, path)) for path in paths] if len(paths) == len(held) else held
        seen = [name for name, one in zip(names, held, strict=True) if not one]
        raise PhaseError(
            f"{name}: {len(seen)} of {len(held)} states hold no gradients: {seen}.",
            cause="grad_and_reduce(..., wrt=), which left them out, before a call with all states.",
            fix='update those that learned: states["m"] = fzero.apply_gradients(states["m"]).',
        )
    if not all(held):
        progress.require_gradients(Progress(), name)


def reduce_agreed(state: TrainState, said: Agreed, used: int = progress.ALL) -> TrainState:
    """Return the state with all its gradients reduced: zeros where this rank holds nothing.

    `used`: what this rank counts as used of what another one brought. A collective if any rank has
    something that waits.
    """
    for _, name, flag in _FLAGS:
        if name in said.flags and flag.heard is not None:
            state = flag.heard(state)
    after = progress.of_all_ranks(state.progress, said.backwards, used)
    if after is not state.progress:
        state = state.replace(progress=after)
    if said.waits:
        return reduce_window(state)
    if state.window.gathered:
        state = state.replace(window=progress.pop(state.window)[0])
    if state.gradients.held:
        return state
    return accumulated(state, filled(state, {}, state.setup.gradients))


def refused(
    states: Sequence[TrainState], treespec: optree.PyTreeSpec | None, said: Sequence[Agreed]
) -> Exception | None:
    """Return the error for which a transform of any rank makes no update. An exchange if any does.

    treespec: of the tree that the states are in, None for one state. said: of those that are due.
    """
    due = [state for state in states if not state.setup.policy.defer_update]
    for _, name, flag in _FLAGS:
        which = [state for state, one in zip(due, said, strict=True) if name in one.flags]
        if which and flag.raises is not None:
            return flag.raises(states, treespec, which)
    return None


@contextmanager
def raises_together(axis: Axis | None) -> Iterator[None]:
    """Tell the other ranks, which go on to a round, of an error that they do not know of.

    axis: None where nobody is to be told.
    """
    performer = None if axis is None else performer_of(axis)
    before = performer and performer.protocol.posted
    try:
        yield
    except BaseException:
        if performer is not None:
            now = performer.protocol
            if not now.known or now.posted is before:  # what is known is an earlier error
                performer.fail()
        raise


# What is said.


def _facts(state: TrainState, *, updates: bool, counts: bool) -> list[str]:
    """Return what ranks must have in common, a line each.

    `counts`: how often gradients were reduced is the same on all ranks, unlike in an engine.
    """
    flats = [*state.params.flats, *state.gradients.flats, *state.window.pending.flats]
    graph = "with a graph" if wants_graph(flats) else "without one"  # it is reduced in another way
    setup = state.setup
    lines = [setup.layout.summary, f"stage {setup.stage}, {graph}", *_options(setup.policy)]
    if counts:
        lines.append(f"{state.progress.reductions} reductions since the update")
    lines += facts(state, "update" if updates else "call")
    if updates:
        step = state.step
        on_host = step.device.type == "cpu" and not lacks_value(step)
        lines += [f"update {int(step)}"] if on_host else []
        lines += state.setup.optimizer.describe((), state.step)
    return lines


@lru_cache(maxsize=64)
def _options(policy: Policy) -> tuple[str, ...]:
    return tuple(policy.options)


def _numbers(
    now: Callable[[], Sequence[TrainState]],
    some: Sequence[int],
    *,
    uses: bool,
    written: Callable[[], object],
) -> list[int]:
    """Return what this rank says of some states: one number each, and another if it `uses`."""
    states, numbers = now(), []
    for i in some:
        state = states[i]
        flags = _WAITS * state.window.pending.held + _REDUCED * state.gradients.held
        flags += _WRITTEN * bool(written())
        flags += sum(bit for bit, _, flag in _FLAGS if flag.of(state))
        numbers.append(flags + _BACKWARDS * state.progress.backwards)
        if uses:
            numbers.append(_digest(_unused(state)))
    return numbers


def _unused(state: TrainState) -> int:
    """The leaves that this rank has not used, bit by bit."""
    return state.setup.layout.learning & ~state.progress.used


@lru_cache(maxsize=64)
def _digest(bits: int) -> int:
    """0 for none; what is equal for equal leaves only."""
    if not bits:
        return 0
    data = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    return 1 + int.from_bytes(blake2b(data, digest_size=7).digest(), "little")


# What it means.


def _together(state: TrainState, said: Sequence[Row], performer: Performer | None) -> Agreed:
    """Return what is true on all ranks, from what each has said of a state.

    Ranks that say the same are one here, so that this work does not grow with their number.
    """
    rows = frozenset(said)
    flags = [row[0] for row in rows]
    if len({flag & _REDUCED for flag in flags}) > 1:
        held = [bool(row[0] & _REDUCED) for row in said]
        raise MismatchError(
            f"rank {held.index(True)} holds reduced gradients, and rank {held.index(False)} holds "
            "none.",
            cause="gradients that were thrown away on some ranks only: zero_grad() of the module "
            "or the optimizer, p.grad = None, or engine.zero_grad() inside a window.",
            fix="throw them away on every rank, with engine.zero_grad() outside of a window. "
            "Nothing was changed.",
        )
    for bit, _, one in _FLAGS if len(rows) > 1 else ():
        # A rank that has made no backward, and has served others, has reduced theirs as its own.
        have = [r for r, (flag, *_) in enumerate(said) if flag & bit]
        some = _REDUCED | -_BACKWARDS  # what says that a rank holds gradients
        lack = [r for r, (flag, *_) in enumerate(said) if flag & some and not flag & bit]
        if one.unlike is not None and have and lack:
            raise one.unlike(have[0], lack[0])
    return Agreed(
        waits=any(flag & _WAITS for flag in flags),
        reduced=bool(flags[0] & _REDUCED),
        written=any(flag & _WRITTEN for flag in flags),
        backwards=max(flag // _BACKWARDS for flag in flags),
        flags=frozenset(name for bit, name, _ in _FLAGS if any(flag & bit for flag in flags)),
        unused=_unused_by_all(state, rows, performer) if len(said[0]) > 1 else (),
    )


def _unused_by_all(
    state: TrainState, rows: Collection[Row], performer: Performer | None
) -> tuple[int, ...]:
    """The leaves that no rank has used. An exchange if ranks have left out other ones."""
    digests = {row[1] for row in rows}
    if not all(digests):
        return ()
    bits = _unused(state)
    if len(digests) > 1:
        assert performer is not None
        for others in performer.tell(bits):
            bits &= others
    return from_bits(bits)
