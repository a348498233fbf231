"""DeepSpeed's functions that take a parameter object: what its engine holds of it.

`full` functions are collectives, which every rank calls in one order; `local` ones are not. Unlike
in DeepSpeed, gradients are what the update will use: without the loss scale, averaged over ranks
and micro-batches; and the local getters work at every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fzero.adapter.access import (
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
    used,
    whole_gradient,
)
from fzero.adapter.driver import OWNERS, Driver
from fzero.adapter.parts import find, find_learning
from fzero.errors import LayoutError
from fzero.machine.offload import to_device
from fzero.machine.packing import unpack
from fzero.state.buffers import SIXTEEN_BIT


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient, whole, in the dtype of accumulation; None of a frozen parameter.

    None as well if no rank has gradients. Inside of a window, as in DeepSpeed, this rank's own,
    which is not reduced yet: what the window has brought so far. Raises `LayoutError` for a
    parameter of no engine.

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
    where = find_learning(driver, path)
    if driver.state.window.is_open:
        return _pending(driver, *where)
    held = driver.reduced("safe_get_full_grad()", path)
    return whole_gradient(driver.state, *where) if held else None


def _pending(driver: Driver, number: int, index: int, position: int) -> Tensor | None:
    """What this rank's own backwards in an open window have brought; None if they have not."""
    driver.wait()
    state = driver.state
    if not state.window.pending.held:
        return None
    flat = to_device(state.window.pending.flats[number], state.device)
    return used(state, unpack(state.setup.layout, index, flat)[position]).clone()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Make `value`, the same on every rank, the gradient."""
    driver, path, _ = _of(param)
    set_full_gradient(driver, path, value)


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The parameter, whole, as the optimizer steps it: its master, if it has one.

    None of a frozen parameter, which no optimizer steps.
    """
    driver, path, learns = _of(param)
    return _wide(full_parameter(driver, path)) if learns else None


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Make `value`, the same on every rank, the parameter and its master."""
    driver, path, _ = _of(param)
    set_full_parameter(driver, path, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """State `optim_state_key` ("exp_avg", ...), whole; None of a frozen parameter."""
    driver, path, learns = _of(param)
    return _wide(full_optimizer_state(driver, path, optim_state_key)) if learns else None


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: Tensor | float, optim_state_key: str
) -> None:
    """Make `value`, the same on every rank, state `optim_state_key`."""
    driver, path, _ = _of(param)
    set_full_optimizer_state(driver, path, optim_state_key, value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's piece of the gradient, 1-D; None of a frozen parameter."""
    driver, path, learns = _of(param)
    return local_gradient(driver, path) if learns else None


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Make `value` this rank's piece of the gradient."""
    driver, path, _ = _of(param)
    set_local_gradient(driver, path, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """This rank's piece of the parameter, as the optimizer steps it: 1-D."""
    driver, path, _ = _of(param)
    return _wide(local_parameter(driver, path))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Make `value` this rank's piece of the parameter and its master. Stage 3."""
    driver, path, _ = _of(param)
    set_local_parameter(driver, path, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's piece of state `optim_state_key`, 1-D; None of a frozen parameter."""
    driver, path, learns = _of(param)
    return _wide(local_optimizer_state(driver, path, optim_state_key)) if learns else None


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor | float, optim_state_key: str
) -> None:
    """Make `value` this rank's piece of state `optim_state_key`."""
    driver, path, _ = _of(param)
    set_local_optimizer_state(driver, path, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Make update_func(gradient, parameter) the gradient of each that learns."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _of(param: Any) -> tuple[Driver, str, bool]:
    """The driver of the engine of a parameter, its path, and whether it learns."""
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
    return driver, path, find(driver, path)[0] in driver.state.setup.layout.trainable


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.float32) if value.dtype in SIXTEEN_BIT else value
