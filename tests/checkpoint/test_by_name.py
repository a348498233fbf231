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
