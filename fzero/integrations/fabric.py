"""Lightning Fabric over the engine: `Fabric(strategy=FzeroStrategy(stage=3))`.

fabric.setup(model, optimizer)          one `Engine`; the model stays the object that it was
fabric.backward, optimizer.step         `engine.backward`, `engine.step`
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
from fzero.transforms._options import check_stage

_REST = "rest.ckpt"
"""What is saved of the state beside sharded models."""


class FzeroStrategy(DDPStrategy):
    """A Fabric strategy whose models are sharded by ZeRO, at stage 0, 1, 2 or 3.

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
            raise shared.refused(
                f"{', '.join(self._ddp_kwargs)}, of DistributedDataParallel",
                "leave them out; options of the engine go into engine={...}",
            )
        self.stage, self.engines = check_stage(stage), list[Engine]()
        self._options = engine or {}
        self._backward_sync_control = _Windows(self)

    def engine_of(self, x: Any) -> Engine | None:
        """Return the open engine of a model, or of an optimizer; None if it has none."""
        module = shared.model_of(x) if isinstance(x, nn.Module) else None
        found = [
            e for e in self.engines if not e.closed and (e.module is module or e.optimizer is x)
        ]
        return found[0] if found else None

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Make the engine of a model and its optimizer. A collective.

        Raises:
            LayoutError: for several optimizers, or one with parameters of another model.
        """
        if len(optimizers) != 1:
            raise shared.refused(
                f"setup() of a model with {len(optimizers)} optimizers",
                "use one optimizer with several param groups",
            )
        shared.only_model(optimizers[0], [module])
        precision, options = self.precision, dict(self._options)
        if isinstance(precision, MixedPrecision):
            if precision.precision != "bf16-mixed":
                raise shared.refused(
                    f'precision="{precision.precision}", whose scaler steps the optimizer',
                    'use "32-true" and engine={"autocast": torch.float16}',
                )
            options.setdefault("autocast", torch.bfloat16)
        self.engines.append(Engine(module, optimizers[0], stage=self.stage, **options))
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> Any:
        """Return a frozen model as it is.

        Raises:
            LayoutError: for a model that learns, which comes with its optimizer.
        """
        if any(p.requires_grad for p in module.parameters()):
            raise shared.refused(
                "setup() of a model that learns, without its optimizer",
                "call fabric.setup(model, optimizer); for a frozen one, requires_grad_(False)",
            )
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raise `LayoutError`: an optimizer is set up with its model."""
        raise shared.refused("setup_optimizers()", "call fabric.setup(model, optimizer)")

    # A step.

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Differentiate a loss; one of several models needs none of them to have a loss scale."""
        engine = None if module is None else self.engine_of(module)
        shared.backward([engine] if engine is not None else self.engines, tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """`engine.step()`."""
        engine = self._known(optimizer)
        if kwargs:
            raise shared.refused("optimizer.step(closure)", "run the backward first, then step()")
        return engine.step()

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """`engine.clip_grad_norm_`; return the norm before. A collective."""
        if float(norm_type) != 2.0:
            raise shared.refused(f"clip_gradients(norm_type={norm_type})", "clip the 2-norm")
        engine = self._known(optimizer)
        norm = engine.global_grad_norm
        if error_if_nonfinite and norm is not None and not torch.isfinite(norm):
            raise RuntimeError(f"clip_gradients: the norm of the gradients is {norm.item()}.")
        return engine.clip_grad_norm_(max_norm)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        """Raise `LayoutError`: gradients are sharded before anybody could clip their values."""
        raise shared.refused(
            "clip_gradients(clip_val=...)", "p.register_hook(lambda g: g.clamp(-1, 1))"
        )

    def _known(self, optimizer: Any) -> Engine:
        engine = self.engine_of(optimizer)
        if engine is None:
            raise shared.refused("an optimizer without an engine", "call fabric.setup(model, it)")
        return engine

    # Checkpoints.

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save to the folder `path`; a sharded model with its optimizer. A collective.

        `load_checkpoint` restores them at any stage, on any number of ranks.
        """
        if filter or storage_options is not None:
            raise shared.refused("fabric.save(filter=...)", "choose what `state` has")
        folder, rest = Path(self.broadcast(path)), {}
        for name, x in state.items():
            engine = self.engine_of(x)
            if engine is None:
                rest[name] = x
            elif isinstance(x, nn.Module):
                checkpoint.save(folder / name, engine, rng=False)
            elif not any(engine is self.engine_of(y) for y in state.values() if y is not x):
                raise shared.refused(f"fabric.save of {name} alone", "save it with its model")
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
        """Return whole values, on the CPU of every rank. A collective for a sharded model."""
        engine = self.engine_of(module)
        if engine is None:
            return super().get_module_state_dict(module)
        return checkpoint.state_dict(engine)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Any, strict: bool = True
    ) -> None:
        """Load whole values; those of rank 0 count. A collective for a sharded model."""
        engine = self.engine_of(module)
        with nullcontext() if engine is None else shared.whole(engine, modify=True):
            super().load_module_state_dict(module, state_dict, strict)


class _Windows(_BackwardSyncControl):
    """What `fabric.no_backward_sync` asks for."""

    def __init__(self, strategy: FzeroStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Let gradients of the block wait for the next backward outside of it, or the update."""
        engine = self._strategy.engine_of(module)
        return engine.no_sync() if enabled and engine is not None else nullcontext()
