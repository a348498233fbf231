"""The names that DeepSpeed's optimizer has beside torch's, on the optimizer of an engine."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer

from fzero.adapter.engine import Engine

_ENGINE = "_fzero_engine"


class Scaler:
    """What `optimizer.loss_scaler` says: of the engine's loss scale, which stays the engine's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss; 1.0 without one. The host waits for the device."""
        return float(self._engine().loss_scale)

    cur_scale = loss_scale


class OptimizerNames:
    """`loss_scale`, `cur_scale`, `loss_scaler` and `optimizer`, read-only."""

    @property
    def loss_scaler(self) -> Scaler:
        """An object with `loss_scale`."""
        return Scaler(self.__dict__[_ENGINE])

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss; 1.0 without one. The host waits for the device."""
        return self.loss_scaler.loss_scale

    @property
    def cur_scale(self) -> float:
        """`loss_scale`."""
        return self.loss_scaler.loss_scale

    @property
    def optimizer(self) -> Any:
        """The optimizer of torch: this one, which no other is around."""
        return self


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
