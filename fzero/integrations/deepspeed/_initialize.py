"""An engine from a DeepSpeed config, which is read before the model is converted and wrapped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fzero.adapter.setup import Factory
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError
from fzero.integrations.deepspeed._config import (
    Batch,
    Config,
    Problem,
    batch_of,
    close_to,
    convert,
    engine_options,
    loader_of,
    read_config,
    require_none,
    with_autos,
    with_defaults,
    without_switch,
)
from fzero.integrations.deepspeed._engine import DeepSpeedEngine
from fzero.integrations.deepspeed._lr_schedules import SCHEDULES
from fzero.integrations.deepspeed._optimizer import (
    factory_of,
    name_optimizer,
    optimizer_of,
    without_type,
)
from fzero.integrations.deepspeed._param_access import name_parameters
from fzero.optim import TorchOptimizer
from fzero.ranks.mesh import Axis, MeshLike, axis_of

Schedule = LRScheduler | Callable[[Optimizer], LRScheduler]
Four = tuple[DeepSpeedEngine, Optimizer | None, Any, Any]
"""What deepspeed.initialize returns: engine, optimizer, loader of training_data, scheduler."""


class _More(TypedDict, total=False):
    """The arguments that `initialize` has by keyword alone."""

    args: Any
    model_parameters: Iterable[Tensor | Mapping[str, Any]] | None
    training_data: Any
    collate_fn: Callable[..., Any] | None
    lr_scheduler: Schedule | None
    mesh: MeshLike
    config_params: Config | None
    auto: Mapping[str, Any] | None


@overload
def initialize(
    model: nn.Module,
    optimizer: Optimizer | Factory | None = ...,
    config: Config | None = ...,
    *,
    as_tuple: Literal[False] = ...,
    **more: Unpack[_More],
) -> DeepSpeedEngine: ...
@overload
def initialize(
    model: nn.Module,
    optimizer: Optimizer | Factory | None = ...,
    config: Config | None = ...,
    *,
    as_tuple: Literal[True],
    **more: Unpack[_More],
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
    places = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    found = [name for name, value in places.items() if value is not None]
    if len(found) > 1:
        raise LayoutError(
            f"{', and '.join(found)}.",
            cause="a config in two places.",
            fix="give one of them.",
        )
    given, axis = places[found[0]] if found else None, axis_of(mesh)
    values, options, batch, chosen, schedule = _asked(
        given, auto, model, optimizer, lr_scheduler, axis
    )
    loader = None
    if training_data is not None:
        drop_last = values["dataloader_drop_last"]
        loader = loader_of(training_data, batch, axis, drop_last=drop_last, collate_fn=collate_fn)
    originals = convert(model, values)
    try:
        makes: Any = None if isinstance(chosen, Optimizer) else chosen
        if callable(makes) and model_parameters is not None:
            some = [p for p in model_parameters if not isinstance(p, Tensor) or p.requires_grad]
            chosen = makes(some)
        engine = DeepSpeedEngine(model, chosen, mesh=axis, **options)
        if schedule is not None:
            engine.lr_scheduler = _stepped(engine, schedule)
    except BaseException:
        for x, data in originals:
            x.data = data
        raise
    engine._follow_config(values, batch, loader)
    name_optimizer(engine)
    name_parameters(engine._driver)
    return (engine, engine.optimizer, loader, engine.lr_scheduler) if as_tuple else engine


def _asked(
    config: Any,
    auto: Mapping[str, Any] | None,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    axis: Axis,
) -> tuple[dict[str, Any], dict[str, Any], Batch, Any, Any]:
    """Return values of the config, options of the engine, batch sizes, optimizer and scheduler.

    Raises `LayoutError` with all keys that cannot be used.

    optimizer, scheduler: the user's, in the place of those sections of the config.
    """
    reading = read_config(config, auto)
    own = {"optimizer.": optimizer, "scheduler.": scheduler}
    skipped = tuple(section for section, x in own.items() if x is not None)
    given, problems = with_autos(reading, model, skipped=skipped)
    values = with_defaults(given)
    values["steps_per_print"] = reading.harmless.get("steps_per_print")
    batch, wrong = batch_of(given, axis.size)
    problems = [*reading.problems, *problems, *without_switch(given), *wrong]
    if optimizer is None:
        optimizer, wrong = optimizer_of(values)
        problems += wrong
    if scheduler is None:
        scheduler, wrong = _scheduler_of(values, optimizer, reading.autos)
        problems += wrong
    options, errors = engine_options(values, model, batch)
    require_none(problems, errors)
    if scheduler is not None:
        _require_steppable(scheduler, optimizer)
    lines = [f"{path} = {value}" for path, value in sorted(given.items())]
    assert_same_everywhere(lines, axis, what="the config")
    return values, options, batch, optimizer, scheduler


def _scheduler_of(
    values: Mapping[str, Any], optimizer: Any, autos: Collection[str]
) -> tuple[Callable[..., Any] | None, list[Problem]]:
    """Return the factory of scheduler.type with scheduler.params, and a problem for each error.

    None without the section. A name that is not DeepSpeed's is one of torch.optim.lr_scheduler.
    """
    name, params = values["scheduler.type"], dict(values["scheduler.params"] or {})
    if name is None:
        return without_type("scheduler", values)
    makers: dict[str, Callable[..., Any]] = {
        own: cls
        for own, cls in vars(torch.optim.lr_scheduler).items()
        if isinstance(cls, type) and issubclass(cls, LRScheduler)
    } | dict(SCHEDULES)
    if name not in makers or name == "ReduceLROnPlateau":
        return None, [
            f"scheduler.type = {name!r}: not supported (near: {close_to(name, makers)}); pass "
            "initialize(lr_scheduler=...) a torch scheduler, or optimizer -> scheduler."
        ]
    if params.get("last_batch_iteration") == -1:  # the default: start at the first update
        del params["last_batch_iteration"]
    count = len(optimizer.param_groups) if isinstance(optimizer, Optimizer) else 1
    tried = Adam([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(count)], lr=0.5)
    return factory_of("scheduler", makers[name], name, params, tried, autos)


def _require_steppable(given: Schedule, optimizer: Any) -> None:
    """Raise `LayoutError` for a scheduler that cannot be stepped after each update."""
    if isinstance(given, ReduceLROnPlateau) or not (
        isinstance(given, LRScheduler) or callable(given)
    ):
        raise LayoutError(
            f"lr_scheduler is a {type(given).__name__}.",
            cause="a scheduler that needs a metric, or that is none of torch's.",
            fix="pass one of torch.optim.lr_scheduler, or optimizer -> scheduler; step one that "
            "needs a metric in the training loop.",
        )
    if not (isinstance(optimizer, Optimizer | TorchOptimizer) or callable(optimizer)):
        raise LayoutError(
            f"a scheduler, and {'no' if optimizer is None else 'no torch.optim'} optimizer.",
            cause="a model that is not stepped, or a rule of fzero.optim, which has no param "
            "groups.",
            fix="give an optimizer of torch.optim; a rule takes lr=fzero.optim.schedules....",
        )
    if isinstance(given, LRScheduler) and given.optimizer is not optimizer:
        raise LayoutError(
            "lr_scheduler is of another optimizer.",
            cause="the engine's optimizer is made from the config, or from a class.",
            fix="pass optimizer -> scheduler: lambda optimizer: StepLR(optimizer, 10).",
        )


def _stepped(engine: DeepSpeedEngine, given: Schedule) -> LRScheduler:
    """Return the scheduler, after registering it to step with each update of the engine."""
    assert engine.optimizer is not None
    schedule: Any = given
    if not isinstance(given, LRScheduler):
        try:
            schedule = given(engine.optimizer)
        except BaseException:
            engine.close()  # which restores the model
            raise

    def step(*_: Any) -> None:
        found_inf = getattr(engine.optimizer, "found_inf", None)  # of a fused kernel, which skips
        if engine.closed or (found_inf is not None and bool(found_inf)):
            return  # a closed engine has given its optimizer back
        schedule.step()

    engine.optimizer.register_step_post_hook(step)
    return schedule
