"""The optimizer that a config describes, and the names that DeepSpeed's has beside torch's."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.adapter.engine import Engine
from fzero.integrations.deepspeed._config import Problem, close_to
from fzero.integrations.deepspeed._config_keys import NAMES, same


def optimizer_of(values: Mapping[str, Any]) -> tuple[Callable[..., Any] | None, list[Problem]]:
    """Return the factory of optimizer.type with optimizer.params, and a problem for each error.

    None without the section.
    """
    name, params = values["optimizer.type"], dict(values["optimizer.params"] or {})
    if name is None:
        return without_type("optimizer", values)
    kind = NAMES["optimizers"].get(name.lower(), name.lower())
    problems: list[Problem] = []
    if kind in ("adam", "adamw"):  # DeepSpeed's, unless torch_adam asks for torch's
        plain = params.pop("torch_adam", False)
        kind = "adamw" if params.pop("adam_w_mode", True) or kind == "adamw" else "adam"
        if not plain:
            params.setdefault("weight_decay", 0.0)
            for key, (default, fix) in NAMES["adam_only"].items():
                if key in params and not same(value := params.pop(key), default):
                    problems.append(f"optimizer.params.{key} = {value!r}: {fix}.")
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
    shown, tried = f"torch.optim.{classes[kind].__name__}", [nn.Parameter(torch.zeros(1))]
    factory, wrong = factory_of("optimizer", classes[kind], shown, params, tried)
    return (None if problems else factory), problems + wrong


def without_type(section: str, values: Mapping[str, Any]) -> tuple[None, list[Problem]]:
    """Return no factory, and a problem if there are params nevertheless."""
    params = f"{section}.params"
    wrong = f"{params} without {section}.type: name the {section}."
    return None, [] if values[params] is None else [wrong]


def factory_of(
    section: str,
    make: Callable[..., Any],
    name: str,
    params: Mapping[str, Any],
    tried: Any,
    autos: Collection[str] = (),
) -> tuple[Callable[..., Any] | None, list[Problem]]:
    """Return `make` with these params but for the first, and a problem for each that is wrong.

    name: as an error calls it. tried: a first argument, to see whether the values are taken.
    autos: keys whose value is "auto", for which there is a problem already.
    """
    known = dict([*inspect.signature(make).parameters.items()][1:])
    problems = [
        f"{section}.params.{key} = {value!r}: {name} does not have it "
        f"(near: {close_to(key, known)})."
        for key, value in params.items()
        if key not in known
    ]
    needed = {
        f"{section}.params.{key}"
        for key, one in known.items()
        if one.default is one.empty and one.kind is not one.VAR_KEYWORD and key not in params
    }
    problems += [f"{path}: {name} needs it." for path in sorted(needed.difference(autos))]
    if problems or needed:
        return None, problems
    factory = partial(make, **params)
    try:
        factory(tried)
    except Exception as error:  # of any type, but caused by these values
        return None, [f"{section}.params = {params}: {name} does not take it ({error})."]
    return factory, []


class Lion(Optimizer):
    """p' = (1 - lr weight_decay) p - lr sign(b1 m + (1-b1) g),  m' = b2 m + (1-b2) g.

    The same rule as `fzero.optim.lion`, with param groups for schedulers; torch has none.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675,
    algorithm 2.

    Example:
        >>> p = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> p.grad = torch.tensor([3.0, -5.0])
        >>> Lion([p], lr=0.25).step()
        >>> p.data
        tensor([0.7500, 1.2500])
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Invalid lr={lr}, betas={betas} or weight_decay={weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one update."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                moment = self.state[p]["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(moment.lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                moment.lerp_(p.grad, 1 - second)
        return loss


# Names of DeepSpeed's optimizer.

_ENGINE = "_fzero_engine"


class OptimizerNames:
    """`loss_scale`, `cur_scale`, `loss_scaler` and `optimizer`, read-only."""

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss; 1.0 without one. The host waits for the device."""
        return float(self.__dict__[_ENGINE]().loss_scale)

    @property
    def optimizer(self) -> Any:
        """The optimizer of torch: this one, which no other is around."""
        return self

    cur_scale = loss_scale
    loss_scaler = optimizer  # who has a `loss_scale`


def name_optimizer(engine: Engine) -> None:
    """Give the optimizer of an engine these names, until the engine is closed."""
    optimizer = engine.optimizer
    if optimizer is None or isinstance(optimizer, OptimizerNames):
        return
    plain = type(optimizer)
    told = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    optimizer.__dict__[_ENGINE] = weakref.ref(engine)
    optimizer.__class__ = type(plain.__name__, (OptimizerNames, plain), told)


def unname_optimizer(optimizer: Optimizer | None) -> None:
    """Give an optimizer its own class back."""
    if isinstance(optimizer, OptimizerNames):
        optimizer.__dict__.pop(_ENGINE, None)
        optimizer.__class__ = type(optimizer).__mro__[2]
