"""DeepSpeed's config as data: every key, its default in DeepSpeed, and what fzero does with it.

Keys are dotted paths; those of `zero_optimization` are in `_zero_keys`. Each line is read by
`_read`, and docs/deepspeed_config.md has them all.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from fzero.options import OPTIONS


class KeyUse(Enum):
    """What fzero does with a key."""

    OPTION = "sets"  # its value is that of the option `Key.says` of `Engine`
    READ = "read"  # `initialize` uses it as `Key.says` tells
    HARMLESS = "harmless"  # any value is accepted and has no effect, for the reason `Key.says`
    REFUSED = "refused"  # unless it has DeepSpeed's default; `Key.says` is the fix
    SECTION = "section"  # a section that must be off: `Key.default` is (switch, its off value)


class Key(NamedTuple):
    """One key of DeepSpeed's config."""

    path: str
    default: Any
    use: KeyUse
    says: str
    kind: str = ""  # of KINDS, for what is used


_OPTION_OF = {one.deepspeed.removeprefix("zero_optimization."): one for one in OPTIONS.values()}


def option(path: str, default: Any, kind: str) -> Key:
    """Return a key that sets an option of the engine; None leaves the engine's default."""
    return Key(path, default, KeyUse.OPTION, _OPTION_OF[path].name, kind)


def taken(path: str, default: Any, kind: str, what: str) -> Key:
    """Return a key that `initialize` reads itself."""
    return Key(path, default, KeyUse.READ, what, kind)


def harmless(path: str, default: Any, why: str) -> Key:
    """Return a key that may have any value."""
    return Key(path, default, KeyUse.HARMLESS, why)


def refused(path: str, default: Any, fix: str) -> Key:
    """Return a key that may only have DeepSpeed's default."""
    return Key(path, default, KeyUse.REFUSED, fix)


def section(path: str, switch: str | None, off: Any, fix: str) -> Key:
    """Return a section that must be off: its `switch` is left out or `off`; or it is empty."""
    return Key(path, (switch, off), KeyUse.SECTION, fix)


_LOG = "it prints, and nothing is printed here: use torch.profiler, engine.memory_report()"
_COMPILE = "leave it out, and call torch.compile on the model, or on parts of it"
_DATA_PARALLEL = "leave it out: there is no tensor or pipeline parallelism"
_IN_A_LOSS = "leave it out: a loss does it, by collectives along a named axis (docs/axes.md)"
_NO_ZERO = (
    "leave it out: it is no part of ZeRO; do it in the model, the data loader or the training loop"
)
_CHECKPOINTING = "leave it out, and use torch.utils.checkpoint in the model"

_OUTSIDE_OF_ZERO = (
    *("tensorboard", "wandb", "csv_monitor", "comet", "autotuning", "hybrid_engine", "eigenvalue"),
    *("data_efficiency", "curriculum_learning", "progressive_layer_drop", "quantize_training"),
)
_OUTSIDE_WITHOUT_SWITCH = ("compression_training", "weight_quantization", "sparse_attention")

TRAINING = (
    taken("train_batch_size", None, "count", "checked: micro-batch size x accumulation x ranks"),
    taken(
        "train_micro_batch_size_per_gpu", None, "count", "checked; of the loader of training_data"
    ),
    taken(
        "gradient_accumulation_steps", None, "count", "step() updates at every n-th call; default 1"
    ),
    taken(
        "managed_gradient_accumulation",
        True,
        "bool",
        "false: every step() updates, divided by the key above, or else by its backwards",
    ),
    option("gradient_clipping", 1.0, "norm"),
    taken("communication_data_type", None, "dtype", "compress: gradients=codecs.cast(dtype)"),
    taken("optimizer.type", None, "text", "a torch.optim optimizer, unless one is given"),
    taken("optimizer.params", None, "mapping", "its arguments"),
    taken("scheduler.type", None, "text", "a scheduler, unless one is given"),
    taken("scheduler.params", None, "mapping", "its arguments"),
    taken("dataloader_drop_last", False, "bool", "drop_last of training_data's loader"),
    harmless("steps_per_print", None, _LOG),
    harmless("wall_clock_breakdown", False, _LOG),
    harmless("memory_breakdown", False, _LOG),
    harmless("dump_state", False, _LOG),
    harmless("log_level", None, _LOG),
    harmless("timers", None, _LOG),
    harmless("optimizer.legacy_fusion", False, "it chooses between two kernels of DeepSpeed"),
    harmless("zero_allow_untested_optimizer", False, "any elementwise optimizer is taken"),
    harmless("zero_force_ds_cpu_optimizer", True, "there is no optimizer of DeepSpeed's to force"),
    harmless(
        "disable_allgather", False, "an option of the first DeepSpeed, which does nothing with it"
    ),
    harmless("disable_python_gc", False, "Python's collector is left to the program"),
    harmless("graph_harvesting", False, "it replays CUDA graphs: the numbers are the same"),
    harmless("vocabulary_size", None, "it warns of a size that is no multiple of 8"),
    harmless("seq_parallel_communication_data_type", "fp32", "a loss does it, along a named axis"),
    harmless("use_data_before_expert_parallelism", False, "a loss does it, along a named axis"),
    taken("prescale_gradients", False, "bool", "the next key counts"),
    taken(
        "gradient_predivide_factor",
        1.0,
        "factor",
        "gradient_predivide_factor, with prescale_gradients; without, as there, it does nothing",
    ),
    option("gradient_allreduce_op", "mean", "op"),
    refused("sparse_gradients", False, "leave it out: gradients are dense"),
)

