"""The keys of `zero_optimization`, the older names of keys, and all keys by path."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from fzero.integrations.deepspeed._keys import (
    AROUND,
    PRECISION,
    TRAINING,
    Key,
    harmless,
    option,
    refused,
    section,
    taken,
)

MOE_CLASSES = tuple(
    f"transformers.models.{name}"
    for name in (
        "mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
)
"""DeepSpeed's default leaf modules; here those of them that the model has."""

_QUANTIZED = "leave it out: collectives carry the dtype of communication_data_type"
_GROUPS = "leave it out, and pass initialize(mesh=...) for the ranks to shard over"
_OWN = "how DeepSpeed does it: the numbers are the same"
_PINNED = "host memory is always pinned where there is a GPU"
_STREAMED = "units come and go one by one, in memory that the sizes of units give"

ZERO = tuple(
    key._replace(path="zero_optimization." + key.path)
    for key in (
        taken("stage", 0, "stage", "stage"),
        option("contiguous_gradients", True, "bool"),
        option("overlap_comm", None, "bool"),
        taken(
            "reduce_bucket_size",
            500_000_000,
            "numel",
            "bucket_bytes: the smaller of this and the next",
        ),
        taken(
            "allgather_bucket_size",
            500_000_000,
            "numel",
            "bucket_bytes: the smaller of this and the one before",
        ),
        option("stage3_prefetch_bucket_size", 50_000_000, "numel"),
        option("stage3_param_persistence_threshold", 100_000, "numel"),
        taken(
            "stage3_max_live_parameters",
            1_000_000_000,
            "numel",
            "reshard_after_forward: false if the model fits into this",
        ),
        taken(
            "stage3_max_reuse_distance",
            1_000_000_000,
            "numel",
            "the same, if twice the model fits into this",
        ),
        taken("stage3_module_granularity_threshold", 0, "numel", "leaf_modules"),
        taken("leaf_module.classes", None, "names", "leaf_modules; its default is above"),
        taken("leaf_module.names", None, "names", "leaf_modules"),
        taken("leaf_module.name_suffixes", None, "names", "leaf_modules"),
        harmless("sub_group_size", 1_000_000_000, "the optimizer steps all of a shard at once"),
        harmless("reduce_scatter", True, "stages 1 to 3 always scatter"),
        harmless("use_multi_rank_bucket_allreduce", True, _OWN),
        harmless("allgather_partitions", True, _OWN),
        harmless("round_robin_gradients", False, _OWN),
        harmless("stage3_use_all_reduce_for_fetch_params", False, _OWN),
        harmless("stage3_allgather_sequential", False, _OWN),
        harmless("stage3_partition_stream_chunk_size", 0, "sharded_init goes unit by unit"),
        harmless("memory_efficient_linear", True, "autograd saves a placeholder for a weight"),
        harmless("override_module_apply", True, _OWN),
        harmless("pipeline_loading_checkpoint", False, _OWN),
        harmless(
            "log_trace_cache_warnings",
            False,
            "units in another order than before are right, and slower",
        ),
        harmless("compute_grad_norm", True, "the norm is computed where gradients are clipped"),
        harmless("parameter_alignment", False, "it says where in memory parameters begin"),
        harmless("enable_sanity_checks", False, "ranks always check"),
        harmless("elastic_checkpoint", False, "fzero.checkpoint loads on any number of ranks"),
        harmless("save_muon_momentum_buffer_in_memory", False, "there is no offloaded Muon"),
        harmless(
            "stage3_gather_16bit_weights_on_model_save",
            False,
            "engine.full_state_dict() always gathers",
        ),
        refused("load_from_fp32_weights", True, "leave it out: masters are loaded as saved"),
        refused("legacy_stage1", False, "leave it out: there is one stage 1"),
        refused(
            "ignore_unused_parameters",
            True,
            "leave it out: no gradient counts as one of zero",
        ),
        refused(
            "stage3_model_persistence_threshold",
            sys.maxsize,
            "leave it out: stage3_param_persistence_threshold bounds what persists",
        ),
        refused("zero_hpz_partition_size", 1, _GROUPS),
        refused("mics_shard_size", -1, _GROUPS),
        refused("mics_hierarchical_params_gather", False, _GROUPS),
        taken("zero_quantized_weights", False, "bool", "compress: parameters=codecs.int8()"),
        refused("zero_quantized_nontrainable_weights", False, _QUANTIZED),
        taken("zero_quantized_gradients", False, "bool", "compress: gradients=codecs.int8()"),
        section("zeropp_loco_param", None, None, _QUANTIZED),
        section("zenflow", None, None, "leave it out: an update uses all gradients at once"),
        taken("offload_param.device", None, "place", "offload: params; stage 3"),
        taken("offload_param.nvme_path", None, "text", "offload: folder, for nvme"),
        harmless("offload_param.pin_memory", True, _PINNED),
        harmless("offload_param.buffer_count", 5, _STREAMED),
        harmless("offload_param.buffer_size", 100_000_000, _STREAMED),
        harmless("offload_param.max_in_cpu", 1_000_000_000, _STREAMED),
        taken("offload_optimizer.device", None, "place", "offload: optimizer and gradients"),
        taken("offload_optimizer.nvme_path", None, "text", "offload: folder, for nvme"),
        harmless("offload_optimizer.pin_memory", True, _PINNED),
        harmless("offload_optimizer.buffer_count", 4, _STREAMED),
        harmless("offload_optimizer.pipeline_read", False, _STREAMED),
        harmless("offload_optimizer.pipeline_write", False, _STREAMED),
        harmless("offload_optimizer.fast_init", False, _OWN),
        refused("offload_optimizer.ratio", 1.0, "leave it out: all of the states are offloaded"),
        harmless("offload_optimizer.super_offload", False, _OWN),
        harmless("offload_optimizer.convert_grad_on_cpu", True, _OWN),
        harmless("offload_optimizer.cpuadam_cores_perc", 0.8, "the device steps, unit by unit"),
        harmless("cpu_offload_use_pin_memory", None, _PINNED),
    )
)

