"""The sections fp16, bf16, torch_autocast and data_types: dtypes, and the loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fzero.adapter.deepspeed._read import config_error
from fzero.errors import LayoutError
from fzero.placeholder import LazyParam
from fzero.state import DynamicScale
from fzero.state.precision import Autocast
from fzero.state.scale import StaticScale


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


def loss_scale(
    given: Mapping[str, Any], values: Mapping[str, Any]
) -> StaticScale | DynamicScale | None:
    """Return the scale of fp16; of bf16 1, by which an overflow is skipped; None without both.

    Raises `LayoutError` for keys of a section that is off, and for numbers out of range.

    Example:
        >>> from fzero.adapter.deepspeed._read import with_defaults
        >>> given = {"fp16.enabled": True, "fp16.initial_scale_power": 4}
        >>> scale = loss_scale(given, with_defaults(given))
        >>> scale.init_scale, scale.growth_interval, scale.hysteresis, scale.min_scale
        (16.0, 1000, 2, 1.0)
    """
    if not values["fp16.enabled"]:
        _require_on("fp16", given)
        skips = values["bf16.enabled"] and values["bf16.check_grad_overflow"]
        return StaticScale(1.0) if skips else None
    if values["fp16.loss_scale"]:
        return StaticScale(values["fp16.loss_scale"])
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


def autocast_of(given: Mapping[str, Any], values: Mapping[str, Any]) -> Autocast | None:
    """Return what torch_autocast asks for: bfloat16 unless it names a dtype.

    Raises `LayoutError` beside fp16 or bf16, and for keys of a section that is off.

    Example:
        >>> from fzero.adapter.deepspeed._read import with_defaults
        >>> given = {"torch_autocast.enabled": True}
        >>> autocast_of(given, with_defaults(given))
        autocast(torch.bfloat16, default)
    """
    if not values["torch_autocast.enabled"]:
        _require_on("torch_autocast", given)
        return None
    if values["fp16.enabled"] or values["bf16.enabled"]:
        raise config_error(
            "config: torch_autocast.enabled beside fp16.enabled or bf16.enabled.",
            cause="two ways to compute in 16 bits; autocast wants parameters in fp32.",
            fix="set one of them.",
        )
    return Autocast(
        dtype=values["torch_autocast.dtype"] or torch.bfloat16,
        lower_precision_safe_modules=values["torch_autocast.lower_precision_safe_modules"],
    )


def _require_on(section: str, given: Mapping[str, Any]) -> None:
    unused = [path for path in given if path.startswith(f"{section}.")]
    if unused and f"{section}.enabled" not in given:
        raise config_error(
            f"config: {unused[0]} without {section}.enabled.",
            cause="a section that is off until it says that it is on.",
            fix=f"set {section}.enabled = true, or leave {section} out.",
        )


# Dtypes.


def dtypes_of(values: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the engine's dtypes, and the size of its buckets in bytes.

    Raises `LayoutError` for keys that contradict each other.
    """
    enabled, asked = values["bf16.enabled"], values["data_types.param_dtype"]
    low = low_dtype(values)
    if asked is not None and asked is not (low or torch.float32):
        raise config_error(
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
    """Without masters the 16-bit parameters are stepped, with fp32 states unless bf16 are asked."""
    low_states = values["bf16.bf16_optimizer_states"]
    none = {name: values[f"{name}.{name}_master_weights_and_grads"] for name in ("bf16", "fp16")}
    for name, wanted in none.items():
        if wanted and not values[f"{name}.enabled"]:
            raise config_error(
                f"config: {name}.{name}_master_weights_and_grads without {name}.enabled.",
                cause=f"the key was kept when {name} was switched off.",
                fix=f"set {name}.enabled = true, or leave it out.",
            )
    if low_states and not none["bf16"]:
        raise config_error(
            "config: bf16.bf16_optimizer_states = True with "
            "bf16.bf16_master_weights_and_grads = False.",
            cause="DeepSpeed has bf16 states only of bf16 masters.",
            fix="set both; or, with fp32 masters, leave both out and make the engine yourself: "
            "Engine(..., state_dtype=torch.bfloat16).",
        )
    without = any(none.values())
    dtype = torch.float32 if without and not low_states else None
    return {"master_weights": not without, "state_dtype": dtype}


def _widest(model: nn.Module) -> torch.dtype:
    """The dtype of the parameters that learn; the widest if there are several."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)


@torch.no_grad()
def convert(model: nn.Module, values: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Convert parameters and buffers to the dtypes of the config; shared memory stays shared.

    Returns the tensors that were converted, with the data that they had before.
    """
    wanted: list[tuple[list[Tensor], torch.dtype | None]] = [
        (list(model.parameters()), low_dtype(values)),
        (list(model.buffers()), values["data_types.buffer_dtype"]),
    ]
    originals = []
    for tensors, dtype in wanted:
        made: dict[Any, Tensor] = {}
        for x in tensors if dtype is not None else ():
            if x.is_floating_point() and x.dtype is not dtype:
                originals.append((x, x.data))
                x.grad = None
                key = (x.data_ptr(), x.shape, x.stride())
                x.data = made.setdefault(key, x.data.to(dtype))
    return originals


def require_convertible(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Raise `LayoutError` if the parameters are to have another dtype, and cannot."""
    low = low_dtype(values)
    if low is not None and any(isinstance(p, LazyParam) for p in model.parameters()):
        name = "fp16.enabled" if low is torch.float16 else "bf16.enabled"
        raise config_error(
            f"config: {name}, and a model made under sharded_init.",
            cause="its parameters are sharded already, in the dtype that they were made in.",
            fix=f"leave {name} out, and make the model under torch.set_default_dtype({low}).",
        )
