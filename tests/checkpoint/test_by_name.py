"""Options of param groups follow their parameters by name; a tied parameter has one value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import Engine
from fzero.checkpoint import (
    export_safetensors,
    import_safetensors,
    load,
    load_universal,
    load_with_extra,
    save,
    save_universal,
)
from fzero.errors import LayoutError

LOADS = [(save, load), (save_universal, load_universal)]


def engine_of(*groups: str, decay: float = 0.0) -> Engine:
    """An engine whose param groups have the parameters of these letters, in this order."""
    module = nn.Linear(3, 2)
    named = {"w": module.weight, "b": module.bias}
    made = [
        {"params": [named[x] for x in names], "weight_decay": decay * ("w" in names)}
        for names in groups
    ]
    return Engine(module, torch.optim.AdamW(made, lr=0.5), stage=1)


def options(engine: Engine) -> list[Any]:
    assert engine.optimizer is not None
    return [(one["lr"], one["weight_decay"]) for one in engine.optimizer.param_groups]


@pytest.mark.parametrize(("write", "read"), LOADS)
def test_groups_in_another_order_have_the_options_of_their_parameters(
    write: Any, read: Any, tmp_path: Path
) -> None:
    engine = engine_of("w", "b", decay=0.25)
    engine.optimizer.param_groups[0]["lr"] = 0.125
    engine(torch.ones(1, 3)).sum().backward()
    engine.step()
    write(tmp_path, engine)
    assert options(read(tmp_path, engine_of("w", "b"))) == [(0.125, 0.25), (0.5, 0.0)]
    assert options(read(tmp_path, engine_of("b", "w"))) == [(0.5, 0.0), (0.125, 0.25)]
    with pytest.raises(LayoutError, match="with another weight_decay, lr"):
        read(tmp_path, engine_of("wb"))


def test_a_group_that_is_divided_here_has_its_options_twice(tmp_path: Path) -> None:
    save(tmp_path, engine_of("wb", decay=0.25))
    assert options(load(tmp_path, engine_of("b", "w"))) == [(0.5, 0.25), (0.5, 0.25)]


class Two(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        if tied:
            self.b.weight = self.a.weight


@pytest.mark.parametrize(
    ("write", "read"), [(export_safetensors, import_safetensors), (save_universal, load_universal)]
)
def test_two_values_for_a_tied_parameter_are_refused_unless_they_are_equal(
    write: Any, read: Any, tmp_path: Path
) -> None:
    def state(module: nn.Module) -> Any:
        return Engine(module, torch.optim.SGD(module.parameters(), lr=0.5), stage=1)

    two = Two(tied=False)
    with torch.no_grad():
        two.b.weight.copy_(two.a.weight)
    write(tmp_path / "equal", state(two))
    read(tmp_path / "equal", state(Two(tied=True)))
    write(tmp_path / "apart", state(Two(tied=False)))
    with pytest.raises(LayoutError, match=r"one value for a.weight and another for b.weight"):
        read(tmp_path / "apart", state(Two(tied=True)))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(("write", "read"), [*LOADS, (export_safetensors, import_safetensors)])
def test_a_tied_parameter_loads_into_both_of_a_model_that_does_not_tie_it(
    write: Any, read: Any, stage: int, tmp_path: Path
) -> None:
    def engine(tied: bool) -> Engine:
        module = Two(tied=tied)
        return Engine(module, torch.optim.AdamW(module.parameters(), lr=0.5), stage=stage)

    one = engine(True)
    module: Any = one.module
    one.backward(module.a(torch.ones(2)).sum() + module.b(torch.ones(2)).square().sum())
    one.step()
    write(tmp_path, one)
    two, wanted = read(tmp_path, engine(False)), one.full_state_dict()["a.weight"]
    for name in ("a.weight", "b.weight"):
        assert torch.equal(two.full_state_dict()[name], wanted)
        if read is not import_safetensors:
            moment = one.full_optimizer_state("a.weight", "exp_avg")
            assert torch.equal(two.full_optimizer_state(name, "exp_avg"), moment)


def test_a_load_sets_the_rate_of_then_for_a_scheduler_that_was_there_before(
    tmp_path: Path,
) -> None:
    """As `load_state_dict` of torch's optimizer and scheduler do."""

    def made() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.5)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def run(stepped: Any, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            stepped.step()
            scheduler.step()
            rates += scheduler.get_last_lr()
        return rates

    engine: Any = engine_of("wb")
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)
    plain, beside = made()
    assert run(engine, scheduler, 3) == run(plain, beside, 3)
    engine.optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.375
    save(tmp_path, engine, extra={"scheduler": scheduler})
    states = plain.state_dict(), beside.state_dict()

    engine = engine_of("wb")
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)
    run(engine, scheduler, 1)
    engine, extra = load_with_extra(tmp_path, engine)
    plain, beside = made()
    run(plain, beside, 1)
    plain.load_state_dict(states[0])
    assert options(engine)[0][0] == plain.param_groups[0]["lr"] == 0.375
    scheduler.load_state_dict(extra["scheduler"])
    beside.load_state_dict(states[1])
    assert run(engine, scheduler, 5) == run(plain, beside, 5)
