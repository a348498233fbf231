"""An engine from a DeepSpeed-style config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.adapter.setup import Factory
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError
from fzero.integrations.deepspeed import _optimizer, _scheduler
from fzero.integrations.deepspeed._auto import with_autos
from fzero.integrations.deepspeed._batch import Batch, batch_of, loader_of
from fzero.integrations.deepspeed._engine import DeepSpeedEngine
from fzero.integrations.deepspeed._options import engine_options
from fzero.integrations.deepspeed._partitioned import name_parameters
from fzero.integrations.deepspeed._precision import convert, require_convertible
from fzero.integrations.deepspeed._read import (
    Config,
    read_config,
    require_none,
    with_defaults,
    without_switch,
)
from fzero.integrations.deepspeed._scheduler import Schedule
from fzero.integrations.deepspeed._wrapped import name_optimizer
from fzero.ranks.mesh import Axis, MeshLike, axis_of

Four = tuple[DeepSpeedEngine, Optimizer | None, Any, Any]
"""What deepspeed.initialize returns: engine, optimizer, loader of training_data, scheduler."""


@overload
def initialize(
    model: nn.Module,
    optimizer: Optimizer | Factory | None = ...,
    config: Config | None = ...,
    *,
    args: Any = ...,
    model_parameters: Iterable[Tensor | Mapping[str, Any]] | None = ...,
    training_data: Any = ...,
    collate_fn: Callable[..., Any] | None = ...,
    lr_scheduler: Schedule | None = ...,
    mesh: MeshLike = ...,
    config_params: Config | None = ...,
    auto: Mapping[str, Any] | None = ...,
    as_tuple: Literal[False] = ...,
) -> DeepSpeedEngine: ...


@overload
def initialize(
    model: nn.Module,
    optimizer: Optimizer | Factory | None = ...,
    config: Config | None = ...,
    *,
    args: Any = ...,
    model_parameters: Iterable[Tensor | Mapping[str, Any]] | None = ...,
    training_data: Any = ...,
    collate_fn: Callable[..., Any] | None = ...,
    lr_scheduler: Schedule | None = ...,
    mesh: MeshLike = ...,
    config_params: Config | None = ...,
    auto: Mapping[str, Any] | None = ...,
    as_tuple: Literal[True],
) -> Four: ...


def initialize(
    model: nn.Module,
    optimizer: Optimizer | Factory | None = None,
    config: Config | None = None,
    *,
    args: Any = None,
    model_parameters: Iterable[Tensor | Mapping[str, Any]] | None = None,
    training_data: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    lr_scheduler: Schedule | None = None,
    mesh: MeshLike = None,
    config_params: Config | None = None,
    auto: Mapping[str, Any] | None = None,
    as_tuple: bool = False,
) -> DeepSpeedEngine | Four:
    """Return an engine with the options that a DeepSpeed config asks for, and DeepSpeed's names.

    docs/deepspeed_config.md has every key. A key is used, or is harmless, or must have DeepSpeed's
    default; what cannot be used is refused, all of it in one error. What is left out, or null, has
    DeepSpeed's default.

    Every gradient_accumulation_steps-th step() updates, from gradients divided by that number.
    With managed_gradient_accumulation = false every step() updates: as in DeepSpeed from the sum of
    gradients over gradient_accumulation_steps, if that is given, however many came; else from
    gradients divided by the number of backwards.

    "Adam" is AdamW unless adam_w_mode is false, and neither decays weights unless weight_decay
    is given (with torch_adam: torch's default). With fp16.enabled, or bf16.enabled
    and its check_grad_overflow, an overflow skips the update and the scheduler; else nothing looks
    for one. Gradients are divided by the scale that they were made with, where DeepSpeed halves
    them when it grows. The model stays on its device.

    Args:
        model: as for `Engine`; bf16.enabled, fp16.enabled and data_types.buffer_dtype convert it
            in place.
        optimizer: as for `Engine`; the config's section is then not looked at, as in DeepSpeed.
        config: a dict, the path of a JSON file, or the base64 of JSON.
        args: has the config as `args.deepspeed_config`, if `config` is None.
        config_params: an older name of `config`.
        model_parameters: what the config's optimizer steps, or a class or factory: tensors or param
            groups; default all that learn. An optimizer that is made already has its own.
        training_data: a dataset, of which `engine.training_dataloader` gives this rank's share.
        collate_fn: of that loader.
        lr_scheduler: a torch scheduler, or optimizer -> scheduler, in the place of the config's; it
            is stepped after each update.
        mesh: as for `Engine`.
        auto: {dotted key: value} for keys that say "auto".
        as_tuple: return what deepspeed.initialize returns.

    Returns:
        The engine; with `as_tuple` (engine, engine.optimizer, engine.training_dataloader,
        engine.lr_scheduler).

    Raises:
        LayoutError: for a config that cannot be followed; the model is as it was.
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
        raise LayoutError(
            f"initialize got a {type(model).__name__}.",
            cause="arguments in another order.",
            fix="call initialize(model, optimizer, config), all by keyword if in doubt.",
        )
    axis = axis_of(mesh)
    values, options, batch, chosen, schedule = _asked(
        _config_of(config, config_params, args), auto, model, (optimizer, lr_scheduler), axis
    )
    loader = None
    if training_data is not None:
        drop_last = values["dataloader_drop_last"]
        loader = loader_of(training_data, batch, axis, drop_last=drop_last, collate_fn=collate_fn)
    require_convertible(model, values)
    originals = convert(model, values)
    try:
        made = _optimizer.made_of(chosen, model_parameters)
        engine = DeepSpeedEngine(model, made, mesh=axis, **options)
        if schedule is not None:
            engine.lr_scheduler = _scheduler.stepped(engine, schedule)
    except BaseException:
        for x, data in originals:
            x.data = data
        raise
    engine._follow_config(values, batch, loader)
    name_optimizer(engine)
    name_parameters(engine._driver)
    return (engine, engine.optimizer, loader, engine.lr_scheduler) if as_tuple else engine


def _asked(
    config: Any, auto: Mapping[str, Any] | None, model: nn.Module, own: tuple[Any, Any], axis: Axis
) -> tuple[dict[str, Any], dict[str, Any], Batch, Any, Any]:
    """Return values of the config, options of the engine, batch sizes, optimizer and scheduler.

    Raises `LayoutError` with all keys that cannot be used.

    own: the optimizer and the scheduler of the user, which replace those sections of the config.
    """
    optimizer, scheduler = own
    reading = read_config(config, auto)
    skipped = tuple(
        s for s, x in zip(("optimizer.", "scheduler."), own, strict=True) if x is not None
    )
    given, problems = with_autos(reading, model, skipped=skipped)
    values = with_defaults(given)
    values["steps_per_print"] = reading.harmless.get("steps_per_print")
    batch, wrong = batch_of(given, axis.size)
    problems = [*reading.problems, *problems, *without_switch(given), *wrong]
    if optimizer is None:
        optimizer, wrong = _optimizer.described(values)
        problems += wrong
    if scheduler is None:
        scheduler, wrong = _scheduler.described(values, optimizer, reading.autos)
        problems += wrong
    options, errors = engine_options(values, model, batch)
    require_none(problems, errors)
    _scheduler.check_schedule(scheduler, optimizer)
    lines = [f"{path} = {value}" for path, value in sorted(given.items())]
    assert_same_everywhere(lines, axis, what="the config")
    return values, options, batch, optimizer, scheduler


def _config_of(config: Any, older: Any, args: Any) -> Any:
    """Return the config, which DeepSpeed's users give in one of three places."""
    given = {
        "config": config,
        "config_params": older,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    found = [name for name, value in given.items() if value is not None]
    if len(found) > 1:
        raise LayoutError(
            f"{', and '.join(found)}.",
            cause="a config in two places.",
            fix="give one of them.",
        )
    return given[found[0]] if found else None
