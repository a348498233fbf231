"""An engine with the names that DeepSpeed's engine has."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fzero.adapter.engine_step import step
from fzero.checkpoint.elements import slots_of
from fzero.errors import LayoutError, PhaseError, explain
from fzero.integrations.deepspeed._checkpoint import CheckpointedEngine
from fzero.integrations.deepspeed._config import (
    Batch,
    loader_of,
    low_dtype,
    with_defaults,
)
from fzero.integrations.deepspeed._config_keys import NAMES
from fzero.integrations.deepspeed._lr_schedules import lrs_of, momenta_of
from fzero.integrations.deepspeed._optimizer import unname_optimizer
from fzero.state.scale import DynamicScale
from fzero.state.setup import MASTERS


class DeepSpeedEngine(CheckpointedEngine):
    """An `Engine` with the methods and properties of DeepSpeed's engine; `initialize` returns it.

    An update divides by gradient_accumulation_steps, however many gradients came. Attributes that
    the engine does not have are looked up on the module, as in DeepSpeed.

    Attributes:
        batch: the batch sizes of the config.
        lr_scheduler: is stepped after each update; None without one.
        training_dataloader: of `training_data`; None without it.
        global_steps: updates that were due, also those that an overflow skipped.
        global_samples: samples of those, on all ranks; 0 if the config has no batch size.
        micro_steps: calls of `step()`.

    Example:
        >>> from fzero.adapter import initialize
        >>> config = {
        ...     "gradient_accumulation_steps": 2,
        ...     "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        ... }
        >>> engine = initialize(torch.nn.Linear(2, 1), config=config)
        >>> for _ in range(3):
        ...     _ = engine.backward(engine(torch.ones(1, 2)).sum())
        ...     engine.step(), engine.global_steps
        (False, 0)
        (True, 1)
        (False, 1)
    """

    batch = Batch(None, None, 1)
    training_dataloader: Any = None
    micro_steps = 0
    _config: Mapping[str, Any] = with_defaults({"steps_per_print": None})
    _managed = True
    _is_boundary: bool | None = None  # what the user says; None: every n-th call of step()
    _moved: tuple[tuple[Tensor, torch.device], ...] = ()  # to the host, and from where
    _was_due = False

    def _follow_config(self, values: Mapping[str, Any], batch: Batch, loader: Any) -> None:
        """Store the values of the config that are no options of `Engine`."""
        self._config, self.batch, self.training_dataloader = values, batch, loader
        self._managed = values["managed_gradient_accumulation"]
        self._is_boundary = None if self._managed else True

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the module, if the engine has none of this name: generate, ..."""
        module = self.__dict__.get("module")
        if module is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(module, name)
        except AttributeError:
            cause = "a name of DeepSpeed's engine that fzero's does not have."
            fix = (
                "docs/deepspeed_config.md, 'The engine', lists the names that there are; "
                "docs/moving/deepspeed.md, 'Other names', what stands for some others."
            )
            for pattern, use in NAMES["engine_names"].items():
                if re.fullmatch(pattern, name):
                    cause = "a name of DeepSpeed's engine that has no one meaning here."
                    fix = f"use {use}."
                    break
            seen = f"neither the engine nor its {type(module).__name__} has {name!r}."
            raise AttributeError(explain(seen, cause=cause, fix=fix)) from None

    # Where it runs, and what its config says.

    @property
    def device(self) -> torch.device:
        """The device of the parameters, to which inputs go."""
        return self.state.device

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine, as its launcher says; 0 without one."""
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def global_rank(self) -> int:
        """The number of this rank."""
        return self.axis.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.axis.size

    def train_batch_size(self) -> int | None:
        """Samples of one update, on all ranks; None if the config does not say."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of one backward, on one rank; None if the config does not say."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Calls of `step()` for one update."""
        return self.options.updating.micro_batches

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Return (samples of an update, samples of a backward on a rank, backwards)."""
        return self.batch.train, self.batch.micro, self.gradient_accumulation_steps()

    def zero_optimization(self) -> bool:
        """Whether the stage is 1, 2 or 3."""
        return self.stage > 0

    def zero_optimization_stage(self) -> int:
        """The stage."""
        return self.stage

    def gradient_clipping(self) -> float:
        """The norm to which an update clips; 0 if it does not."""
        return self.options.updating.max_norm or 0.0

    def fp16_enabled(self) -> bool:
        """Whether the config has fp16.enabled."""
        return low_dtype(self._config) is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the config has bf16.enabled."""
        return low_dtype(self._config) is torch.bfloat16

    def dynamic_loss_scale(self) -> bool:
        """Whether losses are scaled by a number that adapts itself."""
        scale = self.state.scale
        return scale is not None and isinstance(scale.policy, DynamicScale)

    def steps_per_print(self) -> int | None:
        """What the config says; nothing is printed here. None without it."""
        return self._config["steps_per_print"]

    # Backward and step.

    @torch._disable_dynamo
    def backward(
        self, loss: Any, gradient: Any = None, *, scale_wrt_gas: bool = True, **options: Any
    ) -> Any:
        """`Engine.backward`; return the loss over gradient_accumulation_steps.

        With scale_wrt_gas=False this loss is not divided by it, nor is what is returned.
        """
        several = isinstance(loss, list | tuple)
        count = self.gradient_accumulation_steps()
        given = loss
        if not scale_wrt_gas and count != 1:
            given = [x * count for x in loss] if several else loss * count
        elif not scale_wrt_gas and self.state.setup.policy.averages:
            raise _unmanaged("backward(scale_wrt_gas=False)")
        super().backward(given, gradient, **options)
        if several or not isinstance(loss, Tensor):
            return None
        return loss.detach() / count if scale_wrt_gas else loss.detach()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates."""
        if self._is_boundary is not None:
            return self._is_boundary
        return self.state.progress.calls + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next calls of `step()` update, with the same value on every rank.

        It holds until the next call; None returns to every n-th `step()`. An update divides by
        gradient_accumulation_steps all the same.
        """
        if not self._managed:
            raise _unmanaged("set_gradient_accumulation_boundary()")
        self._is_boundary = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change how many backwards make an update, from the next one on; on every rank alike.

        Raises `LayoutError` for what is no multiple of micro-batch size times ranks, and
        `PhaseError` within an accumulation.
        """
        micro, ranks = self.batch.micro, self.axis.size
        each = (micro or 0) * ranks
        positive = type(train_batch_size) is int and train_batch_size > 0
        if not (each and positive) or train_batch_size % each:
            raise LayoutError(
                f"set_train_batch_size({train_batch_size!r}), with a micro-batch size of {micro} "
                f"on {ranks} ranks.",
                cause="a size that is no multiple of both, or a config without a batch size.",
                fix="give a multiple of train_micro_batch_size_per_gpu x ranks.",
            )
        if not self._managed:
            raise PhaseError(
                "set_train_batch_size() with managed_gradient_accumulation = false.",
                cause="an update at each step(), whatever came before it.",
                fix="call step() after as many backwards as there shall be.",
            )
        progress = self.state.progress
        if progress.calls or progress.backwards:
            raise PhaseError(
                f"set_train_batch_size() after {progress.backwards} backwards of an update.",
                cause="gradients that wait for an update were divided by the number before.",
                fix="call it right after an update.",
            )
        count = train_batch_size // each
        updating = replace(
            self.options.updating, micro_batches=count, average_micro_batches=count > 1
        )
        self.options = replace(self.options, updating=updating)
        self._driver.put_each(lambda state: state.replace_policy(grad_scale=1.0 / count))
        self.batch = self.batch._replace(train=train_batch_size, steps=count)

    @torch._disable_dynamo
    def step(self, closure: None = None) -> bool:
        """Call `Engine.step` at a boundary; count a micro-batch elsewhere."""
        count = self.gradient_accumulation_steps()
        every = {None: count, True: 1, False: sys.maxsize}[self._is_boundary]
        self._was_due, backwards = False, self.state.progress.backwards
        self._was_due = step(self._driver, every, closure)
        self.micro_steps += 1
        if self._was_due:
            self.global_steps += 1
            per_backward = (self.batch.train or 0) // count
            self.global_samples += per_backward * (count if self._managed else backwards)
        return self._was_due

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the parameters. It waits for the device in fp16."""
        return self._was_due and not self.step_was_skipped

    @property
    def skipped_steps(self) -> int:
        """Updates that an overflow skipped. It waits for the device in fp16."""
        return self.global_steps - int(self.state.step)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return lrs_of(self.optimizer)

    def get_mom(self) -> list[Any]:
        """The momentum of each param group, or its betas; 0 without both."""
        return momenta_of(self.optimizer)

    def get_global_grad_norm(self) -> float | None:
        """The norm of the gradients at the last update, before clipping; None without clipping."""
        norm = self._driver.guard.norm
        return None if norm is None else float(norm)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce what waits of gradients, as in a window that has ended. A collective.

        A backward reduces its gradients by itself; what a `no_sync()` left waits for the next
        backward, `step()`, or this call. `bucket_size` has no effect: buckets are in the config.
        """
        self._driver.reduced("allreduce_gradients()")

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Return `coalesce()`."""
        return self.coalesce()

    # Data and values.

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: Any = None,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a loader of this rank's share of a dataset, as `initialize(training_data=)` does.

        Args:
            dataset: any that a DataLoader takes.
            batch_size: samples of a backward on one rank; default what the config says.
            route: "eval" and "predict" are not shuffled; default the training.
            pin_memory: of the loader, where there is a GPU.
            data_sampler: in the place of the one that gives each rank its share.
            collate_fn: of the loader.
            num_local_io_workers: its processes.
        """
        return loader_of(
            dataset,
            self.batch if batch_size is None else self.batch._replace(micro=batch_size),
            self.axis,
            drop_last=bool(self._config["dataloader_drop_last"]),
            collate_fn=collate_fn,
            shuffle=route not in ("eval", "predict"),
            sampler=data_sampler,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and torch.accelerator.is_available(),
        )

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> Any:
        """`load_state_dict` of whole values, at every stage. A collective.

        Args:
            checkpoint: a state dict; or a dict that has it as "module", as DeepSpeed's files do.
            strict: as for `load_state_dict`.
            custom_load_fn: None; a function could write to parameters that are not here.
            fetch_z3_params: has no effect: parameters of stage 3 are loaded in any case.
        """
        if custom_load_fn is not None:
            raise LayoutError(
                "load_module_state_dict(custom_load_fn=...).",
                cause="a function that writes to parameters, of which this rank has a part.",
                fix="call it on the state dict first, or inside of fzero.adapter.gathered("
                "engine.module, modify=True).",
            )
        values = checkpoint.get("module", checkpoint)
        return self.load_state_dict(values if isinstance(values, Mapping) else checkpoint, strict)

    # Memory. Tensors that move keep their identity and get other memory, so that the state, the
    # gatherer and all others who hold one see the same. On the CPU nothing is moved.

    @torch.no_grad()
    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states of the engine to host memory, until `reload_states`; not within a step.

        Args:
            include: which of "lp_params", "lp_grads", "hp_params" (masters) and "optim_states";
                default all.
            device: "cpu".
            pin_memory: whether that memory is pinned.
            non_blocking: has no effect: copies are complete on return, as their source is freed.
        """
        if device != "cpu":  # DeepSpeed's enums are equal to their words
            raise LayoutError(
                f"offload_states(device={device!r}).",
                cause="a place that is chosen when the engine is made.",
                fix='offload_states(device="cpu"); or offload_optimizer in the config.',
            )
        self._driver.require_not("offload_states()", "window")
        self._driver.wait()
        state = self._driver.state
        masters, slots = list[Tensor](), list[Tensor]()
        for slot in slots_of(state):
            (masters if slot.name == MASTERS else slots).append(slot.flat)
        owned = state.setup.optimizer.owned(state.optimizer)
        kinds = {
            "lp_params": state.params.flats,
            "lp_grads": (*state.gradients.flats, *state.window.pending.flats),
            "hp_params": masters,
            "optim_states": (*slots, *(x for some in owned.values() for x in some if x.numel())),
        }
        for kind, tensors in kinds.items():
            for x in tensors if include is None or kind in include else ():
                if x.device.type != "cpu":
                    self._moved += ((x, x.device),)
                    x.data = torch.empty_like(x, device="cpu", pin_memory=pin_memory).copy_(x)
        self._rebind()

    @torch.no_grad()
    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo `offload_states`. Copies are complete on return, also with `non_blocking`."""
        self._driver.require_not_closed()
        for x, device in self._moved:
            x.data = x.to(device)
        self._moved = ()
        self._rebind()

    def _rebind(self) -> None:
        """Below stage 3, make the parameters views of the flats again, which have moved."""
        driver = self._driver
        if not driver.state.setup.gathers_by_unit:
            for index, flat in enumerate(driver.state.params.flats):
                driver.params.follow(driver.state.setup, index, flat)
            driver.params.remember()
        driver.published()

    def empty_partition_cache(self) -> None:
        """Free the memory that torch's allocator caches.

        Between steps no unit is gathered but those below stage3_param_persistence_threshold.
        """
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def close(self) -> None:
        """`Engine.close`; the optimizer has its own class again."""
        optimizer = self.optimizer
        super().close()
        unname_optimizer(optimizer)

    def destroy(self) -> None:
        """Return `close()`."""
        self.close()


def _unmanaged(name: str) -> PhaseError:
    return PhaseError(
        f"{name} with managed_gradient_accumulation = false.",
        cause="a call that tells which micro-batch is the last; here each step() updates, and "
        "divides by the number of backwards.",
        fix="leave the call out, or set managed_gradient_accumulation = true.",
    )
