"""An engine from a DeepSpeed-style config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.adapter._engine import Engine
from fzero.adapter._setup import Factory
from fzero.adapter.deepspeed._keys import MOE_CLASSES
from fzero.adapter.deepspeed._optimizer import Schedule, check_schedule, configured, follow
from fzero.adapter.deepspeed._precision import autocast_of, loss_scale, low_dtype
from fzero.adapter.deepspeed._read import (
    Config,
    config_error,
    micro_batches,
    read_config,
    with_defaults,
)
from fzero.collectives import assert_same_everywhere
from fzero.mesh import MeshLike, axis_of
from fzero.placeholder import LazyParam
from fzero.state.leaf_modules import LeafSpec, class_name

_ZERO = "zero_optimization."
_NUMELS = {
    "prefetch_numel": "stage3_prefetch_bucket_size",
    "persistence_threshold_numel": "stage3_param_persistence_threshold",
}


def initialize(
    model: nn.Module,
    optimizer: Optimizer | Factory | None = None,
    config: Config | None = None,
    *,
    mesh: MeshLike = None,
    lr_scheduler: Schedule | None = None,
) -> Engine:
    """Return `Engine(model, optimizer, stage=..., ...)` with what a DeepSpeed config asks for.

    Each key is used, or says what fzero does anyway, or is refused by name; what is left out, or
    null, has DeepSpeed's default:

        key                                         default     here
        train_batch_size                            none        checked only: micro-batch size x
        train_micro_batch_size_per_gpu              none        accumulation x ranks, which also
        gradient_accumulation_steps                 1           gives the one left out
        managed_gradient_accumulation               true        see below
        gradient_clipping                           1.0         max_norm; 0 is off (DeepSpeed's
                                                                default until 0.19 was 0)
        communication_data_type                     none        the parameters' dtype
        data_types.grad_accum_dtype                 none        the model's (fp32 is better)
        data_types.param_dtype                      none        must agree with bf16.enabled
        data_types.buffer_dtype                     none        buffers stay as they are
        bf16.enabled                                false       parameters to bf16, fp32 masters
        fp16.enabled                                false       parameters to fp16, fp32 masters
        fp16.loss_scale                             0           a fixed scale; 0: it adapts itself
        fp16.initial_scale_power                    16          2 to that is the first scale
        fp16.loss_scale_window                      1000        growth_interval
        fp16.hysteresis                             2           it fills up when the scale grows
        fp16.min_loss_scale                         1           min_scale; no error there
        bf16.bf16_master_weights_and_grads          false       both of these, or neither: no
        bf16.bf16_optimizer_states                  false       masters, states in bf16
        torch_autocast.enabled                      false       Engine(autocast=...)
        torch_autocast.dtype                        none        bfloat16; fp16 has a dynamic scale
        torch_autocast.lower_precision_safe_modules none        Linear, Conv1d, Conv2d, Conv3d
        optimizer.type, optimizer.params            none        any of torch.optim
        zero_optimization.
          stage                                     0
          contiguous_gradients                      true
          overlap_comm                              none        true at every stage
          reduce_bucket_size, allgather_bucket_size 5e8         the smaller of both, x bytes of
                                                                an element (Engine: 4 MiB)
          stage3_prefetch_bucket_size               5e7
          stage3_param_persistence_threshold        1e5         (Engine: 0)
          stage3_max_live_parameters                1e9         full parameters stay from forward
          stage3_max_reuse_distance                 1e9         to backward if the model fits into
                                                                the first, and twice into the other
          stage3_module_granularity_threshold       0
          leaf_module.{classes, names, name_suffixes}           three of transformers' mixtures
                                                                of experts, if the model has any

    Every gradient_accumulation_steps-th step() updates, from gradients divided by that number.
    With managed_gradient_accumulation = false every step() updates, from gradients divided by the
    number of backwards; if gradient_accumulation_steps = 1 is given as well, from their sum, as in
    DeepSpeed.

    "Adam" is AdamW unless adam_w_mode is false, and neither decays weights unless weight_decay
    is given (with torch_adam: torch's default). With fp16.enabled an overflow skips the update and
    the scheduler; without, nothing looks for one, also where DeepSpeed does by default
    (bf16.check_grad_overflow). Gradients are divided by the scale that they were made with, where
    DeepSpeed halves them when it grows. The model stays on its device.

    Args:
        model: as for `Engine`; bf16.enabled, fp16.enabled and data_types.buffer_dtype convert it
            in place.
        optimizer: as for `Engine`, in the place of the config's.
        config: a dict, or the path of a JSON file.
        mesh: as for `Engine`.
        lr_scheduler: a torch scheduler, or optimizer -> scheduler; it is stepped after each update.

    Returns:
        The engine; `engine.module` and `engine.optimizer` are the other things that
        deepspeed.initialize returns.

    Raises:
        LayoutError: for a key that is unknown, unsupported or wrong; the model is as it was.
        AxisError: when the ranks have different configs.

    Example:
        >>> import torch
        >>> from fzero.adapter import initialize
        >>> engine = initialize(
        ...     torch.nn.Linear(2, 1),
        ...     config={
        ...         "zero_optimization": {"stage": 2},
        ...         "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        ...     },
        ... )
        >>> engine.stage, engine.options.updating.max_norm
        (2, 1.0)
    """
    if not isinstance(model, nn.Module):
        raise config_error(
            f"initialize got a {type(model).__name__}.",
            cause="arguments in another order.",
            fix="call initialize(model, optimizer, config).",
        )
    given = read_config(config)  # type: ignore[arg-type]  # it says what is wrong with None
    values = with_defaults(given)
    if values["optimizer.type"] is not None or "optimizer.params" in given:
        optimizer = configured(optimizer, values)
    check_schedule(lr_scheduler, optimizer)
    axis = axis_of(mesh)
    lines = [f"{path} = {value}" for path, value in sorted(given.items())]
    assert_same_everywhere(lines, axis, what="the config")
    options = {
        **_precision(values, model),
        "loss_scale": loss_scale(given, values),
        "autocast": autocast_of(given, values),
        **_options(values, model, micro_batches(given, axis.size)),
    }
    stage = values[_ZERO + "stage"]
    _require_convertible(model, values)
    originals = _convert(model, values)
    try:
        engine = Engine(model, optimizer, stage=stage, mesh=axis, **options)
    except BaseException:
        for x, data in originals:
            x.data = data
        raise
    if lr_scheduler is not None:
        follow(engine, lr_scheduler)
    return engine


# Precision.


def _precision(values: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The engine's dtypes, and the size of its buckets in bytes."""
    masters = values["bf16.bf16_master_weights_and_grads"]
    if masters != values["bf16.bf16_optimizer_states"]:
        raise config_error(
            f"config: bf16.bf16_master_weights_and_grads = {masters} with "
            f"bf16.bf16_optimizer_states = {not masters}.",
            cause="a mixture that needs DeepSpeed's own CPU Adam.",
            fix="set both, or neither: optimizer states have the dtype of the weights it steps.",
        )
    enabled, asked = values["bf16.enabled"], values["data_types.param_dtype"]
    low = low_dtype(values)
    if asked is not None and asked is not (low or torch.float32):
        raise config_error(
            f"config: data_types.param_dtype = {asked} with fp16.enabled = "
            f"{values['fp16.enabled']}, bf16.enabled = {enabled}.",
            cause="two keys for one thing.",
            fix="leave data_types.param_dtype out; bf16.enabled makes the parameters bf16.",
        )
    if masters and not enabled:
        raise config_error(
            "config: bf16.bf16_master_weights_and_grads without bf16.enabled.",
            cause="the key was kept when bf16 was switched off.",
            fix="set bf16.enabled = true, or leave it out.",
        )
    dtype = low or _widest(model)
    return {
        "master_weights": not masters,
        "accumulate_dtype": values["data_types.grad_accum_dtype"] or dtype,
        "communication_dtype": values["communication_data_type"],
        "bucket_bytes": dtype.itemsize
        * min(values[_ZERO + "reduce_bucket_size"], values[_ZERO + "allgather_bucket_size"]),
    }


def _widest(model: nn.Module) -> torch.dtype:
    """The dtype of the parameters that learn; the widest if there are several."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)


@torch.no_grad()
def _convert(model: nn.Module, values: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
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


def _require_convertible(model: nn.Module, values: Mapping[str, Any]) -> None:
    low = low_dtype(values)
    if low is not None and any(isinstance(p, LazyParam) for p in model.parameters()):
        name = "fp16.enabled" if low is torch.float16 else "bf16.enabled"
        raise config_error(
            f"config: {name}, and a model made under sharded_init.",
            cause="its parameters are sharded already, in the dtype that they were made in.",
            fix=f"leave {name} out, and make the model under torch.set_default_dtype({low}).",
        )


# The other options.


def _options(values: Mapping[str, Any], model: nn.Module, given: int | None) -> dict[str, Any]:
    """The engine's other options; `given` is the number of micro-batches, if the config says."""
    managed = values["managed_gradient_accumulation"]
    count = given or 1
    if not managed and count > 1:
        raise config_error(
            f"config: gradient_accumulation_steps = {count} with "
            "managed_gradient_accumulation = false.",
            cause="a number of micro-batches for an engine that takes as many as come.",
            fix="leave it out: gradients are then divided by the number of backwards before "
            "step(). Or give 1, and divide the losses yourself.",
        )
    overlap = values[_ZERO + "overlap_comm"]
    return {
        "contiguous_gradients": values[_ZERO + "contiguous_gradients"],
        "overlap": True if overlap is None else overlap,
        "max_norm": values["gradient_clipping"] or None,
        "gradient_accumulation_steps": count,
        "average_micro_batches": count > 1 if managed else given is None,
        "leaf_modules": _leaf_modules(values, model),
        "reshard_after_forward": not _fits_whole(values, model),
        **{option: values[_ZERO + key] for option, key in _NUMELS.items()},
    }


def _fits_whole(values: Mapping[str, Any], model: nn.Module) -> bool:
    """Whether gathered parameters may stay for the backward: DeepSpeed's two bounds allow it.

    The first parameters are used again after a forward and a backward of all the others.
    """
    numel = sum(p.numel() for p in model.parameters())
    live, reuse = (values[_ZERO + "stage3_max_" + k] for k in ("live_parameters", "reuse_distance"))
    return numel <= live and 2 * numel <= reuse


def _leaf_modules(values: Mapping[str, Any], model: nn.Module) -> LeafSpec:
    classes = values[_ZERO + "leaf_module.classes"]
    if classes is None:
        here = {class_name(cls) for part in model.modules() for cls in type(part).__mro__}
        classes = tuple(name for name in MOE_CLASSES if name in here)
    return LeafSpec(
        classes=classes,
        names=values[_ZERO + "leaf_module.names"] or (),
        name_suffixes=values[_ZERO + "leaf_module.name_suffixes"] or (),
        granularity_threshold_numel=values[_ZERO + "stage3_module_granularity_threshold"],
    )
