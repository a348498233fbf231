"""Law 14: for W protocol records and any interleaving of their events every rank that wants a unit
gets it, all ranks start the same collectives in one order, nobody waits for ever, and a failure
anywhere ends every rank in an error that names it.

Ranks use units in other orders, skip some, run other numbers of passes, call other functions, or
fail at any event, or in the middle of what an event asks for; then all of them end, or all go on.
See `world.py` for the model of rounds and collectives, `cases.py` for what ranks do.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given

from fzero.state.schedule import BACKWARD, FORWARD
from tests.state.cases import (
    STEPS,
    Astray,
    Block,
    Case,
    Evaluation,
    Passes,
    Script,
    Window,
    case_of,
    cases,
)
from tests.state.driver import Driver
from tests.state.world import AllAstray, Dead, Fault, OwnError, PeersFailed, Steps, Sync, World

ERRORS = (OwnError, PeersFailed, Dead, AllAstray)


class Actor:
    """A driver that does what a script says."""

    def __init__(self, rank: Driver, script: Script, *, lives: bool) -> None:
        self.rank, self.script, self.lives = rank, script, lives
        self.events = 0
        rank.breaks_in, rank.breaks = script.breaks_in, script.breaks

    def check(self) -> None:
        """Raise at the event at which this rank fails."""
        self.events += 1
        if self.events - 1 == self.script.fails_at:
            raise OwnError

    def run(self) -> Steps:
        """Make all the steps."""
        for number, (items, text) in enumerate(
            zip(self.script.steps, self.script.calls, strict=True)
        ):
            try:
                yield from self.step(number, items, text)
            except ERRORS as error:
                if not self.lives or isinstance(error, Dead):
                    raise
                yield from self.rank.recover(error)

    def step(self, number: int, items: tuple[Any, ...], text: str) -> Steps:
        """The items of a step, and its call."""
        try:
            yield from self.items(items)
            self.check()
        except OwnError as error:
            if not self.lives or error.crosses:
                raise
            yield from self.rank.fails_alone()  # and makes the call
        if number == self.script.raises_at:
            yield from self.rank.raised()
            raise OwnError
        yield from self.rank.call(text, number)
        yield from self.rank.update()

    def items(self, items: tuple[Any, ...]) -> Steps:
        """Some items, one after another."""
        for item in items:
            self.check()
            match item:
                case Passes():
                    yield from self.passes(item)
                case Evaluation():
                    yield from self.evaluation(item)
                case Window(model, inner):
                    self.rank.open_window(model)
                    yield from self.items(inner)
                    yield from self.rank.close_window(model)
                case Block():
                    yield from self.block(item)
                case Astray(model):
                    yield from self.rank.begin(model, FORWARD)
                    error = AllAstray()
                    yield from self.rank.fail([model], error)
                    raise error

    def block(self, block: Block) -> Steps:
        """Units are gathered, and read in another order than they were gathered."""
        rank = self.rank
        yield from rank.open_block(block.model, block.units)
        try:
            for unit in reversed(block.units):
                yield from rank.use(block.model, unit)
                rank.require_blocks()
            yield from self.items(block.items)
            rank.require_blocks()
        except ERRORS:
            yield from rank.close_block()
            raise
        yield from rank.close_block()

    def evaluation(self, one: Evaluation) -> Steps:
        """A forward alone."""
        rank = self.rank
        rank.evaluates[one.model] = one
        try:
            yield from rank.begin(one.model, FORWARD, exact=one.exact)
            yield from self.uses(one.model, one.uses)
            yield from rank.end_forward(one.model)
            yield from rank.finish_forward(one.model)
        except ERRORS as error:
            yield from rank.fail([one.model], error)
            raise
        finally:
            del rank.evaluates[one.model]

    def uses(self, model: int, uses: tuple[Any, ...]) -> Steps:
        """What a forward does."""
        for use in uses:
            self.check()
            match use:
                case int():
                    yield from self.rank.use(model, use)
                case Block():
                    yield from self.block(use)
                case Evaluation():
                    yield from self.evaluation(use)
                case _:
                    assert isinstance(use, Sync)
                    yield from self.rank.sync(use)
        self.check()

    def passes(self, together: Passes) -> Steps:
        """Forwards, one after another; then one backward of all."""
        rank, inside = self.rank, list[int]()
        passes = [one for one in together.passes if one.model >= 0]
        try:
            for one in together.passes:
                if one.model < 0:
                    yield from self.uses(one.model, one.uses)
                    continue
                inside.append(one.model)
                yield from rank.begin(one.model, FORWARD)
                yield from self.uses(one.model, one.uses)
                yield from rank.end_forward(one.model)
            for one in passes:
                self.check()
                yield from rank.begin(one.model, BACKWARD)
            for model, (kind, unit, *more) in together.backwards:
                self.check()
                if kind == "use":
                    yield from rank.use(model, unit)
                elif kind == "sync":
                    yield from rank.sync(Sync(unit), backward=more[0])
                else:
                    yield from rank.gradient(model, unit, complete=more[0])
            for one in passes:
                self.check()
                yield from rank.finish(one.model)
                inside.remove(one.model)
        except ERRORS as error:
            yield from rank.fail(inside, error)
            raise


def run(case: Case) -> tuple[World, list[BaseException | None]]:
    """Run a case; the laws that hold at each event are checked on the way."""
    world = World(**case.world, make=Driver)
    pairs = zip(world.ranks, case.scripts, strict=True)
    scripts = [Actor(rank, script, lives=case.lives).run() for rank, script in pairs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fzero.state.rounds.CODES", case.room)
        return world, world.run(scripts, case.order)


def require(case: Case) -> None:
    """Run a case, and raise `Fault` if a law does not hold."""
    world, raised = run(case)
    for rank in world.ranks:
        rest = rank.protocol.running, rank.protocol.agenda
        if any(rest):
            raise Fault("a pass ends", f"rank {rank.number} has {rest} at the end")
    failed = {r for r, error in enumerate(raised) if isinstance(error, OwnError)}
    if failed:
        _require_named(raised, failed)
        return
    if raised != [None] * world.size:
        raise Fault("nobody raises", str(raised))
    _require_together(world)
    _require_sums(world)
    if case.repeats and any(rank.asked[-1] for rank in world.ranks):
        raise Fault("no questions", f"{[rank.asked for rank in world.ranks]} rounds that ask")


def _require_named(raised: list[BaseException | None], failed: set[int]) -> None:
    """No rank goes on, and all of them name the ranks that failed if it crossed ranks."""
    crosses = all(raised[rank].crosses for rank in failed)
    for rank, error in enumerate(raised):
        if rank in failed:
            continue
        named = isinstance(error, PeersFailed) and {*error.ranks} <= failed
        if not named and (crosses or not isinstance(error, Dead)):
            raise Fault("a failure is named", f"ranks {failed} failed, rank {rank}: {error!r}")


def _require_together(world: World) -> None:
    """Where ranks go on, a step fails on all of them, with an error that names who has raised."""
    for step in range(STEPS):
        errors = [rank.errors[step] for rank in world.ranks]
        failed = {r for r, error in enumerate(errors) if isinstance(error, OwnError)}
        for rank, error in enumerate(errors):
            named = isinstance(error, PeersFailed) and {*error.ranks} <= failed
            if isinstance(error, AllAstray):
                continue
            if any(errors) and rank not in failed and not named:
                raise Fault("a failure is named", f"step {step}, rank {rank}: {errors}")
            alone = any(one.alone[step] for one in world.ranks)
            if named and not error.ranks and not alone:
                raise Fault("a failure is named", f"step {step}, rank {rank}: {errors}")


def _require_sums(world: World) -> None:
    """Each gradient of any rank is in the sums of every rank, once."""
    for step, model in itertools.product(range(STEPS), range(len(world.units))):
        if world.ranks[0].taken[step] is None:
            continue
        wanted = sum((rank.brought[step][model] for rank in world.ranks), Counter[str]())
        for rank in world.ranks:
            got = rank.taken[step][model]
            if got != wanted:
                seen = f"lacks {dict(wanted - got)}, has {dict(got - wanted)} besides"
                where = f"model {model}, step {step}, rank {rank.number}"
                raise Fault("one sum", f"{where}: {seen}")


SAMPLES: dict[str, dict[str, Any]] = {
    "in step": {},
    "they repeat": {"repeats": True},
    "some are out": {"served": True},
    "one fails": {"fails": True},
    "all go on": {"fails": True, "lives": True},
}
"""Kinds of cases: no rank fails, one does and it is over, or all go on after it."""

CASES = 80
"""Of each kind in a run of the tests."""


def require_all(kind: str, count: int = CASES) -> None:
    """Run the first `count` cases of a kind; the fault of the first that breaks a law names it."""
    for number in range(count):
        case = case_of(Random(f"{kind} {number}"), **SAMPLES[kind])
        try:
            require(case)
        except Fault as fault:
            fault.add_note(f"case {number} of {kind!r}")
            raise


@pytest.mark.parametrize("kind", SAMPLES)
def test_all_laws(kind: str) -> None:
    require_all(kind)


@given(case=cases() | cases(fails=True) | cases(fails=True, lives=True))
def test_all_laws_of_cases_that_shrink(case: Case) -> None:
    require(case)


@pytest.mark.parametrize("step", range(STEPS))
def test_ranks_that_make_different_calls_all_raise(step: int) -> None:
    calls = tuple("save" if i == step else "step" for i in range(STEPS))
    for number in range(CASES // 10):
        case = case_of(Random(number), served=True)
        size = case.world["size"]
        odd = number % size
        scripts = [
            replace(script, calls=calls) if rank == odd else script
            for rank, script in enumerate(case.scripts)
        ]
        _, raised = run(replace(case, scripts=tuple(scripts)))
        if size == 1:
            assert raised == [None]
            continue
        assert all(isinstance(error, PeersFailed) and error.ranks == () for error in raised), raised
