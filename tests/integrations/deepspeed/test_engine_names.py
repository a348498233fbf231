"""Names of DeepSpeed's engine, optimizer and parameters: those with one meaning, and the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fzero
from fzero.adapter import Engine, initialize
from fzero.errors import LayoutError, PhaseError
from fzero.integrations import deepspeed
from fzero.integrations.deepspeed import DeepSpeedEngine
from fzero.integrations.deepspeed._param_access import ZeroParamStatus
from fzero.integrations.deepspeed.zero import Init
from tests.integrations.deepspeed.configs import SGD, linear, merged

X = torch.tensor([[1.0, 2.0, 4.0]])

# Public names of DeepSpeedEngine 0.19.8 that have no one meaning here, some of each kind.
OTHERS = (
    "aio_config allreduce_bucket allreduce_no_retain autotp_size autotuning_enabled "
    "basic_optimizer bf16_optimizer_states checkpoint_engine client_lr_scheduler "
    "communication_data_type compile_autosp curriculum_learning_config data_parallel_group "
    "dp_world_size dump_state dynamic_loss_scale_args expert_parallel_group flatten "
    "flops_profiler_enabled gate_modules get_data_types get_model_parallel_rank has_moe_layers "
    "initial_dynamic_scale inside_no_sync_ctxt is_compiled load_moe_state_dict "
    "load_universal_checkpoint memory_breakdown module_forward_pre_hook monitor mp_world_size "
    "mpu num_experts optimizer_name optimizer_params pipeline_parallelism random_ltd_enabled "
    "save_fp16_model save_zero_checkpoint scheduler_name seq_parallel_group "
    "set_train_micro_batch_size sparse_allreduce timers torch_autocast_dtype training_data "
    "tput_timer unflatten wall_clock_breakdown zenflow_config zero_allgather_partitions "
    "zero_cpu_offload zero_optimization_partition_weights zero_sub_group_size "
)


def engine_of(stage: int = 0, model: Any = None, **config: Any) -> DeepSpeedEngine:
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 4}}
    return initialize(model or linear(), config=merged(SGD, zero, config))


def test_other_names_say_what_to_use() -> None:
    engine = engine_of()
    for name in OTHERS.split():
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=r"Fix: use \w+"):
            getattr(engine, name)
    with pytest.raises(AttributeError, match="Fix: use world_size"):
        engine.dp_world_size  # noqa: B018
    with pytest.raises(AttributeError, match="lists the names"):
        engine.no_such_name  # noqa: B018


def test_what_the_config_says() -> None:
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    engine = engine_of(2, steps_per_print=7, **batch)
    assert engine.get_batch_info() == (6, 2, 3)
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 2
    assert not engine_of().zero_optimization()
    assert engine.steps_per_print() == 7 and not engine.dynamic_loss_scale()
    assert engine_of(fp16={"enabled": True}).dynamic_loss_scale()
    assert not engine_of(fp16={"enabled": True, "loss_scale": 8}).dynamic_loss_scale()


@pytest.mark.parametrize("stage", [0, 3])
def test_another_train_batch_size_is_another_number_of_backwards(stage: int) -> None:
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    engine = engine_of(stage, gradient_clipping=0, **batch)
    before = engine.full_parameter("weight")
    engine.set_train_batch_size(2)
    assert engine.get_batch_info() == (2, 1, 2)
    for x, applied in ((1.0, False), (3.0, True)):
        engine.backward(engine(x * X)[:, 0].sum())
        if not applied:
            with pytest.raises(PhaseError, match="right after an update"):
                engine.set_train_batch_size(4)
        assert engine.step() is applied
    lr = engine.get_lr()[0]
    torch.testing.assert_close(before[0] - engine.full_parameter("weight")[0], lr * 2 * X[0])
    engine.set_train_batch_size(1)
    engine.backward(engine(X)[:, 0].sum())
    assert engine.step()
    for wrong in (0, 2.5, True):
        with pytest.raises(LayoutError, match="set_train_batch_size"):
            engine.set_train_batch_size(wrong)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="without a batch size"):
        engine_of().set_train_batch_size(4)


@pytest.mark.parametrize("stage", [0, 3])
def test_state_dicts_of_the_module(stage: int) -> None:
    model: Any = linear()
    model.bias.requires_grad_(False)
    engine = engine_of(stage, model)
    whole = engine.module_state_dict()
    assert whole.keys() == {"weight", "bias"} and whole["weight"].shape == (2, 3)
    assert engine.module_state_dict(exclude_frozen_parameters=True).keys() == {"weight"}
    engine.load_module_state_dict({"module": {name: x + 1 for name, x in whole.items()}})
    assert torch.equal(engine.module_state_dict()["weight"], whole["weight"] + 1)
    engine.load_module_state_dict(whole)
    assert torch.equal(engine.full_parameter("bias"), whole["bias"])
    with pytest.raises(LayoutError, match="custom_load_fn"):
        engine.load_module_state_dict(whole, custom_load_fn=print)
    path = dict(engine.module.named_parameters())
    assert deepspeed.safe_get_local_fp32_param(path["bias"]) is None
    assert deepspeed.safe_get_local_fp32_param(path["weight"]) is not None


def test_gradients_that_wait_are_reduced_and_loaders_are_made() -> None:
    engine = engine_of(2, train_micro_batch_size_per_gpu=2)
    with engine.no_sync():
        engine.backward(engine(X)[:, 0].sum())
    engine.allreduce_gradients(bucket_size=1)
    assert engine.full_gradient("weight")[0].tolist() == X[0].tolist()
    data = TensorDataset(torch.arange(5.0))
    rows = [x.tolist() for (x,) in engine.deepspeed_io(data, route="eval")]
    assert rows == [[0.0, 1.0], [2.0, 3.0], [4.0]]
    assert len(engine.deepspeed_io(data, batch_size=5)) == 1
    with pytest.raises(LayoutError, match="no batch size"):
        engine_of().deepspeed_io(data)


def test_the_optimizer_says_the_loss_scale() -> None:
    own = torch.optim.SGD
    engine = engine_of(fp16={"enabled": True, "initial_scale_power": 4})
    optimizer: Any = engine.optimizer
    assert isinstance(optimizer, own) and type(optimizer).__name__ == "SGD"
    assert optimizer.loss_scale == optimizer.cur_scale == optimizer.loss_scaler.loss_scale == 16.0
    assert optimizer.loss_scaler.cur_scale == 16.0 and optimizer.optimizer is optimizer
    with pytest.raises(AttributeError):
        optimizer.loss_scale = 2.0
    engine.close()
    assert type(optimizer) is own and not hasattr(optimizer, "loss_scale")
    assert engine_of().optimizer.loss_scale == 1.0


def test_a_schedule_says_the_momentum() -> None:
    schedule = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9]}}}
    made: Any = initialize(linear(), config={**adam, "scheduler": schedule})
    assert (
        made.lr_scheduler.get_mom() == made.get_mom() == [made.optimizer.param_groups[0]["betas"]]
    )


NAMES = ("ds_id", "ds_tensor", "ds_status", "ds_persist", "ds_numel", "ds_shape")


def test_parameters_of_stage_3_have_deepspeeds_names_and_others_have_not() -> None:
    def of_rank(rank: torch.Tensor) -> torch.Tensor:
        engine = engine_of(3)
        weight, bias = engine.module.parameters()
        shown: Any = weight
        assert (shown.ds_shape, shown.ds_numel, shown.ds_id) == (torch.Size([2, 3]), 6, 0)
        assert not shown.ds_persist and shown.ds_status is ZeroParamStatus.NOT_AVAILABLE
        small: Any = bias
        assert small.ds_persist and small.ds_status is ZeroParamStatus.AVAILABLE
        assert small.ds_id == 1
        for name in NAMES:
            with pytest.raises(AttributeError):
                setattr(weight, name, 1)
            assert not any(hasattr(p, name) for p in engine_of(2).module.parameters())
            plain = Engine(nn.Linear(3, 2), stage=3)
            assert not any(hasattr(p, name) for p in plain.module.parameters())
        part, whole = shown.ds_tensor, engine.full_parameter("weight").flatten()
        engine.close()
        assert not any(hasattr(p, "ds_id") for p in engine.module.parameters())
        start = 4 * int(rank)  # shards begin at multiples of 16 bytes
        assert part.tolist() == whole[start : start + 4].tolist()
        return rank

    fzero.simulate(of_rank, world_size=2)(torch.arange(2))


def test_zero_init_of_a_module_that_is_made() -> None:
    def of_rank(rank: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(int(rank))
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        Init(module=model, config_dict_or_path={"bf16": {"enabled": True}}, pin_memory=True)
        assert not any(type(p) is nn.Parameter for p in model.parameters())
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        engine = Engine(model, torch.optim.SGD, stage=3)
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        for path, p in plain.named_parameters():
            assert torch.equal(engine.state_dict()[path], p.detach().bfloat16())
        engine.close()
        return rank

    fzero.simulate(of_rank, world_size=2)(torch.arange(2))
    untouched = nn.Linear(2, 2)
    Init(module=untouched, dtype=torch.float16, enabled=False)
    assert untouched.weight.dtype is torch.float32
    with Init(dtype=torch.float64):
        assert nn.Linear(2, 2) is not None
    wrong: Any = 3
    for call in (lambda: Init(module=wrong), lambda: Init(remote_device="nvme")):
        with pytest.raises(LayoutError, match=r"zero\.Init got"):
            call()
