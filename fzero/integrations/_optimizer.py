"""The optimizer that accelerate's loops step: its step is the step of an engine."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from fzero.adapter import Engine
from fzero.errors import LayoutError, PhaseError, explain


class FzeroOptimizer(AcceleratedOptimizer):
    """What `prepare` gives for an optimizer: `step()` is the step of an engine.

    Param groups are the optimizer's own, for schedulers. Its state is in the engine, so
    `state_dict()` raises: see `FzeroAccelerator.save_state`.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine

    def step(self, closure: Any = None) -> None:
        """`engine.step()`, unless gradients are accumulated further."""
        if closure is not None:
            raise LayoutError(
                explain(
                    "optimizer.step(closure).",
                    cause="an optimizer that evaluates the loss several times in a step.",
                    fix="run the backward first, then step().",
                )
            )
        if self.gradient_state.sync_gradients:
            self.engine.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Raise `PhaseError`: the state is in the engine."""
        raise PhaseError(
            explain(
                "load_state_dict() of an optimizer that an engine runs.",
                cause="a checkpoint of another kind of run: one that has optimizer.pt.",
                fix="load what accelerator.save_state has saved with accelerator.load_state; or "
                "write single values with engine.set_full_optimizer_state.",
            )
        )

    @property
    def step_was_skipped(self) -> bool:
        """Whether an overflow skipped the last update."""
        return self.engine.step_was_skipped
