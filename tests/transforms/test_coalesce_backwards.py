"""`coalesce(backwards=N)`: the N-th gradient call reduces what waits, beside its own backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError, MismatchError, PhaseError
from fzero.state.rounds import CODES
from tests.covering import covered
from tests.ranks import run_ranks
from tests.strategies import same, tensors
from tests.transforms.wired import Batch, Odd, each_rank, noise, twelves

STEPS = 2


def trained(rank: int, calls: int, data: Any = twelves, **options: Any) -> Any:
    """A state after `STEPS` updates of so many gradient calls each."""
    apply, params = fzero.functionalize(Odd())
    backwards = options.pop("backwards", None)

    def step_fn(state: Any, *batches: Batch) -> Any:
        for x in batches:
            state, _ = fzero.grad_and_reduce(apply, state)(x)
        return fzero.apply_gradients(state), None

    step: Any = fzero.shard(fzero.coalesce(step_fn, backwards=backwards), **options)
    state = step.init(params, fzero.optim.sgd(0.5, momentum=0.5))
    for number in range(STEPS):
        state, _ = step(state, *(data(rank, number * calls + i) for i in range(calls)))
    return state


@covered(
    world=[1, 2, 3],
    stage=range(4),
    calls=[1, 2, 3, 5],
    backwards=[1, 2, 3, 5],
    donate=[False, True],
)
def test_numbers_are_those_of_one_reduction_at_the_end(
    world: int, stage: int, calls: int, backwards: int, donate: bool
) -> None:
    def body(rank: int) -> Any:
        options = {"stage": stage, "donate": donate, "bucket_bytes": 512}
        wanted = trained(rank, calls, **options)
        found = trained(rank, calls, backwards=backwards, **options)
        assert not found.window.is_open and found.window.length == 0
        same(fzero.full_params(found), fzero.full_params(wanted))

    each_rank(body, world)


def by_engine(rank: int, stage: int, calls: int) -> Any:
    """As PyTorch has it: no_sync for all but the last backward."""
    module = Odd()
    learns = [p for p in module.parameters() if p.requires_grad]
    engine = Engine(module, torch.optim.SGD(learns, 0.5, momentum=0.5), stage=stage)
    for number in range(STEPS):
        batches = [noise(rank, number * calls + i) for i in range(calls)]
        with engine.no_sync():
            for x in batches[:-1]:
                engine(x).backward()
        engine(batches[-1]).backward()
        engine.step()
    return engine.full_state_dict()


def both(rank: int, world_size: int, stage: int) -> None:
    mine = trained(rank, 3, noise, backwards=3, stage=stage)
    theirs = by_engine(rank, stage, 3)
    same(dict(fzero.full_params(mine)), dict(theirs))


@pytest.mark.parametrize("stage", range(4))
def test_an_engine_has_the_same_bits_by_no_sync(stage: int) -> None:
    each_rank(lambda rank: both(rank, 2, stage), 2)


@pytest.mark.smoke
@pytest.mark.xdist_group("gloo")
def test_on_gloo_ranks_too() -> None:
    run_ranks(both, 2, 3)


@pytest.mark.parametrize("stage", range(4))
def test_the_last_call_reduces_and_no_other(stage: int) -> None:
    """In that call, bucket by bucket, as many bytes as at the end."""
    apply, params = fzero.functionalize(Odd())
    moved = {"reduce_scatter", "all_reduce"}

    def body(rank: int) -> None:
        seen: list[int] = []

        def step_fn(state: Any, *batches: Batch) -> Any:
            for x in batches:
                with fzero.count_collectives() as log:
                    state, _ = fzero.grad_and_reduce(apply, state)(x)
                seen.append(sum(e.numel for e in log.events if e.op in moved and e.rank == rank))
            return state, None

        step: Any = fzero.shard(fzero.coalesce(step_fn, backwards=3), stage=stage, bucket_bytes=512)
        state = step.init(params, fzero.optim.sgd(0.5))
        with fzero.count_collectives() as log:
            state, _ = step(state, *(twelves(rank, i) for i in range(3)))
        total = sum(e.numel for e in log.events if e.op in moved and e.rank == rank)
        assert seen == [0, 0, total] and total >= sum(x.numel() for x in tensors(params)[:4]) // 2
        assert state.progress.reductions == 1

    each_rank(body, 2)


def test_gathers_are_those_of_the_window() -> None:
    """With parameters that are kept for its length, each unit is gathered once."""

    def gathered(backwards: int | None) -> int:
        def body(rank: int) -> int:
            options: dict[str, Any] = {"stage": 3, "reshard_after_forward": "window"}
            with fzero.count_collectives() as log:
                trained(rank, 3, backwards=backwards, **options)
            return sum(e.numel for e in log.events if e.op == "all_gather" and e.rank == rank)

        return int(each_rank(lambda rank: torch.tensor(body(rank)), 2)[0])

    assert gathered(3) == gathered(None)


def test_a_loss_that_is_not_finite_and_weights_go_through() -> None:
    def body(rank: int) -> None:
        apply, params = fzero.functionalize(nn.Linear(3, 2))

        def step_fn(state: Any, scale: float) -> Any:
            for i in range(4):
                x = torch.full((1, 3), scale * 2.0**i)
                weight = 2.0 ** (i + rank)
                call = fzero.grad_and_reduce(lambda *a: apply(*a).sum(), state, weight=weight)
                state, _ = call(x)
            return fzero.apply_gradients(state), None

        found = []
        for backwards in (None, 4, 3):
            fn = fzero.scale_loss(fzero.coalesce(step_fn, backwards=backwards), "dynamic")
            step: Any = fzero.shard(fn, stage=2)
            state = step.init(params, fzero.optim.sgd(0.5))
            for scale in (1.0, float("inf"), 1.0):
                state, _ = step(state, scale)
            found.append(fzero.full_params(state))
        same(found[0], found[1])
        same(found[0], found[2])

    each_rank(body, 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_more_units_than_one_message_has_room_for(stage: int) -> None:
    """In the first step nobody knows what the last backward does, and all is asked for at once."""

    def layers() -> nn.Module:
        net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2 * CODES + 3)))
        for p in net.parameters():
            p.data = torch.eye(2)
        return net

    def body(rank: int) -> None:
        x = torch.tensor([[1.0 + rank, 2.0]])
        module, (apply, params) = layers(), fzero.functionalize(layers())
        engine = Engine(module, torch.optim.SGD(module.parameters(), 2.0**-8), stage=stage)

        def step_fn(state: Any) -> Any:
            for _ in range(2):
                state, _ = fzero.grad_and_reduce(lambda p: apply(p, x).sum(), state)()
            return fzero.apply_gradients(state), None

        step = fzero.shard(fzero.coalesce(step_fn, backwards=2), stage=stage, units=apply.units)
        state = step.init(params, fzero.optim.sgd(2.0**-8))
        plain = fzero.shard(step_fn, stage=0)
        wanted = plain.init(params, fzero.optim.sgd(2.0**-8))
        for _ in range(2):
            with engine.no_sync():
                engine(x).sum().backward()
            engine(x).sum().backward()
            engine.step()
            (state, _), (wanted, _) = step(state), plain(wanted)
        same(dict(fzero.full_params(state)), dict(engine.full_state_dict()))
        for a, b in zip(
            tensors(fzero.full_params(state)), tensors(fzero.full_params(wanted)), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)

    each_rank(body, 2)


def test_ranks_that_make_other_numbers_of_calls_all_raise() -> None:
    def body(rank: int) -> None:
        with pytest.raises(MismatchError):
            trained(rank, 3 if rank else 2, backwards=3, stage=2)

    each_rank(body, 2)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(LayoutError, match="backwards="):
        fzero.coalesce(lambda state: (state, None), backwards=0)
    inner = fzero.coalesce(lambda state: (state, None))
    nested = fzero.coalesce(lambda state: inner(state), backwards=1)
    with pytest.raises(PhaseError, match="already open"):
        nested(fzero.init(torch.ones(2), fzero.optim.sgd(1.0), stage=1))
    assert repr(fzero.coalesce(inner.__class__, backwards=2)).startswith("coalesce(backwards=2)")
