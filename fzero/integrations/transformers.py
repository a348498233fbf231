"""`sharded`: a trainer of transformers, TRL or sentence-transformers over the engine.

    Trainer = sharded(transformers.Trainer, stage=3)

The rest of a training script stays as it is.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from fzero.errors import LayoutError
from fzero.integrations._shared import (
    FOLDER,
    close_earlier,
    load_engines,
    refusal,
    save_engines,
)
from fzero.integrations.accelerate import FzeroAccelerator, options_given

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
        LayoutError: if `trainer` is no such class, and for options that are the trainer's. For
            errors of instances see `FzeroAccelerator`.

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
    own = {"_fzero": {"stage": stage, "coalesce": coalesce, "engine": options_given(engine)}}
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = args[0] if args else kwargs.get("model")
        if isinstance(model, nn.Module):  # before it is copied, or gets an adapter
            close_earlier(model)
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Replace the trainer's accelerator by a `FzeroAccelerator` with the same settings."""
        super().create_accelerator_and_postprocess()
        self.accelerator = FzeroAccelerator.of(self.accelerator, **self._fzero)
        here = weakref.ref(self)
        self.accelerator.train_while(lambda: getattr(here(), "is_in_train", False))

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

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse an evaluation that would convert the parameters of an open engine."""
        full = [x for x in ("bf16_full_eval", "fp16_full_eval") if getattr(self.args, x)]
        if full and not self.is_in_train and self.accelerator.engine_of(self.model) is not None:
            raise refusal(
                f"{full[0]}=True, which converts the model, after training",
                "call trainer.accelerator.engine_of(trainer.model).close() before evaluate(), "
                f"which ends training; or leave {full[0]} out, and set bf16=True",
                cause="a conversion of parameters that are in the buffers of an engine.",
            )
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a loss that is the mean over the tokens of all ranks, where labels are counted.

        The trainer takes a loss for this rank's share of a sum, and one that is a mean comes out
        multiplied by the number of ranks.
        """
        if not self.args.average_tokens_across_devices:
            return super().prediction_step(model, inputs, *args, **kwargs)
        with self._alone():
            own: Any = self._get_num_items_in_batch([inputs], self.args.device)
            loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None and own is not None:
            wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
            own = self._of_rows_that_count(own.to(wide))
            both = torch.stack([torch.where(own > 0, wide * own, 0.0), own])
            total, count = self.accelerator.reduce(both, "sum")
            loss = (total / count).to(loss)
        return (loss, *rest)

    def _of_rows_that_count(self, tokens: Tensor) -> Tensor:
        """Return a batch's tokens, or 0: the last batch of a rank may be rows of others again."""
        data, accelerator = self.accelerator.gradient_state, self.accelerator
        if not data.end_of_dataloader or data.remainder <= 0:
            return tokens
        rows = self.args.eval_batch_size * accelerator.process_index
        return tokens if rows < data.remainder else tokens * 0

    def _divides_by_tokens(self) -> bool:
        """Whether compute_loss is known to divide by the count that it gets, if by any."""
        owner = next(x for x in type(self).__mro__ if "compute_loss" in vars(x))
        return owner.__module__ in _DIVIDING

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have losses computed as if this micro-batch on this rank were the whole update."""
        args, steps = self.args, getattr(self, "current_gradient_accumulation_steps", 1)
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
