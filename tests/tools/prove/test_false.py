"""False steps of each kind are not proved, and what is wrong is named; their sound neighbours are.

tests/tools/prove/adversary has hundreds more, each false by numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import axis_index, axis_size
from fzero.tools.trace.schedules import facts_of
from tests.descends import descends
from tests.tools.prove.steps import loss, of_loss, of_update, proof_of, why

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
HELD_PARTIAL.pow = axis_size


def with_pow(t: int) -> float:
    return 0.1 * HELD_PARTIAL.pow()


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
    assert facts_of(lr)[0]


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
    def of(whole: Callable[[Tensor], Tensor]) -> fzero.tools.Proof:
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


def alike(one: Callable[..., Tensor], other: Callable[..., Tensor]) -> fzero.tools.Proof:
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
