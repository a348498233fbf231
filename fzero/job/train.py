"""The main job: train a byte-level GPT on the Python standard library, on any number of ranks.

The global batch is what an optimizer step averages over: ranks x micro-batches x accumulated
parts x sequences in one backward pass. It is the option; the last factor is derived. So a run
that is resumed on another number of ranks, or split in another way, sees the same samples at
the same steps, and is the same run up to the rounding of sums in another order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero.checkpoint import load
from fzero.collectives import gather_objects
from fzero.errors import FzeroError
from fzero.job.claim import claimed, is_restart
from fzero.job.finish import finish
from fzero.job.progress import Progress
from fzero.job.saving import (
    LATEST,
    find_checkpoint,
    read_facts,
    require_free,
    require_writable,
    save_run,
)
from fzero.job.settings import Output, changed_course, resolve, saved_form
from fzero.job.step import Job, Params, make_batches, make_job, make_optimizer
from fzero.job.stop import stop_signals


def train(given: dict[str, Any]) -> int:
    """Run the job with the options that were `given`; return the signal that ended it, or 0.

    With `resume`, the parameters after the last step are those of a run that was never stopped:
    bit for bit on as many ranks, within rounding on another number of them. Ranks that a launcher
    started again (torchrun --max-restarts) resume by themselves.

    Raises:
        LayoutError: options that do not fit together, to the text, or to the saved run; a folder
            that holds another run, without `overwrite`, or that another program trains into.
        CheckpointError: there is nothing to resume, or the disk does not take a checkpoint.
        AxisError: the ranks were given different options or texts.
        NonFiniteError: on every rank, when a loss or a gradient of any rank is not finite. What
            was saved before stays. A launcher that starts the ranks again resumes from there, and
            meets the same.
    """
    folder = find_checkpoint(given["resume"]) if "resume" in given else None
    out = Path(given.get("out", folder.parent if folder else Output().out))
    restarted = _told_by_first(is_restart(out, os.environ))
    if restarted and (out / LATEST).is_file():
        folder = find_checkpoint(out)  # of this launch: a rank of it had died
    facts = read_facts(folder) if folder else {}
    settings = resolve({**given, "out": out}, facts.get("settings"))
    goes_on = folder is not None and out.resolve() == folder.parent.resolve()
    if not (goes_on or restarted or settings.output.overwrite):
        require_free(out)
    require_writable(out)
    job, params = make_job(settings)
    with _held(out):
        return _run(job, params, folder, facts)


def _run(job: Job, params: Params, folder: Path | None, facts: dict[str, Any]) -> int:
    """Train from the beginning, or from the checkpoint in `folder`, to the end or a signal."""
    settings = job.settings
    state = job.step.init(params, make_optimizer(settings))
    if folder:
        state = load(folder, state)
        _note(job, f"resumed {folder}", *_differences(job, facts))
    losses = list(facts.get("losses", []))
    _note(job, *_headline(job, state))
    with stop_signals() as received:  # a checkpoint that has begun is finished, too
        state, stopped = _loop(job, state, losses, received)
        if len(losses) > len(facts.get("losses", [])):
            _say(f"checkpoint: {_save(job, state, losses)}")
    if stopped:
        _say(f"stopped after step {len(losses)} of {settings.course.steps}; continue with --resume")
        return received[0] if received else 0
    _say(*finish(job, state, losses))
    return 0


def _told_by_first(value: bool) -> bool:
    """Return what rank 0 says: it alone writes the file that is asked."""
    return gather_objects(value, fzero.world())[0]


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Hold the folder on rank 0; if that fails, every rank raises."""
    axis = fzero.world()
    with ExitStack() as stack:
        problem: FzeroError | None = None
        try:
            if axis.rank == 0:
                stack.enter_context(claimed(out, os.environ))
        except FzeroError as error:
            problem = error
        problem = gather_objects(problem, axis)[0]
        if problem is not None:
            raise problem
        yield


def _loop(
    job: Job, state: fzero.TrainState, losses: list[float], received: list[int]
) -> tuple[fzero.TrainState, bool]:
    """Train to the last step, or to the first signal to any rank; append to `losses`."""
    course, output = job.settings.course, job.settings.output
    progress = Progress(
        start=len(losses),
        total=course.steps,
        tokens_per_step=course.global_batch * job.context,
    )
    shows = not output.quiet and fzero.axis_index() == 0
    stopped = False
    while len(losses) < course.steps and not stopped:
        state, loss = job.step(state, make_batches(job, len(losses)))
        mean, stopped = _agree(loss, received)
        losses.append(mean)
        if shows:
            progress.step(mean, fzero.state_bytes(state)["total"])
        due = output.save_every and len(losses) % output.save_every == 0
        if due and len(losses) < course.steps and not stopped:  # the last one is `train`'s to save
            _save(job, state, losses)
    return state, stopped


def _agree(loss: Tensor, received: list[int]) -> tuple[float, bool]:
    """Return the mean loss, and whether any rank got a signal: one small collective.

    Ranks that get a signal at different moments must not leave the loop at different steps.
    """
    flag = torch.tensor(float(bool(received)), device=loss.device)
    mean, stopped = fzero.pmean(torch.stack((loss.float(), flag))).tolist()
    return mean, stopped > 0


def _save(job: Job, state: fzero.TrainState, losses: list[float]) -> str:
    facts = {
        "settings": saved_form(job.settings),
        "text_sha256": job.corpus.sha256,
        "losses": losses,
    }
    return str(save_run(job.settings.output.out, state, facts))


def _differences(job: Job, facts: dict[str, Any]) -> list[str]:
    """Say what makes the resumed run another one than the saved run would have been."""
    changed = changed_course(job.settings, facts["settings"])
    if facts["text_sha256"] != job.corpus.sha256:
        changed.append("the text (another Python, --text or --text-mb)")
    return [f"not an exact continuation, changed: {', '.join(changed)}"] if changed else []


def _headline(job: Job, state: fzero.TrainState) -> list[str]:
    settings, corpus, held = job.settings, job.corpus, fzero.state_bytes(state)
    numel = sum(leaf.numel for leaf in state.setup.layout.leaves)
    model = settings.kind.model
    return [
        f"GPT of {numel / 1e6:.2f} M parameters, {model.layers} layers x {model.width}, "
        f"{settings.kind.dtype}, on {fzero.axis_size()} rank(s), {job.device.type}",
        f"text: {corpus.train.numel() / 1e6:.2f} MB of {corpus.files} files, and "
        f"{corpus.valid.numel() / 1e6:.2f} MB of other files held out",
        f"step: {job.step}; {settings.course.global_batch} windows of {job.context} bytes",
        f"bytes per rank: parameters {held['parameters']:,}, optimizer {held['optimizer']:,}",
    ]


def _note(job: Job, *lines: str) -> None:
    """Tell the user something that --quiet leaves out."""
    if not job.settings.output.quiet:
        _say(*lines)


def _say(*lines: str) -> None:
    if fzero.axis_index() == 0:
        for line in lines:
            print(line, flush=True)
