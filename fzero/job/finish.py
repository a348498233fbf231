"""After the last step: validation beside the bigram, the loss curve, a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero.job.bigram import bigram_loss, fit_bigram
from fzero.job.curve import plot_losses
from fzero.job.gpt import generate
from fzero.job.step import Job, Params, byte_losses
from fzero.job.stream import even_windows

VALIDATION_BYTES = 65_536  # about this many are scored, spread over the held-out files
SCORED_TOGETHER = 32  # windows in one forward
PROMPT = b"def "


def finish(job: Job, state: Any, losses: Sequence[float]) -> list[str]:
    """Return the lines that say how good the run is. A collective: all ranks call it.

    Writes the loss curve, on rank 0, unless the settings say not to.
    """
    output = job.settings.output
    params = fzero.full_params(state)
    held = even_windows(
        job.corpus.valid, context=job.context, count=max(VALIDATION_BYTES // job.context, 1)
    )
    validation = validate(job, params, held)
    if fzero.axis_index() != 0:
        return []
    bigram = bigram_loss(fit_bigram(job.corpus.train), held)
    lines = [f"validation loss {validation:.3f} nats/byte (byte bigram: {bigram:.3f})"]
    if output.plot:
        path = output.out / "loss.png"
        path.parent.mkdir(parents=True, exist_ok=True)  # a finished run saves nothing again
        done = plot_losses(losses, path, bigram=bigram, validation=validation)
        lines.append(f"loss curve: {done}")
    if output.sample_bytes:
        lines.append(f"sample:\n{_sample(job, params)}")
    return lines


@torch.no_grad()
def validate(job: Job, params: Params, held: Tensor) -> float:
    """Mean loss over all bytes that the windows `held: [n, context + 1]` predict, in nats.

    A collective: each rank scores every W-th window.
    """
    mine = held[fzero.axis_index() :: fzero.axis_size()].to(job.device)
    total = torch.zeros(2, device=job.device)  # sum of losses, number of bytes
    for batch in mine.split(SCORED_TOGETHER):
        if len(batch):  # more ranks than windows
            losses = byte_losses(job.apply, params, batch)
            total += torch.stack((losses.sum(), torch.tensor(float(losses.numel())).to(losses)))
    loss_sum, scored = fzero.pmean(total).tolist()
    return loss_sum / scored


def _sample(job: Job, params: Params) -> str:
    """Generated text; other bytes than printable ASCII in hex, so that no terminal suffers."""
    prompt = torch.tensor(list(PROMPT), dtype=torch.uint8, device=job.device)
    drawn = generate(
        lambda tokens: job.apply(params, tokens),
        prompt,
        count=job.settings.output.sample_bytes,
        context=job.context,
        seed=job.settings.course.seed,
    )
    return "".join(map(_printable, [*PROMPT, *drawn.tolist()]))


def _printable(byte: int) -> str:
    shown = byte in b"\n\t" or 32 <= byte < 127
    return chr(byte) if shown else f"\\x{byte:02x}"
