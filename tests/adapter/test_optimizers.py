"""Any elementwise torch.optim optimizer, on this rank's flat rows."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine
from fzero.errors import LayoutError, PhaseError
from tests.adapter.nets import linear
from tests.adapter.plain import STAGES
from tests.adapter.unsharded import Odd, Unsharded, loss_of, same_update, seeded
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "decay": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.05}),
    "radam": (torch.optim.RAdam, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.05, "momentum": 0.5, "centered": True}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "adamax": (torch.optim.Adamax, {"lr": 0.05}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05, "t0": 1.0}),
    "rprop": (torch.optim.Rprop, {"lr": 0.05}),
}
STYLES = ("class", "factory", "instance")
STEPS = 4


def learning(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def made(style: str, name: str, module: nn.Module) -> Any:
    """The optimizer argument of an engine, given in that way; a class has its defaults."""
    cls, options = OPTIMIZERS[name]
    if style == "class":
        return cls
    if style == "factory":
        return functools.partial(cls, **options)
    return cls(learning(module), **options)


def unsharded(style: str, name: str, world_size: int) -> Unsharded:
    cls, options = OPTIMIZERS[name]
    chosen = {} if style == "class" else options
    return Unsharded(Odd, lambda m: cls(learning(m), **chosen), world_size)


def train(engine: Engine, rank: int, steps: range = range(STEPS)) -> dict[str, Tensor]:
    for number in steps:
        loss_of(engine, rank, number).backward()
        assert engine.step() is True
    return engine.full_parameters()


def optimizers_body(
    rank: int, world_size: int, names: list[str], styles: tuple[str, ...] = ()
) -> None:
    for at, name in enumerate(names):
        for style in styles or (STYLES[2 - at % 2],):
            reference = unsharded(style, name, world_size)
            for number in range(STEPS):
                reference.step(number)
            for stage in STAGES if world_size == 2 else (0, 3):
                module = seeded(Odd)
                engine = Engine(module, made(style, name, module), stage=stage, bucket_bytes=150)
                label = f"{name} as {style}, stage {stage}, W={world_size}"
                found = train(engine, rank)
                same_update(label, found, reference.parameters(), reference.begin)
                engine.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("half", [0, 1])
def test_every_elementwise_optimizer_makes_the_updates_of_the_unsharded_run(
    world_size: int, half: int
) -> None:
    run_ranks(optimizers_body, world_size, list(OPTIMIZERS)[half::2])


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_is_given_as_a_class_as_a_factory_or_as_an_instance(world_size: int) -> None:
    run_ranks(optimizers_body, world_size, ["adam"], STYLES)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_instance_of_adagrad_has_state_before_its_first_step_and_is_new(
    world_size: int,
) -> None:
    run_ranks(optimizers_body, world_size, ["adagrad"], ("instance",))


def grouped(module: nn.Module) -> torch.optim.Optimizer:
    """Three groups, across modules and out of the module's order; a frozen parameter in one."""
    of = dict(module.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [of["c.weight"], of["a.weight"]], "lr": 0.1, "weight_decay": 0.0},
            {"params": [of["b.bias"], of["fixed"], of["unused.bias"]], "weight_decay": 0.5},
            {"params": [of["unused.weight"], of["a.bias"], of["b.weight"]], "lr": 0.01},
        ],
        lr=0.03,
    )


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    shapes = [lambda n: 0.5**n, lambda n: 1.0 / (1 + n), lambda n: 1.0 + n]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, shapes)


def groups_body(rank: int, world_size: int) -> None:
    reference = Unsharded(Odd, grouped, world_size)
    plan = scheduled(reference.optimizer)
    for number in range(STEPS):
        reference.step(number)
        plan.step()
    for stage in STAGES:
        module = seeded(Odd)
        optimizer = grouped(module)
        plan = scheduled(optimizer)
        engine = Engine(module, optimizer, stage=stage)
        assert engine.optimizer is optimizer and len(optimizer.param_groups) == 3
        for number in range(STEPS):
            loss_of(engine, rank, number).backward()
            engine.step()
            plan.step()
        label = f"stage {stage}, W={world_size}"
        lrs = [group["lr"] for group in reference.optimizer.param_groups]
        assert [group["lr"] for group in optimizer.param_groups] == lrs, label
        found = engine.full_parameters()
        same_update(label, found, reference.parameters(), reference.begin)
        engine.close()
        sets = [{id(p) for p in group["params"]} for group in grouped(module).param_groups]
        fixed = {id(module.get_parameter("fixed"))}
        mine = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
        assert mine in ([s - fixed for s in sets], sets), f"{label}: groups after close()"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_param_groups_keep_their_options_and_a_scheduler_made_before_the_engine_drives_them(
    world_size: int,
) -> None:
    run_ranks(groups_body, world_size)


