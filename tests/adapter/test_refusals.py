"""Calls out of turn and wrong arguments: the right error, its cause, the fix; nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fzero
from fzero.adapter import Engine
from fzero.errors import AxisError, FzeroError, LayoutError, PhaseError
from tests.adapter.nets import Net, linear
from tests.adapter.on_ranks import STAGES, Place, at_places, each_stage, on_ranks, virtually
from tests.adapter.plain import Draw, Reference, back, engine_of, same, sgd_of, update


def refused(call: Callable[[], Any], kind: type[FzeroError], text: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value), str(caught.value)
    assert "\nUsual cause: " in str(caught.value) and "\nFix: " in str(caught.value)


@at_places(1, 2)
def test_calls_out_of_turn_raise_with_the_reason_and_leave_the_engine_good(at: Place) -> None:
    e, plain = at.both(Net)
    optimizer: Any = e.optimizer
    plain_step: Any = type(optimizer).step
    refused(e.full_gradients, PhaseError, "full_gradients(): there are no gradients")
    refused(partial(plain_step, optimizer), PhaseError, "step(optimizer) of an optimizer that an e")
    given, loads = sgd_of(Net()).state_dict(), optimizer.load_state_dict
    refused(optimizer.state_dict, PhaseError, "optimizer.state_dict() of an optimizer that an e")
    refused(lambda: loads(given), PhaseError, "optimizer.load_state_dict() of an optimizer that")
    update(e, plain, at.rank, 0)
    refused(e.full_gradients, PhaseError, "there are no gradients; 1 updates so far")
    back(e, at.draw(1))
    refused(partial(plain_step, optimizer), PhaseError, "step(optimizer) of an optimizer that an e")
    e.zero_grad()
    refused(e.full_gradients, PhaseError, "no gradients")
    assert "Net, stage=" in repr(e) and "1 updates" in repr(e)
    e.close()
    e.close()
    assert repr(e) == "Engine(closed)"
    for call in (e.step, e.coalesce().__enter__, e.no_sync().__enter__):
        refused(call, PhaseError, "a closed engine was used")
    refused(Engine(Net(), stage=at.stage).step, PhaseError, "step() of an engine without optim")


@on_ranks(1, 2)
@pytest.mark.parametrize("options", [{}, {"loss_scale": 2.0}, {"check_finite": True}], ids=str)
def test_what_is_no_loss_is_refused_and_the_gradients_before_it_stay(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    def program(e: Any, draw: Draw) -> None:
        e.backward(e(draw(2, 3)).square().sum())

    e = engine_of(Net, 2, **options)
    program(e, Draw(rank, 0))
    for bad in (None, 3.0, {"loss": torch.ones(())}, [None]):
        refused(lambda bad=bad: e.backward(bad), LayoutError, "engine.backward got ")
        same(e.full_gradients(), Reference(Net, world_size).run(program, 0))
    assert e.step()


@at_places(1, 2)
def test_a_module_or_a_part_of_it_has_one_open_engine_at_most(at: Place) -> None:
    engine = at.engine(Net)
    whole = nn.Sequential(engine.module, linear(3, 3))
    for second in STAGES:
        for module in (engine.module, whole):
            with pytest.raises(PhaseError, match="belongs to an engine that is open"):
                Engine(module, torch.optim.SGD, stage=second)
    update(engine, at.plain(Net), at.rank, 0)
    engine.close()
    Engine(whole, torch.optim.SGD, stage=at.stage).close()


@each_stage
def test_one_module_for_the_engines_of_all_virtual_ranks_is_refused(stage: int) -> None:
    """Each rank comes to its engine before any other has one."""
    shared = linear(3, 3)

    def make(copied: bool) -> int:
        Engine(copy.deepcopy(shared) if copied else shared, torch.optim.SGD, stage=stage).close()
        return 1

    on_two = fzero.simulate(make, world_size=2)
    with pytest.raises(PhaseError, match=r"of 1 modules in all[\s\S]*Fix: make the module"):
        on_two(False)
    assert on_two(True).tolist() == [1, 1]
    Engine(shared, torch.optim.SGD, stage=stage).close()  # nothing had begun


def sgd_of_another(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(Net().parameters())


def lbfgs(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(module.parameters())


# What is made of the module as its optimizer, the options, the error, and what it says.
WRONG: list[tuple[Callable[[nn.Module], Any], dict[str, Any], type[FzeroError], str]] = [
    (lambda m: "adam", {"stage": 0}, LayoutError, "'adam'"),
    (lambda m: lambda params: params, {"stage": 0}, LayoutError, "gives a Named"),
    (sgd_of_another, {"stage": 2}, LayoutError, "not the mod"),
    (lbfgs, {"stage": 1}, LayoutError, "LBFGS cannot"),
    (lambda m: None, {"stage": 4}, LayoutError, "4"),
    (lambda m: None, {"stage": 2, "bucket_bytes": 0}, LayoutError, "bucket_bytes=0"),
    (lambda m: None, {"stage": 2, "overlap": 1}, LayoutError, "overlap=1"),
    (lambda m: None, {"stage": 2, "max_norm": -1.0}, LayoutError, "max_norm=-1.0"),
    (lambda m: None, {"stage": 2, "loss_scale": float("inf")}, LayoutError, "loss_scale=inf"),
    (lambda m: None, {"stage": 2, "accumulate_dtype": "fp32"}, LayoutError, "dtype='fp32'"),
    (lambda m: None, {"stage": 2, "micro_batches": 0}, LayoutError, "micro_batches=0"),
    (lambda m: None, {"stage": 3, "leaf_modules": ["a"]}, LayoutError, "leaf_modules=['a']"),
]


@on_ranks(1, 2)
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_arguments_raise_before_the_module_is_touched(case: int) -> None:
    optimizer_of, options, kind, text = WRONG[case]
    module = Net()
    optimizer = optimizer_of(module)
    values = [p.detach().clone() for p in module.parameters()]
    refused(lambda: Engine(module, optimizer, **options), kind, text)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert all(map(torch.equal, values, module.parameters()))
    assert not module._forward_pre_hooks and not module._forward_hooks
    Engine(module, torch.optim.SGD, stage=3).close()


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_modules_that_no_engine_can_have_are_refused(stage: int) -> None:
    function: Any = torch.relu
    for module, seen in (
        (nn.Sequential(nn.LazyLinear(2)), "0.weight is not initialized"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=True)), "0 gives sparse gradients"),
        (function, "Engine got a builtin"),
    ):
        with pytest.raises(LayoutError, match=seen):
            Engine(module, torch.optim.SGD, stage=stage)
    with pytest.raises(PhaseError, match="inference_mode"), torch.inference_mode():
        Engine(Net(), None, stage=stage)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_that_another_library_has_wrapped_or_sharded_is_refused(stage: int) -> None:
    wrapped, sharded = DistributedDataParallel(Net()), Net()
    fully_shard(sharded)
    message = r"a.(weight|bias) is a DTensor[\s\S]*Fix: leave that call out"
    for module, seen in ((wrapped, r"DistributedDataParallel[\s\S]*\.module"), (sharded, message)):
        with pytest.raises(LayoutError, match=seen):
            Engine(module, torch.optim.SGD, stage=stage)
    with pytest.raises(LayoutError, match=r"a \(Linear\) has DTensors[\s\S]*leave that call out"):
        fzero.functionalize(sharded)
    with pytest.raises(LayoutError, match=message):
        fzero.init(dict(sharded.named_parameters()), fzero.optim.sgd(0.1), stage=stage)


@on_ranks(2, timeout_s=20)
@pytest.mark.parametrize(
    ("name", "bad", "good"), [("stage", 4, 2), ("bucket_bytes", 0, 8), ("max_norm", -1.0, 1.0)]
)
def test_an_option_that_is_wrong_on_one_rank_is_told_to_the_others(
    rank: int, name: str, bad: Any, good: Any
) -> None:
    module = Net()
    options: Any = {"stage": 2} | {name: bad if rank else good}
    with pytest.raises(LayoutError if rank else AxisError, match=f"{name}={bad}"):
        Engine(module, torch.optim.SGD, **options)
    Engine(module, torch.optim.SGD, stage=2).close()


def with_a_part(module: Any, name: str, part: Any) -> None:
    setattr(module, name, part)


ADDED: dict[str, Callable[[Any], None]] = {
    "a replaced part": lambda m: with_a_part(m, "1", linear(3, 3)),
    "a replaced part further down": lambda m: with_a_part(m[0], "0", linear(3, 3)),
    "a new part": lambda m: m.append(linear(3, 3)),
    "a new parameter": lambda m: m.register_parameter("more", nn.Parameter(torch.ones(3))),
    "a wrapped part": lambda m: with_a_part(m, "1", nn.Sequential(m[1], linear(3, 3))),
}
TAKEN: dict[str, Callable[[Any], None]] = {
    "a part without parameters": lambda m: with_a_part(m, "1", nn.Identity()),
    "a frozen part": lambda m: m.append(linear(3, 3).requires_grad_(False)),
    "the same in another": lambda m: with_a_part(m, "1", nn.Sequential(m[1], nn.Identity())),
}


def nested() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(linear(3, 3)), linear(3, 3))


@virtually(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_part_that_was_replaced_or_added_and_learns_is_refused(stage: int) -> None:
    for change in ADDED.values():
        e = engine_of(nested, stage)
        change(e.module)
        e(Draw(fzero.world().rank, 0)(2, 3)).sum().backward()
        for call in (e.step, e.full_state_dict, e.state_dict, e.step):
            refused(call, LayoutError, "was not there when the engine was made.")
        e.close()


@virtually(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_part_that_was_replaced_by_what_does_not_learn_is_taken(stage: int) -> None:
    for change in TAKEN.values():
        e = engine_of(nested, stage)
        change(e.module)
        for number in range(2):
            e(Draw(fzero.world().rank, number)(2, 3)).sum().backward()
            assert e.step()
        with_a_part(e.module, "1", linear(3, 3))
        e(Draw(fzero.world().rank, 2)(2, 3)).sum().backward()
        refused(e.step, LayoutError, "1.weight was not there when the engine was made.")
        e.close()