PRECISION = (
    taken("fp16.enabled", False, "bool", "parameters to fp16, fp32 masters, a loss scale"),
    taken("fp16.loss_scale", 0.0, "number", "loss_scale; 0: it adapts itself"),
    taken("fp16.initial_scale_power", 16, "power", "init_scale = 2 to that"),
    taken(
        "fp16.loss_scale_window", 1000, "count", "growth_interval; DeepSpeed's first is one longer"
    ),
    taken("fp16.hysteresis", 2, "count", "hysteresis: filled up when the scale grows"),
    taken("fp16.min_loss_scale", 1.0, "number", "min_scale"),
    refused("fp16.auto_cast", False, "convert the inputs: engine(x.half())"),
    refused("fp16.consecutive_hysteresis", False, "leave it out: it fills up as the scale grows"),
    taken("fp16.fp16_master_weights_and_grads", False, "bool", "no fp32 masters, states in fp32"),
    harmless("fp16.fused_mode", True, "it chooses between two optimizers of DeepSpeed"),
    taken("bf16.enabled", False, "bool", "parameters to bf16, fp32 masters"),
    taken("bf16.bf16_master_weights_and_grads", False, "bool", "no fp32 masters"),
    taken("bf16.bf16_optimizer_states", False, "bool", "without masters: states in bf16, not fp32"),
    harmless(
        "bf16.immediate_grad_update", False, "it says when bf16 gradients are added to fp32 ones"
    ),
    taken("bf16.check_grad_overflow", True, "bool", "an overflow skips the update, at stage 3 too"),
    taken("torch_autocast.enabled", False, "bool", "autocast"),
    taken("torch_autocast.dtype", None, "dtype", "its dtype; default bf16; fp16 scales losses"),
    taken(
        "torch_autocast.lower_precision_safe_modules", None, "names", "default Linear, Conv1d to 3d"
    ),
    taken("data_types.grad_accum_dtype", None, "dtype", "accumulate_dtype; default the model's"),
    taken("data_types.param_dtype", None, "dtype", "checked: it must agree with bf16, fp16"),
    taken("data_types.buffer_dtype", None, "dtype", "buffers are converted"),
    refused(
        "data_types.keep_in_fp32_modules",
        "auto",
        "leave it out: buffers keep their dtype, unless data_types.buffer_dtype says otherwise",
    ),
    section("amp", "enabled", False, "use torch_autocast, or bf16.enabled"),
)

AROUND = (
    harmless("checkpoint.tag_validation", "WARN", "ranks that save other tags raise, always"),
    harmless("checkpoint.parallel_write", None, "every rank writes its part, always"),
    refused("checkpoint.load_universal", False, "leave it out, and use fzero.checkpoint"),
    refused("checkpoint.use_node_local_storage", False, "save to a file system of all ranks"),
    refused("activation_checkpointing.partition_activations", False, _CHECKPOINTING),
    refused("activation_checkpointing.cpu_checkpointing", False, _CHECKPOINTING),
    refused("activation_checkpointing.contiguous_memory_optimization", False, _CHECKPOINTING),
    harmless("activation_checkpointing.number_checkpoints", None, "of the key before"),
    harmless("activation_checkpointing.synchronize_checkpoint_boundary", False, _LOG),
    harmless("activation_checkpointing.profile", False, _LOG),
    harmless("aio", None, "it tunes DeepSpeed's reader of NVMe files"),
    refused("sequence_parallel_size", 1, _IN_A_LOSS),
    section("flops_profiler", "enabled", False, "leave it out, and use torch.profiler"),
    section("comms_logger", "enabled", False, "leave it out, and use fzero.count_collectives"),
    section("elasticity", "enabled", False, "use fzero.checkpoint: it loads on any ranks"),
    section("nebula", "enabled", False, "use fzero.checkpoint.save_async"),
    section("datastates_ckpt", None, None, "use fzero.checkpoint.save_async"),
    refused("compile.deepcompile", False, _COMPILE),
    refused("compile.enabled", False, _COMPILE),
    section("pipeline", None, None, _DATA_PARALLEL),
    section("tensor_parallel", "autotp_size", 0, _DATA_PARALLEL),
    section("expert_parallel", "enabled", False, _IN_A_LOSS),
    *(section(path, "enabled", False, _NO_ZERO) for path in _OUTSIDE_OF_ZERO),
    *(section(path, None, None, _NO_ZERO) for path in _OUTSIDE_WITHOUT_SWITCH),
)
