"""Agreement on real ranks: its price, what deviates and is right, what is told on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import MismatchError, PeerFailedError
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

LR = 2.0**-6


def layers(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return {
        f"layers.{i}": torch.randint(-3, 4, (i + 2,), generator=generator).double()
        for i in range(count)
    }


def walk_loss(params: Any, x: Tensor, walk: list[int]) -> Tensor:
    """Each layer of the walk is read in forward, and its values once more in backward."""
    total = x.new_zeros(())
    for step, i in enumerate(walk):
        w = params[f"layers.{i}"]
        total = total + (step + 1) * x * (w * w).sum()
    return 12 * total


def train(state: Any, x: Tensor, walk: list[int], calls: int = 1) -> Any:
    for _ in range(calls):
        state, _ = fzero.grad_and_reduce(walk_loss, state)(x, walk)
    return fzero.apply_gradients(state)


def rounds_of(do: Callable[[], Any]) -> tuple[int, Any]:
    """In how many rounds it asks the other ranks, and what it returns."""
    with fzero.count_collectives() as log:
        found = do()
    return log.counts().get("agree", 0), found


# What it costs.


def rounds_body(rank: int, world_size: int) -> dict[Any, list[int]]:
    """{(stage, resharding, layers, calls): rounds of each of four steps}."""
    found = {}
    for stage, reshard in [(0, True), (1, True), (2, True), (3, True), (3, False), (3, "window")]:
        for count in (2, 8):
            for calls in (1, 2):
                state = fzero.init(
                    layers(count), fzero.optim.sgd(LR), stage=stage, reshard_after_forward=reshard
                )
                steps = []
                for _ in range(4):
                    x, walk, old = torch.ones(()).double(), [*range(count)], state
                    rounds, state = rounds_of(lambda: train(old, x, walk, calls))  # noqa: B023
                    steps.append(rounds)
                found[stage, reshard, count, calls] = steps
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_steady_step_has_a_constant_number_of_rounds(ranks: int) -> None:
    for found in run_ranks(rounds_body, ranks):
        for (stage, _, count, calls), (first, *steady) in found.items():
            each = 2 if stage < 3 else 3  # begin and end; the forward begins, too
            assert steady == [each * calls + 1] * 3  # and the update
            if stage == 3:  # the first call asks for each unit, and records it
                assert first >= steady[0] + 2 * count
            else:
                assert first == steady[0]


def windows_body(rank: int, world_size: int) -> dict[Any, list[int]]:
    found = {}
    for stage, reshard in [(0, True), (2, True), (3, True), (3, "window")]:
        state = fzero.init(
            layers(4), fzero.optim.sgd(LR), stage=stage, reshard_after_forward=reshard
        )

        @fzero.coalesce
        def step(state: Any) -> Any:
            return train(state, torch.ones(()).double(), [0, 1, 2, 3], calls=3), None

        steps = []
        for _ in range(3):
            old = state
            rounds, (state, _) = rounds_of(lambda: step(old))  # noqa: B023
            steps.append(rounds)
        found[stage, reshard] = steps[1:]
    return found


def test_a_window_asks_where_something_is_gathered_or_reduced() -> None:
    for found in run_ranks(windows_body, 2):
        assert found == {
            (0, True): [1, 1],
            (2, True): [1, 1],
            (3, True): [3 * 3 + 1] * 2,
            (3, "window"): [3 + 1] * 2,  # the first of three calls gathers
        }


# Ranks that do other things.

JOURNEYS: dict[str, list[Callable[[int], list[int]]]] = {
    # By step: rank -> the walk.
    "the same": [lambda rank: [0, 1, 2, 3, 4, 5]] * 4,
    "other experts": [lambda rank: [0, 1 + rank, 5]] * 4,
    "other experts each time": [
        lambda rank, k=k: [0, 1 + (rank + k) % 4, 5]
        for k in range(5)  # type: ignore[misc]
    ],
    "another order": [lambda rank: [0, 1, 2] if rank else [2, 1, 0]] * 3,
    "another order, later": [
        lambda rank: [0, 1, 2, 3],
        lambda rank: [0, 1, 2, 3] if rank else [3, 2, 1, 0],
        lambda rank: [0, 1, 2, 3] if rank else [3, 2, 1, 0],
        lambda rank: [0, 1, 2, 3],
        lambda rank: [0, 1, 2, 3],
    ],
    "one reads what the record does not have": [
        lambda rank: [0, 1],
        lambda rank: [0, 1] if rank else [0, 4, 1, 5],
        lambda rank: [0, 4, 1, 5],
        lambda rank: [0, 4, 1, 5],
    ],
    "one reads less": [
        lambda rank: [0, 1, 2, 3, 4, 5],
        lambda rank: [0, 1, 2, 3, 4, 5] if rank else [3],
        lambda rank: [0, 1, 2, 3, 4, 5] if rank else [],
        lambda rank: [0, 1, 2, 3, 4, 5],
    ],
    "again and again": [lambda rank: [0, 1, 0, 2, 0, 3] if rank else [3, 3, 0, 1, 3]] * 3,
}


def journey_body(rank: int, world_size: int, reshard: Any) -> dict[str, Any]:
    """{name: (rounds, full parameters) after each step}."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss requires no grad", UserWarning)
        return _journeys(rank, reshard)


