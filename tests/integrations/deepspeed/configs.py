"""Configs and models for the tests of initialize()."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.adapter.plain import LR

SGD = {"optimizer": {"type": "SGD", "params": {"lr": LR}}}


def nested(path: str, value: Any) -> dict[str, Any]:
    """`a.b` and 1 -> {"a": {"b": 1}}."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def merged(*configs: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for config in configs:
        for key, value in config.items():
            both = isinstance(value, dict) and isinstance(made.get(key), dict)
            made[key] = merged(made[key], value) if both else value
    return made


def batch(train: int | None, micro: int | None, steps: int | None) -> dict[str, Any]:
    return {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(3, 2, dtype=dtype)