KEYS: Mapping[str, Key] = {key.path: key for key in (*TRAINING, *PRECISION, *ZERO, *AROUND)}
"""Every key, by path."""


class Renamed(NamedTuple):
    """The current name of a key, for an older or another one."""

    path: str
    values: Mapping[Any, Any] | None = None  # {old value: current value}; None: the same


_DEVICES = {True: "cpu", False: "none"}

RENAMED = {
    "bfloat16": Renamed("bf16"),
    "seq_parallel_comm_data_type": Renamed("seq_parallel_communication_data_type"),
    "allgather_size": Renamed("zero_optimization.allgather_bucket_size"),
    "zero_optimization.cpu_offload": Renamed(
        "zero_optimization.offload_optimizer.device", _DEVICES
    ),
    "zero_optimization.cpu_offload_param": Renamed(
        "zero_optimization.offload_param.device", _DEVICES
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Renamed(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{
        path.replace("stage3_", ""): Renamed(path)  # the names of DeepSpeed's Python fields
        for path in KEYS
        if path.startswith("zero_optimization.stage3_")
    },
}
"""Other names of keys that DeepSpeed accepts."""

NEAR = {
    "max_grad_norm": "gradient_clipping",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "lr_scheduler": "scheduler",
}
"""{name in other libraries: the key to suggest in the error}."""

SWITCHES = {
    "compile": ("deepcompile", False),
    "fp16": ("enabled", False),
    "bf16": ("enabled", False),
    "torch_autocast": ("enabled", False),
    "zero_optimization.offload_param": ("device", "none"),
    "zero_optimization.offload_optimizer": ("device", "none"),
}
"""{section: (key, value)}: with this value of its key a section is off, and not read further."""
