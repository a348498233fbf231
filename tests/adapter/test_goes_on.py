"""An engine goes on from a run without it: from its optimizer's state, and after an unfreezing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import FzeroError, LayoutError, PhaseError
from fzero.optim import from_torch

Make = Callable[[Any], torch.optim.Optimizer]


class Late(nn.Module):
    """Has a layer that is used from some step on, weights that are tied, and nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.late, self.last = (nn.Linear(4, 4).double() for _ in range(3))
        self.last.weight = self.first.weight
        self.nothing = nn.Parameter(torch.zeros(0, 3).double())
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.nothing.sum()
        return self.last(x + self.late(x)) if self.is_late else self.last(x)


def sorted_by_shape(module: Any, cls: Any = torch.optim.AdamW, **options: Any) -> Any:
    """The helper of many training scripts: no decay for vectors."""
    named = list(module.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1, "lr": 0.1},
        {"params": [p for name, p in named if p.ndim < 2 and "bias" in name], "lr": 0.03},
    ]
    return cls(groups, **options)


OPTIMIZERS: dict[str, Make] = {
    "adamw": sorted_by_shape,
    "capturable": partial(sorted_by_shape, cls=torch.optim.Adam, amsgrad=True, foreach=True),
    "nadam": partial(sorted_by_shape, cls=torch.optim.NAdam),
    "asgd": partial(sorted_by_shape, cls=torch.optim.ASGD, t0=1.0),
    "dampening": partial(sorted_by_shape, cls=torch.optim.SGD, momentum=0.9, dampening=0.5),
    "adagrad": partial(
        sorted_by_shape, cls=torch.optim.Adagrad, initial_accumulator_value=0.1, lr_decay=0.1
    ),
}
X = torch.arange(-8.0, 8.0).double().view(4, 4) / 8
WHERE = ((0, 1), (1, 2), (2, 3), (3, 2))


def train(call: Any, step: Any, zero: Any, steps: int) -> None:
    for _ in range(steps):
        zero()
        call(X).square().mean().backward()
        step()


