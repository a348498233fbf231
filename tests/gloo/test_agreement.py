"""Agreement on real ranks: its price, what deviates and is right, errors on one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import PeerFailedError
from tests.failing import fails_in_backward
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
    "other experts each time": [lambda rank, k=k: [0, 1 + (rank + k) % 4, 5] for k in range(5)],
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


def breaking_loss(params: Any, x: Tensor, where: str) -> Tensor:
    total = x.new_zeros(())
    for i in range(6):
        w = params[f"layers.{i}"]
        if i == 3 and where == "forward":
            raise Breaks
        if i == 3 and where == "backward":
            w = fails_in_backward(w, Breaks)
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
