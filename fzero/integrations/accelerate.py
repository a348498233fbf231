"""Hugging Face accelerate over the engine: `FzeroAccelerator` in the place of `Accelerator`.

    prepare(model, optimizer)       one `Engine`; the model stays the object that it was
    accumulate, no_sync             windows of the engine: one reduction for each update
    backward, optimizer.step        `engine.backward`, `engine.step`
    backward(loss, weight=n)        the exact mean over tokens
    save_state, load_state          `fzero.checkpoint` for models and optimizers

For trainers that make their accelerator themselves, see `fzero.integrations.transformers`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fzero import checkpoint
from fzero.adapter import DynamicScale, Engine, gathered
from fzero.integrations import _shared as shared
from fzero.state.train_state import Weight
from fzero.transforms.init import check_stage

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def options_given(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an engine; refuse those that accelerate has words of its own for."""
    return shared.options_given(
        engine,
        "Accelerator(gradient_accumulation_steps=n), or that of TrainingArguments",
        "accelerator.clip_grad_norm_(model.parameters(), x), or max_grad_norm of TrainingArguments",
    )


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `model.generate` with full parameters: ranks may run different numbers of forwards."""
    with gathered(model):
        return type(model).generate(model, *args, **kwargs)


class FzeroOptimizer(AcceleratedOptimizer):
    """The optimizer that `prepare` returns: its `step()` is `engine.step()`.

    Its param groups are the optimizer's own, for schedulers; its state is in the engine.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine

    def step(self, closure: Any = None) -> None:
        """Call `engine.step()`, unless this is not the last micro-batch of an update."""
        if closure is not None:
            raise shared.refusal("optimizer.step(closure)", "run the backward first, then step()")
        if self.gradient_state.sync_gradients:
            self.engine.step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether an overflow skipped the last update."""
        return self.engine.step_was_skipped


class FzeroAccelerator(Accelerator):
    """An `accelerate.Accelerator` that shards models by ZeRO, at stage 0, 1, 2 or 3.

    `prepare` returns the model itself: an `Engine` is attached to it by hooks, so calls of the
    model, `unwrap_model`, and losses that hold the model need no change. A trainable model is
    prepared before its optimizer, or together with it. mixed_precision="bf16" or "fp16" is also the
    engine's `autocast`, the latter with its dynamic loss scale (of `GradScalerKwargs` if given).

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
    def of(cls, accelerator: Accelerator, **options: Any) -> FzeroAccelerator:
        """Return a `FzeroAccelerator` with the settings of an accelerator that prepared nothing.

        `options`: stage, coalesce and engine, as for the class.
        """
        sharding = cls.__new__(cls)
        vars(sharding).update(vars(accelerator))
        sharding._begin(**options)
        return sharding

    def _begin(self, stage: int, coalesce: bool, engine: Mapping[str, Any]) -> None:
        self._stage, self._coalesces = check_stage(stage), coalesce
        options = options_given(engine)
        if self.distributed_type not in _PLAIN or self.parallelism_config is not None:
            seen = f"{self.distributed_type.value}, parallelism {self.parallelism_config}"
            raise shared.refusal(seen, "switch off what shards or splits models beside fzero")
        if self.fp8_enabled:
            raise shared.refusal('mixed_precision="fp8"', 'use "bf16"')
        self._options = {**self._precision(), **options}
        self.scaler = None  # the engine has its own
        self._sharded: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._waiting = shared.Waiting()
        self._weight: Weight | None = None
        self.in_use: Callable[[], bool] = lambda: False  # whether a trainer trains with it now

    def train_while(self, in_use: Callable[[], bool]) -> None:
        """Say how it is known whether a trainer trains with it now."""
        self.in_use = in_use

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
        return shared.engine_of(self._sharded, model)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Do `Accelerator.prepare`, models first: an engine needs both. A collective.

        Raises:
            LayoutError: for an optimizer without its model, or of several models.
        """
        places = device_placement or [None] * len(args)
        order = sorted(range(len(args)), key=lambda i: not isinstance(args[i], nn.Module))
        sent: Any = [places[i] for i in order]
        prepared = super().prepare(*(args[i] for i in order), device_placement=sent)
        if len(args) == 1:
            return prepared
        return tuple(prepared[order.index(i)] for i in range(len(args)))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Do `Accelerator.prepare_model`. The optimizer of a trainable model is prepared next."""
        if not evaluation_mode and self.engine_of(model) is None:
            shared.close_earlier(model, but=self._sharded)
            self._waiting.add(model)
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Create the engine of this optimizer and of its prepared model. A collective."""
        if not isinstance(optimizer, FzeroOptimizer):  # a trainer that trains again brings its own
            model = self._waiting.pop(optimizer)
            engine = Engine(model, optimizer, stage=self._stage, **self._options)
            self._sharded.add(engine)
            vars(model)["no_sync"] = shared.OfModel(engine, self.in_use)
            if engine.stage == 3 and hasattr(model, "generate"):
                vars(model)["generate"] = MethodType(_generate, model)
            optimizer = FzeroOptimizer(engine)
        self._optimizers.append(optimizer)
        return optimizer

    # A step.

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate in the block; the next backward outside, or the update, reduces."""
        with ExitStack() as stack:
            engine = self.engine_of(model)
            if engine is not None and not engine.state.window.is_open:
                stack.enter_context(engine.no_sync())
            yield

    def backward(self, loss: Tensor, *, weight: Weight | None = None, **kwargs: Any) -> None:
        """Call `engine.backward` on loss / gradient_accumulation_steps, or on a weighted loss.

        With `weight`, an update has sum(w g) / sum(w) over its micro-batches and ranks: the exact
        mean over tokens, if each loss is a mean over w of them. The loss is then not divided.
        """
        engines, weight = self.engines, self._weight if weight is None else weight
        share = loss / self.gradient_accumulation_steps if weight is None else loss
        if weight is not None:
            kwargs["weight"] = weight
            if len(engines) != 1:
                raise shared.refusal(
                    f"a weight, and {len(engines)} models that learn",
                    "say whose loss it is: accelerator.engine_of(model).backward(loss, weight=n)",
                )
        if len(engines) > 1 and any(engine.needs_scaler() for engine in engines):
            raise shared.refusal(
                f"a loss of {len(engines)} models, each of which has a loss scale of its own",
                "say whose loss it is: accelerator.engine_of(model).backward(loss)",
            )
        with ExitStack() as stack:
            for engine in engines if self._coalesces else ():
                stack.enter_context(self.no_sync(engine.module))
            how: Any = engines[0] if engines else torch.autograd
            how.backward(share, **kwargs)

    @contextmanager
    def weighing(self, weight: Weight) -> Iterator[None]:
        """Give each `backward(loss)` in the block this weight, for a trainer that calls it."""
        self._weight = weight
        try:
            yield
        finally:
            self._weight = None

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip by `engine.clip_grad_norm_` of the model of these parameters. A collective.

        Parameters of a part of a model, or of several models, are clipped by torch's function.
        """
        if not self.sync_gradients:
            raise shared.refusal(
                "accelerator.clip_grad_norm_ of gradients that are no update's yet",
                "call it under `if accelerator.sync_gradients:`, as accelerate's examples do",
                cause="a clip at each micro-batch of gradient_accumulation_steps.",
            )
        some = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        given = {id(p) for p in some}
        for engine in self.engines:
            every = list(engine.parameters())
            learning = {id(p) for p in every if p.requires_grad}
            if learning <= given <= set(map(id, every)):
                return shared.clip(engine, max_norm, norm_type)
        return nn.utils.clip_grad_norm_(some, max_norm, norm_type)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: the gradients and norms of an engine are unscaled."""

    # Saving.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the full state dict, on every rank's CPU. A collective for a sharded model."""
        engine = self.engine_of(model)
        if engine is None:
            return super().get_state_dict(model, unwrap)
        return checkpoint.state_dict(engine)

    @contextmanager
    def whole(self, model: nn.Module, *, modify: bool = False) -> Iterator[None]:
        """Gather the full parameters of the model to the CPU for the block. A collective.

        `save_pretrained` of any library then works on one rank. With `modify`, all ranks may write
        to them, as `load_state_dict` does; the values of rank 0 count.
        """
        with shared.whole(self.engine_of(model), modify=modify):
            yield

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Do `Accelerator.save_state`; sharded models go to its folder `fzero`. A collective.

        `load_state` restores them at any stage, on any number of ranks.
        """
        engines, sharded = self.engines, list[Any]()

        def first(models: Any, weights: Any, _: Any) -> None:
            sharded.extend(w for x, w in zip(models, weights, strict=True) if self.engine_of(x))

        def last(_: Any, weights: Any, __: Any) -> None:
            weights[:] = [w for w in weights if not any(w is x for x in sharded)]

        with self._with_hooks(self._save_model_state_pre_hook, first, last, modify=False):
            where = super().save_state(output_dir, *args, **kwargs)
        shared.save_engines(where, engines)
        return where

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Do `Accelerator.load_state` from a folder of `save_state`. A collective.

        A pre hook comes after that, and may write to sharded models.
        """
        engines = self.engines

        def first(_: Any, folder: Any) -> None:
            shared.load_engines(folder, engines)

        def last(models: Any, _: Any) -> None:
            models[:] = [x for x in models if self.engine_of(x) is None]

        with self._with_hooks(self._load_model_state_pre_hook, first, last, modify=True):
            super().load_state(input_dir, *args, **kwargs)

    @contextmanager
    def _with_hooks(self, hooks: Any, first: Any, last: Any, *, modify: bool) -> Iterator[None]:
        """Hide models and optimizers with engines, so that accelerate saves and loads the rest.

        hooks: of a user, who gets all models, with whole parameters; around them run `first` and
        `last`, by which accelerate sees none of the sharded ones.
        """
        models, optimizers, user = self._models, self._optimizers, len(hooks) > 0
        engines = [x for x in map(self.engine_of, models) if x is not None]
        self._models = [x for x in models if user or self.engine_of(x) is None]
        self._optimizers = []
        with ExitStack() as stack:

            def begin(*args: Any) -> None:
                first(*args)
                for engine in engines if user else ():
                    stack.enter_context(shared.whole(engine, modify=modify))

            handles = [RemovableHandle(hooks) for _ in range(2)]
            hooks |= {handles[0].id: begin, handles[1].id: last}
            hooks.move_to_end(handles[0].id, last=False)
            try:
                yield
            finally:
                self._models, self._optimizers = models, optimizers
                for handle in handles:
                    handle.remove()
