"""Any elementwise torch.optim optimizer, on this rank's flat shards; clipping."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine
from fzero.errors import LayoutError
from tests.adapter.nets import Odd, Shapes, linear
from tests.adapter.on_ranks import STAGES, Place, at_places, on_ranks
from tests.adapter.plain import (
    Draw,
    Reference,
    back,
    engine_of,
    learning,
    same,
    seeded,
    update,
)
from tests.optim.torch_cases import Clipped

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "decay": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.05}),
    "radam": (torch.optim.RAdam, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.25}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.05, "momentum": 0.5, "centered": True}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "adamax": (torch.optim.Adamax, {"lr": 0.05}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05, "t0": 1.0}),
    "rprop": (torch.optim.Rprop, {"lr": 0.05}),
}
STEPS = 4


@on_ranks(1, 2, 3, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize(
    ("name", "make", "columns"),
    [
        *((name, Odd, 3) for name in OPTIMIZERS),
        ("adagrad", Shapes, 7),  # its state, made early, is first that of a scalar and of nothing
    ],
)
def test_every_elementwise_optimizer_makes_the_updates_of_the_unsharded_run(
    rank: int, world_size: int, name: str, make: Any, columns: int
) -> None:
    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        cls, options = OPTIMIZERS[name]
        return cls(learning(module).values(), **options)

    def program(e: Any, draw: Draw) -> None:
        e(draw(2, columns)).square().sum().backward()

    for stage in {1: (3,), 2: (0, 2), 3: (3,), 4: STAGES}[world_size]:
        engine = engine_of(make, stage, optimizer_of, bucket_bytes=150)
        reference = Reference(make, world_size, optimizer_of)
        for number in range(STEPS):
            update(engine, reference, rank, number, program, 1e-8)


GROUPS = (
    ["c.weight", "a.weight"],
    ["b.bias", "fixed", "unused.bias"],
    ["unused.weight", "a.bias", "b.weight"],
)


def grouped(module: nn.Module) -> torch.optim.Optimizer:
    """Three groups, across modules and out of the module's order; a frozen parameter in one."""
    groups: list[dict[str, Any]] = [
        {"params": [module.get_parameter(path) for path in paths]} for paths in GROUPS
    ]
    groups[0] |= {"lr": 0.1, "weight_decay": 0.0}
    groups[1] |= {"weight_decay": 0.5}
    groups[2] |= {"lr": 0.01}
    return torch.optim.AdamW(groups, lr=0.03)


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    shapes = [lambda n: 0.5**n, lambda n: 1.0 / (1 + n), lambda n: 1.0 + n]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, shapes)


@at_places(1, 2, 3)
def test_param_groups_keep_their_options_and_order_and_a_scheduler_made_before_drives_them(
    at: Place,
) -> None:
    reference, module = at.plain(Odd, grouped), seeded(Odd)
    optimizer, plain_optimizer = grouped(module), reference.optimizer
    assert plain_optimizer is not None
    plans = scheduled(optimizer), scheduled(plain_optimizer)
    engine = Engine(module, optimizer, stage=at.stage)
    assert engine.optimizer is optimizer and len(optimizer.param_groups) == 3
    for number in range(STEPS):
        update(engine, reference, at.rank, number, tol=1e-9)
        for plan in plans:
            plan.step()
    rates = [[group["lr"] for group in o.param_groups] for o in (optimizer, plain_optimizer)]
    assert rates[0] == rates[1]
    engine.close()
    for group, paths in zip(optimizer.param_groups, GROUPS, strict=True):
        wanted = [module.get_parameter(path) for path in paths]
        assert all(p is q for p, q in zip(group["params"], wanted, strict=True))


@on_ranks(1, 2)
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (True, None)),
        ({"foreach": True}, (None, True)),
        ({"foreach": False}, (None, False)),
        ({"fused": False}, (False, None)),
    ],
)
def test_kernels_are_fused_unless_the_optimizer_says_otherwise(
    rank: int, cls: Any, given: dict[str, bool], wanted: tuple[Any, Any]
) -> None:
    found: list[Any] = []

    def step(self: Any, closure: Any = None) -> Any:
        found.extend((group["fused"], group["foreach"]) for group in self.param_groups)
        return cls.step(self, closure)

    noted: Any = type(cls.__name__, (cls,), {"step": step})
    module, factory = seeded(Odd), functools.partial(noted, **given)
    for optimizer in (factory, factory(learning(module).values())):
        engine = Engine(module, optimizer, stage=2)
        back(engine, Draw(rank, 0))
        found.clear()
        engine.step()
        assert found == [wanted]
        engine.close()


