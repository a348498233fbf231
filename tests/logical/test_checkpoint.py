"""A run of logical ranks goes on from a file with the same bits; another one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.errors import LayoutError
from tests.logical.programs import Place, Program, data_of, model_of, step_of

PROGRAM = Program(logical=3, updates=4, dropout=0.4)


def made(ranks: int, stage: int, program: Program = PROGRAM) -> tuple[Any, Any]:
    apply, params = fzero.functionalize(model_of(program))
    step = step_of(program, Place(ranks, stage), apply)
    if ranks > 1:
        step = fzero.simulate(step, world_size=ranks)
    return step, step.init(params, fzero.optim.adamw(1e-2))


def advanced(step: Any, state: Any, updates: range, ranks: int) -> Any:
    for update in updates:
        x = data_of(PROGRAM)[update]
        if ranks > 1:  # each has as many logical ranks
            x = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        state, _ = step(state, x, update)
    return state


def params_of(state: Any, ranks: int) -> Any:
    if ranks == 1:
        return fzero.full_params(state)
    every: Any = fzero.simulate(fzero.full_params, world_size=ranks)(state)
    return {path: x[0] for path, x in every.items()}


@pytest.mark.parametrize(("first", "then"), [((1, 2), (3, 3)), ((3, 3), (1, 0)), ((3, 0), (3, 2))])
def test_it_goes_on_elsewhere(tmp_path: Path, first: Any, then: Any) -> None:
    step, state = made(1, 0)
    wanted = params_of(advanced(step, state, range(4), 1), 1)
    step, state = made(*first)
    fzero.checkpoint.save(tmp_path / "half", advanced(step, state, range(2), first[0]))
    step, state = made(*then)
    state = fzero.checkpoint.load(tmp_path / "half", state)
    found = params_of(advanced(step, state, range(2, 4), then[0]), then[0])
    assert all(torch.equal(wanted[path], found[path]) for path in wanted)


def test_another_run_is_refused(tmp_path: Path) -> None:
    _, state = made(1, 0)
    fzero.checkpoint.save(tmp_path / "it", state)
    _, other = made(1, 0, Program(logical=2))
    with pytest.raises(LayoutError, match=r"a run of Logical\(ranks=3, seed=5\)"):
        fzero.checkpoint.load(tmp_path / "it", other)
