"""Hugging Face accelerate over the engine: `FzeroAccelerator` in the place of `Accelerator`.

    prepare(model, optimizer)       one `Engine`; the model stays the object that it was
    accumulate, no_sync             windows of the engine: one reduction for each update
    backward, optimizer.step        `engine.backward`, `engine.step`
    save_state, load_state          `fzero.checkpoint` for models and optimizers

For trainers that make their accelerator themselves, see `fzero.integrations.transformers`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, convert_to_fp32
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero import checkpoint
from fzero.adapter import DynamicScale, Engine
from fzero.integrations import _shared as shared
from fzero.integrations._optimizer import FzeroOptimizer
from fzero.transforms._options import check_stage

_ELSEWHERE = {
    "gradient_accumulation_steps": "Accelerator(gradient_accumulation_steps=n), or the trainer's",
    "average_micro_batches": "Accelerator(gradient_accumulation_steps=n), or the trainer's",
    "max_norm": "accelerator.clip_grad_norm_, or the trainer's max_grad_norm",
}
_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class FzeroAccelerator(Accelerator):
    """`accelerate.Accelerator` whose models are sharded by ZeRO, at stage 0, 1, 2 or 3.

    `prepare` returns the model itself: an `Engine` is attached to it by hooks, so calls of the
    model, `unwrap_model`, and losses that hold the model need no change. A model that learns is
    prepared together with its optimizer. mixed_precision="bf16" or "fp16" is the engine's
    `autocast`, the latter with its dynamic loss scale (of `GradScalerKwargs` if they are given).

    Args:
        *args: of `Accelerator`.
        stage: of `Engine`.
        coalesce: gradients of all backwards since the last update are reduced once, at the update.
            For losses that run backwards of their own inside of one (GradCache, and the cached
            losses of sentence-transformers). Each rank then holds a whole gradient.
        engine: more options of `Engine`: mesh, offload, ...
        **kwargs: of `Accelerator`.

    Raises:
        LayoutError: for what shards by itself (DeepSpeed, FSDP, tensor parallelism), and fp8.

    Example:
        >>> import torch
        >>> from fzero.integrations.accelerate import FzeroAccelerator
        >>> accelerator = FzeroAccelerator(cpu=True, stage=2)
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.tensor([[1.0, 2.0]])).sum())
        >>> optimizer.step()
        >>> model.weight.data
        tensor([[0.5000, 0.0000]])
        >>> accelerator.engine_of(model).close()
    """

    def __init__(
        self,
        *args: Any,
        stage: int,
        coalesce: bool = False,
        engine: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._begin(stage, coalesce, engine or {})

    @classmethod
    def of(
        cls,
        accelerator: Accelerator,
        *,
        stage: int,
        coalesce: bool = False,
        engine: Mapping[str, Any] | None = None,
    ) -> FzeroAccelerator:
        """Return one with the settings of an accelerator that has prepared nothing yet."""
        made = cls.__new__(cls)
        vars(made).update(vars(accelerator))
        made._begin(stage, coalesce, engine or {})
        return made

    def _begin(self, stage: int, coalesce: bool, options: Mapping[str, Any]) -> None:
        self._stage, self._coalesces = check_stage(stage), coalesce
        for name in options:
            if name in _ELSEWHERE:
                raise shared.refused(f"engine={{{name!r}: ...}}", f"use {_ELSEWHERE[name]}")
        if self.distributed_type not in _PLAIN or self.parallelism_config is not None:
            seen = f"{self.distributed_type.value}, parallelism {self.parallelism_config}"
            raise shared.refused(seen, "switch off what shards or splits models beside fzero")
        if self.fp8_enabled:
            raise shared.refused('mixed_precision="fp8"', 'use "bf16"')
        self._options = {**self._precision(), **options}
        self.scaler = None  # the engine has its own
        self._sharded: weakref.WeakSet[Engine] = weakref.WeakSet()

    def _precision(self) -> dict[str, Any]:
        handler = self.autocast_handler
        if not self.native_amp or (handler is not None and not handler.enabled):
            return {}
        if self.mixed_precision == "bf16":
            return {"autocast": torch.bfloat16}
        given = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
        scale = DynamicScale(**given) if given.pop("enabled", True) else 1.0
        return {"autocast": torch.float16, "loss_scale": scale}

    # The engines.

    @property
    def engines(self) -> list[Engine]:
        """The engines of the optimizers that were prepared, in that order."""
        return [one.engine for one in self._optimizers if isinstance(one, FzeroOptimizer)]

    def engine_of(self, model: nn.Module) -> Engine | None:
        """Return the open engine of a model; None for one that is not sharded."""
        module = shared.model_of(model)
        return next((x for x in self._sharded if x.module is module and not x.closed), None)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """`Accelerator.prepare`: models that learn come with their optimizers. A collective.

        Raises:
            LayoutError: for a model that learns without its optimizer, an optimizer without its
                model, or one of several models.
        """
        places = dict(zip(map(id, args), device_placement or [None] * len(args), strict=True))
        models = [x for x in args if isinstance(x, nn.Module)]
        pairs = {id(shared.only_model(x, models)): x for x in args if isinstance(x, Optimizer)}
        done: dict[int, Any] = {}
        for model in models:
            optimizer = pairs.get(id(model))
            done[id(model)] = self._prepared(model, optimizer, places[id(model)])
            if optimizer is not None:
                done[id(optimizer)] = self._optimizers[-1]
        result = [done[id(x)] if id(x) in done else self._other(x, places[id(x)]) for x in args]
        return tuple(result) if len(result) != 1 else result[0]

    def _other(self, x: Any, place: bool | None) -> Any:
        return super().prepare(x, device_placement=[place])

    def _prepared(self, model: nn.Module, optimizer: Any, place: bool | None) -> nn.Module:
        """Return a model whose engine runs `optimizer`; put that into `_optimizers`."""
        learns = any(p.requires_grad for p in model.parameters())
        if optimizer is None and learns and self.engine_of(model) is None:
            raise shared.refused(
                f"prepare() of a {type(model).__name__} that learns, without its optimizer",
                "call prepare(model, optimizer); to evaluate, prepare_model(model, "
                "evaluation_mode=True); for a frozen model, model.requires_grad_(False)",
            )
        own, self.native_amp = self.native_amp, self.native_amp and optimizer is None
        try:
            prepared = super().prepare_model(model, place, evaluation_mode=True)
        finally:
            self.native_amp = own
        if isinstance(optimizer, FzeroOptimizer) and optimizer.engine is self.engine_of(model):
            self._optimizers.append(optimizer)  # a trainer trains once more
        elif optimizer is not None:
            engine = Engine(shared.model_of(model), optimizer, stage=self._stage, **self._options)
            if "autocast" in self._options:  # as accelerate does
                shared.model_of(model).register_forward_hook(
                    lambda _, __, out: convert_to_fp32(out)
                )
            self._sharded.add(engine)
            self._optimizers.append(FzeroOptimizer(engine))
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """`Accelerator.prepare_model`: of a model that does not learn, or to evaluate."""
        if evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        return self._prepared(model, None, device_placement)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Raise `LayoutError`: an optimizer is prepared with its model."""
        raise shared.refused(
            "prepare() of an optimizer without its model", "call prepare(model, it)"
        )

    # A step.

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Let gradients of the block wait for the next backward outside of it, or the update."""
        with ExitStack() as stack:
            engine = self.engine_of(model)
            if engine is not None and not engine.state.window.is_open:
                stack.enter_context(engine.no_sync())
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Differentiate loss / gradient_accumulation_steps, by `engine.backward`."""
        if "learning_rate" in kwargs:
            raise shared.refused("backward(learning_rate=...), of LOMO", "use another optimizer")
        with ExitStack() as stack:
            for engine in self.engines if self._coalesces else ():
                stack.enter_context(self.no_sync(engine.module))
            share = loss / self.gradient_accumulation_steps
            shared.backward(self.engines, share, **kwargs)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """`engine.clip_grad_norm_` of the model that has all of these parameters. A collective."""
        engine = self._engine_with(parameters)
        if float(norm_type) != 2.0:
            raise shared.refused(f"clip_grad_norm_(norm_type={norm_type})", "clip the 2-norm")
        if max_norm == float("inf"):  # to know the norm
            norm = engine.global_grad_norm
            return torch.zeros(()) if norm is None else norm
        return engine.clip_grad_norm_(max_norm)

    def _engine_with(self, parameters: Iterable[Tensor] | Tensor) -> Engine:
        given = {id(p) for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        for engine in self.engines:
            every, learning = shared.parameters_of(engine.module)
            if learning <= given <= every:
                return engine
        raise shared.refused(
            f"clip_grad_norm_ of {len(given)} parameters that are not those of one model",
            "pass model.parameters(), of each model in a call of its own",
        )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Raise `LayoutError`: gradients are sharded before anybody could clip their values."""
        raise shared.refused(
            "clip_grad_value_", "register a hook instead: p.register_hook(lambda g: g.clamp(-1, 1))"
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: gradients and norms that an engine gives are without the loss scale."""

    # Saving.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return whole values, on the CPU of every rank. A collective for a sharded model."""
        engine = self.engine_of(model)
        if engine is None:
            return super().get_state_dict(model, unwrap)
        return checkpoint.state_dict(engine)

    @contextmanager
    def whole(self, model: nn.Module, *, modify: bool = False) -> Iterator[None]:
        """In the block `state_dict()` of the model and its parts has whole values. A collective.

        So `save_pretrained` of any library works on one rank. With `modify`, `load_state_dict`
        works instead, on all ranks; the values of rank 0 count.
        """
        engine = self.engine_of(model)
        with shared.whole(engine, modify=modify) if engine is not None else nullcontext():
            yield

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.save_state`; models and optimizers go to its folder `fzero`. A collective.

        `load_state` restores them at any stage, on any number of ranks.
        """
        with self._without_engines() as engines:
            where = super().save_state(output_dir, *args, **kwargs)
        shared.save_engines(where, engines)
        return where

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """`Accelerator.load_state` of what `save_state` saved. A collective."""
        where: list[str] = []
        handle = self.register_load_state_pre_hook(lambda _, folder: where.append(folder))
        try:
            with self._without_engines() as engines:
                super().load_state(input_dir, *args, **kwargs)
        finally:
            handle.remove()
        shared.load_engines(where[0], engines)

    @contextmanager
    def _without_engines(self) -> Iterator[list[Engine]]:
        """Let accelerate save and load what is not sharded."""
        models, optimizers = self._models, self._optimizers
        engines = self.engines
        self._models = [x for x in models if self.engine_of(x) is None]
        self._optimizers = []
        try:
            yield engines
        finally:
            self._models, self._optimizers = models, optimizers
