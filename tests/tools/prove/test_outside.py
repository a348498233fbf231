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
from torch.distributed import get_world_size, is_initialized

import fzero
from fzero import axis_index, axis_size
from tests.descends import descends
from tests.tools.prove.steps import PARAMS, loss, of_loss, of_update, proof_of, why

# 7. Ranks.


@pytest.mark.parametrize("rank", [2, 5])
def test_each_rank_is_read(rank: int) -> None:
    assert "ranks run other programs" in why(
        of_loss(lambda x: 2 if axis_index() == rank else 1, world=8)
    )
    dropped = descends(lambda p, x: loss(p, x[1:] if axis_index() == rank else x))
    assert "ranks run other programs" in why(proof_of(dropped, world=8))


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (2, 2), (2, 65)])
def test_options_of_some_leaves_are_followed_on_64_ranks_and_else_named(
    stage: int, world: int
) -> None:
    rule = fzero.optim.adamw(0.1, decay_mask=lambda leaf: len(leaf.shape) > 1)
    proof = proof_of(descends(loss), rule, stage=stage, world=world)
    assert proof.proved if world == 2 else "decay_mask=, groups=" in why(proof)


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
        one in said
        for one in (
            "writes",
            "other programs",
            "a constant of the step",
            "not of",
            "next call",
            "later call",
        )
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


def seeded_by_name(x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(axis_index() + 1)
    return torch.rand(())


def world_by_name(x: Tensor) -> int:
    try:
        return get_world_size()
    except ValueError:
        return 1


def numpy_and_swallowed(x: Tensor) -> float:
    try:
        return float(x.numpy().max())
    except Exception:
        return 1.0


def storage_and_swallowed(x: Tensor) -> float:
    try:
        return float(x.untyped_storage()[0])
    except Exception:
        return 1.0


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (lambda x: float(os.environ.get("FZERO_TESTS", "1")), "os.environ['FZERO_TESTS']"),
        (lambda x: 2 if "RANK" in os.environ else 1, "os.environ['RANK']"),
        (lambda x: float(os.getenv("LOCAL_RANK", "1")), "os.environ['LOCAL_RANK']"),
        (rank_of_torch, "asks torch.distributed"),
        (asked_and_swallowed, "asks for a value"),
        (seeded, "seeds the random numbers"),
        (seeded_by_name, "seeds the random numbers"),
        (lambda x: torch.ones(()).uniform_(generator=torch.Generator()), "a generator of its own"),
        (lambda x: 2 if b"RANK" in os.environb else 1, "os.environ['RANK']"),
        (lambda x: len(os.environ) and 1, "os.environ"),
        (lambda x: 1 if dist.group.WORLD is None else 2, "asks torch.distributed"),
        (lambda x: 2 if is_initialized() else 1, "asks torch.distributed"),
        (world_by_name, "asks torch.distributed"),
        (numpy_and_swallowed, "asks for `.numpy()`"),
        (storage_and_swallowed, "asks for `.untyped_storage()`"),
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
    def drawn(times: int) -> fzero.tools.Proof:
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


# Transforms, and what is refused by its own name.


def test_a_transform_at_local_is_in_the_first_line() -> None:
    clip = fzero.transform(name="bound", local=lambda slots, g, ctx: (slots, g.clamp(-1, 1)))
    proof = proof_of(clip(descends(loss)))
    assert proof and "of the gradients that `local` of bound returns" in str(proof).splitlines()[0]
    assert proof.local == ("bound",)


def average(rate: float = 0.01) -> Any:
    def begin(params: Any, ctx: Any) -> Any:
        return {"mean": {path: p.clone() for path, p in params.items()}}

    def follow(slots: Any, params: Any, ctx: Any) -> Any:
        return {"mean": {k: m.lerp(params[k], rate) for k, m in slots["mean"].items()}}, params

    return fzero.transform(name="average", init=begin, updated=follow)(descends(loss))


def sam(state: Any, x: Tensor) -> Any:
    there, value = fzero.grad_and_reduce(loss, state)(x)
    scale = 0.05 / fzero.global_norm(there)
    moved = fzero.map_params(lambda p, g: p + scale * g, state, there.gradients)
    moved, _ = fzero.grad_and_reduce(loss, moved)(x)
    return fzero.apply_gradients(fzero.add_gradients(state, moved)), value


def halves(slots: Any, grads: Any, ctx: Any) -> Any:
    return slots, {k: g * 0.5 / ctx.norm(grads) for k, g in grads.items()}


HALF = fzero.transform(name="half", reduced=halves)


@pytest.mark.parametrize(
    ("step_fn", "stage", "world"),
    [
        *[(average(), 0, 2), (average(), 1, 5), (average(), 3, 4), (sam, 2, 3), (sam, 3, 2)],
        (HALF(descends(loss)), 2, 5),
    ],
)
def test_pieces_that_differ_by_rank_are_followed(step_fn: Any, stage: int, world: int) -> None:
    assert proof_of(step_fn, stage=stage, world=world)


def test_a_module_with_dropout_is_proved() -> None:
    apply, params = fzero.functionalize(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    assert proof_of(descends(lambda p, x: apply(p, x).pow(2).mean()), params=params)


def test_a_table_that_is_made_once_is_proved() -> None:
    held: dict[str, Tensor] = {}

    def times(x: Tensor) -> Tensor:
        if "table" not in held:
            held["table"] = torch.arange(3.0)
        return held["table"].sum()

    assert of_loss(times) and not held


@pytest.mark.parametrize(
    ("step", "optimizer", "said"),
    [
        (fzero.shard(fzero.check_finite(descends(loss)), stage=2), None, "fzero.check_finite"),
        (fzero.shard(descends(loss), stage=2, logical_ranks=2, seed=0), None, "logical ranks"),
        (
            fzero.shard(descends(loss), stage=2),
            fzero.optim.adamw(0.1, state_dtype=fzero.codecs.int8()),
            "8 bits or fewer",
        ),
    ],
)
def test_what_no_graph_has_is_refused_by_its_own_name(step: Any, optimizer: Any, said: str) -> None:
    state = step.init(PARAMS, optimizer or fzero.optim.sgd(0.1))
    for tool in (fzero.prove, fzero.check_spmd, lambda s, *args: fzero.trace(s)(*args)):
        with pytest.raises(fzero.PhaseError, match=said):
            tool(step, state, torch.zeros(4, 4))


def test_a_loss_under_torch_compile_is_read_as_it_is() -> None:
    assert proof_of(descends(torch.compile(loss, backend="eager")))
