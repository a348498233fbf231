"""`sharded`: a trainer of transformers, TRL or sentence-transformers over the engine.

    Trainer = sharded(transformers.Trainer, stage=3)

The rest of a training script stays as it is.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from fzero.errors import LayoutError
from fzero.integrations._shared import FOLDER, load_engines, save_engines
from fzero.integrations.accelerate import FzeroAccelerator

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

T = TypeVar("T", bound=type)

# Of other classes, compute_loss may divide by a count of its own.
_DIVIDING = ("transformers.trainer", "trl.trainer.sft_trainer")


def sharded(trainer: T, *, stage: int, coalesce: bool = False, **engine: Any) -> T:
    """Return the trainer class with an accelerator that shards models by ZeRO.

    Losses, learning rates and checkpoints are those of the class itself on one process with the
    batches of all ranks. A checkpoint has a folder `fzero` in the place of optimizer.pt, which any
    number of ranks resumes at any stage. See docs/huggingface.md.

    Args:
        trainer: `transformers.Trainer` or a class derived from it.
        stage: of `Engine`.
        coalesce: of `FzeroAccelerator`: one reduction for a loss that runs backwards of its own.
        **engine: more options of `Engine`.

    Returns:
        A class derived from `trainer`, of the same name.

    Raises:
        LayoutError: if `trainer` is no such class. For errors of instances see `FzeroAccelerator`.

    Example:
        >>> import transformers
        >>> from fzero.integrations.transformers import sharded
        >>> Trainer = sharded(transformers.Trainer, stage=3)
        >>> issubclass(Trainer, transformers.Trainer)
        True
    """
    if not isinstance(trainer, type) or not hasattr(trainer, "create_accelerator_and_postprocess"):
        raise LayoutError(
            f"sharded got {trainer!r}.",
            cause="a trainer in the place of its class, or a trainer of another library.",
            fix="pass transformers.Trainer, or a class derived from it.",
        )
    own = {"_fzero": {"stage": stage, "coalesce": coalesce, "engine": engine}}
    sharding: Any = type(trainer.__name__, (_Sharded, trainer), own)
    sharding.__module__, sharding.__doc__ = trainer.__module__, trainer.__doc__
    return sharding


class _Sharded(Base):
    """The methods of a trainer that differ for a sharded model."""

    _fzero: ClassVar[dict[str, Any]]
    accelerator: FzeroAccelerator
    model: Any
    lr_scheduler: Any
    current_gradient_accumulation_steps: int

    def create_accelerator_and_postprocess(self) -> None:
        """Replace the trainer's accelerator by a `FzeroAccelerator` with the same settings."""
        super().create_accelerator_and_postprocess()
        self.accelerator = FzeroAccelerator.of(self.accelerator, **self._fzero)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Give a micro-batch its own number of tokens as weight, where the trainer counts tokens.

        Its loss is then a mean over these, whether or not the model divides by the count that it
        gets, and each update has the mean over the tokens of all ranks and micro-batches.

        Returns:
            This rank's share of the mean loss of the update, times the number of ranks.
        """
        counted = num_items_in_batch is not None and self.args.average_tokens_across_devices
        if not counted or not self._divides_by_tokens():
            return super().training_step(model, inputs, num_items_in_batch)
        with self._alone():
            own: Any = self._get_num_items_in_batch([inputs], self.args.device)
            with self.accelerator.weighing(own):
                loss = super().training_step(model, inputs, own)
        share = own * self.accelerator.num_processes / num_items_in_batch
        return torch.where(own > 0, loss * share, 0.0)

    def _divides_by_tokens(self) -> bool:
        """Whether compute_loss is known to divide by the count that it gets, if by any."""
        owner = next(x for x in type(self).__mro__ if "compute_loss" in vars(x))
        return owner.__module__ in _DIVIDING

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have losses computed as if this micro-batch on this rank were the whole update."""
        args, steps = self.args, self.current_gradient_accumulation_steps
        self.args, self.current_gradient_accumulation_steps = copy.copy(args), 1
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args, self.current_gradient_accumulation_steps = args, steps

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the full parameters on one rank. A collective, as for the trainer."""
        with self.accelerator.whole(self.model):
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_engines(output_dir, self.accelerator.engines)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if os.path.isfile(os.path.join(checkpoint, OPTIMIZER_NAME)):
            raise LayoutError(
                f"{checkpoint} has the optimizer's state in {OPTIMIZER_NAME}.",
                cause="a checkpoint of a trainer that was not sharded.",
                fix="resume it with that one; or begin with its model alone, by from_pretrained.",
            )
        if os.path.isdir(os.path.join(checkpoint, FOLDER)):  # not with save_only_model
            load_engines(checkpoint, self.accelerator.engines)
            where = os.path.join(checkpoint, SCHEDULER_NAME)
            self.lr_scheduler.load_state_dict(torch.load(where, weights_only=True))

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.accelerator.whole(self.model, modify=True):
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with self.accelerator.whole(self.model, modify=True):
            super()._load_best_model()
