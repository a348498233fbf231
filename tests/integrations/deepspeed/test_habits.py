"""What scripts written for DeepSpeed do beside the loop: they run as they are."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import initialize
from fzero.errors import LayoutError
from fzero.integrations import deepspeed
from fzero.integrations.deepspeed import DeepSpeedEngine
from tests.adapter.on_ranks import Place, at_places, on_ranks
from tests.adapter.plain import LR, same, seeded
from tests.integrations.deepspeed.configs import SGD, linear, merged

X = torch.tensor([[1.0, 2.0, 4.0]])


def engine_of(stage: int = 0, model: Any = None, **config: Any) -> DeepSpeedEngine:
    given = {"gradient_clipping": 0, "zero_optimization": {"stage": stage}, **config}
    return initialize(seeded(linear) if model is None else model, config=merged(SGD, given))


def back(engine: DeepSpeedEngine, times: float = 1.0) -> None:
    engine.backward(engine(X * times).sum())


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("backwards", [1, 3])
def test_unmanaged_each_loss_is_divided_and_every_step_updates(stage: int, backwards: int) -> None:
    engine = engine_of(stage, managed_gradient_accumulation=False, gradient_accumulation_steps=2)
    before = engine.full_parameter("weight")
    for _ in range(backwards):
        back(engine)
    assert engine.step() and engine.global_steps == 1
    moved = before - LR * X * backwards / 2  # as in DeepSpeed: a sum of losses over 2
    torch.testing.assert_close(engine.full_parameter("weight"), moved.expand_as(before))


class Device(str, Enum):  # noqa: UP042 - as DeepSpeed has it
    cpu = "cpu"
    none = "none"


class Stage(int, Enum):
    gradients = 2


def test_enums_are_values() -> None:
    zero = {"stage": Stage.gradients, "offload_optimizer": {"device": Device.cpu}}
    engine = initialize(linear(), config=merged(SGD, {"zero_optimization": zero}))
    assert engine.stage == 2 and engine.state.setup.offload.optimizer == "cpu"
    engine = initialize(
        linear(), config_params=merged(SGD, {"zero_optimization": {"stage": Stage.gradients}})
    )
    assert engine.stage == 2
    with pytest.raises(LayoutError, match="config, and config_params"):
        initialize(linear(), config=SGD, config_params=SGD)


@at_places(2)
def test_gradients_that_wait_stay_out_of_a_checkpoint_and_in_the_engine(
    at: Place, tmp_path: Path
) -> None:
    engine = engine_of(at.stage, gradient_accumulation_steps=2)
    back(engine)
    engine.step()
    before, held = engine.full_parameters(), engine.full_gradients()
    with pytest.warns(UserWarning, match="the gradients of 1 backwards wait for an update"):
        engine.save_checkpoint(tmp_path)
    same(engine.full_gradients(), held, 0.0)
    back(engine, 3.0)
    assert engine.step()
    wanted = before["weight"] - LR * X * (1 + 3) / 2
    torch.testing.assert_close(
        engine.full_parameter("weight"), wanted.expand(before["weight"].shape)
    )
    engine.load_checkpoint(tmp_path)
    same(engine.full_parameters(), before, 0.0)
    assert not engine.state.gradients.held


def frozen() -> nn.Module:
    model = nn.Sequential(seeded(linear), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    return model


@on_ranks(2)
@pytest.mark.parametrize(("stage", "other"), [(0, 3), (3, 1)])
def test_frozen_parameters_can_be_left_out(stage: int, other: int, tmp_path: Path) -> None:
    saved = engine_of(stage, seeded(frozen), bf16={"enabled": True})
    saved.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    engine = engine_of(other, seeded(frozen), bf16={"enabled": True})
    for path, value in saved.full_parameters().items():
        engine.set_full_parameter(path, value + 1)
    with pytest.raises(LayoutError, match="has no frozen parameters"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    for path, value in saved.full_parameters().items():
        wanted = value if path.startswith("1.") else (value + 1).to(torch.bfloat16).to(value.dtype)
        assert torch.equal(engine.full_parameter(path), wanted), path
    engine.save_checkpoint(tmp_path, tag="whole")
    engine.load_checkpoint(tmp_path, tag="whole")
    engine.save_16bit_model(tmp_path, "model.bin", exclude_frozen_parameters=True)
    assert set(torch.load(tmp_path / "model.bin")) == {"1.weight", "1.bias"}
    assert engine.save_16bit_model(tmp_path)
    same(torch.load(tmp_path / "pytorch_model.bin"), engine.full_state_dict(), 0.0)


@at_places(2)
def test_what_fragments_answer_without_a_reduced_gradient(at: Place) -> None:
    engine = engine_of(at.stage, seeded(frozen))
    first, second = (engine.module.get_submodule(name) for name in "01")
    frozen_weight, weight = (one.get_parameter("weight") for one in (first, second))
    assert deepspeed.safe_get_full_fp32_param(frozen_weight) is None
    assert deepspeed.safe_get_full_grad(weight) is None
    with engine.coalesce():
        assert deepspeed.safe_get_full_grad(weight) is None
        back(engine, 1.0 + at.rank)
        own = deepspeed.safe_get_full_grad(weight)
    mean = deepspeed.safe_get_full_grad(weight)
    assert own is not None and mean is not None
    hidden = first(X * (1.0 + at.rank)).detach()
    torch.testing.assert_close(own, hidden.expand(2, 2))  # this rank's alone
    both = sum(first(X * (1.0 + r)).detach() for r in range(2)) / 2
    torch.testing.assert_close(mean, both.expand(2, 2))
    assert deepspeed.safe_get_full_grad(frozen_weight) is None


@on_ranks(2)
def test_counts_and_what_the_config_says() -> None:
    engine = engine_of(1, train_batch_size=12, gradient_accumulation_steps=2)
    for _ in range(3):
        back(engine)
        engine.step()
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (3, 1, 12)
    assert engine.gradient_clipping() == 0.0 and engine.get_mom() == [0]
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled()
    engine.empty_partition_cache()
    adam = initialize(linear(), torch.optim.Adam, {"gradient_clipping": 0.5})
    assert adam.get_mom() == [(0.9, 0.999)] and adam.gradient_clipping() == 0.5
    own = engine_of(1, train_micro_batch_size_per_gpu=3, managed_gradient_accumulation=False)
    for _ in range(2):
        back(own)
        back(own)
        own.step()
    assert own.global_samples == 2 * 2 * 3 * 2


@on_ranks(2)
def test_leaf_modules_that_were_marked_are_leaves() -> None:
    models = [nn.Sequential(nn.Sequential(linear(), linear()), linear()) for _ in range(2)]
    vars(models[0][0])["_z3_leaf"] = True  # as deepspeed.utils.set_z3_leaf_modules marks it
    zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    marked, plain = (initialize(one, config=merged(SGD, zero)) for one in models)
    assert [one.options.module.leaf_modules.names for one in (marked, plain)] == [("0",), ()]


@at_places(2)
def test_states_come_back_as_they_were(at: Place) -> None:
    engine, other = engine_of(at.stage), engine_of(at.stage)
    for one in (engine, other):
        back(one)
        one.step()
    engine.offload_states(include=["optim_states", "hp_params"])
    engine.offload_states()
    engine.reload_states()
    for one in (engine, other):
        back(one)
        one.step()
    same(engine.full_parameters(), other.full_parameters(), 0.0)
