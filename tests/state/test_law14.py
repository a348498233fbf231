"""Law 14: for W protocol records and any interleaving of their events every rank that wants a unit
gets it, all ranks start the same collectives in one order, nobody waits for ever, and a failure
anywhere ends every rank in an error that names it.

Ranks use units in other orders, skip some, run other numbers of passes, call other functions, or
fail at any event. See `world.py` for the model of rounds and collectives.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.state.pass_state import BACKWARD, FORWARD
from fzero.state.protocol import Units
from fzero.state.schedule import Limits
from tests.state.rank import Rank
from tests.state.world import SYNC, Dead, Fault, OwnError, PeersFailed, Steps, World

STEPS = 3  # the first one records, the others replay


@dataclass(frozen=True)
class OnePass:
    """A forward and a backward of one model on one rank.

    uses: units and sync points of the forward. backward: ("use", unit) or ("gradient", unit,
    whether it is complete).
    """

    model: int
    uses: tuple[Any, ...]
    backward: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Script:
    """What one rank does: in each step some passes, inside each other or not, then a call."""

    steps: tuple[tuple[tuple[OnePass, ...], ...], ...]
    calls: tuple[str, ...]
    fails_at: int = -1  # the event


@dataclass(frozen=True)
class Case:
    """A world, what its ranks do, and who moves next."""

    world: dict[str, Any]
    scripts: tuple[Script, ...]
    order: tuple[int, ...]
    repeats: bool = False  # all ranks do the same, in each step


def follow(rank: Rank, script: Script) -> Steps:
    """Do what a script says."""
    events, inside = 0, list[int]()

    def check() -> None:
        nonlocal events
        if events == script.fails_at:
            raise OwnError
        events += 1

    try:
        for passes, text in zip(script.steps, script.calls, strict=True):
            for together in passes:
                for one in together:  # forwards, one after another; then one backward of all
                    check()
                    inside.append(one.model)
                    yield from rank.begin(one.model, FORWARD)
                    for unit in one.uses:
                        check()
                        yield from rank.use(one.model, [unit])
                    check()
                    yield from rank.end_forward(one.model)
                for one in together:
                    check()
                    yield from rank.begin(one.model, BACKWARD)
                for one in together:
                    for kind, unit, *more in one.backward:
                        check()
                        if kind == "use":
                            yield from rank.use(one.model, [unit])
                        else:
                            yield from rank.gradient(one.model, unit, complete=more[0])
                for one in together:
                    check()
                    yield from rank.finish(one.model)
                inside.clear()
            check()
            yield from rank.call(text)
            yield from rank.update()
    except (OwnError, PeersFailed, Dead) as error:
        yield from rank.fail(dict.fromkeys(inside), error)
        raise


def run(case: Case) -> tuple[World, list[BaseException | None]]:
    """Run a case; the laws that hold at each event are checked on the way."""
    world = World(**case.world, make=Rank)
    scripts = [follow(rank, script) for rank, script in zip(world.ranks, case.scripts, strict=True)]
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


def _require_sums(world: World) -> None:
    """Each gradient of any rank is in the sums of every rank, once."""
    for step, model in itertools.product(range(STEPS), range(len(world.units))):
        wanted = sum((rank.brought[step][model] for rank in world.ranks), Counter[str]())
        for rank in world.ranks:
            got = rank.taken[step][model]
            if got != wanted:
                seen = f"lacks {dict(wanted - got)}, has {dict(got - wanted)} besides"
                where = f"model {model}, step {step}, rank {rank.number}"
                raise Fault("one sum", f"{where}: {seen}")


# Cases.


@st.composite
def units_of_models(draw: st.DrawFn) -> tuple[Units, ...]:
    found = []
    for _ in range(draw(st.integers(1, 2))):
        count = draw(st.integers(1, 6))
        numbers = range(count)
        bounded, gathers = draw(st.booleans()), draw(st.integers(0, 3)) > 0
        found.append(
            Units(
                numels=tuple(draw(st.integers(1, 3)) for _ in numbers),
                persistent=tuple(u for u in numbers if gathers and draw(st.integers(0, 4)) == 0),
                rounds=frozenset(u for u in numbers if draw(st.booleans())),
                bounded=frozenset(numbers) if bounded else frozenset(),
                limits=Limits(
                    prefetch_numel=draw(st.sampled_from([0, 1, 4])), keeps=draw(st.booleans())
                ),
                gathers=gathers,
            )
        )
    return tuple(found)


@st.composite
def passes(draw: st.DrawFn, model: int, units: Units, syncs: int) -> OnePass:
    unit = st.integers(0, len(units.numels) - 1)
    uses: list[Any] = []
    for part in range(syncs + 1):
        uses += [SYNC] if part else []
        uses += draw(st.lists(unit, max_size=7))
    backward: list[tuple[Any, ...]] = []
    for one in draw(st.permutations(range(len(units.numels)))):
        kind = draw(st.sampled_from(["nothing", "partial", "complete", "complete", "complete"]))
        if kind == "nothing":
            continue
        backward.append(("use", one))
        backward.append(("gradient", one, kind == "complete"))
    return OnePass(model, tuple(uses), tuple(backward))


@st.composite
def cases(draw: st.DrawFn, *, served: bool | None = None, fails: bool = False) -> Case:
    size = draw(st.integers(1, 4))
    units = draw(units_of_models())
    served = draw(st.booleans()) if served is None else served
    replicas = draw(st.sampled_from([1, 2])) if size == 4 else 1
    alike = draw(st.booleans())  # every rank does the same
    repeats = alike and draw(st.booleans())
    scripts: list[list[Any]] = [[] for _ in range(size)]
    for step in range(STEPS):
        if repeats and step:
            for mine in scripts:
                mine.append(mine[0])
            continue
        count = draw(st.integers(1, 2))
        by_rank: list[list[tuple[OnePass, ...]]] = [[] for _ in range(size)]
        for _ in range(count):
            both = len(units) == 2 and draw(st.booleans())
            models = [0, 1] if both else [draw(st.integers(0, len(units) - 1))]
            together = all(len(mine) == len(by_rank[0]) for mine in by_rank)
            syncs = draw(st.sampled_from([0, 0, 1, 3])) if together else 0
            out = served and not syncs and not alike
            first: tuple[OnePass, ...] | None = None
            for rank in range(size):
                if out and draw(st.integers(0, 4)) == 0:
                    continue  # this rank makes the call already
                if first is None or not alike:
                    first = tuple(draw(passes(m, units[m], syncs)) for m in models)
                by_rank[rank].append(first)
        for rank in range(size):
            scripts[rank].append(tuple(by_rank[rank]))
    fails_at = [-1] * size
    if fails:
        fails_at[draw(st.integers(0, size - 1))] = draw(st.integers(0, 40))
    order = draw(st.lists(st.integers(0, 3), max_size=400))
    return Case(
        world={"size": size, "units": units, "served": served, "replicas": replicas},
        scripts=tuple(
            Script(tuple(mine), ("step",) * STEPS, fails_at[rank])
            for rank, mine in enumerate(scripts)
        ),
        order=tuple(order),
        repeats=repeats and not fails and len(units) == 1,  # two end the plans of each other
    )


@given(case=cases())
def test_every_rank_gets_what_it_wants_and_every_gradient_is_summed_once(case: Case) -> None:
    require(case)


@given(case=cases(served=True))
def test_so_it_is_where_a_message_has_room_for_one_collective(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fzero.state.protocol._rounds.CODES", 1)
        require(case)


@given(case=cases(served=True, fails=True))
def test_a_failure_at_any_event_ends_every_rank_in_an_error_that_names_it(case: Case) -> None:
    require(case)


@given(case=cases(served=True), step=st.integers(0, STEPS - 1), data=st.data())
def test_ranks_that_make_different_calls_all_raise(
    case: Case, step: int, data: st.DataObject
) -> None:
    size = case.world["size"]
    odd = data.draw(st.integers(0, size - 1))
    calls = tuple("save" if i == step else "step" for i in range(STEPS))
    scripts = [
        Script(script.steps, calls) if rank == odd else script
        for rank, script in enumerate(case.scripts)
    ]
    _, raised = run(Case(case.world, tuple(scripts), case.order))
    if size == 1:
        assert raised == [None]
        return
    assert all(isinstance(error, PeersFailed) and error.ranks == () for error in raised), raised
