"""A module whose engine is closed and made again has the bits of one engine all along."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from tests.adapter.on_ranks import Place, on_ranks, virtually
from tests.adapter.plain import seeded


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).bfloat16()


def loss_of(e: Any, at: Place, number: int) -> Tensor:
    return e(at.draw(number)(4, 3, dtype=torch.bfloat16)).float().square().sum()


RULES: dict[str, Callable[..., Any]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-3),  # by owners
    "sgd": lambda _: fzero.optim.sgd(1e-3),
}


def trained(at: Place, rule: str, stages: dict[int, int], **options: Any) -> dict[str, Tensor]:
    """Nine updates; an engine is made at these, of the stage. Returns masters."""
    module = seeded(net)
    optimizer = RULES[rule](module.parameters())
    engine: Any = None
    for number in range(9):
        if number in stages:
            if engine is not None:
                engine.close()
            engine = Engine(module, optimizer, stage=stages[number], **options)
        loss_of(engine, at, number).backward()
        engine.step()
    masters = engine.full_parameters()
    engine.close()
    assert all(p.dtype is torch.float32 for p in masters.values())
    return masters


@virtually(1, 3)
@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 0)])
@pytest.mark.parametrize("rule", RULES)
def test_closed_and_made_again_at_any_stage(at: Place, rule: str, first: int, second: int) -> None:
    once = trained(at, rule, {0: first})
    again = trained(at, rule, {0: first, 3: second, 6: first})
    for path, master in once.items():
        assert torch.equal(again[path], master), path


@on_ranks(2)
def test_closed_and_made_again_in_processes(rank: int) -> None:
    at = Place(rank, 2)
    once, again = (trained(at, "adamw", stages) for stages in ({0: 3}, {0: 3, 4: 2}))
    for path, master in once.items():
        assert torch.equal(again[path], master), path


@virtually(2)
def test_what_was_frozen_for_a_while_goes_on_from_its_master(at: Place) -> None:
    module = seeded(net)
    made: list[dict[str, Tensor]] = []
    for learns in (True, False, True):
        module[0].requires_grad_(learns)  # pyright: ignore[reportIndexIssue]
        engine = Engine(module, fzero.optim.sgd(1e-3 * (len(made) < 2)), stage=2)
        loss_of(engine, at, len(made)).backward()
        engine.step()
        made.append(engine.full_parameters())
        engine.close()
    assert torch.equal(made[0]["0.weight"], made[2]["0.weight"])
    assert made[2]["0.weight"].dtype is torch.float32


@virtually(1, 2)
def test_what_is_written_in_between_counts_and_what_is_not_keeps_its_low_bits(at: Place) -> None:
    module = seeded(net)
    for stage, value in ((2, 0.7), (3, -0.3)):
        with Engine(module, fzero.optim.sgd(1e-3), stage=stage) as engine:
            loss_of(engine, at, stage).backward()
            engine.step()
            before = engine.full_parameters()["0.weight"]
        with torch.no_grad():
            module[0].weight[0] = value  # pyright: ignore[reportIndexIssue]
        with Engine(module, fzero.optim.sgd(1e-3), stage=3) as engine:
            after = engine.full_parameters()["0.weight"]
        assert torch.equal(after[1:], before[1:])
        assert torch.equal(after[0], torch.full((3,), value).bfloat16().float())


def test_a_copy_or_a_pickle_of_a_closed_module_has_no_master() -> None:
    module = seeded(net)
    alone = saved(module)
    with Engine(module, fzero.optim.sgd(1e-3), stage=0) as engine:
        loss_of(engine, Place(0, 1), 0).backward()
        engine.step()
    values = module.get_parameter("0.weight").detach().clone()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert len(buffer.getvalue()) < len(alone) + 1500
    with Engine(loaded, fzero.optim.sgd(1e-3), stage=0) as engine:
        assert torch.equal(engine.full_parameters()["0.weight"], values.float())


def saved(module: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    return buffer.getvalue()
