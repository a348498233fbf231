"""An engine with the names that DeepSpeed's engine has."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fzero.adapter import _boundary as boundary
from fzero.adapter._engine import Engine
from fzero.adapter.deepspeed import _checkpoint as checkpoint
from fzero.adapter.deepspeed._batch import Batch
from fzero.errors import LayoutError, PhaseError, explain


class DeepSpeedEngine(Engine):
    """What `initialize` returns: `Engine`, and what DeepSpeed's users call beside it.

    An update divides by gradient_accumulation_steps, whichever way the gradients came. What the
    engine has no name for is looked up on the module, as in DeepSpeed.

    Attributes:
        batch: the batch sizes of the config.
        lr_scheduler: is stepped after each update; None without one.
        training_dataloader: of `training_data`; None without it.
        global_steps: updates that were due, also those that an overflow skipped.

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
    lr_scheduler: Any = None
    training_dataloader: Any = None
    global_steps = 0
    _is_boundary: bool | None = None  # what the user says; None: every n-th call of step()
    _was_due = False

    def __getattr__(self, name: str) -> Any:
        """Return what the module has by a name that the engine has not: generate, config, ..."""
        module = self.__dict__.get("module")
        if module is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(module, name)
        except AttributeError:
            seen = f"neither the engine nor its {type(module).__name__} has {name!r}."
            cause = "a name of DeepSpeed's engine that fzero's does not have."
            fix = "docs/deepspeed_config.md, 'The engine', lists the names that there are; "
            fix += "docs/moving/deepspeed.md, 'Other names', what stands for some others."
            raise AttributeError(explain(seen, cause=cause, fix=fix)) from None

    # Where it runs.

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
        """Whether the next `step()` updates."""
        if self._is_boundary is not None:
            return self._is_boundary
        return self.state.progress.calls + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next calls of `step()` update, on every rank alike.

        It holds until it is said again; None goes back to every n-th call. An update divides by
        gradient_accumulation_steps all the same.
        """
        if self.state.setup.policy.averages:
            raise _unmanaged("set_gradient_accumulation_boundary()")
        self._is_boundary = is_boundary

    @torch._disable_dynamo
    def step(self) -> bool:
        """`Engine.step`, at a boundary; else it counts a micro-batch."""
        count = self.gradient_accumulation_steps()
        every = {None: count, True: 1, False: sys.maxsize}[self._is_boundary]
        self._was_due = False
        self._was_due = boundary.call_step(self._driver, every)
        self.global_steps += int(self._was_due)
        return self._was_due

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the parameters. It waits for the device in fp16."""
        return self._was_due and not self.step_was_skipped

    @property
    def skipped_steps(self) -> int:
        """Updates that an overflow skipped. It waits for the device in fp16."""
        return self.global_steps - int(self.state.step)

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Return `coalesce()`."""
        return self.coalesce()

    # What the config says.

    def train_batch_size(self) -> int | None:
        """Samples of one update, on all ranks; None if the config does not say."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of one backward, on one rank; None if the config does not say."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Calls of `step()` for one update."""
        return self.options.updating.gradient_accumulation_steps

    def zero_optimization_stage(self) -> int:
        """The stage."""
        return self.stage

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [float(group["lr"]) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the gradients at the last update, before clipping; None without clipping."""
        norm = self._driver.norm
        return None if norm is None else float(norm)

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """`fzero.checkpoint.save(save_dir / tag, engine)`, with the scheduler. A collective.

        Args:
            save_dir: a folder of several checkpoints.
            tag: the name of this one; default global_step<n>.
            client_state: what JSON can hold; `load_checkpoint` returns it.
            save_latest: write the tag to save_dir / "latest", for `load_checkpoint`.

        Returns:
            True. What goes wrong is raised, on every rank: see `fzero.checkpoint.save`.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        scheduler = self.lr_scheduler
        extra = {
            "client_state": dict(client_state or {}),
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "global_steps": self.global_steps,
        }
        checkpoint.save(self, save_dir, name, extra, latest=save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` saved, at any stage and number of ranks. A collective.

        Args:
            load_dir: as for `save_checkpoint`.
            tag: as for `save_checkpoint`; default what save_dir / "latest" says.
            load_module_strict: only True: all parameters and buffers are those of the module.
            load_optimizer_states: False: parameters and buffers are loaded, masters follow them;
                other slots, the loss scale and the options of param groups stay.
            load_lr_scheduler_states: whether the scheduler goes on where it was.
            load_module_only: neither of both; `global_steps` and random generators stay, too.

        Returns:
            The path and the client_state; (None, None), with a warning, without a tag and without
            a file `latest`.

        Raises:
            CheckpointError, LayoutError: see `fzero.checkpoint.load`.
        """
        if not load_module_strict:
            raise LayoutError(
                "load_checkpoint(load_module_strict=False).",
                cause="a checkpoint of another model.",
                fix="load it with strict=True; or take single values: engine.set_full_parameter.",
            )
        counters = not load_module_only
        optimizer = load_optimizer_states and counters
        found = checkpoint.load(self, load_dir, tag, optimizer=optimizer, counters=counters)
        if found is None:
            return None, None
        path, extra = found
        position = extra.get("lr_scheduler")
        if load_lr_scheduler_states and counters and None not in (self.lr_scheduler, position):
            self.lr_scheduler.load_state_dict(position)
        if counters:
            self.global_steps = extra.get("global_steps", int(self.state.step))
        return path, extra.get("client_state", {})

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