def matrices() -> nn.Module:
    return nn.Sequential(linear(3, 4, bias=False), nn.Tanh(), linear(4, 3, bias=False))


@at_places(1, 2)
@pytest.mark.parametrize("style", ["class", "instance"])
def test_optimizers_that_need_all_parameters_are_refused_by_name_before_the_module_is_touched(
    at: Place, style: str
) -> None:
    refused: list[Any] = [torch.optim.LBFGS, torch.optim.SparseAdam]
    if at.stage and at.ranks > 1:
        refused += [Clipped]
    for cls in refused:
        module = matrices()
        begin = {path: (p.data_ptr(), p.detach().clone()) for path, p in module.named_parameters()}
        of_module = list(module.parameters())
        optimizer = cls if style == "class" else cls(of_module, lr=0.1)
        with pytest.raises(LayoutError, match=cls.__name__):
            Engine(module, optimizer, stage=at.stage)
        assert not module._forward_hooks and not module._forward_pre_hooks
        for path, p in module.named_parameters():
            assert type(p) is nn.Parameter and p.data_ptr() == begin[path][0]
            assert torch.equal(p, begin[path][1])  # rank 0's values were not given to anybody


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
def test_optimizers_of_whole_matrices_run_on_their_owners(
    rank: int, world_size: int, cls: Any
) -> None:
    reference = Reference(matrices, world_size, lambda m: cls(list(m.parameters())))
    engine = Engine(seeded(matrices), cls, stage=3)
    for number in range(STEPS):
        update(engine, reference, rank, number, tol=1e-8)
    close_as(reference, engine)


def close_as(reference: Reference, engine: Engine) -> None:
    """The optimizer of a closed engine has the state that the reference's has, in its shapes."""
    wanted = {path: reference.optimizer.state[p] for path, p in named(reference.module)}
    given = engine.full_optimizer_states()
    for path, slots in given.items():
        for name, value in slots.items():
            assert value.shape == torch.as_tensor(wanted[path][name]).shape, (path, name)
            assert torch.equal(engine.full_optimizer_state(path, name), value)
            engine.set_full_optimizer_state(path, name, value)
            with pytest.raises(LayoutError, match="97"):
                engine.set_full_optimizer_state(path, name, torch.ones(97))
    module, optimizer = engine.module, engine.optimizer
    engine.close()
    assert optimizer is not None
    for path, p in named(module):
        assert {*optimizer.state[p]} == {*wanted[path]} == {*given[path]}
        for name, value in optimizer.state[p].items():
            torch.testing.assert_close(value, wanted[path][name], rtol=1e-6, atol=1e-8)


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters, by path."""
    return list(module.named_parameters())


class TiedAndFrozen(Odd):
    """d is tied to c, and a is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.d = linear(3, 3, bias=False)
        self.d.weight = self.c.weight
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(super().forward(x)))


@at_places(1, 2, 3)
@pytest.mark.parametrize("max_norm", [0.25, 1e6])
def test_clipping_and_the_global_norm_are_those_of_torch(at: Place, max_norm: float) -> None:
    engine = at.engine(TiedAndFrozen, max_norm=max_norm, bucket_bytes=100)
    by_hand = at.engine(TiedAndFrozen)
    reference = at.plain(TiedAndFrozen)
    assert engine.global_grad_norm is None
    for number in range(3):
        gradients = reference.run(back, number)
        for e in (engine, by_hand):
            back(e, at.draw(number))
        same(engine.full_gradients(), gradients, label="before clipping")
        norm = reference.clip(gradients, max_norm)
        asked, before = engine.global_grad_norm, by_hand.clip_grad_norm_(max_norm)
        same(by_hand.full_gradients(), gradients, label="after clipping")
        for e in (engine, by_hand):
            e.step()
        last, wanted = engine.global_grad_norm, reference.step(gradients)
        for found in (asked, before, last):
            assert found is not None and torch.allclose(found, norm, rtol=1e-12)
        same(engine.full_parameters(), wanted)
        same(by_hand.full_parameters(), wanted)
