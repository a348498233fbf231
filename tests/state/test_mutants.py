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
        "protocol._rounds",
        "said.is_same and said.is_in_order:",
        "said.is_same:",
    ),
    "the announcement is not read": Edit(
        "protocol._rounds",
        "(p.then(Awaiting(t)), (Read(),)) if p.open == t.model else (p, ())",
        "(replaced(p, open=None), ())",
    ),
    "a rank asks while another model's plan runs": Edit(
        "protocol._rounds",
        "return p.then(tasks.EndOthers(t.model), tasks.AskNow(t.model, t.what, t.units)), ()",
        "return p.then(tasks.AskNow(t.model, t.what, t.units)), ()",
        ("in step", 1),
    ),
    "a pass begins while another model's plan runs": Edit(
        "protocol._pass",
        "p.then(tasks.EndOthers(number), tasks.Announce(number))",
        "p.then(tasks.Announce(number))",
        ("in step", 1),
    ),
    "a rank leaves before all are done": Edit(
        "protocol._rounds",
        "    if said.is_over:\n        p, effects = _over(p)\n        return",
        "    if True:\n        p, effects = _over(p)\n        return",
    ),
    "a plan ends on one rank only": Edit(
        "protocol._plan",
        "return p.then(tasks.Learn(t.model), tasks.Walk(t.model), tasks.ClosePlan(t.model)), ()",
        "return p, ()",
        ("all go on", 0),
    ),
    "a rank serves no reductions": Edit(
        "protocol._rounds",
        "return p, (Reduce(one.model, one.unit, mine=mine),)",
        "return p, (Reduce(one.model, one.unit, mine=mine),) * mine",
    ),
    "a rank hands in nothing that it asked for": Edit(
        "protocol._rounds",
        "(Reduce(one.model, one.unit, mine=mine),)",
        "(Reduce(one.model, one.unit, mine=False),)",
    ),
    "what is left is forgotten": Edit(
        "protocol._rounds",
        "    if not course.left:\n        return p, ()",
        "    if True:\n        return p, ()",
    ),
    "a pinned unit is freed": Edit(
        "residency",
        "if r.has(unit) and unit not in r.pinned)",
        "if r.has(unit))",
    ),
    "a plan frees nothing": Edit(
        "replay",
        "collected += [FreeUnit(unit) for unit in step.frees]",
        "collected += []",
        ("in step", 1),
    ),
    "what was asked for at a sync point stays": Edit(
        "replay",
        "replay, frees = free_beside(replay)\n    replay, reduces",
        "frees = ()\n    replay, reduces",
    ),
    "reductions start as they are ready": Edit(
        "replay",
        "            break\n",
        "            continue\n",
        ("they repeat", 1),
    ),
    "a call is not waited for": Edit(
        "protocol._rounds",
        "        if everybody:\n            return",
        "        if True:\n            return",
    ),
    "a rank that raised tells nobody": Edit(
        "pass_state",
        "return PassState(), in_step, in_step and not known",
        "return PassState(), in_step, False",
        ("one fails", 0),
    ),
    "a rank that raised does not keep step": Edit(
        "pass_state",
        "return PassState(), in_step, in_step and not known",
        "return PassState(), False, in_step and not known",
        ("all go on", 0),
    ),
    "a unit that flies is gathered again": Edit(
        "residency",
        "return unit in self.gathered or unit in self.flying",
        "return unit in self.gathered",
        ("some are out", 0),
    ),
    "plans are not followed": Edit(
        "protocol._rounds",
        "course=replaced(model.course, replay=place))), ()",
        "course=model.course)), ()",
        ("they repeat", 0),
    ),
    "nobody asks for what the plan lacks": Edit(
        "protocol._plan",
        "    if resident.has(t.unit):",
        "    if True:",
    ),
    "a pass that is given up leaves its announcement open": Edit(
        "protocol._pass",
        "p = replaced(p, open=None) if p.open == event.model else p",
        "pass",
        ("one fails", 4),
    ),
    "what a window brings is taken for exact": Edit(
        "protocol._pass",
        "residency.adopt(model.residency, event.units, inexact=inexact)",
        "residency.adopt(model.residency, event.units, inexact=())",
        ("in step", 2),
    ),
    "gathers behind an effect that raised are lost": Edit(
        "protocol",
        "kept = Gather | TakePart | Wait | Free | Reduce",
        "kept = Free | Reduce",
        ("all go on", 0),
    ),
    "a rank that has a unit of a block takes no part": Edit(
        "protocol._pass",
        "collected.append(TakePart(event.model, unit, exact=True))",
        "pass",
        ("in step", 61),
    ),
    "stale units stay pinned": Edit(
        "protocol._pass",
        "(model.residency, event.model, pinned=True)\n    return",
        "(model.residency, event.model)\n    return",
        ("they repeat", 0),
    ),
    "a sync point that the plan lacks is not learned": Edit(
        "protocol._plan",
        "asked = course.asked or t.had_plan",
        "asked = course.asked",
        ("they repeat", 41),
    ),
    "who hears of a failure does not wait for reductions": Edit(
        "protocol._rounds",
        "served=()), (WaitForReductions(), *dropped)",
        "served=()), tuple(dropped)",
        ("all go on", 0),
    ),
    "pins are left out of what ranks compare": Edit(
        "protocol._rounds",
        "(said.program.digest, sorted(here.pinned))",
        "said.program.digest",
        ("in step", 37),
    ),
    "a window keeps a unit that is in flight": Edit(
        "protocol._pass",
        "(model.residency, event.model, sorted(model.residency.pinned))",
        "(model.residency, event.model, ())",
        ("in step", 2),
    ),
    "the end of a window frees nothing": Edit(
        "protocol._pass",
        "resident = replaced(model.residency, stays=False)",
        "resident = model.residency",
        ("all go on", 2),
    ),
    "a rank that raised does not know that all know it": Edit(
        "protocol._rounds",
        "replaced(p, known=True, served=()), (W",
        "replaced(p, known=False, served=()), (W",
        ("all go on", 11),
    ),
    "the end of a pass unpins what a block holds": Edit(
        "residency",
        "remain = {*persistent, *(unit for unit, _ in r.blocks)}",
        "remain = {*persistent}",
    ),
    "what was served of a pass that failed stays": Edit(
        "protocol._rounds",
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
