"""The residual of encoded gradients, where something goes wrong, or nothing is reduced."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.adapter import Engine
from fzero.machine.codecs import Codec
from fzero.machine.compress import memory_flats
from fzero.state import TrainState
from tests.covering import covered
from tests.transforms.codecs_tried import POWER
from tests.transforms.wired import (
    GRADIENTS,
    LR,
    USED,
    Batch,
    Odd,
    by_engine,
    by_function,
    each_rank,
    fine,
    moved,
    noise,
    residual,
    with_gradients,
)

ENCODED = GRADIENTS["compress"]
BOTH = [by_engine, by_function]
TWO = [ENCODED, fzero.Compress(gradients=POWER)]
"""With blocks, and with factors: their memories are other slots."""


def lost(state: TrainState) -> list[Tensor]:
    return [flat.clone() for flat in memory_flats(state)]


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


def test_a_state_counts_its_residual_and_stays_as_it_was() -> None:
    def body(rank: int) -> None:
        before = by_function(rank, noise, 2, 0, compress=ENCODED)
        numel = sum(before.setup.layout.full_numel(i) for i in before.setup.layout.trainable)
        assert fzero.state_bytes(before)["window"] == 4 * numel
        apply, _ = fzero.functionalize(Odd())
        after, _ = fzero.grad_and_reduce(lambda p: apply(p, noise(rank, 0)), before)()
        assert not any(flat.any() for flat in lost(before)) and any(x.any() for x in lost(after))
        shown = fzero.gradients(after)
        assert same(lost(after), lost(after)) and shown["wide"].any()
        with pytest.raises(ZeroDivisionError):
            fzero.grad_and_reduce(lambda p: apply(p, noise(rank, 0)) + 1 / 0, after)()
        updated = fzero.apply_gradients(after)
        assert same(lost(updated), lost(after)) and not any(
            slot.before for slot in updated.slots.values()
        )

    each_rank(body, 2)


def overflowing(rank: int, step: int) -> Batch:
    """Noise; in step 1 an infinity on rank 1, and large numbers in the other blocks."""
    found = dict(noise(rank, step))
    if step == 1:
        found = {path: value * 1e30 for path, value in found.items()}
        found["wide"] = torch.where(torch.tensor(rank == 1), torch.inf, found["wide"])
    return found


@covered(driver=BOTH, stage=[0, 1, 3], compress=TWO)
def test_a_skipped_update_leaves_no_trace_in_what_is_kept(
    driver: Any, stage: int, compress: Any
) -> None:
    """The steps around an overflow give the bits of a run that never had it."""

    def without(rank: int, step: int) -> Batch:
        return overflowing(rank, 2 * step)

    def body(rank: int) -> None:
        scale = fzero.DynamicScale(init_scale=4.0, growth_interval=1)
        options: Any = {"compress": compress, "loss_scale": scale}
        mine = driver(rank, overflowing, stage, 3, **options)
        theirs = driver(rank, without, stage, 2, **options)
        assert int(mine.step) == 2
        assert same(list(mine.params.flats), list(theirs.params.flats))
        assert same(lost(mine), lost(theirs)) and any(flat.any() for flat in lost(mine))

    each_rank(body, 2)


def test_gradients_that_are_thrown_away_take_their_residual_with_them() -> None:
    def body(rank: int) -> None:
        module = Odd()
        learns = [p for p in module.parameters() if p.requires_grad]
        engine = Engine(module, torch.optim.SGD(learns, LR), stage=2, compress=ENCODED)
        engine(noise(rank, 0)).backward()
        engine.step()
        before = lost(engine.state)
        for _ in range(2):
            engine(noise(rank, 1)).backward()
        assert not same(lost(engine.state), before)
        engine.zero_grad()
        assert same(lost(engine.state), before)
        engine(noise(rank, 1)).backward()
        module.zero_grad()
        engine(noise(rank, 2)).backward()
        engine.step()
        engine.zero_grad()  # there is nothing to throw away
        theirs = by_engine(rank, lambda r, step: noise(r, 2 * step), 2, 2, compress=ENCODED)
        assert same(lost(engine.state), lost(theirs))
        assert same(list(engine.state.params.flats), list(theirs.params.flats))

    each_rank(body, 2)


def test_a_nan_stays_out_of_the_residual_and_is_seen_in_the_gradient() -> None:
    def bad(rank: int, step: int) -> Batch:
        found = dict(noise(rank, step))
        if rank == 0:
            found["wide"] = torch.full_like(found["wide"], torch.nan)
        return found

    def body(rank: int) -> None:
        for driver, compress in itertools.product(BOTH, TWO):
            state = with_gradients(driver, rank, bad, 2, compress=compress)
            assert all(flat.isfinite().all() for flat in lost(state))
            found = fzero.gradients(state)
            assert found["wide"].isnan().all() and found["blocks.1.bias"].isfinite().all()

    each_rank(body, 2)


def in_a_window(engine: Engine, rank: int) -> list[tuple[int, int]]:
    """Other numbers of backwards on the ranks of an engine, three of which wait."""
    with engine.coalesce():
        for step in range(1 + rank):
            engine(fine(rank, step)).backward()
    engine.step()
    return [(r, step) for r in range(2) for step in range(1 + r)]


def in_micro_batches(engine: Engine, rank: int) -> list[tuple[int, int]]:
    """One that waits, and one that is reduced at once; then a window of both."""
    for waits in (engine.no_sync, nullcontext, engine.no_sync, engine.no_sync):
        with waits():
            engine(fine(rank, int(engine.state.progress.backwards))).backward()
        engine.step()
    return [(r, step) for r in range(2) for step in range(2)]  # half of it in each update


def in_other_numbers(engine: Engine, rank: int) -> list[tuple[int, int]]:
    """A rank that has called step() takes part in the backwards of the others, with zeros."""
    for update in range(2):
        for number in range(1 + rank):
            engine(fine(rank, 2 * update + number)).backward()
        engine.step()
    return [(0, 0), (0, 2), *((1, step) for step in range(4))]


MICRO: dict[str, Any] = {"gradient_accumulation_steps": 2, "average_micro_batches": True}


@covered(train=[in_a_window, in_micro_batches, in_other_numbers], stage=[0, 2, 3], compress=TWO)
def test_however_ranks_go_updates_lack_the_last_residual_and_nothing_else(
    train: Any, stage: int, compress: Any
) -> None:
    options = MICRO if train is in_micro_batches else {}

    def body(rank: int) -> Tensor:
        module = Odd(torch.float64)
        sgd = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], LR)
        engine = Engine(module, sgd, stage=stage, compress=compress, **options)
        given = train(engine, rank)
        found, left = moved(engine.state), residual(engine.state)
        for path in USED:
            wanted = torch.stack([fine(*one)[path] for one in given]).sum(0) / 2
            torch.testing.assert_close(found[path] + left[path], wanted, rtol=0, atol=1e-12)
        return torch.tensor(len(engine.state.setup.layout.trainable))

    with fzero.count_collectives() as log:
        groups = each_rank(body, 2)
    if train is in_a_window and compress is ENCODED:
        assert log.counts(0)["all_to_all"] == groups[0]  # each of them is encoded once


def test_a_unit_that_is_reduced_twice_in_a_backward_sends_its_residual_once() -> None:
    """Its rank leaves the plan, which ends with zeros, and reduces its own gradient after that."""
    x = torch.linspace(-1, 1, 700, dtype=torch.float64)
    params = {"a": {"w": x.clone()}, "b": {"w": x.clone()}}

    def body(rank: int) -> None:
        state: Any = fzero.init(
            params, fzero.optim.sgd(1.0), stage=3, compress=ENCODED, units=lambda p: p[0]
        )
        for step in range(4):

            def loss(p: Any, step: int = step) -> Tensor:
                first = (p["a"]["w"] * x * (1 + rank)).sum()
                return first + (p["b"]["w"] ** 2).sum() if rank and step == 2 else first

            state, _ = fzero.grad_and_reduce(loss, state)()
        (index,) = [i for i, g in enumerate(state.setup.layout.groups) if g.name == "a"]
        at = state.setup.layout.trainable.index(index)
        left = fzero.pmean(memory_flats(state)[at])[:700]
        found = fzero.gradients(state)["a"]["w"]
        torch.testing.assert_close(found + left, 4 * 1.5 * x, rtol=0, atol=1e-12)

    with fzero.count_collectives() as log:
        each_rank(body, 2)
    assert log.counts(0)["all_to_all"] == 4 + 1 + 2  # of a once more; of b, from then on planned


@pytest.mark.parametrize("stage", [2, 3])
def test_a_unit_of_empty_parameters_has_nothing_to_lose(stage: int) -> None:
    params = {"full": {"w": torch.ones(5)}, "none": {"w": torch.ones(0, 3)}}

    def body(rank: int) -> None:
        state: Any = fzero.init(
            params, fzero.optim.sgd(1.0), stage=stage, compress=ENCODED, bucket_bytes=4
        )
        state, _ = fzero.grad_and_reduce(
            lambda p: p["full"]["w"].sum() * (1 + rank) + p["none"]["w"].sum(), state
        )()
        found = fzero.full_params(fzero.apply_gradients(state))
        assert torch.equal(found["full"]["w"], torch.full((5,), -0.5))
        assert tuple(found["none"]["w"].shape) == (0, 3)

    each_rank(body, 2)


@dataclass(frozen=True)
class Steps(Codec):
    """Multiples of 1/64: what it loses of a gradient depends on the units in which that comes."""

    def encode(self, x: Tensor) -> tuple[Tensor]:
        return ((64 * x).round().to(torch.int16),)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype) / 64

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def bound(self, x: Tensor) -> Tensor:
        return torch.full_like(x, 1 / 128 + 1e-6)


PARTS = 3
WAYS: dict[str, tuple[Any, bool]] = {  # how, and whether parts cross one by one
    "parts": (lambda fn: fzero.accumulate(fn, micro_batches=PARTS), True),
    "parts in a window": (lambda fn: fzero.coalesce(fzero.accumulate(fn, micro_batches=3)), False),
    "windows of parts": (lambda fn: fzero.accumulate(fzero.coalesce(fn), micro_batches=3), True),
    "parts in parts": (
        lambda fn: fzero.accumulate(fzero.accumulate(fn, micro_batches=PARTS), micro_batches=1),
        True,
    ),
}


@covered(way=[*WAYS], stage=[0, 1, 3], scale=[None, 8.0])
def test_what_crosses_and_what_is_remembered_are_in_the_units_of_the_update(
    way: str, stage: int, scale: float | None
) -> None:
    """Against the same written out: e + g / k is rounded, and what that loses is the next e."""
    torch.manual_seed(0)
    gradients = torch.randn(3, 2, PARTS, 5, dtype=torch.float64)  # update, rank, part
    wrap, one_by_one = WAYS[way]

    def step_fn(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p, x: (p * x).sum(), state)(x)
        return fzero.apply_gradients(state), None

    fn = wrap(fzero.compress(step_fn, gradients=Steps(memory=True)))
    fn = fn if scale is None else fzero.scale_loss(fn, scale=scale)
    run = fzero.simulate(fzero.shard(fn, stage=stage), world_size=2)
    state = run.init(torch.zeros(5, dtype=torch.float64), fzero.optim.sgd(1.0))
    by = scale or 1.0
    left, back, wanted = torch.zeros(2, 5).double(), torch.zeros(5).double(), torch.zeros(5)
    for given in gradients:
        state, _ = run(state, given)
        parts = given / PARTS if one_by_one else given.mean(1, keepdim=True)
        for k in range(parts.shape[1]):
            whole = parts[:, k] + left
            sent = (64 * by * whole).round() / 64 / by
            left, total = whole - sent, sent.sum(0)
            if stage == 0:  # which is encoded once more, on its way back
                whole, total = total + back, (64 * by * (total + back)).round() / 64 / by
                back = whole - total
            wanted = wanted - total / 2
    found = fzero.simulate(fzero.full_params, world_size=2)(state)
    torch.testing.assert_close(found, wanted.expand(2, 5), rtol=0, atol=1e-12)
    kept = memory_flats(state)[0][:, :5]
    torch.testing.assert_close(kept, left, rtol=0, atol=1e-12)
