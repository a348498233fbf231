"""Calls out of turn and wrong arguments: the right error, its cause, the fix; nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import Engine
from fzero.errors import AxisError, FzeroError, LayoutError, PhaseError
from tests.adapter.nets import F64, Net
from tests.adapter.plain import STAGES, Draw, Reference, engine_of, same
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


def back(e: Any, draw: Draw) -> None:
    e(draw(2, 3)).square().sum().backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_calls_out_of_turn_raise_with_the_reason_and_leave_the_engine_good(world_size: int) -> None:
    run_ranks(out_of_turn, world_size)


def out_of_turn(rank: int, world_size: int) -> None:
    for stage in STAGES:
        e, plain = engine_of(Net, stage), Reference(Net, world_size)
        for call, text in (
            (e.step, "step(): there are no gradients; 0 updates so far"),
            (e.full_gradients, "full_gradients(): there are no gradients"),
            (e.optimizer.step, "optimizer.step() of an optimizer that an engine runs"),
        ):
            refused(call, PhaseError, text)
        wanted = plain.run(back, 0)
        back(e, Draw(rank, 0))
        refused(e.optimizer.step, PhaseError, "optimizer.step() of an optimizer")
        e.step()
        same(f"stage {stage}", e.full_parameters(), plain.step(wanted), 1e-11)
        refused(e.step, PhaseError, "step(): there are no gradients; 1 updates so far")
        back(e, Draw(rank, 1))
        e.zero_grad()
        refused(e.step, PhaseError, "no gradients")
        e.close()
        e.close()
        refused(e.step, PhaseError, "a closed engine was used")
        refused(lambda e=e: e.coalesce().__enter__(), PhaseError, "a closed engine was used")
        refused(lambda e=e: e.no_sync().__enter__(), PhaseError, "a closed engine was used")
        refused(Engine(Net(), stage=stage).step, PhaseError, "step() of an engine without optim")


def refused(call: Callable[[], Any], kind: type[FzeroError], text: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value), str(caught.value)
    assert "\nUsual cause: " in str(caught.value) and "\nFix: " in str(caught.value)


def used_adam(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 3, dtype=F64)).sum().backward()
    optimizer.step()
    return optimizer


Wrong = tuple[Callable[[Any], Any], type[FzeroError], str]


def _any(**options: Any) -> Any:
    """Options of kinds that a type checker would not let pass."""
    return options


ANYTHING: Any = {"function": lambda x: x, "name": "adam", "list": lambda params: params}
WRONG: list[Wrong] = [
    (lambda m: Engine(m, stage=4), LayoutError, "4"),
    (lambda m: Engine(ANYTHING["function"], stage=0), LayoutError, "Engine got a function"),
    (lambda m: Engine(m, ANYTHING["name"], stage=0), LayoutError, "'adam'"),
    (lambda m: Engine(m, ANYTHING["list"], stage=0), LayoutError, "gives a list"),
    (lambda m: Engine(m, used_adam(m), stage=0), PhaseError, "has state for 6 parameters"),
    (lambda m: Engine(m, torch.optim.SGD(Net().parameters()), stage=2), LayoutError, "not the mod"),
    (lambda m: Engine(m, torch.optim.LBFGS(m.parameters()), stage=1), LayoutError, "LBFGS cannot"),
    (lambda m: Engine(m, stage=2, bucket_bytes=0), LayoutError, "bucket_bytes=0"),
    (lambda m: Engine(m, stage=2, **_any(overlap=1)), LayoutError, "overlap=1"),
    (lambda m: Engine(m, stage=2, max_norm=-1.0), LayoutError, "max_norm=-1.0"),
    (lambda m: Engine(m, stage=2, loss_scale=float("inf")), LayoutError, "loss_scale=inf"),
    (lambda m: Engine(m, stage=2, **_any(accumulate_dtype="fp32")), LayoutError, "dtype='fp32'"),
    (lambda m: Engine(m, stage=2, gradient_accumulation_steps=0), LayoutError, "steps=0"),
    (lambda m: Engine(m, stage=3, **_any(leaf_modules=["a"])), LayoutError, "leaf_modules=['a']"),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_arguments_raise_before_the_module_is_touched(world_size: int) -> None:
    run_ranks(wrong_arguments, world_size)


def wrong_arguments(rank: int, world_size: int) -> None:
    for make, kind, text in WRONG:
        module = Net()
        refused(lambda make=make, module=module: make(module), kind, text)
        values = [p.detach().clone() for p in module.parameters()]
        assert all(type(p) is nn.Parameter for p in module.parameters())
        assert not module._forward_pre_hooks and not module._forward_hooks
        Engine(module, torch.optim.SGD, stage=3).close()
        if rank == 0:
            assert all(map(torch.equal, values, module.parameters()))


def test_an_option_that_is_wrong_on_one_rank_is_told_to_the_others() -> None:
    run_ranks(wrong_on_one_rank, 2, timeout_s=20)


def wrong_on_one_rank(rank: int, world_size: int) -> None:
    for name, bad, good in (("stage", 4, 2), ("bucket_bytes", 0, 8), ("max_norm", -1.0, 1.0)):
        module = Net()
        options: Any = {"stage": 2} | {name: bad if rank else good}
        with pytest.raises(LayoutError if rank else AxisError, match=f"{name}={bad}"):
            Engine(module, torch.optim.SGD, **options)
        Engine(module, torch.optim.SGD, stage=2).close()
