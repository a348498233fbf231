"""Values of "auto", which Hugging Face's Trainer puts in before DeepSpeed reads a config.

known from the model        fp16.enabled, bf16.enabled: whether its parameters have that dtype;
                            bucket sizes and the persistence threshold: from
                            model.config.hidden_size, as the Trainer has them
known from other keys       of the batch sizes two give the third; warmup_max_lr is the
                            optimizer's lr, and warmup_min_lr 0
changes no number           what else is in zero_optimization: as if it was left out
known to the user only      refused: give initialize(auto={key: value}), or write the value
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fzero.integrations.deepspeed._keys import KeyUse
from fzero.integrations.deepspeed._read import Problem, Reading
from fzero.integrations.deepspeed._zero_keys import KEYS

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")
_DTYPES = {"fp16.enabled": torch.float16, "bf16.enabled": torch.bfloat16}
_BY_HIDDEN_SIZE = {
    "zero_optimization.reduce_bucket_size": lambda size: size * size,
    "zero_optimization.stage3_prefetch_bucket_size": lambda size: size * size * 9 // 10,
    "zero_optimization.stage3_param_persistence_threshold": lambda size: 10 * size,
}
_FLOOR, _PEAK = "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr"


def with_autos(
    reading: Reading, model: nn.Module, *, skipped: tuple[str, ...] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of the config with each "auto" resolved, and a problem for each other one.

    skipped: sections whose "auto" values are ignored.

    Example:
        >>> auto = Reading(autos=["bf16.enabled", "gradient_clipping"])
        >>> given, problems = with_autos(auto, nn.Linear(2, 2, dtype=torch.bfloat16))
        >>> given, problems[0].split(":")[0]
        ({'bf16.enabled': True}, 'gradient_clipping = "auto"')
    """
    given, problems = dict(reading.given), []
    for path in reading.autos:
        if path in _DTYPES:
            learning = {p.dtype for p in model.parameters() if p.requires_grad}
            given[path] = learning == {_DTYPES[path]}
        elif path in _BY_HIDDEN_SIZE and (size := _hidden_size(model)):
            given[path] = _BY_HIDDEN_SIZE[path](size)
        elif path == _PEAK:
            given["scheduler.params"] = {**given["scheduler.params"], "warmup_max_lr": None}
        elif not (path.startswith(skipped) or _may_be_left_out(path, reading.given)):
            problems.append(
                f'{path} = "auto": only its user knows the value; write it, or pass '
                f'initialize(auto={{"{path}": ...}}).'
            )
    return given, problems


def _may_be_left_out(path: str, given: Mapping[str, Any]) -> bool:
    if path == "gradient_accumulation_steps":
        return all(given.get(other) is not None for other in _BATCH)
    zero = path.startswith("zero_optimization.") and path != "zero_optimization.stage"
    refused = path in KEYS and KEYS[path].use is KeyUse.REFUSED  # its default is what is done
    return zero or refused or path in (*_BATCH, _FLOOR)


def _hidden_size(model: nn.Module) -> int | None:
    """Return the hidden size of a Hugging Face model, or of its text part."""
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", None)
    return getattr(config, "hidden_size", None) or getattr(text, "hidden_size", None)
