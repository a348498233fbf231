"""Properties of DeepSpeed's engine that return values of the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fzero.adapter.engine import Engine
from fzero.integrations.deepspeed._batch import Batch
from fzero.integrations.deepspeed._precision import low_dtype
from fzero.integrations.deepspeed._schedules import lrs_of, momenta_of


class Configured(Engine):
    """An engine that keeps the config from which it was created."""

    batch = Batch(None, None, 1)
    training_dataloader: Any = None
    _managed = True
    _low_dtype: torch.dtype | None = None  # of fp16.enabled, bf16.enabled
    _steps_per_print: int | None = None
    _drops_last = False
    _is_boundary: bool | None = None  # what the user says; None: every n-th call of step()

    def _follow_config(self, values: Mapping[str, Any], batch: Batch, loader: Any) -> None:
        """Store the values of the config that are no options of `Engine`."""
        self.batch, self.training_dataloader = batch, loader
        self._low_dtype = low_dtype(values)
        self._steps_per_print = values["steps_per_print"]
        self._drops_last = bool(values["dataloader_drop_last"])
        self._managed = values["managed_gradient_accumulation"]
        self._is_boundary = None if self._managed else True

    def train_batch_size(self) -> int | None:
        """Samples of one update, on all ranks; None if the config does not say."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of one backward, on one rank; None if the config does not say."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Calls of `step()` for one update."""
        return self.options.updating.micro_batches

    def zero_optimization_stage(self) -> int:
        """The stage."""
        return self.stage

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return lrs_of(self.optimizer)

    def get_mom(self) -> list[Any]:
        """The momentum of each param group, or its betas; 0 without both."""
        return momenta_of(self.optimizer)

    def gradient_clipping(self) -> float:
        """The norm to which an update clips; 0 if it does not."""
        return self.options.updating.max_norm or 0.0

    def fp16_enabled(self) -> bool:
        """Whether the config has fp16.enabled."""
        return self._low_dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the config has bf16.enabled."""
        return self._low_dtype is torch.bfloat16

    def get_global_grad_norm(self) -> float | None:
        """The norm of the gradients at the last update, before clipping; None without clipping."""
        norm = self._driver.guard.norm
        return None if norm is None else float(norm)
