"""Configs as public repositories have them: each is followed, or refused with all that is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fzero.adapter import initialize
from fzero.errors import LayoutError
from tests.integrations.deepspeed.public import FOLLOWED, REFUSED


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_config_is_followed(name: str, tmp_path: Path) -> None:
    config, given, wanted = FOLLOWED[name]
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    engine, optimizer, loader, scheduler = initialize(
        model=model, config=path, as_tuple=True, **given
    )
    assert engine.stage == wanted["stage"] and loader is None
    assert engine.gradient_accumulation_steps() == wanted["steps"]
    assert engine.options.updating.max_norm == wanted["norm"]
    assert engine.get_lr() == [wanted["lr"]] and optimizer is engine.optimizer
    has = "scheduler" in config or "lr_scheduler" in given
    assert (scheduler is not None) == has
    dtype = wanted.get("dtype", torch.float32)
    assert {p.dtype for p in model.parameters()} == {dtype}
    before = engine.full_parameters()
    for _ in range(3 * wanted["steps"]):  # a warm-up by logarithms begins with two of lr = 0
        loss = engine(torch.randn(2, 4).to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 3 and engine.was_step_applied()
    after = engine.full_parameters()
    assert all(not torch.equal(after[path], before[path]) for path in before)
    engine.close()


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_is_refused_with_all_that_is_wrong_in_it(name: str) -> None:
    config, wanted = REFUSED[name]
    with pytest.raises(LayoutError) as error:
        initialize(nn.Linear(2, 1), config=config)
    named = re.findall(r"^  (\S+) ", str(error.value), re.MULTILINE)
    assert sorted(named) == sorted(wanted)
