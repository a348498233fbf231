"""The sections fp16, bf16, torch_autocast and data_types: dtypes, and the loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fzero.errors import LayoutError
from fzero.machine.placeholder import LazyParam
from fzero.state import DynamicScale
from fzero.state.precision import Autocast
from fzero.state.scale import StaticScale


def low_dtype(values: Mapping[str, Any]) -> torch.dtype | None:
    """Return the 16-bit dtype to which parameters are converted; None to keep their dtypes.

    Raises `LayoutError` if the config asks for two.
    """
    if values["bf16.enabled"] and values["fp16.enabled"]:
        raise LayoutError(
            "config: bf16.enabled = True with fp16.enabled = True.",
            cause="two keys for one thing.",
            fix="set one of them.",
        )
    if values["fp16.enabled"]:
        return torch.float16
    return torch.bfloat16 if values["bf16.enabled"] else None


def loss_scale(values: Mapping[str, Any]) -> StaticScale | DynamicScale | None:
    """Return the loss scale: of fp16; 1 for bf16 that skips overflows; else None.

    Raises `LayoutError` for numbers out of range.

    Example:
        >>> from fzero.integrations.deepspeed._read import with_defaults
        >>> given = {"fp16.enabled": True, "fp16.initial_scale_power": 4}
        >>> scale = loss_scale(with_defaults(given))
        >>> scale.init_scale, scale.growth_interval, scale.hysteresis, scale.min_scale
        (16.0, 1000, 2, 1.0)
    """
    if not values["fp16.enabled"]:
        skips = values["bf16.enabled"] and values["bf16.check_grad_overflow"]
        return StaticScale(1.0) if skips else None
    if values["fp16.loss_scale"]:
        return StaticScale(values["fp16.loss_scale"])
    return DynamicScale(
        init_scale=2.0 ** values["fp16.initial_scale_power"],
        growth_interval=values["fp16.loss_scale_window"],
        hysteresis=values["fp16.hysteresis"],
        min_scale=values["fp16.min_loss_scale"],
    )


def autocast_of(values: Mapping[str, Any]) -> Autocast | None:
    """Return the autocast of section torch_autocast; its default dtype is bfloat16.

    Raises `LayoutError` beside fp16 or bf16.

    Example:
        >>> from fzero.integrations.deepspeed._read import with_defaults
        >>> autocast_of(with_defaults({"torch_autocast.enabled": True}))
        autocast(torch.bfloat16, default)
    """
    if not values["torch_autocast.enabled"]:
        return None
    if values["fp16.enabled"] or values["bf16.enabled"]:
        raise LayoutError(
            "config: torch_autocast.enabled beside fp16.enabled or bf16.enabled.",
            cause="two ways to compute in 16 bits; autocast wants parameters in fp32.",
            fix="set one of them.",
        )
    return Autocast(
        dtype=values["torch_autocast.dtype"] or torch.bfloat16,
        lower_precision_safe_modules=values["torch_autocast.lower_precision_safe_modules"],
    )


# Dtypes.


def dtypes_of(values: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the options of `Engine` about dtypes, and its bucket size in bytes.

    Raises `LayoutError` for keys that contradict each other.
    """
    enabled, asked = values["bf16.enabled"], values["data_types.param_dtype"]
    low = low_dtype(values)
    if asked is not None and asked is not (low or torch.float32):
        raise LayoutError(
            f"config: data_types.param_dtype = {asked} with fp16.enabled = "
            f"{values['fp16.enabled']}, bf16.enabled = {enabled}.",
            cause="two keys for one thing.",
            fix="leave data_types.param_dtype out; bf16.enabled makes the parameters bf16.",
        )
    dtype = low or _widest(model)
    buckets = [values[f"zero_optimization.{x}_bucket_size"] for x in ("reduce", "allgather")]
    return {
        **_masters(values),
        "accumulate_dtype": values["data_types.grad_accum_dtype"] or dtype,
        "bucket_bytes": dtype.itemsize * max(1, min(buckets)),  # 0: each parameter by itself
    }


def _masters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options about masters: without them, states are fp32 unless bf16 is set."""
    low_states = values["bf16.bf16_optimizer_states"]
    without = any(
        values[f"{name}.enabled"] and values[f"{name}.{name}_master_weights_and_grads"]
        for name in ("bf16", "fp16")
    )
    if low_states and not values["bf16.bf16_master_weights_and_grads"]:
        raise LayoutError(
            "config: bf16.bf16_optimizer_states = True with "
            "bf16.bf16_master_weights_and_grads = False.",
            cause="DeepSpeed has bf16 states only of bf16 masters.",
            fix="set both; or, with fp32 masters, leave both out and make the engine yourself: "
            "Engine(..., state_dtype=torch.bfloat16).",
        )
    dtype = torch.float32 if without and not low_states else None
    return {"master_weights": not without, "state_dtype": dtype}


def _widest(model: nn.Module) -> torch.dtype:
    """Return the widest dtype of the trainable parameters."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)


@torch.no_grad()
def convert(model: nn.Module, values: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Convert parameters and buffers to the dtypes of the config; shared memory stays shared.

    Returns (converted tensor, its data before) pairs.
    """
    wanted: list[tuple[list[Tensor], torch.dtype | None]] = [
        (list(model.parameters()), low_dtype(values)),
        (list(model.buffers()), values["data_types.buffer_dtype"]),
    ]
    originals = []
    for tensors, dtype in wanted:
        converted: dict[Any, Tensor] = {}
        for x in tensors if dtype is not None else ():
            if x.is_floating_point() and x.dtype is not dtype:
                originals.append((x, x.data))
                x.grad = None
                key = (x.data_ptr(), x.shape, x.stride())
                x.data = converted.setdefault(key, x.data.to(dtype))
    return originals


def require_convertible(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Raise `LayoutError` if parameters must be converted, and are sharded already."""
    low = low_dtype(values)
    for path, p in model.named_parameters() if low is not None else ():
        if isinstance(p, LazyParam) and p.is_floating_point() and p.dtype is not low:
            name = "fp16.enabled" if low is torch.float16 else "bf16.enabled"
            raise LayoutError(
                f"config: {name}, and {path} is {p.dtype}, made under sharded_init.",
                cause="its parameters are sharded already, in the dtype that they were made in.",
                fix=f"make the model under sharded_init(dtype={low}).",
            )
