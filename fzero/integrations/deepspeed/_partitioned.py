"""What DeepSpeed notes on a parameter of stage 3, on the parameters of its engines here alone.

Other libraries ask `hasattr(p, "ds_id")` and import deepspeed if it is there: so no other engine's
parameters have these names.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fzero.adapter.driver import OWNERS, Driver
from fzero.adapter.parts import find
from fzero.machine.placeholder import LazyParam

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
    place = find(driver, path)
    state = driver.state
    return place.piece(state, state.params.flats[place.group]).clone()


def _persists(driver: Driver, p: Tensor) -> bool:
    return p.numel() <= driver.state.setup.gathering.persistence_threshold_numel


def _status(driver: Driver, p: Tensor) -> ZeroParamStatus:
    here = _persists(driver, p)
    return ZeroParamStatus.AVAILABLE if here else ZeroParamStatus.NOT_AVAILABLE


_READ: dict[str, Callable[[Any, Driver, int, str], Any]] = {
    "ds_id": lambda p, driver, number, path: number,
    "ds_shape": lambda p, driver, number, path: torch.Size(p.shape),
    "ds_numel": lambda p, driver, number, path: p.numel(),
    "ds_tensor": lambda p, driver, number, path: _shard(driver, path),
    "ds_persist": lambda p, driver, number, path: _persists(driver, p),
    "ds_status": lambda p, driver, number, path: _status(driver, p),
}


def _attribute(name: str) -> property:
    return property(lambda p: _READ[name](p, *_place(p, name)))


for _name in _READ:
    setattr(LazyParam, _name, _attribute(_name))
