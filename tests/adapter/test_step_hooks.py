"""What is in step hooks of an engine's optimizer: before an update and after all of it."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fzero
from fzero.adapter import Engine, initialize
from fzero.errors import LayoutError, PhaseError
from tests.adapter.on_ranks import Place, virtually
from tests.adapter.plain import STAGES, back, learning, same, seeded

ON_DISK = fzero.Offload(optimizer="disk", folder=tempfile.gettempdir())  # a step for each flat


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def by_owners(module: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.1}]  # pyright: ignore[reportIndexIssue]
    return torch.optim.Adafactor(groups, lr=0.05)


def in_hooks(optimizer: torch.optim.Optimizer, module: nn.Module) -> AveragedModel:
    """Clip before a step; average, clip the weights and lower the rate after it."""
    average = AveragedModel(seeded(net), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def before(of: Any, *_: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)

    def after(of: Any, *_: Any) -> None:
        average.update_parameters(module)
        scheduler.step()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return average


@virtually(1, 2, 3)
@pytest.mark.parametrize(
    ("stage", "options"),
    [*((stage, {}) for stage in STAGES), (2, {"offload": ON_DISK})],
)
def test_clipping_averages_and_schedules_in_hooks_are_those_of_plain_training(
    at: Place, stage: int, options: dict[str, Any]
) -> None:
    at = at._replace(stage=stage)
    plain = at.plain(net, by_owners)
    module = seeded(net)
    optimizer = by_owners(module)
    ours, theirs = in_hooks(optimizer, module), in_hooks(plain.optimizer, plain.module)  # pyright: ignore[reportArgumentType]
    engine = Engine(module, optimizer, stage=stage, **options)
    for number in range(3):
        want = plain.run(back, number)
        back(engine, at.draw(number))
        engine.step()
        same(engine.full_parameters(), plain.step(want), 1e-9)
    same(dict(ours.module.named_parameters()), dict(theirs.module.named_parameters()), 1e-9)
    assert int(ours.n_averaged) == 3
    engine.close()


@virtually(1, 2)
@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.AdamW])  # the latter fused
def test_an_update_that_an_overflow_skips_is_no_step(at: Place, make: Any) -> None:
    module, seen = seeded(net).float(), list[None]()
    optimizer = make(module.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append(None))
    engine = Engine(module, optimizer, stage=2, loss_scale="dynamic")
    for bad in (1.0, float("inf")):
        engine.backward(engine(torch.ones(1, 3)).sum() * bad)
        engine.step()
    assert engine.step_was_skipped and len(seen) == 1
    engine.close()


@virtually(1, 2)
def test_what_a_hook_may_not_do_is_refused_and_the_next_step_is_right(at: Place) -> None:
    module = seeded(net)
    optimizer = torch.optim.AdamW(module.parameters())
    engine = Engine(module, optimizer, stage=2)
    back(engine, at.draw(0))

    def replaces(*_: Any) -> None:
        for p in module.parameters():
            p.grad = None

    handle = optimizer.register_step_pre_hook(replaces)
    with pytest.raises(LayoutError, match="replaced in a step pre hook"):
        engine.step()
    handle.remove()
    engine.zero_grad()

    def looks(*_: Any) -> None:
        optimizer.state.popitem()

    handle = optimizer.register_step_pre_hook(looks)
    back(engine, at.draw(1))
    with pytest.raises(PhaseError, match="full_optimizer_state"):
        engine.step()
    handle.remove()
    assert engine.step()
    engine.close()


@virtually(2)
def test_a_warm_up_of_the_config_goes_on_by_one_with_each_update(at: Place) -> None:
    module = seeded(net)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 10, "warmup_max_lr": 1.0, "warmup_type": "linear"},
        },
    }
    optimizer = torch.optim.Adafactor(learning(module).values())
    engine = initialize(module, optimizer, config=config)
    rates = []
    for number in range(4):
        engine.backward(engine(at.draw(number)(2, 3)).square().sum())
        engine.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.0, 0.1, 0.2, 0.3]
