"""After an error on all ranks the engine is as if that call had not been."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fzero.adapter import Engine
from fzero.errors import PhaseError
from tests.adapter.nets import Fragile, Net, TiledLoss, faulty, linear
from tests.adapter.plain import LR, STAGES, Draw, Reference, engine_of, order_may_change, same
from tests.failing import fails_in_backward
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")
Fault = Callable[[Engine, Draw], None]
FAULTS: dict[str, Fault] = {}


def fault(do: Fault) -> Fault:
    FAULTS[do.__name__] = do
    return do


def back(e: Any, draw: Draw) -> None:
    e(draw(2, 3)).square().sum().backward()


@fault
def in_forward(e: Engine, draw: Draw) -> None:
    with faulty(e, "forward"):
        e(draw(2, 3))


@fault
def in_the_forward_of_the_module(e: Engine, draw: Draw) -> None:
    with faulty(e, "forward"):
        e.module(draw(2, 3))


@fault
def in_forward_without_gradient(e: Engine, draw: Draw) -> None:
    with faulty(e, "forward"), torch.no_grad():
        e(draw(2, 3))


@fault
def in_the_middle_of_the_backward(e: Engine, draw: Draw) -> None:
    with faulty(e, "middle"):
        back(e, draw)


@fault
def in_the_middle_of_engine_backward(e: Engine, draw: Draw) -> None:
    with faulty(e, "middle"):
        e.backward(e(draw(2, 3)).sum())


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
def in_the_recompute_of_a_checkpoint(e: Engine, draw: Draw) -> None:
    loss = checkpoint(e, draw(2, 3).requires_grad_(), use_reentrant=True).sum()
    with faulty(e, "forward"):
        loss.backward()


@fault
def in_the_backward_of_a_checkpoint(e: Engine, draw: Draw) -> None:
    with faulty(e, "middle"):
        checkpoint(e, draw(2, 3).requires_grad_(), use_reentrant=True).sum().backward()


@fault
def in_the_recompute_without_reentry(e: Engine, draw: Draw) -> None:
    loss = checkpoint(e, draw(2, 3).requires_grad_(), use_reentrant=False).sum()
    with faulty(e, "forward"):
        loss.backward()


@fault
def in_a_tiled_backward(e: Engine, draw: Draw) -> None:
    out = e(draw(5, 3))
    TiledLoss.apply(out, nn.Sequential(linear(3, 3), RaisesBack()))


@fault
def after_a_tiled_loss(e: Engine, draw: Draw) -> None:
    with faulty(e, "middle"):
        TiledLoss.apply(e(draw(5, 3)), e.module.c).backward()


@fault
def in_a_gradient_of_the_input(e: Engine, draw: Draw) -> None:
    x = draw(2, 3).requires_grad_()
    with faulty(e, "middle"):
        torch.autograd.grad(e(x).sum(), x)


@fault
def in_coalesce(e: Engine, draw: Draw) -> None:
    with e.coalesce():
        back(e, draw)
        with faulty(e, "middle"):
            back(e, draw)


@fault
def in_no_sync_after_a_backward(e: Engine, draw: Draw) -> None:
    with e.no_sync():
        back(e, draw)
        raise ValueError("raised in the window")


@fault
def step_inside_a_backward(e: Engine, draw: Draw) -> None:
    out = e(draw(2, 3))
    out.register_hook(lambda g: raise_it(g) if e.step() else None)
    out.sum().backward()


@fault
def a_window_inside_a_backward(e: Engine, draw: Draw) -> None:
    out = e(draw(2, 3))

    def open_it(gradient: Tensor) -> None:
        with e.coalesce():
            pass

    out.register_hook(open_it)
    out.sum().backward()


def raise_it(gradient: Tensor) -> None:
    raise ValueError("raised in a hook")


class RaisesBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return fails_in_backward(x, ValueError("raised in backward"))


def tiles(e: Any, draw: Draw) -> None:
    TiledLoss.apply(e(draw(5, 3)), e.module.c)


# What these bring before they raise is theirs to keep: whole backwards.
BROUGHT = {
    "in_a_hook_of_the_input_after_every_gradient": back,
    "in_a_backward_of_a_kept_graph": back,
    "after_a_tiled_loss": tiles,
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_after_an_error_gradients_and_updates_are_those_of_a_run_without_it(
    name: str, world_size: int
) -> None:
    run_ranks(one_fault, world_size, name, timeout_s=30)


def one_fault(rank: int, world_size: int, name: str) -> None:
    small = {"bucket_bytes": 8, "contiguous_gradients": False}
    cases = (("nothing", {}), ("reduced", small), ("waiting", {}), ("waiting", small))
    for stage, (before, options) in itertools.product(STAGES, cases):

        def wanted_program(e: Any, draw: Draw, before: str = before) -> None:
            if before == "reduced":
                back(e, draw)
            elif before == "waiting":
                with e.no_sync():
                    back(e, draw)
            if name in BROUGHT:
                BROUGHT[name](e, Draw(draw.rank, 50))

        label = f"{name}, stage {stage}, {before}, {options}"
        e, plain = engine_of(Fragile, stage, **options), Reference(Fragile, world_size)
        for number in range(2):
            draw = Draw(rank, number)
            if before == "reduced":
                back(e, draw)
            elif before == "waiting":
                with e.no_sync():
                    back(e, draw)
            with pytest.raises((ValueError, RuntimeError)) as caught, order_may_change():
                FAULTS[name](e, Draw(rank, 50))
            assert_expected(caught.value)

            def both(e: Any, draw: Draw, program: Any = wanted_program) -> None:
                program(e, draw)
                back(e, draw)

            wanted = plain.run(both, number)
            with order_may_change():
                back(e, draw)
            same(f"{label}: gradients", e.full_gradients(), wanted, 1e-11)
            assert e.hooks.backward_active_depth == 0, label
            e.step()
            same(f"{label}: updated", e.full_parameters(), plain.step(wanted), 1e-11)


def assert_expected(error: BaseException) -> None:
    text = str(error)
    known = ("raised in", "second time", "step() inside a backward", "coalesce() inside a backward")
    assert any(part in text for part in known), repr(error)


class Stubborn(torch.optim.SGD):
    """Raises when it is told to."""

    raises = False

    def step(self, closure: Any = None) -> None:
        if self.raises:
            raise ValueError("raised in step")
        super().step(closure)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_that_raises_leaves_gradients_and_parameters_as_they_were(
    world_size: int,
) -> None:
    run_ranks(stubborn, world_size)


def stubborn(rank: int, world_size: int) -> None:
    for stage, every in itertools.product(STAGES, (1, 2)):
        plain = Reference(Net, world_size)
        torch.manual_seed(7)
        module = Net()
        made = Stubborn(module.parameters(), lr=LR)
        options = {"gradient_accumulation_steps": every, "loss_scale": 4.0, "max_norm": 1e9}
        e = Engine(module, made, stage=stage, **options)
        for number in range(3):
            label = f"stage {stage}, step {number}, {every=}"
            wanted = plain.run(back, number)
            e.scale(e(Draw(rank, number)(2, 3)).square().sum()).backward()
            for _ in range(every - 1):
                assert e.step() is False
            if number == 1:
                kept, records = e.full_parameters(), e.state.progress
                made.raises = True
                with pytest.raises(ValueError, match="raised in step"):
                    e.step()
                made.raises = False
                assert e.state.progress == records, label
                same(f"{label}: kept", e.full_parameters(), kept, 0.0)
            same(f"{label}: gradients", e.full_gradients(), wanted, 1e-11)
            assert e.step() is True
            same(label, e.full_parameters(), plain.step(wanted), 1e-11)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_of_a_submodule_right_after_one_that_raised_is_not_lost_silently(
    world_size: int,
) -> None:
    run_ranks(submodule_after_a_fault, world_size)


def submodule_after_a_fault(rank: int, world_size: int) -> None:
    def submodule(e: Any, draw: Draw) -> None:
        e.module.a(draw(2, 3)).square().sum().backward()

    for stage, told in itertools.product(STAGES, ("engine.backward", "zero_grad", "")):
        e, plain = engine_of(Fragile, stage, bucket_bytes=8), Reference(Fragile, world_size)
        for number in range(2):
            label = f"stage {stage}, {told}, {number}"
            wanted = plain.run(submodule, number)
            seen = told == "engine.backward"
            fault = in_the_middle_of_engine_backward if seen else in_the_middle_of_the_backward
            with pytest.raises(ValueError, match="raised in backward"), order_may_change():
                fault(e, Draw(rank, 50))
            if told == "zero_grad":
                e.zero_grad()
            submodule(e, Draw(rank, number))
            if not told:
                with pytest.raises(PhaseError, match="a backward raised"):
                    e.step()
                submodule(e, Draw(rank, number))
            same(label, e.full_gradients(), wanted, 1e-11)
            e.step()
            same(label, e.full_parameters(), plain.step(wanted), 1e-11)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_of_a_loss_from_before_an_update_raises(world_size: int) -> None:
    run_ranks(loss_of_before, world_size)


def loss_of_before(rank: int, world_size: int) -> None:
    for stage in STAGES:
        e = engine_of(Net, stage)
        stale = e(Draw(rank, 0)(2, 3)).square().sum()
        back(e, Draw(rank, 1))
        e.step()
        with pytest.raises(RuntimeError):
            stale.backward()
