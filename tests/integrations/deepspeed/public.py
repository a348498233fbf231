"""Configs as public repositories have them, and what becomes of each.

They are written for these tests in the style of what is named beside them, with its usual keys.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.deepspeed.configs import merged

FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 500,
    "initial_scale_power": 5,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
AUTO_FP16 = FP16 | {"enabled": "auto"}
AUTO_ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
AUTO_WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
AUTO_BATCH = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
AUTO_ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
NOWHERE = {"device": "none", "pin_memory": True}
CPU = {"device": "cpu", "pin_memory": True}
ADAM = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8}}
NUMBERS = {
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer.params.lr": 0.01,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_num_steps": 10,
}

TRAINER_ZERO3 = {
    "fp16": AUTO_FP16,
    "bf16": {"enabled": "auto"},
    "optimizer": AUTO_ADAMW,
    "scheduler": AUTO_WARMUP,
    "zero_optimization": AUTO_ZERO3 | {"offload_optimizer": NOWHERE, "offload_param": NOWHERE},
    **AUTO_BATCH,
}
ONLY_AUTO = {
    "zero_allow_untested_optimizer": True,
    "fp16": AUTO_FP16,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
CHAT = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    },
    "fp16": {"enabled": True, "loss_scale_window": 100},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {"enabled": False, "inference_tp_size": 1, "max_out_tokens": 512},
    "tensorboard": {"enabled": False, "output_path": "logs", "job_name": "step1"},
}
MEGATRON = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 1,
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": FP16,
    "bf16": {"enabled": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "wall_clock_breakdown": True,
}
CIFAR = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": merged({"optimizer": ADAM})["optimizer"] | {"legacy_fusion": False},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "last_batch_iteration": -1,
            "warmup_min_lr": 0,
            "warmup_max_lr": 0.01,
            "warmup_num_steps": 0,
        },
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": False},
    "fp16": FP16 | {"enabled": False, "fp16_master_weights_and_grads": False},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 0,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
}
CHECKPOINTING = {
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
    "number_checkpoints": False,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}
VISION = {
    "zero_allow_untested_optimizer": True,
    "optimizer": ADAM,
    "zero_optimization": {"stage": 2, "contiguous_gradients": 1, "overlap_comm": 0},
    "fp16": FP16 | {"initial_scale_power": 16, "fused_mode": True},
    "train_micro_batch_size_per_gpu": 8,
    "activation_checkpointing": CHECKPOINTING,
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1},
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False},
}
OLD = {
    "train_batch_size": 8,
    "zero_optimization": True,
    "allgather_size": 500000000,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "disable_allgather": True,
    "bfloat16": {"enabled": True},
    "amp": {"enabled": False, "opt_level": "O1"},
    "vocabulary_size": 30522,
}
AUTOCAST = {
    "train_micro_batch_size_per_gpu": 1,
    "torch_autocast": {
        "enabled": True,
        "dtype": "bfloat16",
        "lower_precision_safe_modules": ["torch.nn.Linear"],
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "param_persistence_threshold": 0},
    "checkpoint": {"tag_validation": "Ignore", "load_universal": False},
}
CYCLE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": ADAM,
    "scheduler": {
        "type": "OneCycle",
        "params": {
            "cycle_first_step_size": 10,
            "cycle_first_stair_count": 5,
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "decay_lr_rate": 1e-3,
            "decay_step_size": 10,
            "cycle_min_mom": 0.85,
            "cycle_max_mom": 0.99,
        },
    },
    "zero_optimization": {"stage": 1, "elastic_checkpoint": True},
}

FOLLOWED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # config, arguments of initialize, (stage, steps, max_norm, lr of the first update, dtype)
    "Hugging Face Trainer, ZeRO-3, all auto": (
        TRAINER_ZERO3,
        {"auto": NUMBERS},
        {"stage": 3, "steps": 2, "norm": 0.5, "lr": 0.0},
    ),
    "Hugging Face Trainer, ZeRO-3 with offload": (
        TRAINER_ZERO3
        | {"zero_optimization": AUTO_ZERO3 | {"offload_optimizer": CPU, "offload_param": CPU}},
        {"auto": NUMBERS},
        {"stage": 3, "steps": 2, "norm": 0.5, "lr": 0.0},
    ),
    "accelerate, optimizer and scheduler of the user's": (
        TRAINER_ZERO3,
        {
            "auto": {key: NUMBERS[key] for key in list(NUMBERS)[:2]},
            "optimizer": lambda ps: torch.optim.AdamW(ps, lr=0.25),
            "lr_scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda _: 1.0),
        },
        {"stage": 3, "steps": 2, "norm": 0.5, "lr": 0.25},
    ),
    "LLaMA-Factory, ZeRO-2, no optimizer": (
        ONLY_AUTO,
        {"optimizer": torch.optim.AdamW},
        {"stage": 2, "steps": 1, "norm": 1.0, "lr": 1e-3},
    ),
    "DeepSpeed-Chat": (
        CHAT,
        {"optimizer": torch.optim.AdamW},
        {"stage": 3, "steps": 2, "norm": 1.0, "lr": 1e-3, "dtype": torch.float16},
    ),
    "Megatron-DeepSpeed": (
        MEGATRON,
        {"optimizer": torch.optim.AdamW},
        {"stage": 1, "steps": 4, "norm": 1.0, "lr": 1e-3, "dtype": torch.float16},
    ),
    "the CIFAR tutorial": (CIFAR, {}, {"stage": 0, "steps": 1, "norm": 1.0, "lr": 0.0}),
    "a vision model with every section": (
        VISION,
        {},
        {"stage": 2, "steps": 1, "norm": 1.0, "lr": 0.01, "dtype": torch.float16},
    ),
    "2020": (OLD, {}, {"stage": 1, "steps": 1, "norm": 1.0, "lr": 0.1, "dtype": torch.bfloat16}),
    "torch_autocast": (AUTOCAST, {}, {"stage": 3, "steps": 1, "norm": 1.0, "lr": 1e-3}),
    "buckets of no elements, and a dtype by the name that DeepSpeed had": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "communication_data_type": "bfp16",
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 0},
        },
        {"optimizer": torch.optim.AdamW},
        {"stage": 2, "steps": 1, "norm": 1.0, "lr": 1e-3, "dtype": torch.bfloat16},
    ),
    "OneCycle": (CYCLE, {}, {"stage": 1, "steps": 1, "norm": 1.0, "lr": 1e-4}),
}

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "the Trainer's, without its numbers": (
        TRAINER_ZERO3,
        [
            *("gradient_accumulation_steps", "gradient_clipping", "optimizer.params.lr"),
            *("optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay"),
            "scheduler.params.warmup_num_steps",
        ],
    ),
    "ZeRO++": (
        {
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 8,
                "zero_quantized_gradients": True,
            }
        },
        [
            "zero_optimization.zero_hpz_partition_size",
        ],
    ),
    "BERT of 2020": (
        {
            "train_batch_size": 4096,
            "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "max_coeff": 0.3}},
            "prescale_gradients": True,
            "zero_optimization": {"stage": 1, "cpu_offload": True},
            "sparse_attention": {"mode": "fixed", "block": 16},
            "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"},
        },
        [
            *("curriculum_learning.enabled", "optimizer.type"),
            "sparse_attention",
        ],
    ),
    "a scheduler inside of the optimizer, and a comment": (
        {
            "_comment": "see the docs",
            "fp16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}, "scheduler": AUTO_WARMUP},
        },
        ["_comment", "optimizer.scheduler"],
    ),
}
