"""Agreement on real ranks: in how many rounds, and that ranks which deviate are right."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests import oracle
from tests.behaviours.networks import PLACES
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


def train(state: Any, x: Tensor, walk: list[int], calls: int = 1) -> tuple[Any, None]:
    for _ in range(calls):
        state, _ = fzero.grad_and_reduce(walk_loss, state)(x, walk)
    return fzero.apply_gradients(state), None


def counted(step: Any, state: Any, batches: list[tuple[Any, ...]]) -> list[tuple[int, Any]]:
    """For each step in how many rounds it asks the other ranks, and the state after it."""
    found = []
    for batch in batches:
        with fzero.count_collectives() as log:
            state, _ = step(state, *batch)
        found.append((log.counts().get("agree", 0), state))
    return found


def rounds_everywhere(rank: int, world_size: int) -> dict[Any, list[int]]:
    """{(place, layers, calls, coalesced): rounds of each of three steps}."""
    found = {}
    for place in PLACES:
        for count in (2, 8):
            for calls, coalesced in ((1, False), (2, False), (3, True)):
                options: Any = {"stage": place[0], "reshard_after_forward": place[1]}
                state = fzero.init(layers(count), fzero.optim.sgd(LR), **options)
                step = fzero.coalesce(train) if coalesced else train
                batch = (torch.ones(()).double(), [*range(count)], calls)
                steps = counted(step, state, [batch] * 3)
                found[place, count, calls, coalesced] = [rounds for rounds, _ in steps]
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_steady_step_has_a_constant_number_of_rounds(ranks: int) -> None:
    """Whatever the number of units: where something is gathered or reduced, and for the update."""
    for found in run_ranks(rounds_everywhere, ranks, fresh=True):
        for (place, count, calls, coalesced), (first, *steady) in found.items():
            stage, reshard = place
            if coalesced:  # at stage 3 "window" the first of the calls gathers
                passes = 0 if stage < 3 else 1 if reshard == "window" else calls
                expected = 3 * passes + 1
            else:  # begin and end, and at stage 3 the forward begins, too
                expected = (2 if stage < 3 else 3) * calls + 1
            assert steady == [expected] * 2, (place, count, calls, coalesced)
            if stage < 3:
                assert first == expected
            elif not coalesced:  # the first call asks for each unit, and records it
                assert first >= expected + 2 * count


# By step: the walk of rank 0, of rank 1, and so on; the last one is that of all further ranks.
JOURNEYS: dict[str, list[tuple[list[int], ...]]] = {
    "the same": [([0, 1, 2, 3, 4, 5],)] * 4,
    "other experts": [([0, 1, 5], [0, 2, 5], [0, 3, 5])] * 4,
    "other experts each time": [
        ([0, 1, 5], [0, 2, 5], [0, 3, 5]),
        ([0, 2, 5], [0, 3, 5], [0, 4, 5]),
        ([0, 3, 5], [0, 4, 5], [0, 1, 5]),
    ],
    "another order, later": [
        ([0, 1, 2, 3],),
        ([3, 2, 1, 0], [0, 1, 2, 3]),
        ([3, 2, 1, 0], [0, 1, 2, 3]),
        ([0, 1, 2, 3],),
    ],
    "one reads what the record does not have": [
        ([0, 1],),
        ([0, 4, 1, 5], [0, 1]),
        ([0, 4, 1, 5],),
        ([0, 4, 1, 5],),
    ],
    "one reads less": [
        ([0, 1, 2, 3, 4, 5],),
        ([3], [0, 1, 2, 3, 4, 5]),
        ([], [0, 1, 2, 3, 4, 5]),
        ([0, 1, 2, 3, 4, 5],),
    ],
    "again and again": [([3, 3, 0, 1, 3], [0, 1, 0, 2, 0, 3])] * 3,
}


def batches_of(journey: list[tuple[list[int], ...]], rank: int) -> list[tuple[Tensor, list[int]]]:
    x = torch.tensor(rank + 1.0).double()
    return [(x, walks[min(rank, len(walks) - 1)]) for walks in journey]


def journey_everywhere(rank: int, world_size: int, name: str, reshard: Any) -> Any:
    """The rounds of each step, and the full parameters after it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss requires no grad", UserWarning)
        state = fzero.init(layers(6), fzero.optim.sgd(LR), stage=3, reshard_after_forward=reshard)
        steps = counted(train, state, batches_of(JOURNEYS[name], rank))
        return [(rounds, fzero.full_params(state)) for rounds, state in steps]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", JOURNEYS)
def test_ranks_that_use_other_units_are_right_and_the_union_is_replayed(
    name: str, ranks: int, reshard: Any
) -> None:
    journey = JOURNEYS[name]
    batches = list(zip(*(batches_of(journey, rank) for rank in range(ranks)), strict=True))
    make = partial(torch.optim.SGD, lr=LR)
    want = [
        oracle.train(lambda p, batch: walk_loss(p, *batch), layers(6), batches[: k + 1], make)
        for k in range(len(journey))
    ]
    steady = 3 + 1
    for steps in run_ranks(journey_everywhere, ranks, name, reshard):
        rounds = [count for count, _ in steps]
        for (_, got), right in zip(steps, want, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
        if name in ("the same", "other experts", "one reads less"):
            assert rounds[1:] == [steady] * 3  # the union has them all
        if name == "one reads what the record does not have":
            assert rounds[1] > steady == rounds[3]
