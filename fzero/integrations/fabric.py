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
from lightning_fabric.strategies.strategy import (
    _BackwardSyncControl,
    _validate_keys_for_strict_loading,
)
from lightning_fabric.utilities.types import _Stateful
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero import checkpoint
from fzero.adapter import Engine
from fzero.checkpoint.elements import read_whole
from fzero.integrations import _shared as shared
from fzero.transforms.init import check_stage

_REST = "rest.ckpt"
"""What is saved of the state beside sharded models."""

_SHARDED = "fzero.sharded"
"""In it: {name of a sharded model or optimizer: that of its model}."""


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
        self._options = shared.options_given(
            engine or {},
            "fabric.no_backward_sync(model), and optimizer.step() for every n-th batch",
            "fabric.clip_gradients(model, optimizer, max_norm=...)",
        )
        self._waiting = shared.Waiting()
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
        folder, of_engines = Path(self.broadcast(path)), self._of_engines(state)
        for name, model in of_engines.items():
            engine: Any = self.engine_of(state[name])
            if model is None:
                raise shared.refusal(f"fabric.save of {name} alone", "save it with its model")
            if name == model:
                shared.save(folder / name, engine)
        rest = {name: x for name, x in state.items() if name not in of_engines}
        plain = self._convert_stateful_objects_in_state(rest, filter={})
        if self.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            saved = {**plain, _SHARDED: of_engines}
            self.checkpoint_io.save_checkpoint(checkpoint=saved, path=folder / _REST)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` saved into what `state` names, and no more. A collective.

        Nothing is changed before all was read. Without a state all is returned, whole, on each
        rank; with one the rest that it does not name, but for sharded models and optimizers. A
        model alone takes the raw `state_dict` of a file.
        """
        folder = Path(self.broadcast(path))
        if (state is not None and not isinstance(state, dict)) or not folder.is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        left = self.checkpoint_io.load_checkpoint(folder / _REST, weights_only=weights_only)
        of_engines, wanted = self._of_engines(state or {}), state or {}
        saved = left.pop(_SHARDED, None) or of_engines  # older ones do not say
        if not state:
            for name, model in saved.items():
                left[name] = read_whole(folder / model)[name != model]
            return left
        rest = {name: x for name, x in wanted.items() if name not in of_engines}
        _validate_keys_for_strict_loading(wanted.keys(), {*left, *saved}, strict=strict)
        made: dict[str, tuple[Engine, Any, set[str]]] = {}
        for name in (name for name in of_engines if name in saved):
            engine: Any = self.engine_of(wanted[name])
            if saved[name] not in made:
                there = checkpoint.load(folder / saved[name], engine.state, rng=False)
                made[saved[name]] = engine, there, set()
            made[saved[name]][2].add(name)
        for name, x in rest.items():
            if name not in left:
                continue
            value = left.pop(name)
            if isinstance(x, nn.Module):
                self.load_module_state_dict(x, value, strict)
            elif isinstance(x, _Stateful):
                x.load_state_dict(value)
            else:
                state[name] = value
        for name, (engine, there, named) in made.items():
            optimizer = bool(named - {name})
            shared.adopt(folder / name, engine, there, model=name in named, optimizer=optimizer)
        return left

    def _of_engines(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return {name: that of its model} of models and optimizers that have an engine."""
        engines = {name: self.engine_of(x) for name, x in state.items()}
        models = {id(engines[k]): k for k, x in state.items() if isinstance(x, nn.Module)}
        return {k: models.get(id(x)) for k, x in engines.items() if x is not None}

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
        engine = self.engine_of(module)
        if engine is None:
            super().load_module_state_dict(module, state_dict, strict)
        else:
            engine.load_state_dict(state_dict, strict)


class _Windows(_BackwardSyncControl):
    """The windows that `fabric.no_backward_sync` opens."""

    def __init__(self, strategy: FzeroStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Accumulate in the block; the next backward outside, or the update, reduces."""
        engine = self._strategy.engine_of(module)
        return engine.no_sync() if enabled and engine is not None else nullcontext()
