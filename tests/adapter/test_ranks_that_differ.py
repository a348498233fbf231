"""Ranks that make other numbers of backwards, throw gradients away alone, or raise alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, gathered
from fzero.errors import AxisError, LayoutError, MismatchError, PeerFailedError, PhaseError
from fzero.integrations import deepspeed
from tests.adapter.nets import Net, linear
from tests.adapter.on_ranks import Place, at_places, on_ranks
from tests.adapter.plain import Draw, back, check_program, engine_of, same
from tests.failing import fails_in_backward

X = torch.ones(1, 3, dtype=torch.float64)


def layer() -> nn.Module:
    """For a sum of outputs, the gradient of the bias counts the rows."""
    return linear(3, 2)


def bias_gradient(engine: Engine) -> list[float]:
    return engine.full_gradient("bias").tolist()


def a_rank_with_more_backwards(e: Any, draw: Draw) -> None:
    for _ in range(1 + draw.rank):
        back(e, draw)


def evaluates_more_often_on_later_ranks(e: Any, draw: Draw) -> None:
    back(e, draw)
    for _ in range(2 * draw.rank):  # the first rank trains on meanwhile
        with torch.inference_mode():
            e(draw(2, 3))
    back(e, draw)


def windows_of_other_lengths_even_empty_ones(e: Any, draw: Draw) -> None:
    with e.coalesce():
        for _ in range((draw.rank + 1) % 3):
            back(e, draw)
    with e.no_sync():
        for _ in range(draw.rank):
            back(e, draw)


def slopes_while_gradients_of_some_ranks_wait(e: Any, draw: Draw) -> None:
    with e.no_sync():
        for _ in range(draw.rank):
            e(draw(2, 3)).sum().backward()
    x = draw(2, 3).requires_grad_()
    (slope,) = torch.autograd.grad(e(x).square().sum(), x)
    e(slope.detach()).sum().backward()


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("program", "stages"),
    [
        (a_rank_with_more_backwards, (0, 1, 2, 3)),
        (evaluates_more_often_on_later_ranks, (0, 1, 2, 3)),
        (windows_of_other_lengths_even_empty_ones, (0, 1, 2, 3)),
        (slopes_while_gradients_of_some_ranks_wait, (0, 1, 2)),
    ],
)
def test_ranks_with_other_numbers_of_passes_are_served_by_the_others(
    rank: int,
    world_size: int,
    program: Callable[[Any, Draw], None],
    stages: tuple[int, ...],
) -> None:
    check_program(rank, world_size, Net, program, stages=stages, steps=3)


@on_ranks(2, timeout_s=20)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_that_average_over_other_numbers_of_backwards_stay_equal(
    rank: int, stage: int
) -> None:
    engine = engine_of(Net, stage, average_micro_batches=True)
    with engine.coalesce():
        a_rank_with_more_backwards(engine, Draw(rank, 0))
    engine.step()
    for p in engine.module.parameters():
        of_rank_0 = p.detach().clone()
        torch.distributed.broadcast(of_rank_0, 0)
        assert torch.equal(p, of_rank_0)


@on_ranks(2, 3)
def test_ranks_throw_away_other_numbers_of_backwards(rank: int) -> None:
    engine = engine_of(layer, 3)
    for _ in range(1 + rank):
        engine(X).sum().backward()
    engine.zero_grad()
    (10 * engine(X)).sum().backward()
    assert bias_gradient(engine) == [10.0, 10.0]
    engine.step()
    with engine.coalesce():
        for _ in range(1 + rank):  # in a window nothing is reduced, and nobody waits
            engine(X).sum().backward()
            engine.zero_grad()
        engine(X).sum().backward()
    assert bias_gradient(engine) == [1.0, 1.0]
    engine.close()


@on_ranks(2, 3)
def test_gradients_that_are_dropped_by_p_grad_must_be_dropped_by_all(rank: int) -> None:
    """p.grad = None is seen at the next backward: it must be that of the other ranks, too."""
    engine = engine_of(layer, 3)
    for _ in range(2):
        engine(X).sum().backward()
        engine.module.zero_grad()
        (10 * engine(X)).sum().backward()
        assert bias_gradient(engine) == [10.0, 10.0]
        engine.step()
    engine(X).sum().backward()
    with pytest.raises(MismatchError, match="gradients dropped just before: True"):
        for _ in range(rank):
            engine(X).sum().backward()
        engine.module.zero_grad()
        (10 * engine(X)).sum().backward()
    engine.zero_grad()
    engine(X).sum().backward()
    assert bias_gradient(engine) == [1.0, 1.0]
    engine.close()


class Branches(nn.Module):
    """A third part that some calls use, and a backward that raises below the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.extra = (linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x: Tensor, extra: bool = False, fails: bool = False) -> Tensor:
        h = self.a(x)
        h = self.b(fails_in_backward(h, ZeroDivisionError) if fails else h)
        return self.extra(h) if extra else h


@at_places(2, 3)
@pytest.mark.parametrize("told", [True, False])
def test_all_raise_in_a_backward_of_which_they_had_reduced_other_parts(
    at: Place, told: bool
) -> None:
    one, two = (at.engine(Branches, bucket_bytes=1) for _ in range(2))
    with pytest.raises((ZeroDivisionError, AxisError)):  # at stage 3 the first tells the others
        loss = one(at.draw(0)(2, 3), at.rank == 0, True).sum()
        one.backward(loss) if told else loss.backward()
    for engine in (one, two):
        back(engine, at.draw(1))
    same(one.full_gradients(), two.full_gradients(), 0.0)
    for engine in (one, two):
        engine.step()
        engine.close()


