"""The laws are sharp: each of these faults in the protocol breaks a law that names it.

A mutant is an edit of one line. Cases of `test_law14` are run with it until a law does not hold:
first the one that is known to catch it. `mutation.py` makes mutants of all lines.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from tests.state.cases import Case, case_of
from tests.state.mutation import functions_of, put_in
from tests.state.test_law14 import CASES, SAMPLES, require
from tests.state.world import Fault


@dataclass(frozen=True)
class Edit:
    """A line of a module, what stands there instead, and the number of a case that catches it."""

    module: str
    old: str
    new: str
    case: tuple[str, int] = ("in step", 0)


MUTANTS: dict[str, Edit] = {
    "the order that others expect is not compared": Edit(
        "protocol",
        "said.is_same and said.is_in_order:",
        "said.is_same:",
    ),
    "the announcement is not read": Edit(
        "protocol",
        "    return p.then((heard_announcement, number), *tasks), (Read(),)",
        "    return replaced(p, open=None).then(*tasks), ()",
    ),
    "a rank asks while another model's plan runs": Edit(
        "protocol",
        "        return p.then(*ends, (ask, number, what, units)), ()",
        "        pass",
        ("in step", 1),
    ),
    "a pass begins while another model's plan runs": Edit(
        "protocol",
        "        return p.then(*ends, (announce, number)), ()",
        "        pass",
        ("in step", 1),
    ),
    "a rank leaves before all are done": Edit(
        "protocol",
        "    if not said.is_over:\n        p, effects = serve(p, said)\n",
        "    if False:\n        p, effects = serve(p, said)\n",
    ),
    "a plan ends on one rank only": Edit(
        "protocol",
        "    if p.open == number or course.due:\n",
        "    if ends:\n"
        "        p = replaced(p, open=None if p.open == number else p.open)\n"
        "        return p.put(number, course=replaced(course, replay=None, due=())), ()\n"
        "    if p.open == number or course.due:\n",
        ("all go on", 0),
    ),
    "a rank serves no reductions": Edit(
        "protocol",
        "            collected.append(Reduce(number, unit, mine=one in mine))",
        "            collected += [Reduce(number, unit, mine=True)] * (one in mine)",
    ),
    "a rank hands in nothing that it asked for": Edit(
        "protocol",
        "collected.append(Reduce(number, unit, mine=one in mine))",
        "collected.append(Reduce(number, unit, mine=False))",
    ),
    "what is left is forgotten": Edit(
        "protocol",
        "    if course.left:\n        p = p.put(",
        "    if False:\n        p = p.put(",
    ),
    "a pinned unit is freed": Edit(
        "residency",
        "if r.has(unit) and unit not in r.pinned)",
        "if r.has(unit))",
    ),
    "a plan frees nothing": Edit(
        "replay",
        "residency.free(r, step.frees)",
        "residency.free(r, ())",
        ("in step", 1),
    ),
    "what was asked for at a sync point stays": Edit(
        "replay",
        "return free_beside(replaced(replay, waits=False), r)",
        "return replaced(replay, waits=False), r, ()",
    ),
    "reductions start as they are ready": Edit(
        "replay",
        "list(takewhile(",
        "list(filter(",
        ("they repeat", 1),
    ),
    "a call is not waited for": Edit(
        "protocol",
        "        if everybody:\n            return",
        "        if True:\n            return",
    ),
    "a rank that raised tells nobody": Edit(
        "protocol",
        "tells = in_step and not p.known",
        "tells = False",
        ("one fails", 0),
    ),
    "a rank that raised does not keep step": Edit(
        "protocol",
        "end = ((run_plan, number, True),) if in_step else ()",
        "end = ()",
        ("all go on", 0),
    ),
    "a unit that flies is gathered again": Edit(
        "residency",
        "return unit in self.gathered or unit in self.flying",
        "return unit in self.gathered",
        ("some are out", 0),
    ),
    "plans are not followed": Edit(
        "protocol",
        "return p.put(number, course=replaced(course, replay=place)), effects",
        "return p.put(number, course=course), effects",
        ("they repeat", 0),
    ),
    "nobody asks for what the plan lacks": Edit(
        "protocol",
        "    if here.has(unit):\n        here, waits =",
        "    if True:\n        here, waits =",
    ),
    "a pass that is given up leaves its announcement open": Edit(
        "protocol",
        "open=None if p.open == number else p.open)",
        "open=p.open)",
        ("one fails", 4),
    ),
    "what a window brings is taken for exact": Edit(
        "protocol",
        "inexact=event.units.rounds.intersection(whole)",
        "inexact=frozenset()",
        ("in step", 2),
    ),
    "gathers behind an effect that raised are lost": Edit(
        "protocol",
        "kept = Gather | TakePart | Wait | Free | Reduce",
        "kept = Free | Reduce",
        ("all go on", 0),
    ),
    "a rank that has a unit of a block takes no part": Edit(
        "protocol",
        "        if here.has(unit):\n"
        "            collected.append(TakePart(number, unit, exact=True))\n",
        "        if here.has(unit):\n",
        ("in step", 61),
    ),
    "stale units stay pinned": Edit(
        "protocol",
        "residency.release(p.models[e.model].residency, pinned=True)",
        "residency.release(p.models[e.model].residency)",
        ("they repeat", 0),
    ),
    "a sync point that the plan lacks is not learned": Edit(
        "protocol",
        "asked = course.asked or had_plan",
        "asked = course.asked",
        ("they repeat", 41),
    ),
    "who hears of a failure does not wait for reductions": Edit(
        "protocol",
        "served=()), (WaitForReductions(), *dropped)",
        "served=()), tuple(dropped)",
        ("all go on", 0),
    ),
    "pins are left out of what ranks compare": Edit(
        "protocol",
        "(said.program.digest, sorted(here.pinned))",
        "said.program.digest",
        ("in step", 37),
    ),
    "a window keeps a unit that is in flight": Edit(
        "protocol",
        "    if here.stays:  # what a window keeps may be carried from here\n",
        "    if False:\n",
        ("in step", 2),
    ),
    "the end of a window frees nothing": Edit(
        "protocol",
        "residency.end_backward(replaced(here, stays=False))",
        "residency.end_backward(here)",
        ("all go on", 2),
    ),
    "a rank that raised does not know that all know it": Edit(
        "protocol",
        "replaced(p, known=True, served=()), (W",
        "replaced(p, known=False, served=()), (W",
        ("all go on", 11),
    ),
    "the end of a pass unpins what a block holds": Edit(
        "residency",
        "remain = {*r.units.persistent, *(unit for unit, _ in r.blocks)}",
        "remain = {*r.units.persistent}",
    ),
    "a rank waits for a reduction before a collective's backward": Edit(
        "protocol",
        "    waits = model.may_not_wait\n",
        "    waits = False\n",
        ("in step", 126),
    ),
    "a rank that raised reduces what the others have not come to": Edit(
        "protocol",
        "if tells and model.may_not_wait:",
        "if False:",
        ("one fails", 706),
    ),
    "a rank that evaluates a model loses what it has reduced for others": Edit(
        "protocol",
        "if number not in p.served:",
        "if number not in (*p.running, *p.served):",
        ("in step", 100),
    ),
    "sums of a backward are taken before it has ended": Edit(
        "protocol",
        "for model in p.served if model not in takes)",
        "for model in p.served)",
    ),
    "a rank reduces before a collective in which others are": Edit(
        "replay",
        "    return free_beside(replaced(replay, waits=False), r)",
        "    replay, r, frees = free_beside(replaced(replay, waits=False), r)\n"
        "    replay, r, reduces = start_ready(replay, r)\n"
        "    return replay, r, (*frees, *reduces)",
        ("all go on", 582),
    ),
    "a backward beside another follows a plan": Edit(
        "protocol",
        "    if beside and not model.units.gathers and not course.deferred:\n",
        "    if False:\n",
        ("all go on", 27),
    ),
    "a collective that only a backward makes is waited for in a plan": Edit(
        "protocol",
        "    if not late:\n",
        "    if True:\n",
        ("all go on", 27),
    ),
    "a collective that only a backward makes is not expected again": Edit(
        "protocol",
        "late=p.late.union(p.inside)",
        "late=p.late",
        ("they repeat", 17),
    ),
    "each pass meets at a collective for itself": Edit(
        "protocol",
        "return p.then(*ahead, *ends, (call, Call(SYNC, values), True), *away), ()",
        "return p.then(*ahead, *ends, *[(call, Call(SYNC, values), True)] * len(at), *away), ()",
        ("in step", 1),
    ),
    "what was served of a pass that failed stays": Edit(
        "protocol",
        "(WaitForReductions(), *dropped)",
        "(WaitForReductions(),)",
        ("all go on", 51),
    ),
    "a rank that raised leaves an exchange to the others": Edit(
        "protocol",
        "undone.append(Exchange(None))",
        "pass",
        ("all go on", 22),
    ),
}


@pytest.fixture(scope="module")
def sample() -> list[Case]:
    """The first cases of each kind, by turns."""
    pairs = [(n, kind) for n in range(CASES) for kind in SAMPLES]
    return [case_of(Random(f"{kind} {n}"), **SAMPLES[kind]) for n, kind in pairs]


@pytest.fixture
def whole() -> Iterator[None]:
    """The protocol is as it was after the test."""
    before = {one: one.__code__ for name in MODULES for one in functions_of(name)}
    yield
    for function, code in before.items():
        function.__code__ = code


MODULES = sorted({f"fzero.state.{edit.module}" for edit in MUTANTS.values()})


def law_that_breaks(case: Case) -> str | None:
    try:
        require(case)
    except Fault as fault:
        return fault.law
    except Exception as error:  # the transition itself fails on what is not legal
        return type(error).__name__
    return None


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_law_catches(name: str, sample: list[Case]) -> None:
    edit = MUTANTS[name]
    module = f"fzero.state.{edit.module}"
    source = Path(str(importlib.import_module(module).__file__)).read_text()
    assert source.count(edit.old) == 1
    put_in(module, ast.parse(source.replace(edit.old, edit.new)))
    kind, number = edit.case
    known = case_of(Random(f"{kind} {number}"), **SAMPLES[kind])
    assert any(law_that_breaks(case) for case in (known, *sample))
