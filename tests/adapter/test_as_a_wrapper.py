"""What a user of DistributedDataParallel calls on the wrapped module, called on an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import Engine
from fzero.errors import FzeroError, LayoutError, PhaseError
from tests.adapter.on_ranks import Place, at_places, on_ranks


class Net(nn.Sequential):
    def __init__(self, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            super().__init__(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        self.config = {"width": 5}


def engine_of(stage: int) -> Engine:
    module = Net(0)
    return Engine(module, torch.optim.AdamW(module.parameters()), stage=stage)


def prefixed(given: dict[str, Any]) -> dict[str, Any]:
    return {f"module.{name}": x for name, x in given.items()}


@at_places(1, 2)
def test_load_state_dict_takes_whole_values_at_every_stage_or_changes_nothing(at: Place) -> None:
    with engine_of(at.stage) as e:
        wanted = Net(7).state_dict()
        assert str(e.load_state_dict(wanted)) == "<All keys matched successfully>"
        refused: tuple[tuple[Callable[[], Any], str], ...] = (
            (lambda: e.load_state_dict(prefixed(wanted)), "no 0.weight"),
            (lambda: e.load_state_dict({**wanted, "0.weight": torch.ones(2)}), r"shape \(2,\)"),
            (lambda: e.load_state_dict({**wanted, "more": torch.ones(2)}), "unknown more"),
            (lambda: e.load_state_dict(wanted, assign=True), "assign=True"),
        )
        for load, seen in refused:
            with pytest.raises(LayoutError, match=f"(?s){seen}.*Fix: "):
                load()
        found = e.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], x) for name, x in wanted.items())
        e.load_state_dict({"0.weight": torch.ones(5, 3)}, strict=False)
        assert (e.full_parameter("0.weight") == 1).all()
        x = torch.ones(4, 3)
        e(x).sum().backward()
        assert e.step()
    assert e.closed and type(e.module.get_parameter("1.weight")) is nn.Parameter


@at_places(1, 2)
def test_the_names_of_a_module_are_served_or_say_where_they_are(at: Place) -> None:
    e = engine_of(at.stage)
    assert e.training and e.eval() is e and not e.training and e.train() is e
    assert [*e.modules()] == [*e.module.modules()] and [*e.children()] == [*e.module.children()]
    assert len([*e.buffers()]) == 3 and e.get_submodule("2").get_parameter("bias").shape == (2,)
    assert next(iter(dict(e.named_parameters(prefix="net")))) == "net.0.weight"
    for same in (lambda: e.to("cpu"), e.float, e.cpu, lambda: e.to(torch.float32)):
        assert same() is e
    for other in (e.half, lambda: e.to(torch.bfloat16), lambda: e.to("meta"), e.share_memory):
        with pytest.raises(LayoutError, match="before Engine"):
            other()
    with pytest.raises(AttributeError, match=r"engine\.module\.config"):
        _ = e.config
    assert not hasattr(e, "nothing") and not hasattr(e, "__len__")

    def initialize(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.constant_(part.weight, 1.0 + at.rank)

    assert e.apply(initialize) is e
    assert (e.full_parameter("2.weight") == 1).all()
    seen: list[int] = []
    handle = e.register_forward_hook(lambda *_: seen.append(1))
    e.forward(torch.ones(4, 3)).sum().backward()
    handle.remove()
    assert seen and e.requires_grad_(True) is e and e.step()
    e.close()


@on_ranks(1, 2)
def test_a_with_block_closes_unless_the_other_ranks_may_not_come(world_size: int) -> None:
    e = engine_of(2)
    with pytest.raises(ArithmeticError), e:
        raise ArithmeticError("in the block")
    assert e.closed is (world_size == 1)
    e.close()
    with e:
        assert e.closed
    with pytest.raises((PhaseError, FzeroError), match="closed"):
        e(torch.ones(4, 3))
