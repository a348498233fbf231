"""Law 14 is sharp: each of these faults in a transition of the protocol breaks a law that names it.

A mutant is one transition that forgets something. Cases of `test_law14` are run with it until a law
does not hold; which one, is part of the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fzero.state import pass_state, replay, residency
from fzero.state import protocol as machine
from fzero.state.effects import FreeUnit, Reduce, ReduceUnit
from fzero.state.protocol import _rounds, events
from fzero.state.protocol import _tasks as tasks
from fzero.state.rounds import Round
from tests.state.test_law14 import Case, cases, require
from tests.state.world import Fault

Patch = Callable[[pytest.MonkeyPatch], None]


def does_nothing(p: Any, *_: Any) -> Any:
    return p, ()


def takes_it_for_answered(p: Any, t: tasks.Learn) -> Any:
    return replace(p, open=None), ()


def step(kind: type, mutant: Callable[..., Any]) -> Patch:
    """What an event or a task does first is `mutant`."""
    return lambda patch: patch.setitem(machine._STEPS, kind, mutant)


def answer(kind: type, mutant: Callable[..., Any]) -> Patch:
    """How a task goes on with an answer is `mutant`."""
    return lambda patch: patch.setitem(machine._ANSWERED, kind, mutant)


def attribute(owner: Any, name: str, mutant: Any) -> Patch:
    return lambda patch: patch.setattr(owner, name, mutant)


def asks_without_waiting_for_other_plans(p: Any, t: tasks.Ask) -> Any:
    return p.then(tasks.AskNext(t)), ()


def leaves_before_all_are_done(p: Any, t: tasks.SayDone, said: Round) -> Any:
    return p.then(tasks.EndOfPass(t.model, asked=False)), ()


def serves_gathers_only(p: Any, one: Any, *, mine: bool, served: Any = _rounds._served) -> Any:
    if one.what is _rounds.What.REDUCE and not mine:
        return p, ()
    return served(p, one, mine=mine)


def hands_in_nothing_that_it_asked_for(
    p: Any, one: Any, *, mine: bool, served: Any = _rounds._served
) -> Any:
    p, effects = served(p, one, mine=mine)
    lost = [replace(x, mine=False) if isinstance(x, Reduce) else x for x in effects]
    return p, tuple(lost)


def forgets_what_is_left(p: Any, t: tasks.AskLeft) -> Any:
    return p, ()


def frees_what_is_pinned(r: Any, model: int, units: Any, free: Any = residency.free) -> Any:
    units = tuple(units)
    return free(replace(r, pinned=r.pinned.difference(units)), model, units)


def frees_nothing_at_a_use(place: Any, at: int, walk: Any = replay._walk) -> Any:
    there, effects = walk(place, at)
    return there, tuple(x for x in effects if not isinstance(x, FreeUnit))


def never_frees_what_was_asked_for_here(place: Any) -> Any:
    return replay.start_ready(replace(place, waits=False, gathered_here=()))


def reduces_out_of_order(place: Any) -> Any:
    steps = place.plan.steps[place.at].reduces
    due = [unit for unit in steps[place.started :] if unit in place.ready]
    rest = place.ready.difference(due)
    there = replace(place, started=place.started + len(due), ready=rest)
    return there, tuple(ReduceUnit(unit) for unit in due)


def does_not_answer_a_call(p: Any, e: Any, said: Round) -> Any:
    return replace(p, heard=tuple(said.values)), ()


def gives_up_without_a_word(s: Any, *, known: bool, astray: bool) -> Any:
    state, in_step, _ = FAIL(s, known=known, astray=astray)
    return state, in_step, False


def gives_up_out_of_step(s: Any, *, known: bool, astray: bool) -> Any:
    state, _, tells = FAIL(s, known=known, astray=astray)
    return state, False, tells


FAIL = pass_state.fail


def starts_again(r: Any, model: int, unit: int, *, inexact: bool) -> Any:
    flying = tuple(u for u in r.flying if u != unit)
    new = replace(r, flying=(*flying, unit))
    return new, (residency.Gather(model, unit, exact=not inexact),)


def goes_on_without_the_plan(p: Any, t: tasks.Follow) -> Any:
    return p, ()


def does_not_ask_at_the_end_of_a_plan(p: Any, t: tasks.Obtain) -> Any:
    model = p.models[t.model]
    here, waits = residency.wait(model.residency, t.model, [t.unit])
    return p.put(t.model, replace(model, residency=here)), waits


MUTANTS: dict[str, tuple[Patch, set[str]]] = {
    "the announcement of others is not compared": (
        attribute(Round, "is_in_order", True),
        {"one order", "nobody waits for ever"},
    ),
    "the announcement is not read": (
        step(tasks.Learn, takes_it_for_answered),
        {"no questions", "nobody waits for ever", "one order"},
    ),
    "a rank asks while another model's plan runs": (
        step(tasks.Ask, asks_without_waiting_for_other_plans),
        {"one order", "nobody waits for ever"},
    ),
    "a pass begins while another model's plan runs": (
        step(tasks.EndOthers, does_nothing),
        {"one order", "nobody waits for ever"},
    ),
    "a rank leaves before all are done": (
        answer(tasks.SayDone, leaves_before_all_are_done),
        {"one order", "nobody waits for ever", "one sum", "nobody raises"},
    ),
    "a plan ends on one rank only": (
        step(tasks.EndPlan, does_nothing),
        {"no questions", "one order", "a failure is named"},
    ),
    "a rank serves no reductions": (
        attribute(_rounds, "_served", serves_gathers_only),
        {"one order", "nobody waits for ever"},
    ),
    "a rank hands in nothing that it asked for": (
        attribute(_rounds, "_served", hands_in_nothing_that_it_asked_for),
        {"one sum"},
    ),
    "what is left is forgotten": (step(tasks.AskLeft, forgets_what_is_left), {"one sum"}),
    "a pinned unit is freed": (
        attribute(residency, "free", frees_what_is_pinned),
        {"what is wanted is here", "one order", "nobody waits for ever", "no questions"},
    ),
    "a plan frees nothing": (attribute(replay, "_walk", frees_nothing_at_a_use), {"memory"}),
    "what was asked for at a sync point stays": (
        attribute(replay, "leave_sync_point", never_frees_what_was_asked_for_here),
        {"memory", "one order"},
    ),
    "reductions start as they are ready": (
        attribute(replay, "start_ready", reduces_out_of_order),
        {"one order"},
    ),
    "a call is not waited for": (
        answer(events.Call, does_not_answer_a_call),
        {"nobody raises", "nobody waits for ever", "one order"},
    ),
    "a rank that raised tells nobody": (
        attribute(pass_state, "fail", gives_up_without_a_word),
        {"a failure is named"},
    ),
    "a rank that raised does not keep step": (
        attribute(pass_state, "fail", gives_up_out_of_step),
        {"a failure is named", "one order", "nobody waits for ever"},
    ),
    "a unit that flies is gathered again": (
        attribute(residency, "start", starts_again),
        {"gathered once", "one order"},
    ),
    "plans are not followed": (step(tasks.Follow, goes_on_without_the_plan), {"no questions"}),
    "nobody asks for what the plan lacks": (
        step(tasks.Obtain, does_not_ask_at_the_end_of_a_plan),
        {"what is wanted is here"},
    ),
}


@pytest.fixture(scope="module")
def sample() -> list[Case]:
    """Cases, drawn once for all mutants: to draw one takes longer than to run it."""
    drawn: list[Case] = []

    @settings(
        max_examples=300,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(case=cases() | cases(served=True, fails=True))
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    return drawn


def law_that_breaks(case: Case) -> str | None:
    try:
        require(case)
    except Fault as fault:
        return fault.law
    except Exception as error:  # the transition itself fails on what is not legal
        return type(error).__name__
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_law_catches(name: str, sample: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    patch, laws = MUTANTS[name]
    patch(monkeypatch)
    found = next((law for law in map(law_that_breaks, sample) if law is not None), None)
    monkeypatch.undo()
    assert found in laws


def test_without_a_mutant_no_law_breaks(sample: list[Case]) -> None:
    assert {law_that_breaks(case) for case in sample} == {None}
