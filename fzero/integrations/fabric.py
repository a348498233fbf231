"""Lightning Fabric over the engine: `Fabric(strategy=FzeroStrategy(stage=3))`.

fabric.setup(model, optimizer)          one `Engine`; the model stays the object that it was
loss.backward, fabric.backward          seen by the hooks of the engine; before a loss with a
                                        weight, strategy.engine_of(model).scale(loss, weight=n)
optimizer.step                          `engine.step`
fabric.no_backward_sync(model)          a window of the engine
fabric.save, fabric.load                a folder, with `fzero.checkpoint` for each model
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.precision import MixedPrecision
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero import checkpoint
from fzero.adapter import Engine
from fzero.integrations import _shared as shared
from fzero.transforms.state_options import check_stage

_REST = "rest.ckpt"
"""What is saved of the state beside sharded models."""


class FzeroStrategy(DDPStrategy):
    """A Fabric strategy that shards models by ZeRO, at stage 0, 1, 2 or 3.

    Processes are launched as with "ddp". Any number of models may be set up, each with one
    optimizer, or frozen. precision="bf16-mixed" is also the engine's `autocast`.

    Args:
        stage: of `Engine`.
        engine: more options of `Engine`: mesh, offload, loss_scale, ...
        **options: of `DDPStrategy` (start_method, timeout, ...), not of DistributedDataParallel.

    Raises:
        LayoutError: for a stage that does not exist.

    Example:
        >>> import torch
        >>> from lightning_fabric import Fabric
        >>> from fzero.integrations.fabric import FzeroStrategy
        >>> FzeroStrategy(stage=3).stage
        3
    """

    def __init__(self, stage: int, engine: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        if self._ddp_kwargs:
            raise shared.refusal(
                f"{', '.join(self._ddp_kwargs)}, of DistributedDataParallel",
                "leave them out; options of the engine go into engine={...}",
            )
        self.stage, self.engines = check_stage(stage), list[Engine]()
        self._options, self._waiting = engine or {}, shared.Waiting()
        self._backward_sync_control = _Windows(self)

    def engine_of(self, x: Any) -> Engine | None:
        """Return the open engine of a model, or of an optimizer; None if it has none."""
        return shared.engine_of(self.engines, x)

    def setup_module(self, module: nn.Module) -> Any:
        """Return the model unchanged. The optimizer of a trainable model is set up next."""
        self._waiting.add(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Create the engine of this optimizer and of its model. A collective.

        Raises:
            LayoutError: for a model that was not set up, or has an optimizer; and for several.
        """
        precision, options = self.precision, dict(self._options)
        if isinstance(precision, MixedPrecision):
            if precision.precision != "bf16-mixed":
                raise shared.refusal(
                    f'precision="{precision.precision}", whose scaler steps the optimizer',
                    'use "bf16-mixed"; or "32-true" and engine={"autocast": torch.float16}, with '
                    "fabric.strategy.engine_of(model).backward(loss)",
                )
            options.setdefault("autocast", torch.bfloat16)
        module = self._waiting.pop(optimizer)
        self.engines.append(Engine(module, optimizer, stage=self.stage, **options))
        return optimizer

    # A step.

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Call `engine.step()`."""
        if kwargs:
            raise shared.refusal("optimizer.step(closure)", "run the backward first, then step()")
        return self._known(optimizer).step()

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Call `engine.clip_grad_norm_`; return the norm before clipping. A collective."""
        norm = shared.clip(self._known(optimizer), max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"clip_gradients: the norm of the gradients is {norm.item()}.")
        return norm

    def _known(self, optimizer: Any) -> Engine:
        engine = self.engine_of(optimizer)
        if engine is None:
            raise shared.refusal("an optimizer without an engine", "call fabric.setup(model, it)")
        return engine

    # Checkpoints.

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save to the folder `path`; a model with its optimizer, no gradients. A collective.

        `load_checkpoint` restores them at any stage, on any number of ranks.
        """
        if filter or storage_options is not None:
            raise shared.refusal("fabric.save(filter=...)", "choose what `state` has")
        folder, rest = Path(self.broadcast(path)), {}
        for name, x in state.items():
            engine = self.engine_of(x)
            if engine is None:
                rest[name] = x
            elif isinstance(x, nn.Module):
                shared.save(folder / name, engine)
            elif not any(engine is self.engine_of(y) for y in state.values() if y is not x):
                raise shared.refusal(f"fabric.save of {name} alone", "save it with its model")
        plain = self._convert_stateful_objects_in_state(rest, filter={})
        if self.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            self.checkpoint_io.save_checkpoint(checkpoint=plain, path=folder / _REST)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` saved into the models of `state`. A collective.

        A model alone takes the raw `state_dict` of a file.
        """
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only)
        folder, rest = Path(self.broadcast(path)), {}
        for name, x in state.items():
            engine = self.engine_of(x)
            if engine is None:
                rest[name] = x
            elif isinstance(x, nn.Module):
                checkpoint.load(folder / name, engine, rng=False)
        left = super().load_checkpoint(folder / _REST, rest, strict, weights_only)
        state.update(rest)
        return left

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the full state dict, on every rank's CPU. A collective for a sharded model."""
        engine = self.engine_of(module)
        if engine is None:
            return super().get_module_state_dict(module)
        return checkpoint.state_dict(engine)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Any, strict: bool = True
    ) -> None:
        """Load a full state dict; the values of rank 0 count. A collective for a sharded model."""
        with shared.whole(self.engine_of(module), modify=True):
            super().load_module_state_dict(module, state_dict, strict)


class _Windows(_BackwardSyncControl):
    """The windows that `fabric.no_backward_sync` opens."""

    def __init__(self, strategy: FzeroStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Accumulate in the block; the next backward outside, or the update, reduces."""
        engine = self._strategy.engine_of(module)
        return engine.no_sync() if enabled and engine is not None else nullcontext()
