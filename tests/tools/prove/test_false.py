"""False steps of each kind are not proved, and what is wrong is named; their sound neighbours are.

tests/tools/prove/adversary has hundreds more, each false by numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero import axis_index, axis_size
from fzero.tools.prove._schedules import unreadable
from tests.descends import descends

PARAMS = {"w": torch.ones(4, 4), "v": torch.ones(4)}


def loss(p: Any, x: Tensor) -> Tensor:
    return (x @ p["w"] + p["v"]).pow(2).mean()


def proof_of(
    step_fn: Callable[..., Any],
    optimizer: Any = None,
    *,
    world: int = 2,
    stage: int = 2,
    x: Tensor | None = None,
    params: Any = PARAMS,
    **options: Any,
) -> fzero.Proof:
    step = fzero.shard(step_fn, stage=stage)
    state = step.init(params, optimizer or fzero.optim.sgd(0.1))
    return fzero.prove(step, state, torch.zeros(3, 4) if x is None else x, world=world, **options)


def of_loss(times: Callable[[Tensor], Any], **options: Any) -> fzero.Proof:
    """The loss, times a number that may be made in any way."""
    return proof_of(descends(lambda p, x: loss(p, x) * times(x)), **options)


def of_update(change: Callable[[Tensor], Tensor], **options: Any) -> fzero.Proof:
    """The mean gradients are changed before the update."""

    def step_fn(state: Any, x: Tensor) -> Any:
        state, value = fzero.grad_and_reduce(loss, state)(x)
        flats = tuple(change(flat) for flat in state.gradients.flats)
        gradients = dataclasses.replace(state.gradients, flats=flats)
        return fzero.apply_gradients(state.replace(gradients=gradients)), value

    return proof_of(step_fn, **options)


def why(proof: fzero.Proof) -> str:
    assert not proof.proved and str(proof).startswith("Not proved")
    return f"{proof.unshown[0].why} {proof.unshown[0].line}"


# 1. Options.

LATE = 10**6


def halves(t: int) -> float:
    return 0.1 * 0.5 ** sum(t >= one for one in (30, 60))


def counts(t: int, calls: list[int] = []) -> float:  # noqa: B006
    calls.append(t)
    return 0.1 * len(calls)


class Warmup:
    def __call__(self, t: int) -> float:
        return 0.1 / axis_size()


HELD_PARTIAL = functools.partial(float, 1.0)
HELD_PARTIAL.pow = axis_size  # type: ignore[attr-defined]


def with_pow(t: int) -> float:
    return 0.1 * HELD_PARTIAL.pow()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "lr",
    [
        fzero.optim.schedules.warmup_cosine(0.1, 10, 100),
        lambda t: 0.1 * math.cos(min(t, 100) / 100),
        halves,
    ],
)
def test_a_schedule_of_the_step_alone_is_proved(lr: Any) -> None:
    assert proof_of(descends(loss), fzero.optim.adamw(lr))


@pytest.mark.parametrize(
    "lr",
    [
        lambda t: 0.1 * fzero.axis_size(),
        lambda t: 0.1 * (axis_size() if t > LATE else 1),
        lambda t: 0.1 * axis_index(),
        lambda t: (lambda: 0.1 * axis_size())(),
        lambda t: 0.1 * float(os.environ.get("SCALE", "1")),
        lambda t: 0.1 * dist.get_world_size(),
        lambda t: 0.1 * time.time(),
        lambda t: eval("0.1"),
        lambda t: __import__("fzero").axis_size(),
        counts,
        Warmup(),
        Warmup().__call__,
        random.random,
        with_pow,
        eval("lambda t: abs(t)", {"__builtins__": {"abs": lambda t: axis_size()}}),
    ],
)
def test_a_schedule_with_more_in_it_is_named(lr: Any) -> None:
    assert unreadable(lr)


def test_what_a_schedule_asks_for_is_part_of_the_program() -> None:
    proof = proof_of(descends(loss), fzero.optim.sgd(lambda t: 0.1 * fzero.axis_size()))
    assert "the option lr is a function that uses 'fzero'" in why(proof)


def test_what_a_schedule_reads_is_read_when_it_is_asked() -> None:
    rate = [0.1]

    def step_fn(state: Any, x: Tensor) -> Any:
        state, value = fzero.grad_and_reduce(loss, state)(x)
        rate[0] = 0.1 * axis_size()
        state, rate[0] = fzero.apply_gradients(state), 0.1
        return state, value

    def scheduled(t: int) -> float:
        return rate[0] / (1 + t)

    said = why(proof_of(step_fn, fzero.optim.sgd(scheduled)))
    assert "the option lr reads other values" in said
    assert proof_of(descends(loss), fzero.optim.sgd(scheduled))


def test_options_that_a_new_state_has_otherwise_are_seen() -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        state, value = descends(loss)(state, x)
        optimizer = fzero.optim.sgd(0.1 * axis_size())
        return state.replace(setup=dataclasses.replace(state.setup, optimizer=optimizer)), value

    assert "other options" in why(proof_of(step_fn))


# 2. Sums over ranks.


def test_a_sum_of_parts_is_a_total_only_where_all_ranks_have_the_same() -> None:
    def of(whole: Callable[[Tensor], Tensor]) -> fzero.Proof:
        def times(x: Tensor) -> Tensor:
            parts = fzero.psum(fzero.psum(whole(x)[axis_index()].sum())) / axis_size()
            return parts if axis_size() > 1 else whole(x).sum()

        return of_loss(times, x=torch.zeros(2, 4))

    assert "total of its part" in why(of(lambda x: x))


# 3. Dtypes.


@pytest.mark.parametrize(
    "number",
    [
        lambda g: torch.empty_like(g, dtype=torch.int8).copy_(g * 0 + 1.4 * axis_size()).float(),
        lambda g: torch.empty((), dtype=torch.int64).fill_(0.6 * axis_size()).float(),
        lambda g: torch.full((), 0.6 * axis_size(), dtype=torch.int64).float(),
        lambda g: torch.full((), 0.7 * axis_size()).to(torch.uint8).float(),
        lambda g: torch.scalar_tensor(0.6 * axis_size(), dtype=torch.int64).float(),
        lambda g: torch.full((2,), 0.6 * axis_size()).sum(dtype=torch.int64).float(),
        lambda g: torch.full((), 200 * axis_size(), dtype=torch.int64).to(torch.uint8).float(),
        lambda g: torch.full((), 1e30 * axis_size()).half().float(),
        lambda g: torch.full((), axis_size(), dtype=torch.uint8).sub(3).float(),
        lambda g: torch.full((), axis_size(), dtype=torch.int64).div(2, rounding_mode="floor"),
    ],
)
def test_what_a_dtype_makes_of_numbers_is_not_read_as_these(number: Any) -> None:
    why(of_update(lambda g: g * number(g)))


def test_a_value_passes_between_dtypes_that_hold_it() -> None:
    assert of_update(lambda g: g.double().mul(2).to(torch.float32))
    assert of_update(lambda g: g.bfloat16().float())  # the same function of elements in both
    only_on_several = of_update(lambda g: g.bfloat16().float() if axis_size() > 1 else g)
    assert "cast" in why(only_on_several)


# 4. Overloads.

library = torch.library.Library("fzero_tests_prove", "DEF")
for op in ("clone", "relu", "neg"):
    library.define(f"{op}(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.impl(op, lambda x: torch.empty_like(x), "Meta")


@pytest.mark.parametrize("op", ["clone", "relu", "neg"])
def test_an_op_of_a_name_that_is_known_is_not_that_op(op: str) -> None:
    mine = getattr(torch.ops.fzero_tests_prove, op)
    said = why(of_update(lambda g: mine(g)))
    assert f"fzero_tests_prove.{op}.default is no op that a proof knows" in said


# 5. Arguments.


def alike(one: Callable[..., Tensor], other: Callable[..., Tensor]) -> fzero.Proof:
    """One function on one rank, another one on several."""
    return proof_of(descends(lambda p, x: (one if axis_size() == 1 else other)(p, x).pow(2).sum()))


def cube(p: Any, x: Tensor) -> Tensor:
    return (x[:, :, None] * p["w"])[:3, :3, :3]


AT = torch.arange(3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            lambda p, x: F.layer_norm(x, (4,), weight=p["v"]),
            lambda p, x: F.layer_norm(x, (4,), bias=p["v"]),
        ),
        (
            lambda p, x: cube(p, x)[AT, :, AT] * x[:3, :3],
            lambda p, x: cube(p, x)[:, AT, AT].T * x[:3, :3],
        ),
        (lambda p, x: p["w"].sum(0), lambda p, x: p["w"].sum(1)),
        (lambda p, x: F.gelu(p["w"]), lambda p, x: F.gelu(p["w"], approximate="tanh")),
        (lambda p, x: p["w"].var(), lambda p, x: p["w"].var(correction=0)),
        (lambda p, x: p["w"].clamp(min=0.5), lambda p, x: p["w"].clamp(max=0.5)),
    ],
)
def test_arguments_are_told_apart_by_their_places(one: Any, other: Any) -> None:
    assert alike(one, one)
    why(alike(one, other))


# 6. The gradient.


@pytest.mark.parametrize("logged", [False, True])
def test_a_clip_before_the_reduction_is_no_gradient(logged: bool) -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        p = {k: v.detach().clone().requires_grad_() for k, v in fzero.full_params(state).items()}
        gradients = torch.autograd.grad(loss(p, x), list(p.values()))
        norm = torch.stack([one.norm() for one in gradients]).norm()
        clipped = [one * (1 / norm).clamp(max=1) for one in gradients]
        log = norm
        if logged:
            made = sum(
                (a.detach() * b).pow(2).sum() for a, b in zip(clipped, p.values(), strict=True)
            )
            assert isinstance(made, Tensor)
            log = torch.cat([x.flatten() for x in torch.autograd.grad(made, list(p.values()))])
        given = dict(zip(p, clipped, strict=True))
        return fzero.apply_gradients(fzero.add_gradients(state, given)), log

    assert "more of the batch than a gradient" in why(proof_of(step_fn))


def test_gradients_that_are_only_logged_change_nothing() -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        state, value = fzero.grad_and_reduce(loss, state)(x)
        p = {k: v.detach().requires_grad_() for k, v in fzero.full_params(state).items()}
        seen = torch.autograd.grad(loss(p, x).tanh(), list(p.values()))
        return fzero.apply_gradients(state), (value, seen)

    assert proof_of(step_fn)


def test_derivatives_in_a_loss_are_its_own() -> None:
    def penalized(p: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        value = loss(p, x)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + gradient.pow(2).sum()

    assert proof_of(descends(penalized), stage=3)


# 7. Ranks.


@pytest.mark.parametrize("rank", [2, 5])
def test_each_rank_is_read(rank: int) -> None:
    assert "ranks run other programs" in why(
        of_loss(lambda x: 2 if axis_index() == rank else 1, world=8)
    )
    dropped = descends(lambda p, x: loss(p, x[1:] if axis_index() == rank else x))
    assert "ranks run other programs" in why(proof_of(dropped, world=8))


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
