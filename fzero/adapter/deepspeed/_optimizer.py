"""The optimizer that a DeepSpeed-style config describes, and a scheduler for an engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fzero.adapter._engine import Engine
from fzero.adapter._setup import Factory
from fzero.adapter.deepspeed._keys import OPTIMIZER_PARAMS
from fzero.adapter.deepspeed._read import config_error

Schedule = LRScheduler | Callable[[Optimizer], LRScheduler]

_NOT_TORCHS = (
    *("lamb", "lion", "muon", "onebitadam", "onebitlamb", "zerooneadam"),
    *("muadam", "muadamw", "musgd"),
)
"""DeepSpeed's own optimizers; its Muon is another one than torch's."""


def configured(optimizer: Optimizer | Factory | None, values: Mapping[str, Any]) -> Factory:
    """Return the factory that optimizer.type and optimizer.params describe."""
    name, params = values["optimizer.type"], dict(values["optimizer.params"] or {})
    if optimizer is not None or name is None:
        raise config_error(
            f"config: optimizer.type = {name}, and initialize(optimizer={optimizer!r}).",
            cause="an optimizer in two places, or params without a type.",
            fix="give either optimizer.type in the config, or the argument.",
        )
    kind = name.lower()
    if kind in ("adam", "adamw"):
        kind = _adam(kind, params)
    classes = {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    if kind in _NOT_TORCHS or kind not in classes:
        near = ", ".join(get_close_matches(kind, classes, n=3)) or "nothing"
        raise config_error(
            f"config: optimizer.type = {name!r} is not supported (near: {near}).",
            cause="an optimizer of DeepSpeed's own, or a misspelt name.",
            fix="use one of torch.optim, or pass initialize(optimizer=...) a class or a factory.",
        )
    cls = classes[kind]
    _check_params(name, params, cls)
    factory: Factory = partial(cls, **params)
    try:
        _try(factory)
    except Exception as error:  # whatever it is, it comes from these values
        raise config_error(
            f"config: optimizer.params: {error}; given are {params}.",
            cause=f"a value that torch.optim.{cls.__name__} does not take.",
            fix="give the values of its documentation.",
        ) from error
    return factory


def _try(factory: Factory) -> None:
    """Make one, and one update of a scalar: some wrong values raise only there."""
    p = nn.Parameter(torch.zeros(1))
    made = factory([p])
    if not isinstance(made, _NEED_MORE):  # those are refused later, by name
        p.grad = torch.zeros_like(p)
        made.step()


_NEED_MORE = (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon)
"""Optimizers that a scalar with a dense gradient cannot try."""


def _adam(kind: str, params: dict[str, Any]) -> str:
    """Return "adam" or "adamw" in DeepSpeed's meaning; drop what is not torch's from `params`."""
    plain = params.pop("torch_adam", False)
    decoupled = params.pop("adam_w_mode", True) or kind == "adamw"
    if not plain:
        if params.pop("bias_correction", True) is not True:
            raise config_error(
                "config: optimizer.params.bias_correction is not supported as false.",
                cause="an option of DeepSpeed's fused Adam.",
                fix="leave it out: torch's Adam corrects the bias.",
            )
        params.setdefault("weight_decay", 0.0)
    return "adamw" if decoupled else "adam"


def _check_params(name: str, params: Mapping[str, Any], cls: type[Optimizer]) -> None:
    known = [x for x in inspect.signature(cls).parameters if x != "params"]
    for key, value in params.items():
        path = f"optimizer.params.{key}"
        if key in known and not (isinstance(value, str) and value == "auto"):
            continue
        fix = OPTIMIZER_PARAMS.get(key)
        near = ", ".join(get_close_matches(key, known, n=3)) or "nothing"
        raise config_error(
            f"config: {path} = {value!r} is not supported"
            + (f" (near: {near})." if fix is None and key not in known else "."),
            cause=f"an option that torch.optim.{cls.__name__} ({name!r}) does not have, or a "
            'config for the Hugging Face Trainer ("auto").',
            fix=f"{fix or f'use one of {known}, with a value'}.",
        )


def check_schedule(given: Schedule | None, optimizer: Optimizer | Factory | None) -> None:
    """Raise `LayoutError` for a scheduler that cannot be stepped after each update."""
    if given is None:
        return
    own = isinstance(given, LRScheduler)
    if isinstance(given, ReduceLROnPlateau) or not (own or callable(given)) or optimizer is None:
        raise config_error(
            f"lr_scheduler is a {type(given).__name__}"
            + (", and there is no optimizer." if optimizer is None else "."),
            cause="a scheduler that needs a metric, or that is none of torch's.",
            fix="pass one of torch.optim.lr_scheduler, or optimizer -> scheduler; step one that "
            "needs a metric in the training loop.",
        )
    if own and given.optimizer is not optimizer:
        raise config_error(
            "lr_scheduler is of another optimizer.",
            cause="the engine's optimizer is made from the config, or from a class.",
            fix="pass optimizer -> scheduler: lambda optimizer: StepLR(optimizer, 10).",
        )


def follow(engine: Engine, given: Schedule) -> None:
    """Step the scheduler after each update of the engine."""
    assert engine.optimizer is not None
    schedule = given if isinstance(given, LRScheduler) else given(engine.optimizer)

    def step(*_: Any) -> None:
        found_inf = getattr(engine.optimizer, "found_inf", None)  # of a fused kernel, which skips
        if engine.closed or (found_inf is not None and bool(found_inf)):
            return  # a closed engine has given its optimizer back
        schedule.step()

    engine.optimizer.register_step_post_hook(step)
