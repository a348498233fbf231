"""After the last step: validation beside the bigram, the loss curve, a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fzero
from train.bigram import bigram_loss, fit_bigram
from train.curve import plot_losses
from train.gpt import generate
from train.step import Job, Params, byte_losses
from train.stream import even_windows

VALIDATION_BYTES = 65_536  # about this many are scored, spread over the held-out files
SCORED_TOGETHER = 32  # windows in one forward
PROMPT = b"def "


def finish(
    job: Job,
    state: Any,
    losses: Sequence[float],
    *,
    curve: Path | None,
    received: Sequence[int] = (),
    note: Callable[[str], None] = lambda text: None,
) -> list[str] | None:
    """Return the lines that say how good the run is. A collective: all ranks call it.

    Args:
        job: the job.
        state: after the last step.
        losses: of all steps.
        curve: where rank 0 draws the losses; None: nowhere.
        received: signals to this process, a list that grows.
        note: told what is done next, for it takes seconds.

    Returns:
        The lines, on rank 0. On the others none. None if a signal came to any rank before the
        validation was over, or to this rank while it draws the sample.
    """
    params = fzero.full_params(state)
    held = even_windows(
        job.corpus.valid, context=job.context, count=max(VALIDATION_BYTES // job.context, 1)
    )
    lines = [f"last loss {losses[-1]:.9g}, parameters {digest(params)}"]
    note(f"validating on {len(held)} windows of the text that was held out ...")
    validation = validate(job, params, held, received)
    if validation is None or fzero.axis_index() != 0:
        return None if validation is None else []
    bigram = bigram_loss(fit_bigram(job.corpus.train), held)
    lines.append(f"validation loss {validation:.3f} nats/byte (byte bigram: {bigram:.3f})")
    if curve:
        curve.parent.mkdir(parents=True, exist_ok=True)  # a finished run saves nothing again
        done = plot_losses(losses, curve, bigram=bigram, validation=validation)
        lines.append(f"loss curve: {done}")
    if count := job.settings.output.sample_bytes:
        note(f"sampling {count} bytes ...")
        sample = _sample(job, params, received)
        if sample is None:
            return None
        lines.append(f"sample:\n{sample}")
    return lines


def digest(params: Params) -> str:
    """Return 16 hex digits that are equal only for parameters of the same names and bits.

    Example:
        >>> digest({"w": torch.zeros(2)}), digest({"w": -torch.zeros(2)})
        ('e5868624950d7b3f', 'b21fb0859336301c')
    """
    found = hashlib.sha256()
    for name in sorted(params):
        found.update(name.encode())
        found.update(params[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@torch.no_grad()
def validate(job: Job, params: Params, held: Tensor, received: Sequence[int] = ()) -> float | None:
    """Mean loss over all bytes that the windows `held: [n, context + 1]` predict, in nats.

    A collective: each rank scores every W-th batch of them. A rank that has `received` a signal
    stops, and then all ranks return None.
    """
    mine = held.split(SCORED_TOGETHER)[fzero.axis_index() :: fzero.axis_size()]
    total = torch.zeros(3, dtype=torch.float64, device=job.device)  # losses, bytes, signals
    for batch in mine:
        if not received:
            losses = byte_losses(job.apply, params, batch.to(job.device))
            total[0] += losses.sum()
            total[1] += losses.numel()
    total[2] += len(received)
    loss_sum, scored, signals = fzero.pmean(total).tolist()
    return None if signals else loss_sum / scored


def _sample(job: Job, params: Params, received: Sequence[int]) -> str | None:
    """Generated text; other bytes than printable ASCII in hex, so that no terminal suffers.

    None if there was a signal.
    """
    prompt = torch.tensor(list(PROMPT), dtype=torch.uint8, device=job.device)
    drawn = generate(
        lambda tokens: job.apply(params, tokens),
        prompt,
        count=job.settings.output.sample_bytes,
        context=job.context,
        seed=job.settings.kind.seed,
        ended=lambda: bool(received),
    )
    if received:
        return None
    return "".join(map(_printable, [*PROMPT, *drawn.tolist()]))


def _printable(byte: int) -> str:
    shown = byte in b"\n\t" or 32 <= byte < 127
    return chr(byte) if shown else f"\\x{byte:02x}"
