"""Names of DeepSpeed's engine that have one meaning here, and what stands for all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from fzero.errors import LayoutError, PhaseError
from fzero.integrations.deepspeed._batch import loader_of
from fzero.integrations.deepspeed._configured import Configured
from fzero.state.scale import DynamicScale


class DeepSpeedNames(Configured):
    """An engine with the methods of DeepSpeed's that say or set one thing."""

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return `full_state_dict()`: copies, at stage 3 too. A collective.

        With `exclude_frozen_parameters` parameters that do not learn are left out.
        """
        held = self.full_state_dict()
        frozen = {path for path, p in self.module.named_parameters() if not p.requires_grad}
        drops = frozen if exclude_frozen_parameters else set()
        return {name: value for name, value in held.items() if name not in drops}

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

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Return (samples of an update, samples of a backward on a rank, backwards)."""
        count = self.gradient_accumulation_steps()
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), count

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

    def zero_optimization(self) -> bool:
        """Whether the stage is 1, 2 or 3."""
        return self.stage > 0

    def steps_per_print(self) -> int | None:
        """What the config says; nothing is printed here. None without it."""
        return self._steps_per_print

    def dynamic_loss_scale(self) -> bool:
        """Whether losses are scaled by a number that adapts itself."""
        scale = self.state.scale
        return scale is not None and isinstance(scale.policy, DynamicScale)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce what waits of gradients, as in a window that has ended. A collective.

        A backward reduces its gradients by itself; what a `no_sync()` left waits for the next
        backward, `step()`, or this call. `bucket_size` has no effect: buckets are in the config.
        """
        self._driver.reduced("allreduce_gradients()")

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
        batch = self.batch if batch_size is None else self.batch._replace(micro=batch_size)
        return loader_of(
            dataset,
            batch,
            self.axis,
            drop_last=self._drops_last,
            collate_fn=collate_fn,
            shuffle=route not in ("eval", "predict"),
            sampler=data_sampler,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and torch.cuda.is_available(),
        )
