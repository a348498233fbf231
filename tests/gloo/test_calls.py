"""Calls that differ by rank: all ranks raise, both calls are named, and all can go on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import MismatchError
from tests.gloo.test_agreement import LR, layers, walk_loss
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


def grad(state: Any, **options: Any) -> Any:
    x = torch.ones(()).double()
    return fzero.grad_and_reduce(walk_loss, state)(x, [0, 1], **options)[0]


def reads_params(state: Any, odd: bool) -> None:
    if odd:
        fzero.full_params(state)
    grad(state)


def reads_gradients(state: Any, odd: bool) -> None:
    state = grad(state)
    fzero.gradients(state) if odd else fzero.apply_gradients(state)


def updates(state: Any, odd: bool) -> None:
    state = grad(state)
    fzero.apply_gradients(state) if odd else grad(state)


def clips(state: Any, odd: bool) -> None:
    step = fzero.clip(lambda state: (fzero.apply_gradients(grad(state)), None), max_norm=1.0)
    step(state) if odd else fzero.apply_gradients(grad(state))


def accumulates(state: Any, odd: bool) -> None:
    def step(state: Any, x: Tensor) -> Any:
        return fzero.apply_gradients(grad(state)), None

    fzero.accumulate(step, steps=2 if odd else 4)(state, torch.ones(4))


def coalesces(state: Any, odd: bool) -> None:
    def step(state: Any) -> Any:
        return fzero.apply_gradients(grad(grad(state))), None

    (fzero.coalesce(step) if odd else step)(state)


def loses_a_gradient(state: Any, odd: bool) -> None:
    one = grad(state)
    grad(state if odd else one)


def saves(state: Any, odd: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fzero.checkpoint.save(f"{folder}/1", state) if odd else grad(state)


def halved(state: Any) -> Any:
    return fzero.map_params(lambda p: p / 2, state)


def maps(state: Any, odd: bool) -> None:
    state = halved(state)  # alike, and tested: from here on nothing crosses ranks
    grad(halved(state) if odd else state)


def maps_a_teacher(state: Any, odd: bool) -> None:
    teacher = halved(state)
    if odd:
        teacher = halved(teacher)
    fzero.psum(torch.ones(()))  # the next round, of whatever it is


def maps_before_a_save(state: Any, odd: bool) -> None:
    state = halved(state)
    with tempfile.TemporaryDirectory() as folder:
        fzero.checkpoint.save(f"{folder}/1", halved(state) if odd else state)


def maps_by_another(state: Any, odd: bool) -> None:
    thirds = lambda p: p / 3  # noqa: E731
    state = fzero.map_params(thirds, halved(state))
    fzero.apply_gradients(grad(halved(state) if odd else fzero.map_params(thirds, state)))


def gives_gradients(state: Any, odd: bool) -> None:
    one = grad(state)
    fzero.apply_gradients(fzero.add_gradients(state, one) if odd else one)


def adds_in_a_window(state: Any, odd: bool) -> None:
    def step(state: Any) -> Any:
        for _ in range(1 + odd):
            state = fzero.add_gradients(state, layers(2))
        return fzero.apply_gradients(state), None

    fzero.coalesce(step)(state)


CALLS: dict[str, tuple[Callable[[Any, bool], None], str]] = {
    "full_params on one rank": (reads_params, "grad_and_reduce, {odd} full_params"),
    "a checkpoint on one rank": (saves, "grad_and_reduce, {odd} init, an Engine or a checkpoint"),
    "gradients on one rank": (reads_gradients, "apply_gradients, {odd} gradients"),
    "an update on one rank": (updates, "grad_and_reduce, {odd} apply_gradients"),
    "a bound on one rank": (clips, "max_norm=None"),
    "another number of parts": (accumulates, "gradients x 0.25, {odd} grad_and_reduce with"),
    "a window on one rank": (coalesces, "{odd} "),
    "map_params on one rank": (maps, "before: 1, the last map_params(<lambda>, line"),
    "map_params of a teacher": (maps_a_teacher, "{odd} a collective of the user's"),
    "map_params before a save": (maps_before_a_save, "{odd} init, an Engine or a checkpoint with"),
    "map_params by another function": (maps_by_another, "before: 3, the last map_params"),
    "gradients of a state on one rank": (gives_gradients, "{odd} apply_gradients with local calls"),
    "gradients in a window": (adds_in_a_window, "before: 2, the last add_gradients in a window"),
    "a gradient that was lost": (loses_a_gradient, "after 1 reductions since the update, {odd}"),
}


def calls_body(rank: int, world_size: int, stage: int) -> dict[str, str]:
    """The message of each mismatch; after it, all go on with the state that they had."""
    state = fzero.init(layers(2), fzero.optim.sgd(LR), stage=stage)
    found = {}
    for name, (do, _) in CALLS.items():
        if stage < 3 and do is reads_params:
            continue  # every rank has them all
        with pytest.raises(MismatchError) as caught:
            do(state, rank == 1)
        found[name] = str(caught.value)
        assert fzero.full_params(fzero.apply_gradients(grad(state))).keys() == layers(2).keys()
    return found


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_that_differ_raise_on_every_rank_and_both_are_named(ranks: int, stage: int) -> None:
    everyone = run_ranks(calls_body, ranks, stage)
    for name, message in everyone[0].items():
        assert message.startswith("the ranks make different calls: rank 0 ")
        assert CALLS[name][1].format(odd="rank 1") in message, (name, message)
        assert all(found[name] == message for found in everyone), name
    assert len(everyone[0]) == len(CALLS) - (stage < 3)


def rates_body(rank: int, world_size: int) -> str:
    """Schedules that give other numbers on other ranks from step 1 on."""
    rates = [0.5, 0.25 + 0.25 * (rank == 1)]
    state = fzero.init(layers(2), fzero.optim.sgd(lambda step: rates[step]), stage=2)
    state = fzero.apply_gradients(grad(state))
    state = grad(state)
    with pytest.raises(MismatchError) as caught:
        fzero.apply_gradients(state)
    assert fzero.gradients(state).keys() == layers(2).keys()
    return str(caught.value)


@pytest.mark.smoke
def test_learning_rates_that_differ_are_told_before_the_update() -> None:
    for message in run_ranks(rates_body, 2):
        seen = "rank 0 apply_gradients with lr(1) = 0.25, rank 1 apply_gradients with lr(1) = 0.5"
        assert seen in message


def inits_body(rank: int, world_size: int) -> str:
    state = fzero.init(layers(2), fzero.optim.sgd(LR), stage=3)
    with pytest.raises(MismatchError) as caught:
        if rank == 1:
            fzero.init(layers(2), fzero.optim.sgd(LR), stage=3)
        fzero.full_params(state)
    assert fzero.full_params(state).keys() == layers(2).keys()
    return str(caught.value)


def test_a_state_made_on_one_rank_only_is_told() -> None:
    for message in run_ranks(inits_body, 2):
        assert "rank 0 full_params, rank 1 init, an Engine or" in message


OPTIONS: dict[str, tuple[Callable[[bool], Any], str]] = {
    "a field of an engine": (
        lambda odd: fzero.adapter.Engine(
            torch.nn.Linear(2, 1), fzero.optim.sgd(LR), stage=2, max_norm=1.0 + odd
        ),
        "rank 0 has max_norm=1.0, rank 1 has max_norm=2.0.",
    ),
    "a field of a rule": (
        lambda odd: fzero.init(
            layers(2), fzero.optim.adamw(LR, betas=(0.5 + odd / 4, 0.9)), stage=2
        ),
        "rank 0 has betas=(0.5, 0.9), rank 1 has betas=(0.75, 0.9).",
    ),
    "a stage": (
        lambda odd: fzero.init(layers(2), fzero.optim.sgd(LR), stage=1 + odd),
        "rank 0 has stage 1, rank 1 has stage 2.",
    ),
}


def options_body(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for name, (make, _) in OPTIONS.items():
        with pytest.raises(MismatchError) as caught:
            make(rank == 1)
        found[name] = str(caught.value)
    return found


def test_the_option_that_differs_is_named_alone() -> None:
    for found in run_ranks(options_body, 2):
        for name, (_, said) in OPTIONS.items():
            assert said in found[name].splitlines()[0], found[name]


def first_body(rank: int, world_size: int) -> list[str]:
    found = []
    with pytest.raises(MismatchError) as caught:
        (fzero.psum if rank == 1 else fzero.pmean)(torch.ones(3))
    found.append(str(caught.value))
    with pytest.raises(MismatchError) as caught:
        try:
            if rank == 1:
                raise ValueError("the first one")
            fzero.psum(torch.ones(2))
        finally:
            if rank == 1:
                fzero.psum(torch.ones(()))
    found.append(str(caught.value))
    return found


def test_another_collective_is_not_blamed_on_shapes_and_a_first_error_is_named() -> None:
    for other, in_finally in run_ranks(first_body, 2):
        assert "Usual cause: a branch that depends on the rank" in other
        assert "shape" not in other.partition("In a backward")[0]
        assert "rank 1: all_reduce[() float32] after ValueError: the first one." in in_finally
