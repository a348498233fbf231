"""Keeps a torch.optim optimizer to the engine that runs it, by its public hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fzero.errors import PhaseError
from fzero.optim import TorchOptimizer
from fzero.state import Setup


class Guard:
    """While an engine has an optimizer, its step, state_dict and load_state_dict raise."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._steps = False
        self._handles = (
            []
            if optimizer is None
            else [
                optimizer.register_step_pre_hook(self._require_engine),
                optimizer.register_state_dict_pre_hook(_refuse_state_dict),
                optimizer.register_load_state_dict_pre_hook(_refuse_load),
            ]
        )

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
        for handle in self._handles:
            handle.remove()

    def _require_engine(self, *_: Any) -> None:
        if not self._steps:
            raise PhaseError(
                "optimizer.step() of an optimizer that an engine runs.",
                cause="the training loop of before the engine; or torch's get_state_dict(), "
                "which makes a step, and has set the learning rates to 0 for it.",
                fix="call engine.step(); a scheduler's step() stays as it is. Save with "
                "fzero.checkpoint.save(path, engine.state).",
            )


def _refuse_state_dict(optimizer: Optimizer) -> None:
    raise PhaseError(
        "optimizer.state_dict() of an optimizer that an engine runs.",
        cause="saving it in the usual way: its state is sharded over the ranks, in "
        "engine.state, and one rank's part is no checkpoint.",
        fix="save with fzero.checkpoint.save(path, engine.state), or take whole values: "
        "engine.full_optimizer_states().",
    )


def _refuse_load(optimizer: Optimizer, _: Any) -> None:
    raise PhaseError(
        "optimizer.load_state_dict() of an optimizer that an engine runs.",
        cause="resuming in the usual way: its state is sharded, in engine.state.",
        fix="load what fzero.checkpoint.save has saved with fzero.checkpoint.load; or write "
        "whole values with engine.set_full_optimizer_state(path, name, value).",
    )


def optimizer_of(setup: Setup, at: Callable[[str], Tensor]) -> Optimizer | None:
    """Return the torch.optim optimizer of a state, if it has one.

    One that was made by a class or a factory gets its parameters back, by their paths: `at`.
    """
    chosen: Any = setup.optimizer
    if not isinstance(chosen, TorchOptimizer):
        return None
    if chosen.instance is not chosen.source:
        for group, paths in zip(chosen.instance.param_groups, chosen.members, strict=True):
            group["params"] = [at(path) for path in paths]
    return chosen.instance