def plainly(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    train(module, optimizer.step, optimizer.zero_grad, steps)
    return module, optimizer


def by_engine(engine: Engine, steps: int) -> None:
    train(engine, engine.step, lambda: None, steps)


def facts(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All parameters, and all that the optimizer keeps of each."""
    found = {}
    for path, p in module.named_parameters():
        found[path] = p.detach().clone()
        for name, value in optimizer.state.get(p, {}).items():
            found[f"{path} {name}"] = torch.as_tensor(value).double().detach().clone()
    return found


def compare(run: Callable[[int], dict[str, Tensor]], want: dict[str, Tensor]) -> None:
    for stage, ranks in WHERE:
        made = fzero.simulate(lambda _, stage=stage: run(stage), world_size=ranks)
        found = made(torch.zeros(ranks))
        assert found.keys() == want.keys()
        for path, x in want.items():
            for one in found[path]:
                torch.testing.assert_close(one, x, rtol=1e-12, atol=1e-13, msg=f"{stage} {path}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_taken_over(name: str) -> None:
    """A layer that was not used has none; it comes back, as torch has it, when the engine ends."""
    make = OPTIMIZERS[name]
    module, optimizer = plainly(*_made(make), steps=3)
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    module.is_late = True
    want = facts(*plainly(module, optimizer, 3))

    def run(stage: int) -> dict[str, Tensor]:
        own, instance = _made(make)
        own.load_state_dict(saved[0])
        instance.load_state_dict(copy.deepcopy(saved[1]))
        own.is_late = True
        engine = Engine(own, instance, stage=stage)
        by_engine(engine, 3)
        engine.close()
        found = facts(own, instance)
        return {path: x for path, x in found.items() if "nothing " not in path}

    compare(run, {path: x for path, x in want.items() if "nothing " not in path})


def _made(make: Make) -> Any:
    module = Late()
    return module, make(module)


def test_a_state_that_does_not_fit_is_refused_and_stays() -> None:
    module, optimizer = plainly(*_made(OPTIMIZERS["dampening"]), steps=1)
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    before = facts(module, optimizer)
    with pytest.raises(LayoutError, match=r"SGD has \['momentum_buffer'\] for \w+; its rule"):
        Engine(module, optimizer, stage=2)
    after = facts(module, optimizer)
    assert all(torch.equal(after[path], x) for path, x in before.items())


def test_ranks_that_have_other_states_are_refused() -> None:
    def run(rank: Tensor) -> None:
        module, optimizer = _made(sorted_by_shape)
        if rank.item():
            plainly(module, optimizer, 1)
        Engine(module, optimizer, stage=1)

    with pytest.raises(FzeroError, match=r"the optimizer's state of \w+: exp_avg"):
        fzero.simulate(run, world_size=2)(torch.arange(2))


def test_a_frozen_parameter_has_its_state_again_when_the_engine_ends() -> None:
    module, optimizer = plainly(*_made(sorted_by_shape), steps=2)
    module.first.bias.requires_grad_(False)
    held = copy.deepcopy(optimizer.state[module.first.bias])
    engine = Engine(module, optimizer, stage=1)
    by_engine(engine, 1)
    engine.close()
    again = optimizer.state[module.first.bias]
    assert all(torch.equal(again[name], x) for name, x in held.items())


@pytest.mark.parametrize("name", ["adamw", "nadam", "dampening"])
def test_unfreezing_by_the_documented_recipe(name: str) -> None:
    """Close, requires_grad_(True), a new engine, set_full_optimizer_state."""

    def optimizer_of(module: nn.Module) -> Any:
        return OPTIMIZERS[name](module)

    module, _ = _made(OPTIMIZERS[name])
    module.is_late = True
    module.late.requires_grad_(False)
    optimizer = optimizer_of(module)
    plainly(module, optimizer, 3)
    module.late.requires_grad_(True)
    want = facts(*plainly(module, optimizer, 2))

    def run(stage: int) -> dict[str, Tensor]:
        module, _ = _made(OPTIMIZERS[name])
        module.is_late = True
        module.late.requires_grad_(False)
        first = Engine(module, optimizer_of(module), stage=stage)
        by_engine(first, 3)
        held = first.full_optimizer_states()
        first.close()
        module.late.requires_grad_(True)
        engine = Engine(module, optimizer_of(module), stage=stage)
        for path, state in held.items():
            for key, value in state.items():
                engine.set_full_optimizer_state(path, key, value)
        by_engine(engine, 2)
        engine.close()
        assert engine.optimizer is not None
        found = facts(module, engine.optimizer)
        return {path: x for path, x in found.items() if "nothing " not in path}

    compare(run, {path: x for path, x in want.items() if "nothing " not in path})


def test_unfreezing_with_the_same_optimizer() -> None:
    def begun() -> Any:
        module, optimizer = _made(sorted_by_shape)
        module.is_late = True
        module.late.requires_grad_(False)
        return module, optimizer

    module, optimizer = plainly(*begun(), steps=2)
    module.late.requires_grad_(True)
    plainly(module, optimizer, 2)
    want = {path: p.detach() for path, p in module.named_parameters()}

    def run(stage: int) -> dict[str, Tensor]:
        module, optimizer = begun()
        for learns in (False, True):
            module.late.requires_grad_(learns)
            engine = Engine(module, optimizer, stage=stage)
            by_engine(engine, 2)
            engine.close()
        return {path: p.detach() for path, p in module.named_parameters()}

    compare(run, want)


@pytest.mark.parametrize("closes_over", [False, True])
def test_a_factory_keeps_its_groups(closes_over: bool) -> None:
    """By shape and by name; what is in none of them is not stepped; in both drivers."""
    module, optimizer = _made(sorted_by_shape)
    module.is_late = True
    want = {path: p.detach() for path, p in plainly(module, optimizer, 2)[0].named_parameters()}

    def factory(module: nn.Module) -> Any:
        return lambda params: sorted_by_shape(module if closes_over else params)

    def run(stage: int) -> dict[str, Tensor]:
        module, _ = _made(sorted_by_shape)
        module.is_late = True
        apply, params = fzero.functionalize(module)
        state = fzero.init(params, from_torch(factory(module)), stage=stage)
        for _ in range(2):
            state = fzero.grad_and_reduce(lambda p: apply(p, X).square().mean(), state)()[0]
            state = fzero.apply_gradients(state)
        engine = Engine(module, factory(module), stage=stage)
        assert engine.optimizer is not None
        by_engine(engine, 2)
        groups = [len(group["params"]) for group in engine.optimizer.param_groups]
        assert groups == [3, 3]
        engine.close()
        for path, p in module.named_parameters():
            torch.testing.assert_close(fzero.full_params(state)[path], p.detach())
        return {path: p.detach() for path, p in module.named_parameters()}

    compare(run, want)


@pytest.mark.parametrize(("stage", "ranks"), WHERE)
def test_optimizer_state_is_in_the_engine_and_says_so(stage: int, ranks: int) -> None:
    def run(_: Tensor) -> None:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(module.parameters())
        own = optimizer.state
        engine = Engine(module, optimizer, stage=stage)
        engine(torch.ones(2)).sum().backward()
        engine.step()
        for use in (
            lambda: optimizer.state[module.weight]["exp_avg"],
            lambda: list(optimizer.state),
            lambda: [value for value in optimizer.state.values()],
            lambda: bool(optimizer.state),
            lambda: optimizer.state.pop(module.weight),
            lambda: optimizer.state.__setitem__(module.weight, {}),
            lambda: copy.deepcopy(optimizer),
        ):
            with pytest.raises(PhaseError, match="full_optimizer_state"):
                use()
        assert "in engine.state" in repr(optimizer.state)
        shown, optimizer.state = optimizer.state, own
        engine(torch.ones(2)).sum().backward()
        with pytest.raises(PhaseError, match="was replaced"):
            engine.step()
        optimizer.state = shown
        engine.close()
        assert optimizer.state is own and len(own) == 2

    fzero.simulate(run, world_size=ranks)(torch.zeros(ranks))


@pytest.mark.parametrize("name", ["adamw", "dampening"])
def test_clearing_it_begins_anew(name: str) -> None:
    module, optimizer = plainly(*_made(OPTIMIZERS[name]), steps=2)
    optimizer.state.clear()
    plainly(module, optimizer, 2)
    want = {path: p.detach() for path, p in module.named_parameters()}

    def run(stage: int) -> dict[str, Tensor]:
        module, optimizer = _made(OPTIMIZERS[name])
        module.late.requires_grad_(False)  # it is not used, and would be stepped
        engine = Engine(module, optimizer, stage=stage)
        by_engine(engine, 2)
        optimizer.state.clear()
        by_engine(engine, 2)
        engine.close()
        return {path: p.detach() for path, p in module.named_parameters()}

    compare(run, want)


def test_one_rank_that_clears_alone_is_told_to_all() -> None:
    def run(rank: Tensor) -> None:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(module.parameters())
        engine = Engine(module, optimizer, stage=1)
        engine(torch.ones(2)).sum().backward()
        if rank.item():
            optimizer.state.clear()
        engine.step()

    with pytest.raises(FzeroError, match=r"state\.clear\(\)"):
        fzero.simulate(run, world_size=2)(torch.arange(2))