def _journeys(rank: int, reshard: Any) -> dict[str, Any]:
    found = {}
    for name, journey in JOURNEYS.items():
        state = fzero.init(layers(6), fzero.optim.sgd(LR), stage=3, reshard_after_forward=reshard)
        steps = []
        for walk_of in journey:
            x, walk, old = torch.tensor(rank + 1.0).double(), walk_of(rank), state
            rounds, state = rounds_of(lambda: train(old, x, walk))  # noqa: B023
            steps.append((rounds, fzero.full_params(state)))
        found[name] = steps
    return found


def unsharded(journey: list[Callable[[int], list[int]]], ranks: int) -> list[dict[str, Tensor]]:
    params, found = layers(6), []
    for walk_of in journey:
        own = {path: p.clone().requires_grad_() for path, p in params.items()}
        for rank in range(ranks):
            x = torch.tensor(rank + 1.0).double()
            value = walk_loss(own, x, walk_of(rank)) / ranks
            if value.requires_grad:
                value.backward()
        params = {
            path: (p if p.grad is None else p - LR * p.grad).detach() for path, p in own.items()
        }
        found.append(params)
    return found


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_use_other_units_are_right_at_every_step(ranks: int, reshard: Any) -> None:
    everyone = run_ranks(journey_body, ranks, reshard)
    for name, journey in JOURNEYS.items():
        want = unsharded(journey, ranks)
        for found in everyone:
            for k, ((_, got), params) in enumerate(zip(found[name], want, strict=True)):
                for path, p in params.items():
                    torch.testing.assert_close(
                        got[path],
                        p,
                        rtol=1e-12,
                        atol=1e-12,
                        msg=lambda m, n=name, k=k: f"{n} {k}: {m}",
                    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_that_deviates_costs_more_and_the_union_is_replayed(ranks: int) -> None:
    steady = 3 + 1
    for found in run_ranks(journey_body, ranks, True):
        rounds = {name: [count for count, _ in steps] for name, steps in found.items()}
        assert rounds["the same"][1:] == [steady] * 3
        assert rounds["other experts"][0] > steady
        assert rounds["other experts"][1:] == [steady] * 3  # the union has them all
        deviates = rounds["one reads what the record does not have"]
        assert deviates[1] > steady and deviates[3] == steady
        assert rounds["one reads less"][1:] == [steady] * 3  # it takes part in the rest


# Errors on one rank.


class Breaks(Exception):
    pass


class _BreaksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        raise Breaks


def breaking_loss(params: Any, x: Tensor, where: str) -> Tensor:
    total = x.new_zeros(())
    for i in range(6):
        w = params[f"layers.{i}"]
        if i == 3 and where == "forward":
            raise Breaks
        if i == 3 and where == "backward":
            w = _BreaksInBackward.apply(w)
        total = total + x * (w * w).sum()
    return 12 * total


def errors_body(rank: int, world_size: int, stage: int, reshard: Any) -> list[str]:
    """What each of several calls raised; between them all go on."""
    options: dict[str, Any] = {"stage": stage, "reshard_after_forward": reshard, "bucket_bytes": 8}
    state = fzero.init(layers(6), fzero.optim.sgd(LR), **options)
    x, found = torch.tensor(rank + 1.0).double(), []
    for steady in (False, True):
        for where in ("forward", "backward"):
            for raiser in range(world_size):
                step = fzero.grad_and_reduce(breaking_loss, state)
                try:
                    step(x, where if rank == raiser else "")
                    found.append("nothing")
                except (Breaks, PeerFailedError) as error:
                    found.append(f"{type(error).__name__} {raiser}: {error}")
        if not steady:  # the next ones replay what these record
            new, _ = fzero.grad_and_reduce(breaking_loss, state)(x, "")
            state = fzero.apply_gradients(new)
            new, _ = fzero.grad_and_reduce(breaking_loss, state)(x, "")
            assert new.progress.backwards == 1
    mean = sum(range(1, world_size + 1)) / world_size
    state, _ = fzero.grad_and_reduce(breaking_loss, state)(x, "")
    for path, p in layers(6).items():
        now = p - LR * 24 * mean * p
        torch.testing.assert_close(fzero.gradients(state)[path], 24 * mean * now)
    return found


@pytest.mark.parametrize(
    ("stage", "reshard"), [(0, True), (1, True), (2, True), (3, True), (3, False)]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_error_on_one_rank_is_raised_by_all_in_the_same_call(
    ranks: int, stage: int, reshard: Any
) -> None:
    for rank, found in enumerate(run_ranks(errors_body, ranks, stage, reshard)):
        assert len(found) == 4 * ranks
        for message in found:
            raiser = int(message.split()[1].rstrip(":"))
            if rank == raiser:
                assert message.startswith("Breaks ")
            else:
                assert message.startswith("PeerFailedError ")
                assert f"raised on rank [{raiser}]" in message and "Fix: " in message


# Calls that differ.


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


def norms(state: Any, odd: bool) -> None:
    state = grad(state)
    fzero.global_norm(state) if odd else fzero.gradients(state)


def clips(state: Any, odd: bool) -> None:
    step = fzero.clip(lambda state: (fzero.apply_gradients(grad(state)), None), max_norm=1.0 + odd)
    step(state)


def clips_or_not(state: Any, odd: bool) -> None:
    def step(state: Any) -> Any:
        return fzero.apply_gradients(grad(state)), None

    (fzero.clip(step, max_norm=1.0) if odd else step)(state)


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


CALLS: dict[str, tuple[Callable[[Any, bool], None], str]] = {
    "full_params on one rank": (reads_params, "grad_and_reduce, {odd} full_params"),
    "gradients on one rank": (reads_gradients, "apply_gradients, {odd} gradients"),
    "an update on one rank": (updates, "grad_and_reduce, {odd} apply_gradients"),
    "a norm on one rank": (norms, "gradients, {odd} global_norm"),
    "another bound": (clips, "max_norm=1.0"),
    "a bound on one rank": (clips_or_not, "max_norm=None"),
    "another number of parts": (accumulates, "gradients x 0.25, {odd} grad_and_reduce with"),
    "a window on one rank": (coalesces, "{odd} "),
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
    """Schedules that are one function, and give other numbers on other ranks from step 1 on."""
    rates = [0.5, 0.25 + 0.25 * (rank == 1)]
    state = fzero.init(layers(2), fzero.optim.sgd(lambda step: rates[step]), stage=2)
    state = fzero.apply_gradients(grad(state))
    state = grad(state)
    with pytest.raises(MismatchError) as caught:
        fzero.apply_gradients(state)
    assert fzero.gradients(state).keys() == layers(2).keys()
    return str(caught.value)


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
        assert "rank 0 full_params, rank 1 a comparison of the layout" in message
