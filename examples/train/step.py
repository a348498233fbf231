"""The job's model, step and data, put together from the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero.data import Order
from train.gpt import GPT
from train.ranks import require_same
from train.settings import Kind, Settings, saved_form
from train.stream import even_windows, make_order, micro_batches
from train.text import Corpus, read_corpus

Params = dict[str, Tensor]
Apply = Callable[..., Any]  # (params, tokens) -> logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What stays the same from the first step to the last."""

    settings: Settings
    corpus: Corpus
    order: Order  # of the data, at the first batch
    apply: Apply
    step: Any  # (state, batches) -> (state, loss), with .init
    device: torch.device

    @property
    def context(self) -> int:
        """Bytes that a window predicts."""
        return self.settings.kind.model.context


def make_job(settings: Settings) -> tuple[Job, Params]:
    """Read the text, make the model and the step; check all that can be checked before it runs.

    Returns:
        The job, and the parameters to begin with, the same on every rank.

    Raises:
        LayoutError: a batch that cannot be split, too little text, or more ranks than logical
            ranks.
        MismatchError: the ranks have different options or texts.
    """
    course, context = settings.course, settings.kind.model.context
    root = Path(course.text) if course.text else None
    corpus = read_corpus(root, cap_bytes=int(course.text_mb * 1e6))
    same = [*map(str, saved_form(settings).items()), f"text {corpus.sha256}"]
    require_same(same, what="the options and the text")
    order = make_order(corpus.train, settings)
    order.carried()  # refuses more ranks than logical ranks
    even_windows(corpus.valid, context=context, count=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    apply, params = make_model(settings.kind, device=device)
    job = Job(
        settings=settings,
        corpus=corpus,
        order=order,
        apply=apply,
        step=make_step(settings, apply),
        device=device,
    )
    return job, params


def make_model(kind: Kind, *, device: torch.device) -> tuple[Apply, Params]:
    """Return `(apply, params)` of the GPT, drawn on the CPU so that every device starts alike."""
    torch.manual_seed(kind.seed)
    module = GPT(kind.model).to(device=device, dtype=getattr(torch, kind.dtype))
    return fzero.functionalize(module)


def make_step(settings: Settings, apply: Apply) -> Any:
    """Return the sharded step: `(state, batches) -> (state, loss)`.

    `batches` is a tuple of `micro_batches` uint8 tensors `[l * accumulate * b, context + 1]`, for
    the l logical ranks of this rank; `loss` is the mean over all of them on all ranks, in nats per
    byte. It raises `NonFiniteError`, on every rank, before it updates from a loss or a gradient
    that is not finite.
    """
    kind, split = settings.kind, settings.split

    def loss_fn(params: Params, batch: Tensor) -> Tensor:
        # The gradients of several calls add up, so each call is its share of the mean.
        return byte_losses(apply, params, batch).mean() / split.micro_batches

    def step_fn(state: Any, batches: tuple[Tensor, ...]) -> tuple[Any, Tensor]:
        losses = []
        for batch in batches:
            state, loss = fzero.grad_and_reduce(loss_fn, state)(batch)
            losses.append(loss)
        return fzero.apply_gradients(state), torch.stack(losses).sum()

    step = fzero.accumulate(fzero.check_finite(step_fn), steps=split.accumulate)
    step = fzero.clip(step, max_norm=settings.course.clip or None)
    step = fzero.coalesce(step) if split.coalesce else step
    return fzero.shard(
        step,
        stage=split.stage,
        donate=True,
        logical_ranks=kind.logical_ranks,
        seed=kind.seed,
    )


def byte_losses(apply: Apply, params: Params, batch: Tensor) -> Tensor:
    """`-log p(batch[:, t + 1] | batch[:, : t + 1])` in nats: `[b, context]` float32."""
    logits = apply(params, batch[:, :-1])
    return F.cross_entropy(logits.float().mT, batch[:, 1:].long(), reduction="none")


def make_optimizer(settings: Settings) -> Any:
    """Return the optimizer, its learning rate warmed up and then a cosine down to a tenth."""
    course, optim = settings.course, fzero.optim
    lr = optim.schedules.warmup_cosine(
        course.lr, course.warmup, course.steps, floor=0.1 * course.lr
    )
    match settings.kind.optimizer:
        case "adamw":
            return optim.adamw(lr, betas=(0.9, 0.95), weight_decay=0.1, decay_mask=_is_matrix)
        case "adam":
            return optim.adam(lr, betas=(0.9, 0.95))
        case "lion":
            return optim.lion(lr, weight_decay=0.1, decay_mask=_is_matrix)
        case _:
            return optim.sgd(lr, momentum=0.9)


def make_batches(job: Job, order: Order) -> tuple[Tensor, ...]:
    """Return this rank's part of the next batch: one `[l * accumulate * b, context + 1]` each."""
    count = job.settings.split.micro_batches
    parts = micro_batches(job.corpus.train, order, context=job.context, count=count)
    return tuple(part.to(job.device) for part in parts)


def _is_matrix(leaf: Any) -> bool:
    return len(leaf.shape) >= 2
