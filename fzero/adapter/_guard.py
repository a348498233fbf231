"""Keeps an optimizer to the engine that runs it: it has rows, and gradients only in step()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from fzero.errors import PhaseError, explain


class Guard:
    """What an optimizer's methods do while an engine has it."""

    def __init__(self, optimizer: Optimizer, zero_grad: Callable[..., None]) -> None:
        self._optimizer, self._steps = optimizer, False
        self._handle = optimizer.register_step_pre_hook(self._require_engine)
        vars(optimizer).update(zero_grad=zero_grad, add_param_group=_refuse_group)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The engine runs it."""
        self._steps = True
        try:
            yield
        finally:
            self._steps = False

    def remove(self) -> None:
        """It is an ordinary optimizer again."""
        self._handle.remove()
        for name in ("zero_grad", "add_param_group"):
            vars(self._optimizer).pop(name, None)

    def _require_engine(self, *_: Any) -> None:
        if not self._steps:
            raise PhaseError(
                explain(
                    "optimizer.step() of an optimizer that an engine runs.",
                    cause="the training loop of before the engine; the optimizer has this rank's "
                    "rows, and their gradients come at engine.step().",
                    fix="call engine.step(). A scheduler's step() stays as it is.",
                )
            )


def _refuse_group(param_group: Any) -> None:
    raise PhaseError(
        explain(
            "add_param_group() of an optimizer that an engine runs.",
            cause="unfreezing step by step: the new group would have no rows and no gradients.",
            fix="give all groups before Engine(...), and freeze with requires_grad_(False) for "
            "now; or close() the engine, add the group, and make a new one.",
        )
    )
