"""After an error on all ranks the engine is as if that call had not been.

Errors in a forward, a backward and a window, in any order with all else, are in
test_random_programs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fzero.adapter import Engine
from fzero.errors import FzeroError, PhaseError
from tests.adapter.nets import Fragile, Net, TiledLoss, faulty, linear
from tests.adapter.on_ranks import Place, at_places, each_stage, on_ranks
from tests.adapter.plain import (
    LR,
    Draw,
    Reference,
    back,
    engine_of,
    is_idle,
    learning,
    same,
    seeded,
    update,
)
from tests.failing import fails_in_backward

Fault = Callable[[Engine, Draw], None]
FAULTS: dict[str, Fault] = {}


def fault(do: Fault) -> Fault:
    FAULTS[do.__name__] = do
    return do


def raise_it(gradient: Tensor) -> None:
    raise ValueError("raised in a hook")


class RaisesBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return fails_in_backward(x, ValueError("raised in backward"))


@fault
def in_the_forward_of_the_module(e: Engine, draw: Draw) -> None:
    with faulty(e, "forward"):
        e.module(draw(2, 3))


@fault
def before_any_gradient(e: Engine, draw: Draw) -> None:
    fails_in_backward(e(draw(2, 3)), ValueError("raised in backward")).sum().backward()


@fault
def in_a_hook_of_the_input_after_every_gradient(e: Engine, draw: Draw) -> None:
    back(e, draw)
    x = draw(2, 3).requires_grad_()
    x.register_hook(raise_it)
    e(x).square().sum().backward()


@fault
def in_one_of_two_backwards(e: Engine, draw: Draw) -> None:
    first = e(draw(2, 3)).square().sum()
    with faulty(e, "middle"):
        second = e(draw(2, 3)).square().sum()
    (first + second).backward()


@fault
def in_a_backward_of_a_kept_graph(e: Engine, draw: Draw) -> None:
    loss = e(draw(2, 3)).square().sum()
    loss.backward()
    loss.backward()


@fault
def in_the_recompute_of_a_reentrant_checkpoint(e: Engine, draw: Draw) -> None:
    loss = checkpoint(e, draw(2, 3).requires_grad_(), use_reentrant=True).sum()
    with faulty(e, "forward"):
        loss.backward()


@fault
def in_a_tiled_backward(e: Engine, draw: Draw) -> None:
    TiledLoss.apply(e(draw(5, 3)), nn.Sequential(linear(3, 3), RaisesBack()))


@fault
def in_a_gradient_of_the_input(e: Engine, draw: Draw) -> None:
    x = draw(2, 3).requires_grad_()
    with faulty(e, "middle"):
        torch.autograd.grad(e(x).sum(), x)


@fault
def step_inside_a_backward(e: Engine, draw: Draw) -> None:
    out = e(draw(2, 3))
    out.register_hook(lambda g: raise_it(g) if e.step() else None)
    out.sum().backward()


@fault
def a_window_inside_a_backward(e: Engine, draw: Draw) -> None:
    out = e(draw(2, 3))
    out.register_hook(lambda g: e.coalesce().__enter__())
    out.sum().backward()


# What these bring before they raise is theirs to keep: whole backwards.
BROUGHT = {
    "in_a_hook_of_the_input_after_every_gradient": back,
    "in_a_backward_of_a_kept_graph": back,
}
EXPECTED = "raised in|second time|(step|coalesce)\\(\\) inside a backward"


@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2, timeout_s=30)
@each_stage
@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_after_an_error_gradients_and_updates_are_those_of_a_run_without_it(
    rank: int, world_size: int, stage: int, waiting: bool, name: str
) -> None:
    """With nothing before it, or with gradients that wait; random programs have reduced ones."""
    options = {"bucket_bytes": 8, "contiguous_gradients": False} if waiting else {}

    def start(e: Any, draw: Draw) -> None:
        if waiting:
            with e.no_sync():
                back(e, draw)

    def without_it(e: Any, draw: Draw) -> None:
        start(e, draw)
        if name in BROUGHT:
            BROUGHT[name](e, Draw(draw.rank, 50))
        back(e, draw)

    e, plain = engine_of(Fragile, stage, **options), Reference(Fragile, world_size)
    for number in range(2):
        draw = Draw(rank, number)
        start(e, draw)
        with pytest.raises((ValueError, RuntimeError), match=EXPECTED):
            FAULTS[name](e, Draw(rank, 50))
        wanted = plain.run(without_it, number)
        back(e, draw)
        same(e.full_gradients(), wanted, label="gradients")
        assert is_idle(e)
        e.step()
        same(e.full_parameters(), plain.step(wanted), label="updated")


class Stubborn(torch.optim.SGD):
    """Raises when it is told to."""

    raises = False

    def step(self, closure: Any = None) -> None:
        if self.raises:
            raise ValueError("raised in step")
        super().step(closure)


def stubborn_of(module: nn.Module) -> torch.optim.Optimizer:
    return Stubborn(learning(module).values(), lr=LR)


@at_places(1, 2)
@pytest.mark.parametrize("every", [1, 2])
def test_an_optimizer_that_raises_leaves_gradients_and_parameters_as_they_were(
    at: Place, every: int
) -> None:
    options: Any = {"gradient_accumulation_steps": every, "loss_scale": 4.0, "max_norm": 1e9}
    e, plain = at.engine(Net, stubborn_of, **options), at.plain(Net)
    optimizer: Any = e.optimizer
    for number in range(3):
        wanted = plain.run(back, number)
        e.scale(e(at.draw(number)(2, 3)).square().sum()).backward()
        for _ in range(every - 1):
            assert e.step() is False
        if number == 1:
            kept, records = e.full_parameters(), e.state.progress
            optimizer.raises = True
            with pytest.raises(ValueError, match="raised in step"):
                e.step()
            optimizer.raises = False
            assert e.state.progress == records
            same(e.full_parameters(), kept, 0.0, "kept")
        same(e.full_gradients(), wanted, label="gradients")
        assert e.step() is True
        same(e.full_parameters(), plain.step(wanted), label="updated")


@at_places(1, 2)
@pytest.mark.parametrize("told_by", ["engine.backward", "zero_grad", "nobody"])
def test_a_backward_of_a_submodule_right_after_one_that_raised_counts(
    at: Place, told_by: str
) -> None:
    def submodule(e: Any, draw: Draw) -> None:
        e.module.a(draw(2, 3)).square().sum().backward()

    e, plain = at.both(Fragile, bucket_bytes=8)
    for number in range(2):
        with faulty(e, "middle"):
            loss = e(at.draw(50)(2, 3)).sum()
            with pytest.raises(ValueError, match="raised in backward"):
                e.backward(loss) if told_by == "engine.backward" else loss.backward()
        if told_by == "zero_grad":
            e.zero_grad()
        update(e, plain, at.rank, number, submodule)


@at_places(1, 2)
def test_a_backward_that_raised_leaves_the_gradients_of_those_before_it_in_p_grad(
    at: Place,
) -> None:
    e = at.engine(Net)
    back(e, at.draw(0))
    before = e.global_grad_norm
    out = e(at.draw(1)(2, 3))
    out.register_hook(raise_it)
    with pytest.raises((ValueError, FzeroError)):
        out.sum().backward()
    assert before is not None
    assert torch.allclose(nn.utils.clip_grad_norm_(e.module.parameters(), 1.0), before)
    e.module.zero_grad()
    with pytest.raises(PhaseError, match="there are no gradients"):
        e.full_gradients()


@at_places(1, 2)
def test_a_backward_of_a_loss_from_before_an_update_raises(at: Place) -> None:
    e = at.engine(Net)
    stale = e(at.draw(0)(2, 3)).square().sum()
    back(e, at.draw(1))
    e.step()
    with pytest.raises(RuntimeError):
        stale.backward()
    e.close()


@at_places(2, 3)
def test_an_engine_that_raised_and_is_left_alone_does_not_disturb_another(at: Place) -> None:
    """Also where ranks make another number of backwards with that other one."""
    left = engine_of(
        lambda: nn.Sequential(linear(3, 3), RaisesBack(), linear(3, 3)), stage=at.stage
    )
    with pytest.raises(ValueError, match="raised in backward"):
        back(left, at.draw(0))
    engine, plain = at.engine(Net), seeded(Net)
    for number in range(1 + at.rank):
        back(engine, at.draw(number))
    for other in range(at.ranks):
        for number in range(1 + other):
            (plain(Draw(other, number)(2, 3)).square().sum() / at.ranks).backward()
    found = engine.full_gradients()
    for path, p in learning(plain).items():
        assert p.grad is not None and torch.allclose(found[path], p.grad), path
    engine.step()
    left.close()
    engine.close()
