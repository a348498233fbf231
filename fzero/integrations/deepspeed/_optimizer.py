"""The optimizer that a DeepSpeed-style config describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.adapter.setup import Factory
from fzero.integrations.deepspeed._kinds import same
from fzero.integrations.deepspeed._lion import Lion
from fzero.integrations.deepspeed._read import Problem, close_to, unknown_params, without_type

_CLASSES = {
    "fusedadam": "adam",
    "deepspeedcpuadam": "adam",
    "fusedlion": "lion",
    "deepspeedcpulion": "lion",
    "deepspeedcpuadagrad": "adagrad",
}
"""DeepSpeed's optimizer classes, which a config may also name."""

_ONLY = {
    "bias_correction": (True, "leave it out: torch's Adam corrects the bias"),
    "amsgrad": (False, "leave it out, or set torch_adam = true"),
    "set_grad_none": (True, "leave it out: gradients are never kept as zeros"),
    "fp32_optimizer_states": (True, "leave it out: see bf16.bf16_optimizer_states"),
}
"""Arguments of DeepSpeed's Adam that torch's lacks, or reads differently."""


def described(values: Mapping[str, Any]) -> tuple[Factory | None, list[Problem]]:
    """Return the factory of optimizer.type with optimizer.params, and a problem for each error.

    None without the section.
    """
    name, params = values["optimizer.type"], dict(values["optimizer.params"] or {})
    if name is None:
        return None, without_type("optimizer", values)
    kind = str(name).lower()
    kind = _CLASSES.get(kind, kind)
    problems: list[Problem] = []
    if kind in ("adam", "adamw"):
        kind, problems = _adam(kind, params)
    classes: dict[str, type[Optimizer]] = {
        own.lower(): cls
        for own, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer)
    } | {"lion": Lion}
    del classes["optimizer"], classes["muon"]  # DeepSpeed's Muon is another algorithm
    if kind not in classes:
        return None, [
            f"optimizer.type = {name!r}: not supported (near: {close_to(kind, classes)}); use one "
            "of torch.optim, or pass initialize(optimizer=...) a class or a factory."
        ]
    full_name = f"torch.optim.{classes[kind].__name__}"
    problems += unknown_params("optimizer", params, classes[kind], full_name)
    if problems:
        return None, problems
    factory: Factory = partial(classes[kind], **params)
    try:
        factory([nn.Parameter(torch.zeros(1))])
    except Exception as error:  # of any type, but caused by these values
        return None, [f"optimizer.params = {params}: {full_name} does not take it ({error})."]
    return factory, []


def made_of(optimizer: Any, parameters: Iterable[Tensor | Mapping[str, Any]] | None) -> Any:
    """Return optimizer(parameters), without frozen ones; an instance is returned as it is."""
    if parameters is None or isinstance(optimizer, Optimizer) or not callable(optimizer):
        return optimizer
    return optimizer([p for p in parameters if not isinstance(p, Tensor) or p.requires_grad])


def _adam(kind: str, params: dict[str, Any]) -> tuple[str, list[Problem]]:
    """Return torch's name of DeepSpeed's Adam; drop the keys that torch lacks from `params`."""
    plain = params.pop("torch_adam", False)
    decoupled = params.pop("adam_w_mode", True) or kind == "adamw"
    problems: list[Problem] = []
    if not plain:
        given = {key: params.pop(key) for key in _ONLY if key in params}
        problems = [
            f"optimizer.params.{key} = {value!r}: {_ONLY[key][1]}."
            for key, value in given.items()
            if not same(value, _ONLY[key][0])
        ]
        params.setdefault("weight_decay", 0.0)
    return "adamw" if decoupled else "adam", problems