@on_ranks(2, 3)
def test_a_window_that_raises_on_ranks_with_other_forwards_loses_nobody_elses(
    rank: int, world_size: int
) -> None:
    engine = engine_of(layer, 3)
    with pytest.raises(ZeroDivisionError), engine.coalesce():
        for _ in range(2 * rank):
            engine(X)
        raise ZeroDivisionError
    for _ in range(1 if rank else 2):
        engine(X).sum().backward()
    assert bias_gradient(engine) == [(world_size + 1) / world_size] * 2
    engine.close()


@at_places(2, 3)
def test_one_rank_raises_in_its_backward_and_the_others_in_theirs(at: Place) -> None:
    engine = at.engine(Branches, bucket_bytes=1)
    loss = engine(at.draw(0)(2, 3), fails=at.rank == 0).sum()
    with pytest.raises(PeerFailedError if at.rank else ZeroDivisionError):
        engine.backward(loss)
    with pytest.raises(PhaseError, match="there are no gradients"):
        engine.full_gradients()
    engine(at.draw(1)(2, 3)).sum().backward()
    assert engine.step()
    engine.close()


@on_ranks(2, 3)
def test_a_backward_of_two_engines_that_raises_on_one_rank_before_it_reaches_the_first(
    rank: int,
) -> None:
    first, second = (engine_of(lambda: linear(3, 3), 3) for _ in range(2))
    second(first(X)).sum().backward()  # a good one
    wanted = [engine.full_gradients() for engine in (first, second)]
    between = first(X)
    loss = second(fails_in_backward(between, ZeroDivisionError) if rank == 0 else between).sum()
    with pytest.raises((ZeroDivisionError, AxisError)):
        loss.backward()
        first.full_gradients()  # a rank that was through hears of it here
    for engine, gradients in zip((first, second), wanted, strict=True):
        same(engine.full_gradients(), gradients, 0.0)
        engine.close()


@on_ranks(2, 3)
def test_ranks_that_hold_other_units_come_to_a_write_together(rank: int) -> None:
    engine = engine_of(layer, 3, persistence_threshold_numel=100)
    if rank == 1:
        with torch.no_grad():
            engine(X)
    engine.full_parameters()
    with gathered(engine.module, modify=True) as values, torch.no_grad():
        for value in values:
            value.fill_(7.0)
    for value in engine.full_parameters().values():
        assert value.unique().tolist() == [7.0]
    engine.close()


@on_ranks(2, 3)
def test_ranks_come_to_a_read_with_other_numbers_of_forwards(rank: int) -> None:
    engine = engine_of(layer, 3)
    new = torch.full((2,), 2.0, dtype=torch.float64)
    reads = [
        lambda: engine.full_parameters(),
        lambda: engine.set_full_parameter("bias", new),
        lambda: engine.full_state_dict(),
    ]
    for number, read in enumerate(reads):
        with torch.no_grad():
            for _ in range(rank + number):
                engine(X)
        read()
        assert engine.full_optimizer_states() == {"weight": {}, "bias": {}}
    assert engine.full_parameter("bias").tolist() == [2.0, 2.0]
    for _ in range(rank):
        engine(X).sum().backward()
    engine.close()


@at_places(2)
def test_gradients_are_clipped_to_one_norm_on_all_ranks(at: Place) -> None:
    engine = at.engine(layer)
    engine(X).sum().backward()
    before = engine.full_gradients()
    with pytest.raises(MismatchError, match=r"clip_grad_norm_\(1.0\)[\s\S]*clip_grad_norm_\(2.0\)"):
        engine.clip_grad_norm_(1.0 + at.rank)
    for wrong in (-1.0, float("nan"), "1"):
        with pytest.raises(LayoutError, match="max_norm"):
            engine.clip_grad_norm_(wrong)  # type: ignore[arg-type]
    after = engine.full_gradients()
    assert all(torch.equal(x, after[path]) for path, x in before.items())
    assert engine.clip_grad_norm_(float("inf")) > 0


ASKED: dict[str, Callable[[Engine], object]] = {
    "global_grad_norm": lambda e: e.global_grad_norm,
    "safe_get_full_grad": lambda e: deepspeed.safe_get_full_grad(next(e.parameters())),
}


@on_ranks(2)
@pytest.mark.parametrize("name", ASKED)
def test_a_question_of_gradients_on_one_rank_alone_raises_on_both(rank: int, name: str) -> None:
    """Also where there are none: the answer None is one that all ranks have agreed on."""
    engine = engine_of(layer, 2)
    assert ASKED[name](engine) is None
    with pytest.raises(MismatchError, match="full_parameters"):
        ASKED[name](engine) if rank == 0 else engine.full_parameters()
    assert ASKED[name](engine) is None
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_pass_that_failed_leaves_nothing_with_a_rank_that_served_it(stage: int) -> None:
    """The gradients of it that were reduced while the rank waited in step() are not used later."""

    def weights(fails: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
        engine = Engine(module, torch.optim.SGD(module.parameters(), lr=1.0), stage=stage)
        if fails and fzero.axis_index() == 0:
            x = fails_in_backward(torch.ones(2, 4).requires_grad_(), ValueError("own"))
            with pytest.raises(ValueError, match="own"):
                engine.backward(100 * engine(x).sum())
        elif fails:
            with pytest.raises(PeerFailedError):
                engine.step()
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        return list(fzero.full_params(engine.state).values())

    after, expected = (fzero.simulate(weights, world_size=2)(fails) for fails in (True, False))
    assert all(map(torch.equal, after[0] + after[1], expected[0] + expected[1]))
