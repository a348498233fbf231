"""What is reduced and updated is decided by what all ranks say, not by what one of them holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import AxisError, MismatchError, PhaseError
from tests.descends import descends
from tests.oracle import linear_loss, square_loss
from tests.strategies import same

STEPS = 3
PARAMS = {"v": torch.arange(5.0), "w": torch.ones(3, 2)}


def empty_on(rank: int, step: int, ranks: int) -> bool:
    """Another rank has nothing in each step, and none has in the last one but the first rank."""
    return rank == step % ranks if step + 1 < STEPS else rank > 0


def batches(ranks: int) -> Tensor:
    """[W, steps] of whole numbers."""
    return torch.arange(1.0, ranks * STEPS + 1).reshape(STEPS, ranks).T


def in_a_window(state: Any, xs: Tensor, *, beside: bool, inside: bool, fails: bool) -> Any:
    """Steps of one window each, in which some ranks find nothing, or an error."""
    rank, ranks = fzero.axis_index(), fzero.world().size

    def body(state: Any, step: int) -> Any:
        if not empty_on(rank, step, ranks):
            state, _ = fzero.grad_and_reduce(square_loss, state)(xs[step])
        elif fails:
            with pytest.raises(ZeroDivisionError):
                fzero.grad_and_reduce(lambda p: 1 / 0, state)()
        return (fzero.apply_gradients(state) if inside else state), None

    for step in range(STEPS):
        if beside:  # an auxiliary loss, reduced at once
            state, _ = fzero.grad_and_reduce(linear_loss, state)(torch.ones(()))
        state, _ = fzero.coalesce(body)(state, step)
        if not inside:
            state = fzero.apply_gradients(state)
    return state, None


def plain(ranks: int, *, beside: bool) -> Any:
    params = {k: p.clone().requires_grad_() for k, p in PARAMS.items()}
    optimizer = torch.optim.SGD(params.values(), lr=2.0**-9, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            if not empty_on(rank, step, ranks):
                (square_loss(params, batches(ranks)[rank, step]) / ranks).backward()
        if beside:
            linear_loss(params, torch.ones(())).backward()
        optimizer.step()
    return {k: p.detach() for k, p in params.items()}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("ranks", "beside", "inside", "fails"),
    [
        (2, False, True, False),
        (2, True, True, True),
        (3, True, False, False),
        (3, False, True, True),
    ],
)
def test_a_rank_that_holds_nothing_in_a_window_counts_as_zero(
    stage: int, ranks: int, beside: bool, inside: bool, fails: bool
) -> None:
    run = functools.partial(in_a_window, beside=beside, inside=inside, fails=fails)
    step = fzero.simulate(fzero.shard(run, stage=stage), world_size=ranks)
    state = step.init(PARAMS, fzero.optim.sgd(2.0**-9, momentum=0.5))
    state, _ = step(state, batches(ranks))
    whole = fzero.simulate(fzero.full_params, world_size=ranks)(state)
    for rank in range(ranks):
        same({k: x[rank] for k, x in whole.items()}, plain(ranks, beside=beside))


def on_two(body: Callable[[Any, int], Any], *, stage: int = 2, optimizer: Any = None) -> None:
    """Run body(state, rank) on two ranks, each of which has a state of its own."""

    def each(_: Tensor) -> None:
        made = fzero.init(PARAMS, optimizer or fzero.optim.sgd(2.0**-9), stage=stage)
        body(made, fzero.axis_index())

    fzero.simulate(each, world_size=2)(torch.zeros(2, 1))


def differentiated(state: Any) -> Any:
    return fzero.grad_and_reduce(linear_loss, state)(torch.ones(()))[0]


@pytest.mark.parametrize("call", [fzero.apply_gradients, fzero.gradients, fzero.global_norm])
def test_what_no_rank_holds_raises_on_every_rank(call: Callable[[Any], Any]) -> None:
    def body(state: Any, rank: int) -> None:
        def nothing(state: Any) -> Any:
            with pytest.raises(PhaseError, match="holds no gradients"):
                call(state)
            return state, None

        fzero.coalesce(nothing)(state)

    on_two(body)


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_and_their_norm_are_those_of_all_ranks(stage: int) -> None:
    def body(state: Any, rank: int) -> None:
        def window(state: Any) -> Any:
            state = state if rank else differentiated(state)
            half = {
                k: (6.0 + 6 * torch.arange(p.numel()).remainder(3)).reshape(p.shape)
                for k, p in PARAMS.items()
            }
            same(fzero.gradients(state), half)
            assert (
                fzero.global_norm(state) == torch.cat([x.flatten() for x in half.values()]).norm()
            )
            return state, None

        state, _ = fzero.coalesce(window)(state)
        assert state.progress.reductions == 1 and not state.window.pending.held

    on_two(body, stage=stage)


def test_one_of_two_states_may_have_nothing_on_one_rank() -> None:
    def body(state: Any, rank: int) -> None:
        def window(states: Any) -> Any:
            a = differentiated(states["a"]) if rank else states["a"]
            return fzero.apply_gradients({"a": a, "b": differentiated(states["b"])}), None

        states, _ = fzero.coalesce(window)({"a": state, "b": state})
        moved = {k: fzero.full_params(one)["v"] - PARAMS["v"] for k, one in states.items()}
        assert torch.equal(2 * moved["a"], moved["b"]) and moved["b"].abs().min() > 0

    on_two(body)


def other_arguments(state: Any, rank: int) -> None:
    fzero.grad_and_reduce(linear_loss, state)(torch.ones((), requires_grad=not rank))


def other_graphs(state: Any, rank: int) -> None:
    """They are reduced by other collectives."""
    x = torch.ones((), requires_grad=not rank)
    fzero.coalesce(descends(square_loss))(state, x)


def one_gradient_more(state: Any, rank: int) -> None:
    def window(state: Any) -> Any:
        state = fzero.apply_gradients(differentiated(state))
        return (state if rank else differentiated(state)), None

    fzero.full_params(fzero.coalesce(window)(state)[0])
    differentiated(state)  # at stage 2 parameters are whole: nobody was asked for them


def other_updates(state: Any, rank: int) -> None:
    state = differentiated(fzero.apply_gradients(differentiated(state)))
    fzero.apply_gradients(state.replace(step=state.step + rank))


def other_scales(state: Any, rank: int) -> None:
    """Of the user's own."""
    step = fzero.scale_loss(descends(linear_loss), torch.tensor(4.0 + rank))
    step(state, torch.ones(()))


