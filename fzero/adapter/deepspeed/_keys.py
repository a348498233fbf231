"""DeepSpeed's config as data: the keys that are used, those that are fixed, those that are refused.

Keys are dotted paths. None (JSON null) stands for a key that is left out.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Used(NamedTuple):
    """What a key is when it is left out, and what may be given."""

    default: Any
    kind: str  # of KINDS in _read.py


class Only(NamedTuple):
    """The one value that says what fzero does anyway, and what to do instead of another one."""

    value: Any
    fix: str


MOE_CLASSES = tuple(
    f"transformers.models.{name}"
    for name in (
        "mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
)
"""DeepSpeed's default leaf modules; here those of them that the model has."""

USED = {
    "train_batch_size": Used(None, "count"),
    "train_micro_batch_size_per_gpu": Used(None, "count"),
    "gradient_accumulation_steps": Used(None, "count"),
    "managed_gradient_accumulation": Used(True, "bool"),
    "gradient_clipping": Used(1.0, "number"),
    "communication_data_type": Used(None, "dtype"),
    "data_types.grad_accum_dtype": Used(None, "dtype"),
    "data_types.param_dtype": Used(None, "dtype"),
    "data_types.buffer_dtype": Used(None, "dtype"),
    "bf16.enabled": Used(False, "bool"),
    "bf16.bf16_master_weights_and_grads": Used(False, "bool"),
    "bf16.bf16_optimizer_states": Used(False, "bool"),
    "fp16.enabled": Used(False, "bool"),
    "fp16.loss_scale": Used(0.0, "number"),
    "fp16.initial_scale_power": Used(16, "whole"),
    "fp16.loss_scale_window": Used(1000, "count"),
    "fp16.hysteresis": Used(2, "count"),
    "fp16.min_loss_scale": Used(1.0, "number"),
    "torch_autocast.enabled": Used(False, "bool"),
    "torch_autocast.dtype": Used(None, "dtype"),
    "torch_autocast.lower_precision_safe_modules": Used(None, "names"),
    "optimizer.type": Used(None, "text"),
    "optimizer.params": Used(None, "mapping"),
    "zero_optimization.stage": Used(0, "stage"),
    "zero_optimization.contiguous_gradients": Used(True, "bool"),
    "zero_optimization.overlap_comm": Used(None, "bool"),
    "zero_optimization.reduce_bucket_size": Used(500_000_000, "some"),
    "zero_optimization.allgather_bucket_size": Used(500_000_000, "some"),
    "zero_optimization.stage3_prefetch_bucket_size": Used(50_000_000, "numel"),
    "zero_optimization.stage3_param_persistence_threshold": Used(100_000, "numel"),
    "zero_optimization.stage3_max_live_parameters": Used(1_000_000_000, "numel"),
    "zero_optimization.stage3_max_reuse_distance": Used(1_000_000_000, "numel"),
    "zero_optimization.stage3_module_granularity_threshold": Used(0, "numel"),
    "zero_optimization.leaf_module.classes": Used(None, "names"),
    "zero_optimization.leaf_module.names": Used(None, "names"),
    "zero_optimization.leaf_module.name_suffixes": Used(None, "names"),
}
"""The keys that set something, with DeepSpeed's defaults."""

_OUT = "leave it out: it would change nothing here"
_OFFLOAD = "leave it out: states and parameters stay on the device; take a higher stage, or ranks"
_AUTOCAST = "use torch_autocast, or bf16.enabled"
_QUANTIZED = "leave it out: collectives carry the dtype of communication_data_type"
_MEAN = "leave it out: gradients are summed over ranks and then divided by their number"
_GROUPS = "leave it out, and pass initialize(mesh=(replicas, shards)), or a DeviceMesh"

