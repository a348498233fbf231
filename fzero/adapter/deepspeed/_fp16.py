"""The fp16 and bf16 sections of a config: the dtype of parameters, and the loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fzero.adapter.deepspeed._read import config_error
from fzero.errors import LayoutError
from fzero.state import DynamicScale


def low_dtype(values: Mapping[str, Any]) -> torch.dtype | None:
    """Return the 16-bit dtype that the parameters are to have; None for their own.

    Raises `LayoutError` if the config asks for two.
    """
    if values["bf16.enabled"] and values["fp16.enabled"]:
        raise config_error(
            "config: bf16.enabled = True with fp16.enabled = True.",
            cause="two keys for one thing.",
            fix="set one of them.",
        )
    if values["fp16.enabled"]:
        return torch.float16
    return torch.bfloat16 if values["bf16.enabled"] else None


def loss_scale(given: Mapping[str, Any], values: Mapping[str, Any]) -> float | DynamicScale:
    """Return the scale of fp16: a number, or one that adapts itself; 1 without fp16.

    Raises `LayoutError` for keys of a section that is off, and for numbers out of range.

    Example:
        >>> from fzero.adapter.deepspeed._read import with_defaults
        >>> given = {"fp16.enabled": True, "fp16.initial_scale_power": 4}
        >>> scale = loss_scale(given, with_defaults(given))
        >>> scale.init_scale, scale.growth_interval, scale.hysteresis, scale.min_scale
        (16.0, 1000, 2, 1.0)
    """
    if not values["fp16.enabled"]:
        unused = [path for path in given if path.startswith("fp16.") and path != "fp16.enabled"]
        if unused:
            raise config_error(
                f"config: {unused[0]} without fp16.enabled.",
                cause="the key was kept when fp16 was switched off.",
                fix="set fp16.enabled = true, or leave it out.",
            )
        return 1.0
    if values["fp16.loss_scale"]:
        return values["fp16.loss_scale"]
    try:
        return DynamicScale(
            init_scale=2.0 ** min(values["fp16.initial_scale_power"], 128),  # which is too large
            growth_interval=values["fp16.loss_scale_window"],
            hysteresis=values["fp16.hysteresis"],
            min_scale=values["fp16.min_loss_scale"],
        )
    except LayoutError as error:
        raise config_error(
            f"config: the fp16 section makes a scale that cannot be: {str(error).splitlines()[0]}",
            cause="a power above 127, or a min_loss_scale above the first scale.",
            fix="make 2 ** initial_scale_power a number that fp32 holds, from min_loss_scale up.",
        ) from error
