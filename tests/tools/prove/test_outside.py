"""Every rank is read; what a call writes, what is outside, and what takes too long is named."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from fzero import axis_index, axis_size
from tests.descends import descends
from tests.tools.prove.steps import loss, of_loss, of_update, proof_of, why

# 7. Ranks.


@pytest.mark.parametrize("rank", [2, 5])
def test_each_rank_is_read(rank: int) -> None:
    assert "ranks run other programs" in why(
        of_loss(lambda x: 2 if axis_index() == rank else 1, world=8)
    )
    dropped = descends(lambda p, x: loss(p, x[1:] if axis_index() == rank else x))
    assert "ranks run other programs" in why(proof_of(dropped, world=8))


@pytest.mark.parametrize("stage", [0, 2])
def test_options_of_some_leaves_are_named(stage: int) -> None:
    rule = fzero.optim.adamw(0.1, decay_mask=lambda leaf: len(leaf.shape) > 1)
    proof = proof_of(descends(loss), rule, stage=stage)
    assert proof.proved if stage == 0 else "decay_mask=, groups=" in why(proof)


def test_beyond_64_ranks_the_theorem_says_which_were_read() -> None:
    text = str(proof_of(descends(loss), world=100))
    assert "of ranks 0, 1, 2, 3, 8, " in text and "ranks that were not read are assumed" in text


# 8. What is outside.


def from_closure() -> Callable[[Tensor], Any]:
    number = 0

    def times(x: Tensor) -> int:
        nonlocal number
        number += 1
        return 2 if number > 100 else 1

    return times


class Counter:
    calls = 0

    def __call__(self, x: Tensor) -> int:
        type(self).calls += 1
        return 2 if self.calls > 100 else 1


class Attribute(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> int:
        self.calls += 1
        return 2 if self.calls > 100 else 1


def counted() -> Any:
    number = 0
    while True:
        number += 1
        yield 2 if number > 100 else 1


GLOBAL, HELD, DRAWN = [0], torch.zeros(()), np.random.default_rng(0)
BITS = np.random.PCG64(0)
NUMBERS, ENDLESS, ONES = itertools.count(), counted(), iter([1] * 10_000)


def from_global(x: Tensor) -> int:
    GLOBAL[0] += 1
    return 2 if GLOBAL[0] > 100 else 1


def from_tensor(x: Tensor) -> Tensor:
    return HELD.add_(1) * 0 + 1


def from_data(x: Tensor) -> Tensor:
    HELD.data.add_(1)
    return HELD * 0 + 1


@pytest.mark.parametrize(
    "times",
    [
        from_closure(),
        Counter(),
        Attribute(),
        from_global,
        from_tensor,
        from_data,
        lambda x: 2 if next(NUMBERS) > 100 else 1,
        lambda x: next(ENDLESS),
        lambda x: next(ONES),
        lambda x: 2 if DRAWN.random() > 1 else 1,
        lambda x: 2 if BITS.random_raw() < 0 else 1,
        lambda x: 2 if random.random() > 1 else 1,
        lambda x: random.random(),
    ],
)
def test_what_a_call_writes_for_the_next_one_is_refused(times: Any) -> None:
    said = why(of_loss(times))
    assert any(
        one in said for one in ("writes", "other programs", "a constant of the step", "not of")
    )


def asked_and_swallowed(x: Tensor) -> float:
    try:
        return float(x.sum())
    except Exception:
        return 1.0


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(torch.initial_seed())
    return torch.rand(())


def rank_of_torch(x: Tensor) -> int:
    try:
        return dist.get_rank() + 1
    except ValueError:
        return 1


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (lambda x: float(os.environ.get("FZERO_TESTS", "1")), "os.environ['FZERO_TESTS']"),
        (lambda x: 2 if "RANK" in os.environ else 1, "os.environ['RANK']"),
        (lambda x: float(os.getenv("LOCAL_RANK", "1")), "os.environ['LOCAL_RANK']"),
        (rank_of_torch, "asks torch.distributed"),
        (asked_and_swallowed, "asks for a value"),
        (seeded, "seeds the random numbers"),
    ],
)
def test_what_is_read_from_outside_is_named(times: Any, said: str) -> None:
    assert said in why(of_loss(times))


def test_what_remains_is_printed_with_every_proof() -> None:
    text = str(proof_of(descends(loss)))
    for part in ("in every call", "in every process and under every launcher", "not recorded"):
        assert part in text


# 9. The budget.


def test_a_budget_ends_with_the_op_at_which_it_was_spent() -> None:
    apply, params = fzero.functionalize(nn.LSTM(2, 2, batch_first=True))
    step_fn = descends(lambda p, x: apply(p, x)[0].pow(2).mean())
    x = torch.zeros(1, 6, 2)
    assert proof_of(step_fn, x=x, params=params)
    before = time.thread_time()
    said = why(proof_of(step_fn, x=x, params=params, budget_s=0.02))
    assert "the budget of 0.02 s of CPU time is spent" in said and "aten." in said
    assert time.thread_time() - before < 5
    with pytest.raises(fzero.LayoutError, match="budget_s=0"):
        proof_of(step_fn, x=x, params=params, budget_s=0)


# Draws, and memory.


def test_a_state_of_random_numbers_that_is_put_back_on_ranks_only_is_seen() -> None:
    def twice(x: Tensor) -> Tensor:
        before = torch.get_rng_state()
        first = torch.rand(())
        if axis_size() > 1:
            torch.set_rng_state(before)
        return first * torch.rand(())

    assert "sets the state of random numbers" in why(of_loss(twice))


def test_a_draw_that_nobody_reads_is_one() -> None:
    def drawn(times: int) -> fzero.Proof:
        def of(x: Tensor) -> Tensor:
            for _ in range(times if axis_size() > 1 else 1):
                made = torch.rand(())
            return made

        return of_loss(of)

    assert drawn(1)
    assert "rand" in why(drawn(2))


def test_views_are_read_as_they_are() -> None:
    def stale(p: Any, x: Tensor) -> Tensor:
        made = x @ p["w"]
        back = made.t().t()
        kept = back.clone()
        made.mul_(axis_size())
        return (back + 0 * kept).pow(2).mean()

    assert "a view of what was written to" in why(proof_of(descends(stale)))


def test_a_test_of_each_element_is_not_one_of_all() -> None:
    def finite(g: Tensor) -> Tensor:
        good = g.isfinite() if axis_size() == 1 else g.isfinite().all()
        return torch.where(good, g, 0.0)

    why(of_update(finite, stage=0))


def test_a_number_of_the_batch_in_the_update_is_no_gradient() -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        state, value = fzero.grad_and_reduce(loss, state)(x)
        flats = tuple(flat * x.mean() for flat in state.gradients.flats)
        gradients = dataclasses.replace(state.gradients, flats=flats)
        return fzero.apply_gradients(state.replace(gradients=gradients)), value

    assert "more of the batch than a gradient" in why(proof_of(step_fn, stage=0))