@pytest.mark.parametrize(
    ("differ", "stage", "seen"),
    [
        (other_arguments, 0, "arguments that require grad"),
        (other_arguments, 3, "arguments that require grad"),
        (other_graphs, 2, "with a graph"),
        (one_gradient_more, 2, "the end of coalesce"),
        (other_updates, 2, "update 1, rank 1 apply_gradients with update 2"),
        (other_scales, 2, r"the loss scale is 4.0, rank 1 .* 5.0"),
    ],
)
def test_ranks_that_differ_all_raise(differ: Any, stage: int, seen: str) -> None:
    def body(state: Any, rank: int) -> None:
        with pytest.raises(MismatchError, match=seen):
            differ(state, rank)

    on_two(body, stage=stage)


def test_nobody_is_asked_at_the_end_of_a_window_that_ends_with_its_update() -> None:
    counts = []

    def body(state: Any, rank: int) -> None:
        def window(state: Any) -> Any:
            return fzero.apply_gradients(differentiated(state)), None

        with fzero.count_collectives() as log:
            fzero.coalesce(window)(state)
        counts.append(len([one for one in log.of(rank) if one.op == "agree"]))

    on_two(body)
    assert counts == [1, 1]


@pytest.mark.parametrize(
    ("one", "other", "seen"),
    [
        (fzero.optim.sgd(0.5), fzero.optim.sgd(0.25), "lr=0.5"),
        (fzero.optim.sgd(lambda k: 0.5), fzero.optim.sgd(lambda k: 0.25), "= 0.25"),
        (fzero.optim.adamw(0.5), fzero.optim.adamw(0.5, betas=(0.9, 0.5)), "betas"),
    ],
)
def test_optimizers_that_differ_raise_at_the_update(one: Any, other: Any, seen: str) -> None:
    def body(state: Any, rank: int) -> None:
        state = differentiated(state)
        setup = dataclasses.replace(state.setup, optimizer=other if rank else one)
        mine = fzero.init(PARAMS, one, stage=2).optimizer
        state = state.replace(setup=setup, optimizer=mine)
        with pytest.raises(MismatchError, match=seen):
            fzero.apply_gradients(state)

    on_two(body)


def test_more_states_than_a_round_has_numbers_for_are_asked_about_in_several() -> None:
    def body(state: Any, rank: int) -> None:
        def window(states: Any) -> Any:
            states = [
                state if rank and k == 9 else differentiated(state)
                for k, state in enumerate(states)
            ]
            return fzero.apply_gradients(states), None

        states, _ = fzero.coalesce(window)([state] * 11)
        moved = [float(fzero.full_params(one)["v"][0]) for one in states]
        assert [2 * moved[9]] * 11 == [*moved[:9], 2 * moved[9], moved[10]] and moved[0] < 0

    on_two(body)


def test_a_rank_that_makes_no_update_ends_those_that_make_one() -> None:
    def body(state: Any, rank: int) -> None:
        with pytest.raises(AxisError):
            fzero.apply_gradients(differentiated(state)) if rank else fzero.gradients(
                differentiated(state)
            )

    on_two(body)