ONLY = {
    "fp16.auto_cast": Only(False, "convert the inputs: engine(x.half())"),
    "fp16.consecutive_hysteresis": Only(
        False, "leave it out: hysteresis is filled up when the scale grows"
    ),
    "fp16.fp16_master_weights_and_grads": Only(False, "leave it out: masters are in fp32"),
    "amp.enabled": Only(False, _AUTOCAST),
    "bf16.immediate_grad_update": Only(False, _OUT),
    "bf16.check_grad_overflow": Only(
        False, "leave it out, and look at engine.global_grad_norm before engine.step()"
    ),
    "prescale_gradients": Only(False, _MEAN),
    "gradient_predivide_factor": Only(1, _MEAN),
    "gradient_allreduce_op": Only(
        "mean", "multiply the loss by the number of ranks for the sum over them"
    ),
    "sparse_gradients": Only(False, "leave it out: gradients are dense"),
    "zero_allow_untested_optimizer": Only(True, "leave it out: any elementwise optimizer goes"),
    "zero_force_ds_cpu_optimizer": Only(False, _OUT),
    "graph_harvesting": Only(False, _OUT),
    "disable_allgather": Only(False, _OUT),
    "wall_clock_breakdown": Only(False, "leave it out, and use torch.profiler"),
    "memory_breakdown": Only(False, "leave it out, and print engine.memory_report()"),
    "dump_state": Only(False, "leave it out, and print engine.state"),
    "zero_optimization.reduce_scatter": Only(True, "leave it out: stages 1 to 3 scatter"),
    "zero_optimization.use_multi_rank_bucket_allreduce": Only(False, _OUT),
    "zero_optimization.allgather_partitions": Only(True, _OUT),
    "zero_optimization.elastic_checkpoint": Only(False, "use fzero.checkpoint"),
    "zero_optimization.legacy_stage1": Only(False, _OUT),
    "zero_optimization.ignore_unused_parameters": Only(
        True, "leave it out: a parameter without gradient counts as one with a gradient of zero"
    ),
    "zero_optimization.round_robin_gradients": Only(False, _OUT),
    "zero_optimization.offload_param.device": Only("none", _OFFLOAD),
    "zero_optimization.offload_optimizer.device": Only("none", _OFFLOAD),
    "zero_optimization.cpu_offload": Only(False, _OFFLOAD),
    "zero_optimization.cpu_offload_param": Only(False, _OFFLOAD),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Only(
        False, "leave it out, and save engine.full_state_dict()"
    ),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": Only(False, _OUT),
    "zero_optimization.stage3_allgather_sequential": Only(False, _OUT),
    "zero_optimization.zero_hpz_partition_size": Only(1, _GROUPS),
    "zero_optimization.mics_shard_size": Only(-1, _GROUPS),
    "zero_optimization.mics_hierarchical_params_gather": Only(False, _GROUPS),
    "zero_optimization.zero_quantized_weights": Only(False, _QUANTIZED),
    "zero_optimization.zero_quantized_nontrainable_weights": Only(False, _QUANTIZED),
    "zero_optimization.zero_quantized_gradients": Only(False, _QUANTIZED),
    "zero_optimization.memory_efficient_linear": Only(
        False, "leave it out: autograd saves a placeholder in the place of a weight"
    ),
    "zero_optimization.stage3_model_persistence_threshold": Only(
        sys.maxsize, "leave it out: what persists is bounded by stage3_param_persistence_threshold"
    ),
    "zero_optimization.pipeline_loading_checkpoint": Only(False, _OUT),
    "zero_optimization.log_trace_cache_warnings": Only(
        False, "leave it out: a step in another order is right, slower, and not warned about"
    ),
    "zero_optimization.enable_sanity_checks": Only(True, "leave it out: ranks always check"),
}
"""The keys that may only say what fzero does anyway. Another value is refused."""

REFUSED = {
    "steps_per_print": _OUT,
    "scheduler": "pass initialize(lr_scheduler=...): a torch scheduler, or optimizer -> scheduler",
    "zero_optimization.sub_group_size": _OUT,
    "zero_optimization.load_from_fp32_weights": "leave it out, and use fzero.checkpoint",
    "zero_optimization.override_module_apply": _OUT,
    "zero_optimization.zenflow": _OFFLOAD,
    "zero_optimization.zeropp_loco_param": _QUANTIZED,
    "zero_optimization.save_muon_momentum_buffer_in_memory": _OUT,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "leave it out, and save engine.full_state_dict()"
    ),
    "seq_parallel_communication_data_type": "leave it out: there is no sequence parallelism",
    "amp": _AUTOCAST,
    "activation_checkpointing": "use torch.utils.checkpoint in the model",
    "checkpoint": "leave it out, and use fzero.checkpoint",
    "aio": _OFFLOAD,
    "flops_profiler": "leave it out, and use torch.profiler",
    "comms_logger": "leave it out, and use torch.profiler",
    "tensorboard": "leave it out, and log in the training loop",
    "wandb": "leave it out, and log in the training loop",
    "csv_monitor": "leave it out, and log in the training loop",
    "comet": "leave it out, and log in the training loop",
    "pipeline": "leave it out: there is data parallelism only",
    "tensor_parallel": "leave it out: there is data parallelism only",
    "autotuning": "leave it out",
    "elasticity": "leave it out: fzero.checkpoint restores onto other numbers of ranks",
    "compile": "call torch.compile on parts of the model",
    "data_efficiency": "do it in the data loader",
    "curriculum_learning": "do it in the data loader",
    "progressive_layer_drop": "do it in the model",
    "compression_training": "do it in the model",
    "sparse_attention": "do it in the model",
    "eigenvalue": "leave it out",
    "quantize_training": "do it in the model",
}
"""The keys that are refused whatever they say, and all below them, with what to do instead."""

OFF = {
    **{
        name: ("enabled", False)
        for name in (
            *("fp16", "amp", "torch_autocast", "flops_profiler", "comms_logger", "tensorboard"),
            *("wandb", "csv_monitor", "comet", "autotuning", "elasticity", "data_efficiency"),
            *("curriculum_learning", "progressive_layer_drop", "eigenvalue"),
        )
    },
    "zero_optimization.offload_param": ("device", "none"),
    "zero_optimization.offload_optimizer": ("device", "none"),
}
"""Sections that are off when this key has this value."""

ALIASES = {
    "bfloat16": "bf16",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "max_grad_norm": "gradient_clipping",
    "allgather_size": "zero_optimization.allgather_bucket_size",
}
"""Older names, and those of other libraries."""

OPTIMIZER_PARAMS = {
    "max_grad_norm": "write gradient_clipping at the top of the config",
    "set_grad_none": "leave it out: gradients are never kept as zeros",
    "freeze_step": "use Adam or AdamW: there is no compressed communication",
    "cuda_aware": "use Adam or AdamW: there is no compressed communication",
    "comm_backend_name": "use Adam or AdamW: there is no compressed communication",
}
"""Parameters of DeepSpeed's own optimizers, refused by name."""