def state_dict_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        first = Engine(seeded(Odd), functools.partial(torch.optim.AdamW, lr=0.05), stage=stage)
        begin = first.full_parameters()
        assert first.optimizer is not None
        train(first, rank, range(2))
        with pytest.raises(PhaseError, match=r"optimizer\.state_dict(.|\n)*checkpoint\.save"):
            first.optimizer.state_dict()
        states = first.full_optimizer_states()
        wanted = train(first, rank, range(2, 5))
        second = Engine(seeded(Odd), functools.partial(torch.optim.AdamW, lr=0.05), stage=stage)
        train(second, rank, range(2))
        for path, slots in states.items():
            for name, value in slots.items():
                second.set_full_optimizer_state(path, name, torch.full_like(value, 9.0))
                second.set_full_optimizer_state(path, name, value)
        found = train(second, rank, range(2, 5))
        same_update(f"stage {stage}, W={world_size}", found, wanted, begin, rtol=0.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_optimizer_refuses_its_own_state_dict_and_whole_states_are_read_and_written(
    world_size: int,
) -> None:
    run_ranks(state_dict_body, world_size)


def fused_body(rank: int, world_size: int) -> None:
    for cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        for given, wanted in (
            ({}, (True, None)),
            ({"foreach": True}, (None, True)),
            ({"foreach": False}, (None, False)),
            ({"fused": False}, (False, None)),
        ):
            for style in ("factory", "instance"):
                module = seeded(Odd)
                factory = functools.partial(cls, **given)
                optimizer = factory if style == "factory" else factory(learning(module))
                engine = Engine(module, optimizer, stage=2)
                assert engine.optimizer is not None
                found = []

                def note(one: Any, *_: Any, found: list[Any] = found) -> None:
                    found += [(group["fused"], group["foreach"]) for group in one.param_groups]

                engine.optimizer.register_step_pre_hook(note)
                loss_of(engine, rank, 0).backward()
                engine.step()
                assert found == [wanted], f"{cls.__name__}, {given}, {style}: {found}"
                engine.close()


def test_kernels_are_fused_unless_the_optimizer_says_otherwise() -> None:
    run_ranks(fused_body, 1)
    run_ranks(fused_body, 2)


def refusal_body(rank: int, world_size: int) -> None:
    always = dict.fromkeys((torch.optim.LBFGS, torch.optim.SparseAdam), STAGES)
    whole = dict.fromkeys((torch.optim.Adafactor, torch.optim.Muon), STAGES[1:])
    for cls, stages in (always | (whole if world_size > 1 else {})).items():
        for style in ("class", "instance"):
            module = nn.Sequential(linear(3, 3, bias=False), linear(3, 2, bias=False))
            values = {name: p.data_ptr() for name, p in module.named_parameters()}
            hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
            begin = [p.detach().clone() for p in module.parameters()]
            optimizer = cls if style == "class" else cls(list(module.parameters()))
            for stage in stages:
                try:
                    Engine(module, optimizer, stage=stage)
                except LayoutError as error:
                    assert cls.__name__ in str(error), str(error)
                else:
                    raise AssertionError(f"{cls.__name__} was taken at stage {stage}")
                assert {n: p.data_ptr() for n, p in module.named_parameters()} == values
                assert (len(module._forward_hooks), len(module._forward_pre_hooks)) == hooks
                assert all(type(p) is nn.Parameter for p in module.parameters())
                # Rank 0's values were not given to anybody either: the module is untouched.
                assert all(map(torch.equal, begin, module.parameters()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_that_need_whole_matrices_are_refused_by_name_before_the_module_is_touched(
    world_size: int,
) -> None:
    run_ranks(refusal_body, world_size)


def whole_body(rank: int, world_size: int, stage: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(linear(3, 4, bias=False), nn.Tanh(), linear(4, 3, bias=False))

    for cls in (torch.optim.Adafactor, torch.optim.Muon):
        reference = Unsharded(make, lambda m, c=cls: c(learning(m)), world_size)
        for number in range(STEPS):
            reference.step(number)
        engine = Engine(seeded(make), cls, stage=stage)
        found = train(engine, rank)
        same_update(cls.__name__, found, reference.parameters(), reference.begin)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (3, 0)])
def test_optimizers_of_whole_matrices_run_where_a_rank_has_whole_matrices(
    world_size: int, stage: int
) -> None:
    run_ranks(whole_body, world_size, stage)


class TiedAndFrozen(Odd):
    """d is tied to c, and a is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.d = linear(3, 3, bias=False)
        self.d.weight = self.c.weight
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(super().forward(x)))


def clipping_body(rank: int, world_size: int, max_norm: float) -> None:
    reference = Unsharded(TiedAndFrozen, lambda m: torch.optim.SGD(learning(m), 0.5), world_size)
    norms = []
    for number in range(3):
        reference.gradients(number)
        norms.append(nn.utils.clip_grad_norm_(learning(reference.module), max_norm))
        reference.optimizer.step()
    for stage in STAGES:
        label = f"stage {stage}, W={world_size}, max_norm {max_norm}"
        module = seeded(TiedAndFrozen)
        optimizer = torch.optim.SGD(learning(module), 0.5)
        engine = Engine(module, optimizer, stage=stage, max_norm=max_norm, bucket_bytes=100)
        assert engine.global_grad_norm is None
        for number, norm in enumerate(norms):
            loss_of(engine, rank, number).backward()
            for _ in range(2):
                asked = engine.global_grad_norm
                assert asked is not None and torch.allclose(asked, norm, rtol=1e-12), label
            engine.step()
            last = engine.global_grad_norm
            assert last is not None and torch.allclose(last, norm, rtol=1e-12), label
        found = engine.full_parameters()
        same_update(label, found, reference.parameters(), reference.begin)
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clipping_and_the_global_norm_are_those_of_clip_grad_norm_at_every_stage(
    world_size: int,
) -> None:
    run_ranks(clipping_body, world_size, 0.25)
    run_ranks(clipping_body, world_size, 1e6)
