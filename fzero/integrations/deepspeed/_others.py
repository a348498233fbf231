"""What stands for the names of DeepSpeed's engine that fzero's does not have: one table."""

from __future__ import annotations

import re

_CONFIG = (
    "engine.options and engine.state.setup; docs/deepspeed_config.md has the option of each key"
)
_PRECISION = "fp16_enabled(), bfloat16_enabled(), engine.options.autocast, engine.state.scale"
_RANKS = "world_size, global_rank, and engine.axis, the ranks of the engine"
_SAVE = "save_checkpoint(), load_checkpoint(), or fzero.checkpoint.save and load"
_TIME = "torch.profiler"
_REDUCE = "nothing: a backward reduces its gradients; allreduce_gradients() what a window left"
_NO_PARTS = "nothing: fzero shards data-parallel training alone; mesh=(R, S) has two dims of ranks"
_COMPILE = "torch.compile(model) before initialize, or fzero.compile(step) of a functional step"
_DATA = "a loader and a sampler of your own: engine(batch) takes what they give"

INSTEAD: tuple[tuple[str, str], ...] = (
    (r"zero_optimization_partition_\w+", "zero_optimization_stage()"),
    (r"zero_save\w*|zero_load\w*|zero_elastic_checkpoint", _SAVE),
    (r"zero_\w+|super_offload|swap_tensor_config|aio_config|zenflow_config", _CONFIG),
    (r"cpuadam_cores_perc|use_node_local_storage|dont_change_device|use_ds_comm", _CONFIG),
    (r"gradient_predivide_factor|postscale_gradients|gradient_average", _CONFIG),
    (r"managed_gradient_accumulation|scale_wrt_gas|dataloader_drop_last", _CONFIG),
    (r"optimized_linear_\w+|param_names|config|dump_state|get_type|log_level", _CONFIG),
    (r"fp16_\w+|bf16_\w+|bfloat16_\w+|torch_autocast_\w+|amp_\w+", _PRECISION),
    (r"communication_data_type|get_data_types|\w*dynamic_(scale|loss_scale_args)", _PRECISION),
    (r"clip_fp32_gradients", "max_norm= of the config's gradient_clipping: step() clips"),
    (r"set_train_micro_batch_size", "batches of another size from your loader"),
    (r"save_fp16_model", "save_16bit_model()"),
    (r"load_universal_checkpoint", "fzero.checkpoint.load_universal(folder, engine)"),
    (r"(save|load)\w*checkpoint|checkpoint_\w+|loaded_checkpoint_\w+", _SAVE),
    (r"load_moe_state_dict", "load_module_state_dict(): all experts are in one state dict"),
    (r"optimizer_(name|legacy_fusion)", "type(engine.optimizer).__name__"),
    (r"optimizer_params|get_optimizer_configuration", "engine.optimizer.param_groups"),
    (r"(basic|client)_optimizer", "engine.optimizer"),
    (r"scheduler_\w+|client_lr_scheduler", "engine.lr_scheduler"),
    (r"training_data|collate_fn|first_dataloader_check", "engine.training_dataloader"),
    (r"is_(map|iterable)_style_dataset", "isinstance(data, torch.utils.data.IterableDataset)"),
    (r"data_(efficiency|sampling)_\w+|curriculum_\w+|random_ltd_\w+|set_(custom|data)_\w+", _DATA),
    (r"dp_world_size", "world_size"),
    (r"get_data_parallel_rank", "global_rank"),
    (r"data_parallel_group|dist_backend|mesh_device|seq_data_parallel_group", _RANKS),
    (r"is_first_weights_partition_group", "global_rank == 0"),
    (r"mpu|(mp|seq_dp)_world_size|\w*(tensor|model|sequence|pipeline|seq)_parallel\w*", _NO_PARTS),
    (r"autotp_size|get_auto(sp|tp)_backend|uses_parallelization_pass_only", _NO_PARTS),
    (r"pipeline_parallelism", _NO_PARTS),
    (
        r"expert_\w+|\w*moe_layers|num_experts|gate_modules",
        "the experts of your model",
    ),
    (r"\w*all_to_all_group|all_gather_scalar", "torch.distributed, or fzero.psum in a step"),
    (r"sparse_\w+", "nothing: embeddings have dense gradients here"),
    (r"\w*allreduce\w*|(un)?flatten", _REDUCE),
    (r"inside_no_sync_ctxt", "engine.state.window.is_open"),
    (r"\w*compile\w*|register_compile_pass|get_deepspeed\w*", _COMPILE),
    (r"flops\w*", "fzero.plan(model, batch, ...) for FLOPs; torch.profiler for times"),
    (r"autotuning_\w+|update_interval", "fzero.plan.compare(...), which runs nothing"),
    (r"memory_breakdown|collect_python_gc", "memory_report()"),
    (r"wall_clock_\w+|get_wall_clock_timers|\w*timers?(_cache)?|\w*_duration", _TIME),
    (r"print_forward_breakdown|module_forward_\w+hook", _TIME),
    (r"monitor|summary_events|losses", "a logger of your own: backward() returns the loss"),
    (r"is_sanity_checks_enabled|warn_unscaled_loss", "Engine(check_finite=True)"),
)
"""(pattern of names, what to use): the first that fits a whole name counts."""


def instead_of(name: str) -> str | None:
    """Return what to use in the place of a name of DeepSpeed's engine; None for no such name.

    Example:
        >>> instead_of("dp_world_size"), instead_of("generate")
        ('world_size', None)
    """
    return next((use for pattern, use in INSTEAD if re.fullmatch(pattern, name)), None)
