"""DeepSpeed's functions that read and write the values of one parameter of an engine.

`full` functions are collectives, which every rank calls in one order; `local` ones are not. Unlike
in DeepSpeed, gradients are what the update will use: without the loss scale, averaged over ranks
and micro-batches; and the local getters work at every stage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from fzero.adapter.driver import OWNERS, Driver
from fzero.adapter.gradients import used
from fzero.adapter.param_access import (
    ParameterPlace,
    find,
    find_learning,
    full_optimizer_state,
    full_parameter,
    local_gradient,
    local_optimizer_state,
    local_parameter,
    set_full_gradient,
    set_full_optimizer_state,
    set_full_parameter,
    set_local_gradient,
    set_local_optimizer_state,
    set_local_parameter,
    whole_gradient,
)
from fzero.errors import LayoutError
from fzero.machine.offload import to_device
from fzero.machine.packing import unpack
from fzero.machine.placeholder import LazyParam
from fzero.state.buffers import SIXTEEN_BIT


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the full gradient, in the dtype of accumulation; None for a frozen parameter.

    Also None if no rank has gradients. In an open window it is the local gradient that this rank
    has accumulated, as in DeepSpeed. Raises `LayoutError` for a parameter of no engine.

    Example:
        >>> from fzero.adapter import deepspeed
        >>> config = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
        >>> engine = deepspeed.initialize(nn.Linear(2, 1, bias=False), config=config)
        >>> _ = engine.backward(engine(torch.tensor([[1.0, 2.0]])).sum())
        >>> [safe_get_full_grad(p) for p in engine.module.parameters()]
        [tensor([[1., 2.]])]
    """
    driver, path, learns = _of(param)
    if not learns:
        return None
    place = find_learning(driver, path)
    if driver.state.window.is_open:
        return _pending(driver, place)
    held = driver.reduced("safe_get_full_grad()", path)
    return whole_gradient(driver, place) if held else None


def _pending(driver: Driver, place: ParameterPlace) -> Tensor | None:
    """Return the local gradient accumulated in an open window; None without one."""
    driver.wait()
    state = driver.state
    if not state.window.pending.held:
        return None
    flat = to_device(place.flat_of(state, state.window.pending.flats), state.device)
    return used(state, unpack(state.setup.layout, place.group, flat)[place.position]).clone()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the gradient to the full tensor `value`, which is the same on every rank."""
    driver, path, _ = _of(param)
    set_full_gradient(driver, path, value)


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the full parameter in fp32: its master, if it has one.

    None for a frozen parameter, which no optimizer steps.
    """
    driver, path, learns = _of(param)
    return _wide(full_parameter(driver, path)) if learns else None


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the parameter and its master to the full `value`, the same on every rank."""
    driver, path, _ = _of(param)
    set_full_parameter(driver, path, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return the full state `optim_state_key` ("exp_avg", ...); None for a frozen parameter."""
    driver, path, learns = _of(param)
    return _wide(full_optimizer_state(driver, path, optim_state_key)) if learns else None


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: Tensor | float, optim_state_key: str
) -> None:
    """Set state `optim_state_key` to the full `value`, the same on every rank."""
    driver, path, _ = _of(param)
    set_full_optimizer_state(driver, path, optim_state_key, value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's shard of the gradient, 1-D; None for a frozen parameter."""
    driver, path, learns = _of(param)
    return local_gradient(driver, path) if learns else None


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's shard of the gradient to `value`."""
    driver, path, _ = _of(param)
    set_local_gradient(driver, path, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's shard of the parameter in fp32, 1-D: of its master, if it has one.

    None for a frozen parameter, which no optimizer steps.
    """
    driver, path, learns = _of(param)
    return _wide(local_parameter(driver, path)) if learns else None


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's shard of the parameter and of its master to `value`. Stage 3."""
    driver, path, _ = _of(param)
    set_local_parameter(driver, path, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's shard of state `optim_state_key`, 1-D; None for a frozen parameter."""
    driver, path, learns = _of(param)
    return _wide(local_optimizer_state(driver, path, optim_state_key)) if learns else None


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor | float, optim_state_key: str
) -> None:
    """Set this rank's shard of state `optim_state_key` to `value`."""
    driver, path, _ = _of(param)
    set_local_optimizer_state(driver, path, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Set the gradient of each trainable parameter to update_func(gradient, parameter)."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _of(param: Any) -> tuple[Driver, str, bool]:
    """Return the driver of a parameter's engine, the path, and whether it is trainable."""
    driver = OWNERS.get(id(param))
    named = {} if driver is None else dict(driver.module.named_parameters())
    path = next((path for path, p in named.items() if p is param), None)
    if driver is None or path is None:
        raise LayoutError(
            f"no open engine has this {type(param).__name__}.",
            cause="a parameter from before the engine was made (another object), of another "
            "model, or of an engine that was closed.",
            fix="take it from engine.module.parameters().",
        )
    return driver, path, find(driver, path).leaf.trainable


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.float32) if value.dtype in SIXTEEN_BIT else value


# What DeepSpeed notes on a parameter of stage 3, on the parameters of its engines here alone. Other
# libraries ask `hasattr(p, "ds_id")` and import deepspeed if it is there: so no other engine's
# parameters have these names.

_DRIVERS: weakref.WeakSet[Driver] = weakref.WeakSet()  # of engines that have these names


class ZeroParamStatus(Enum):
    """Where the values of a parameter are: names and numbers as in DeepSpeed."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def name_parameters(driver: Driver) -> None:
    """Give the parameters of an engine of stage 3 these names."""
    _DRIVERS.add(driver)


def _place(p: Any, name: str) -> tuple[Driver, int, str]:
    """Return the driver of a parameter, its number and its path."""
    driver = OWNERS.get(id(p))
    if driver is not None and driver in _DRIVERS and not driver.closed:
        for number, (path, own) in enumerate(driver.module.named_parameters()):
            if own is p:
                return driver, number, path
    raise AttributeError(f"{type(p).__name__!r} object has no attribute {name!r}")


def _shard(driver: Driver, path: str) -> Tensor:
    place, state = find(driver, path), driver.state
    return place.piece(state, state.params.flats[place.group]).clone()


def _persists(p: Tensor, driver: Driver) -> bool:
    return p.numel() <= driver.state.setup.gathering.persistence_threshold_numel


def _status(p: Tensor, driver: Driver) -> ZeroParamStatus:
    return ZeroParamStatus.AVAILABLE if _persists(p, driver) else ZeroParamStatus.NOT_AVAILABLE


def _attribute(name: str, read: Callable[[Any, Driver, int, str], Any]) -> None:
    setattr(LazyParam, name, property(lambda p: read(p, *_place(p, name))))


_attribute("ds_id", lambda p, driver, number, path: number)
_attribute("ds_shape", lambda p, *_: torch.Size(p.shape))
_attribute("ds_numel", lambda p, *_: p.numel())
_attribute("ds_tensor", lambda p, driver, _, path: _shard(driver, path))
_attribute("ds_persist", lambda p, driver, *_: _persists(p, driver))
_attribute("ds_status", lambda p, driver, *_: _status(p, driver))
