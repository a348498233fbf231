"""Recording leaves a program as it was found: whatever a step keeps, and wherever."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.descends import descends
from tests.tools.prove.adversary import kept

PARAMS = {"w": torch.arange(24.0).view(4, 6) / 8, "b": torch.ones(4)}
X = torch.arange(12.0).view(2, 6) / 4
FORMS = {name: make for name, make in kept.FIRST.items() if name not in ("a byte array",)}
Step = Callable[..., Any]


def tables() -> Step:
    """A step that makes a table in each of the forms, and counts its calls."""
    made = {name: make() for name, make in FORMS.items()}
    numbers, calls, own = itertools.count(1), [0], nn.Linear(4, 4)

    def loss(p: Any, x: Tensor) -> Tensor:
        calls[0] += 1
        own.weight.grad = None
        rows = x @ p["w"].T + p["b"]
        for table in made.values():
            rows = rows + table()
        return rows.pow(2).mean() * next(numbers) * calls[0]

    return fzero.shard(descends(loss), stage=2)


def traced(step: Step, state: Any) -> Any:
    return fzero.trace(step)(state, X)


def checked(step: Step, state: Any) -> Any:
    return fzero.check_spmd(step, state, X)


def proved(step: Step, state: Any) -> Any:
    return fzero.prove(step, state, X, world=2)


def planned(step: Step, state: Any) -> Any:
    return fzero.plan.of_step(step, PARAMS, fzero.optim.sgd(0.5), X, world=2)


def differed(step: Step, state: Any) -> Any:
    run = fzero.tools.Run(
        step=step, params=PARAMS, optimizer=fzero.optim.sgd(0.5), batches=[X[None]], world_size=1
    )
    return fzero.diff(run, run)


TOOLS = [traced, checked, proved, planned, differed]


def states_after(tool: Any) -> list[Tensor]:
    step = tables()
    state = step.init(PARAMS, fzero.optim.sgd(0.5))
    if tool is not None:
        tool(step, state)
    found = []
    for _ in range(2):
        state, loss = step(state, X)
        found += [loss, *fzero.full_params(state).values()]
    return found


@pytest.mark.parametrize("tool", TOOLS)
def test_steps_after_a_tool_have_the_bits_of_a_program_without_it(
    tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "value", lambda: torch.arange(4.0))
    wanted, found = states_after(None), states_after(tool)
    assert all(type(x) is Tensor and torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_a_compiled_step_makes_its_own_tables_and_leaves_those_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept, "value", lambda: torch.arange(4.0))
    table = kept.FIRST["a memo"]()
    step = fzero.shard(descends(lambda p, x: (x @ p["w"].T + table()).pow(2).mean()), stage=2)
    state = step.init(PARAMS, fzero.optim.sgd(0.5))
    wanted = step(state, X)[1]
    table.cache_clear()
    compiled: Any = fzero.compile(step, backend="eager")
    for one in (compiled, compiled, step):
        assert torch.equal(one(state, X)[1], wanted)


@pytest.mark.parametrize(
    "met",
    [
        lambda rows, table: rows * table,
        lambda rows, table: rows[:, table.argsort()],
        lambda rows, table: rows * table.tolist()[0],
        lambda rows, table: rows.sum() * table.sum(),
    ],
)
@pytest.mark.parametrize("tool", [traced, planned, proved])
def test_what_is_left_where_nobody_looks_is_named_where_it_is_met(
    tool: Any, met: Any, request: pytest.FixtureRequest
) -> None:
    logger: Any = logging.getLogger(request.node.name)

    def loss(p: Any, x: Tensor) -> Tensor:
        rows = x @ p["w"].T
        if not hasattr(logger, "table"):
            logger.table = torch.arange(4.0)
            return rows.pow(2).mean() * logger.table.sum()
        return met(rows, logger.table).pow(2).mean()

    step = fzero.shard(descends(loss), stage=0)
    state = step.init(PARAMS, fzero.optim.sgd(0.5))
    with contextlib.suppress(fzero.PhaseError):  # a second record, or the plan's second step
        tool(step, state)
    name = {"traced": "trace", "planned": "plan", "proved": "prove"}[tool.__name__]
    with pytest.raises(fzero.PhaseError, match=rf"fzero\.{name} left in logging\.Logger\.table"):
        step(state, X)
    del logger.table
    assert step(state, X)[1].isfinite()


@pytest.mark.parametrize("tool", [traced, planned])
def test_a_step_that_returns_what_is_left_raises(tool: Any, request: pytest.FixtureRequest) -> None:
    logger: Any = logging.getLogger(request.node.name)

    def step_fn(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p, x: (x @ p["w"].T).mean(), state)(x)
        if not hasattr(logger, "table"):
            logger.table = torch.ones(())
        return fzero.apply_gradients(state), logger.table

    step = fzero.shard(step_fn, stage=1)
    state = step.init(PARAMS, fzero.optim.sgd(0.5))
    tool(step, state)
    with pytest.raises(fzero.PhaseError, match=r"left in logging\.Logger\.table"):
        step(state, X)
    del logger.table
    assert step(state, X)[1] == 1


def test_an_error_of_a_step_names_what_was_left_only_where_somebody_holds_it(
    request: pytest.FixtureRequest,
) -> None:
    logger: Any = logging.getLogger(request.node.name)

    def step_fn(state: Any, x: Tensor) -> Any:
        if hasattr(logger, "table"):
            raise ValueError("of the user's own")
        logger.table = torch.ones(())
        return state, None

    step = fzero.shard(step_fn, stage=1)
    state = step.init(PARAMS, fzero.optim.sgd(0.5))
    traced(step, state)
    with pytest.raises(ValueError, match="own") as held:
        step(state, X)
    cycle = [logger.table]
    cycle.append(cycle)
    logger.table = None
    del cycle
    with pytest.raises(ValueError, match="own") as garbage:
        step(state, X)
    (note,) = held.value.__notes__
    assert note.startswith("(fzero.trace left") and note.endswith("in logging.Logger.table)")
    assert not hasattr(garbage.value, "__notes__")


def test_generators_and_small_tensors_are_put_back() -> None:
    held, drawn = torch.zeros(3), torch.Generator()
    array = held.numpy()
    before = drawn.get_state(), torch.get_rng_state()

    def loss(p: Any, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        drawn.manual_seed(7)
        array[0] += 1
        return (x @ p["w"].T).pow(2).mean()

    step = fzero.shard(descends(loss), stage=0)
    fzero.trace(step)(step.init(PARAMS, fzero.optim.sgd(0.5)), X)
    assert not held.any()
    assert all(map(torch.equal, (drawn.get_state(), torch.get_rng_state()), before))
