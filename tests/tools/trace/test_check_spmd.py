"""`check_spmd` names the first collective in which ranks differ, before any of them is issued."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import MismatchError
from tests.adapter.on_ranks import on_ranks
from tests.covering import covered
from tests.descends import descends

Loss = Callable[[Any, Tensor], Tensor]


def layers() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return fzero.functionalize(nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"}))


def through(params: Any, order: str, x: Tensor) -> Tensor:
    for name in order:
        x = torch.nn.functional.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])
    return x.sum()


def same(params: Any, x: Tensor) -> Tensor:
    return through(params, "abc", x)


def other_order(params: Any, x: Tensor) -> Tensor:
    return through(params, "abc" if fzero.axis_index() != 1 else "acb", x)


def skips_one(params: Any, x: Tensor) -> Tensor:
    return through(params, "abc" if fzero.axis_index() != 1 else "ab", x)


def says_more(params: Any, x: Tensor) -> Tensor:
    extra = fzero.psum(x) if fzero.axis_index() == 1 else x
    return through(params, "abc", extra)


def other_size(params: Any, x: Tensor) -> Tensor:
    rows = 2 if fzero.axis_index() == 1 else 3
    return through(params, "abc", fzero.psum(x[:rows]))


def step_of(loss: Loss, stage: int) -> Any:
    step_fn = descends(loss)
    return fzero.shard(step_fn, stage=stage)


SAID: dict[Loss, str] = {
    other_order: r"rank 0 has 1: all_gather dp: b\.weight, b\.bias -> f32\[24\], rank 1 has "
    r"1: all_gather dp: c\.weight",
    skips_one: r"rank 0 has 2: all_gather dp: c\.weight, .*rank 1 has 2: all_gather dp: b\.weight",
    says_more: r"rank 0 has 1: all_gather dp: b\.weight, .*rank 1 has 1: all_reduce dp -> "
    r"f32\[3,4\]",
    other_size: r"rank 0 has 1: all_reduce dp -> f32\[3,4\], rank 1 has 1: .* f32\[2,4\]",
}


@pytest.mark.parametrize("loss", SAID)
def test_a_rank_that_differs_is_named(loss: Loss) -> None:
    step = fzero.simulate(step_of(loss, 3), world_size=3)
    state = step.init(layers()[1], fzero.optim.sgd(0.5))
    with pytest.raises(MismatchError, match=SAID[loss]):
        fzero.check_spmd(step, state, torch.ones(3, 3, 4))


def skips_the_update(state: Any, x: Tensor) -> tuple[Any, Tensor]:
    new, loss = fzero.grad_and_reduce(same, state)(x)
    return (new if fzero.axis_index() == 1 else fzero.apply_gradients(new)), loss


def clips_otherwise(state: Any, x: Tensor) -> tuple[Any, Tensor]:
    bound = 0.1 if fzero.axis_index() == 1 else 0.2
    step = fzero.clip(step_of(same, state.setup.stage).inner, max_norm=bound)
    return step(state, x)


def turns_two_around(state: Any, x: Tensor) -> tuple[Any, None]:
    one, two = (x[0], x) if fzero.axis_index() == 1 else (x, x[0])
    for value in (one, two):
        fzero.psum(value)  # nobody reads it
    return state, None


def update(state: Any, x: Tensor) -> Any:
    return fzero.apply_gradients(fzero.grad_and_reduce(same, state)(x)[0])


def halved(state: Any) -> Any:
    return fzero.map_params(lambda p: p / 2, state)


def maps(state: Any, x: Tensor) -> tuple[Any, None]:
    new = update(state, x)
    return (halved(new) if fzero.axis_index() == 1 else new), None


def sums(state: Any, x: Tensor) -> tuple[Any, Tensor]:
    new = update(state, x)
    return new, (fzero.psum if fzero.axis_index() == 1 else fzero.pmean)(x)


def returns_the_old_state(state: Any, x: Tensor) -> tuple[Any, Any]:
    new = update(state, x)
    return (state if fzero.axis_index() == 1 else new), new.step


def returns_the_first_of_two(state: Any, x: Tensor) -> tuple[Any, Any]:
    one = update(state, x)
    two = update(one, x)
    return (one if fzero.axis_index() == 1 else two), two.step


OF_STEPS = {
    maps: r"calls of the step: rank 0 has nothing, rank 1 has \d: map_params\(<lambda>, line",
    sums: r"calls .*: rank 0 has \d: all_reduce of pmean, rank 1 has \d: all_reduce\.",
    returns_the_old_state: r"what the step returns: .* rank 1 has .*: the argument state\.params",
    returns_the_first_of_two: r"what the step returns: rank 0 has .*: new .*'add.Tensor', 'add",
    skips_the_update: r"calls of the step: rank 0 has \d: apply_gradients, rank 1 has nothing",
    clips_otherwise: r"calls .* \d: apply_gradients, max_norm=0.2, rank 1 has .* max_norm=0.1",
    turns_two_around: r"rank 0 has 0: all_reduce dp -> f32\[3,4\], rank 1 has 0: .* f32\[4\]",
}


@covered(stage=[0, 3], body=[*OF_STEPS])
def test_what_differs_beside_gathers_is_named(body: Any, stage: int) -> None:
    step = fzero.simulate(fzero.shard(body, stage=stage), world_size=3)
    state = step.init(layers()[1], fzero.optim.sgd(0.5))
    with pytest.raises(MismatchError, match=OF_STEPS[body]):
        fzero.check_spmd(step, state, torch.ones(3, 3, 4))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("size", [2, 3])
def test_a_map_of_uneven_shards_is_not_accused(size: int, stage: int) -> None:
    step = fzero.simulate(
        fzero.shard(lambda state, x: (halved(update(state, x)), fzero.pmean(x)), stage=stage),
        world_size=size,
    )
    state = step.init(layers()[1], fzero.optim.adamw(0.5))
    fzero.check_spmd(step, state, torch.ones(size, 3, 4))


@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_do_the_same_are_told_what(stage: int) -> None:
    step = fzero.simulate(step_of(same, stage), world_size=3)
    state = step.init(layers()[1], fzero.optim.sgd(0.5))
    found = fzero.check_spmd(step, state, (torch.ones(3, 3, 4),))
    with fzero.count_collectives() as log:
        step(step(state, torch.ones(3, 3, 4))[0], torch.ones(3, 3, 4))
    kinds = [event.op for event in log.of(0) if event.op != "agree"]
    assert len(kinds) == 2 * len(found)
    alone = fzero.simulate(step_of(other_order, stage), world_size=1)
    state = alone.init(layers()[1], fzero.optim.sgd(0.5))
    assert fzero.check_spmd(alone, state, torch.ones(1, 3, 4)) == ()


@on_ranks(2)
def test_processes_hear_of_it_before_anything_is_sent(rank: int) -> None:
    step = step_of(other_size, 3)
    state = step.init(layers()[1], fzero.optim.sgd(0.5))
    with fzero.count_collectives() as log, pytest.raises(MismatchError, match=SAID[other_size]):
        fzero.check_spmd(step, state, torch.ones(3, 4))
    assert set(log.counts()) == {"agree"}  # one round, and the lines
    good = step_of(same, 3)
    lines = fzero.check_spmd(good, state, torch.ones(3, 4))
    assert [line.split()[1] for line in lines].count("reduce_scatter") == 3
    state, loss = good(state, torch.ones(3, 4))  # and the ranks are in step
    assert torch.isfinite(loss)


def test_an_error_of_the_step_says_whose_program_raised_it() -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        if fzero.axis_index() == 1:
            raise ValueError("of the user's own")
        return state, x

    step = fzero.simulate(fzero.shard(step_fn, stage=0), world_size=3)
    state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0))
    with pytest.raises(ValueError, match="of the user's own") as raised:
        fzero.check_spmd(step, state, torch.ones(3, 2))
    assert raised.value.__notes__ == ["(raised while rank 1 of 3 was traced)"]
