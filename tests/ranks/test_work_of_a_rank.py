"""What a virtual rank costs: calls of functions, which can be counted, in the place of seconds."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero

PACKAGE = str(Path(fzero.__file__).parent)
PHASES = ("init", "step", "full_params")


def calls(run: Callable[[], Any]) -> Counter[str]:
    """Count calls of fzero's functions in all threads, a generator's each time it goes on."""
    found: Counter[str] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_name}"] += 1

    before = sys.getprofile()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return found


def of_phases(world: int) -> dict[str, Counter[str]]:
    """Return the calls of init, the first step and full_params at stage 3, over all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    apply, params = fzero.functionalize(model)

    def loss_fn(p: Any, batch: Any) -> torch.Tensor:
        return F.mse_loss(apply(p, batch[0]), batch[1])

    def step_fn(state: Any, batch: Any) -> Any:
        state, loss = fzero.grad_and_reduce(loss_fn, state)(batch)
        return fzero.apply_gradients(state), loss

    step = fzero.simulate(fzero.shard(step_fn, stage=3), world_size=world)
    full = fzero.simulate(fzero.full_params, world_size=world)
    batch = torch.randn(world, 4, 16), torch.randn(world, 4, 8)
    values: list[Any] = []
    return {
        "init": calls(lambda: values.append(step.init(params, fzero.optim.adamw(1e-3)))),
        "step": calls(lambda: values.append(step(values[0], batch)[0])),
        "full_params": calls(lambda: values.append(full(values[1]))),
    }


@pytest.fixture(scope="module")
def counted() -> dict[int, dict[str, Counter[str]]]:
    of_phases(2)  # what is done once in a process
    return {world: of_phases(world) for world in (2, 4, 8)}


@pytest.mark.parametrize("phase", PHASES)
def test_the_work_of_a_rank_does_not_grow_with_their_number(counted: Any, phase: str) -> None:
    two, four, eight = (counted[world][phase] for world in (2, 4, 8))
    more = {
        name: (eight[name] - four[name]) / 4 - (four[name] - two[name]) / 2 for name in [*eight]
    }
    assert {name: n for name, n in more.items() if n > 0} == {}


@pytest.mark.parametrize(("phase", "most"), [("init", 680), ("step", 2270), ("full_params", 230)])
def test_a_rank_makes_few_calls(counted: Any, phase: str, most: int) -> None:
    """A tenth above what it is now; comprehensions are calls until Python 3.12 alone."""
    four, eight = (
        sum(n for name, n in counted[world][phase].items() if ":<" not in name) for world in (4, 8)
    )
    assert (eight - four) / 4 <= most


def test_garbage_is_collected_as_often_for_a_rank_as_in_a_process() -> None:
    before = gc.get_threshold()
    seen = []

    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.get_threshold())
        return fzero.psum(x)

    fzero.simulate(body, world_size=3)(torch.ones(3))
    assert seen == [(3 * before[0], *before[1:])] * 3
    assert gc.get_threshold() == before
    with suppress(ZeroDivisionError):
        fzero.simulate(lambda x: x / (1 // 0), world_size=2)(torch.ones(2))
    assert gc.get_threshold() == before
