"""An engine with the names that DeepSpeed's engine has."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fzero.adapter.boundary import call_step, require_no_closure
from fzero.errors import LayoutError, PhaseError, explain
from fzero.integrations.deepspeed import _checkpoint as checkpoint
from fzero.integrations.deepspeed import _moving as moving
from fzero.integrations.deepspeed._named import DeepSpeedNames
from fzero.integrations.deepspeed._others import instead_of
from fzero.integrations.deepspeed._wrapped import unname_optimizer


class DeepSpeedEngine(DeepSpeedNames):
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

    lr_scheduler: Any = None
    global_steps = 0
    global_samples = 0
    micro_steps = 0
    _moved: moving.Moved = []  # noqa: RUF012 - replaced, and never added to
    _was_due = False

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the module, if the engine has none of this name: generate, ..."""
        module = self.__dict__.get("module")
        if module is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(module, name)
        except AttributeError:
            seen = f"neither the engine nor its {type(module).__name__} has {name!r}."
            if (use := instead_of(name)) is not None:
                cause = "a name of DeepSpeed's engine that has no one meaning here."
                raise AttributeError(explain(seen, cause=cause, fix=f"use {use}.")) from None
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

    @torch._disable_dynamo
    def step(self, closure: None = None) -> bool:
        """Call `Engine.step` at a boundary; count a micro-batch elsewhere."""
        require_no_closure(closure)
        count = self.gradient_accumulation_steps()
        every = {None: count, True: 1, False: sys.maxsize}[self._is_boundary]
        self._was_due, backwards = False, self.state.progress.backwards
        self._was_due = call_step(self._driver, every)
        self.micro_steps += 1
        if self._was_due:
            self.global_steps += 1
            per_backward = (self.batch.train or 0) // count
            self.global_samples += per_backward * (count if self._managed else backwards)
        return self._was_due

    def _go_on_from(self, global_steps: int, global_samples: int) -> None:
        """Set the counters, those of a checkpoint."""
        self.global_steps, self.global_samples = global_steps, global_samples

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

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """`fzero.checkpoint.save(save_dir / tag, engine)`, with the scheduler. A collective.

        Gradients that wait for an update stay in the engine and are not saved, with a warning.

        Args:
            save_dir: a folder of several checkpoints.
            tag: the name of this one; default global_step<n>.
            client_state: what JSON can hold; `load_checkpoint` returns it.
            save_latest: write the tag to save_dir / "latest", for `load_checkpoint`.
            exclude_frozen_parameters: parameters that do not learn are left out.

        Returns:
            True. What goes wrong is raised, on every rank: see `fzero.checkpoint.save`.
        """
        frozen = not exclude_frozen_parameters
        checkpoint.save(self, save_dir, tag, client_state, latest=save_latest, frozen=frozen)
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
            load_module_strict: False: frozen parameters that the checkpoint leaves out stay as they
                are. All others must be those of the module.
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
        counters = not load_module_only
        return checkpoint.load(
            self,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states and counters,
            scheduler=load_lr_scheduler_states and counters,
            counters=counters,
        )

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `full_state_dict()` to save_dir / save_filename, by torch.save. A collective.

        At stage 3, too, whatever stage3_gather_16bit_weights_on_model_save says.
        """
        checkpoint.save_model(self, save_dir, save_filename, frozen=not exclude_frozen_parameters)
        return True

    # Memory.

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
        wanted = [kind for kind in moving.KINDS if include is None or kind in include]
        self._moved = self._moved + moving.to_host(self._driver, wanted, pin=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo `offload_states`. Copies are complete on return, also with `non_blocking`."""
        moving.to_device(self._driver, self._moved)
        self._moved = []

    def empty_partition_cache(self) -> None:
        """Free the memory that torch's allocator caches.

        Between steps no unit is gathered but those below stage3_param_persistence_threshold.
        """
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

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
