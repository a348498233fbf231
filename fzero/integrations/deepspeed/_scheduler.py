"""The learning-rate scheduler of a config, or of the user, stepped after each update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fzero.adapter.engine import Engine
from fzero.errors import LayoutError
from fzero.integrations.deepspeed._read import Problem, close_to, unknown_params, without_type
from fzero.integrations.deepspeed._schedules import SCHEDULES, ConfiguredSchedule
from fzero.optim import TorchOptimizer

AnySchedule = LRScheduler | ConfiguredSchedule
Schedule = AnySchedule | Callable[[Optimizer], AnySchedule]


def described(
    values: Mapping[str, Any], optimizer: Any, autos: Collection[str] = ()
) -> tuple[Callable[[Optimizer], AnySchedule] | None, list[Problem]]:
    """Return the factory of scheduler.type with scheduler.params, and a problem for each error.

    None without the section. A name that is not DeepSpeed's is one of torch.optim.lr_scheduler.
    autos: keys whose value is "auto", for which there is a problem already.
    """
    name, params = values["scheduler.type"], dict(values["scheduler.params"] or {})
    if name is None:
        return None, without_type("scheduler", values)
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
    make: Any = makers[name]
    if params.get("last_batch_iteration") == -1:  # the default: start at the first update
        del params["last_batch_iteration"]
    problems = unknown_params("scheduler", params, make, name)
    needed = [f"scheduler.params.{x}" for x in _needed(make) if x not in params]
    problems += [f"{path}: {name} needs it." for path in needed if path not in autos]
    if problems or needed:
        return None, problems

    def factory(optimizer: Optimizer) -> AnySchedule:
        schedule = make(optimizer, **params)
        return ConfiguredSchedule(optimizer, schedule) if name in SCHEDULES else schedule

    count = len(optimizer.param_groups) if isinstance(optimizer, Optimizer) else 1
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(count)]
    try:
        factory(Adam(groups, lr=0.5))
    except Exception as error:  # of any type, but caused by these values
        return None, [f"scheduler.params = {params}: {name} does not take it ({error})."]
    return factory, []


def _needed(factory: Callable[..., Any]) -> list[str]:
    """Return the required parameters of a factory, besides the optimizer."""
    parameters = list(inspect.signature(factory).parameters.values())[1:]
    return [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


def check_schedule(given: Schedule | None, optimizer: Any) -> None:
    """Raise `LayoutError` for a scheduler that cannot be stepped after each update."""
    if given is None:
        return
    if isinstance(given, ReduceLROnPlateau) or not (
        isinstance(given, AnySchedule) or callable(given)
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
    if isinstance(given, AnySchedule) and given.optimizer is not optimizer:
        raise LayoutError(
            "lr_scheduler is of another optimizer.",
            cause="the engine's optimizer is made from the config, or from a class.",
            fix="pass optimizer -> scheduler: lambda optimizer: StepLR(optimizer, 10).",
        )


def stepped(engine: Engine, given: Schedule) -> AnySchedule:
    """Return the scheduler, after registering it to step with each update of the engine."""
    assert engine.optimizer is not None
    schedule: Any = given
    if not isinstance(given, AnySchedule):
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
