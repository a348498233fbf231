"""The main job: train a byte-level GPT on the Python standard library, on any number of ranks.

The global batch is what an optimizer step averages over: ranks x micro-batches x accumulated
parts x sequences in one backward pass. It is the option; the last factor is derived. So a run
that is resumed on another number of ranks, or split in another way, sees the same samples at
the same steps, and is the same run up to the rounding of sums in another order.
"""

from __future__ import annotations

import functools
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero.checkpoint import Mirror, load
from train.again import resume_command
from train.claim import begun_before, claimed
from train.finish import finish
from train.progress import Progress
from train.ranks import any_rank, by_first, everyones
from train.saving import (
    LATEST,
    find_checkpoint,
    new_folder,
    numbered_folders,
    read_facts,
    require_free,
    require_writable,
    save_run,
)
from train.settings import changed_course, resolve, saved_form
from train.step import Job, Params, make_batches, make_job, make_optimizer
from train.stop import say_last, stop_signals


def train(given: dict[str, Any]) -> int:
    """Run the job with the options that were `given`; return the signal that ended it, or 0.

    With `resume`, the parameters after the last step are those of a run that was never stopped:
    bit for bit on as many ranks, within rounding on another number of them. Ranks that a launcher
    started again (torchrun --max-restarts) resume by themselves.

    Raises:
        LayoutError: options that do not fit together, to the text, or to the saved run; a folder
            that holds another run, without `overwrite`, or that another program trains into.
        CheckpointError: there is nothing to resume, or the disk does not take a checkpoint.
        MismatchError: the ranks were given different options or texts.
        NonFiniteError: on every rank, when a loss or a gradient of any rank is not finite. What
            was saved before stays. A launcher that starts the ranks again resumes from there, and
            meets the same.
    """
    folder = find_checkpoint(given["resume"]) if "resume" in given else None
    out = given.get("out", folder.parent if folder else None)
    known = [out] if out else list(numbered_folders().values())
    begun = by_first(lambda: begun_before(known, os.environ))
    if begun:
        out = begun
        if (out / LATEST).is_file():
            folder = find_checkpoint(out)  # of this launch: a rank of it had died
    facts = read_facts(folder) if folder else {}
    settings = resolve(given, facts.get("settings"))
    if out:
        goes_on = folder is not None and out.resolve() == folder.parent.resolve()
        if not (goes_on or begun or settings.output.overwrite):
            require_free(out)
        require_writable(out)
    job, params = make_job(settings)
    out = out or by_first(new_folder)
    with ExitStack() as held:
        by_first(lambda: held.enter_context(claimed(out, os.environ)))
        return _run(job, params, out, folder, facts)


def _run(job: Job, params: Params, out: Path, folder: Path | None, facts: dict[str, Any]) -> int:
    """Train from the beginning, or from the checkpoint in `folder`, to the end or a signal."""
    steps, output = job.settings.course.steps, job.settings.output
    numel = sum(each.numel() for each in params.values())
    state = job.step.init(params, make_optimizer(job.settings))
    with ExitStack() as until_saved, stop_signals() as received:  # a save that began is finished
        mirror = Mirror(every=output.mirror) if output.mirror else None
        if mirror is not None:
            until_saved.enter_context(mirror)
        state, losses = _go_on(job, state, folder, facts, mirror)
        before = len(facts.get("losses", []))
        _note(job, *_headline(job, state, numel))
        if before >= steps:
            more = f"    {_resume(job, folder, out)} --steps {2 * before}"
            _say(f"this run is finished: its {before} steps are done; for {before} more:", more)
        state = _loop(job, state, losses, received, out, mirror)
        if len(losses) > before:
            _say(f"checkpoint: {_save(job, state, losses, out)}")
            folder = find_checkpoint(out)
        until_saved.close()
        lines = None
        if not any_rank(bool(received)):
            curve = out / "loss.png" if output.plot else None
            note = functools.partial(_remark, job)
            lines = finish(job, state, losses, curve=curve, received=received, note=note)
    if lines is None:
        _say_how_to_continue(job, len(losses), folder, out)
        return received[0] if received else 0
    _say(*lines)
    return 0


def _go_on(
    job: Job,
    state: fzero.TrainState,
    folder: Path | None,
    facts: dict[str, Any],
    mirror: Mirror | None,
) -> tuple[fzero.TrainState, list[float]]:
    """Return where the run goes on, and its losses: from copies in memory, or the checkpoint."""
    losses = list(facts.get("losses", []))
    if mirror is not None:
        held, extra = mirror.restore(state)
        if len(extra.get("losses", [])) > len(losses):
            _note(job, f"restored step {len(extra['losses'])} from memory")
            return held, list(extra["losses"])
    if folder:
        state = load(folder, state)
        _note(job, f"resumed {folder}", *_differences(job, facts))
    return state, losses


def _say_how_to_continue(job: Job, done: int, folder: Path | None, out: Path) -> None:
    """Tell after a signal how far the run is, and last the command that continues it."""
    steps = job.settings.course.steps
    left = "it continues with" if done < steps else "validation and sample are made by"
    command = f"    {_resume(job, folder, out)}"
    lines = [f"stopped after step {done} of {steps}, which is saved; {left}:", command]
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        _say(*lines)
    elif fzero.axis_index() == 0:
        say_last(*lines, launcher=os.getppid())  # torchrun has words of its own about the signal


def _resume(job: Job, folder: Path | None, out: Path) -> str:
    """Return the command that goes on from the checkpoint in `folder`."""
    assert folder is not None  # every run that can be stopped here has one
    saved = folder.parent if find_checkpoint(folder.parent) == folder else folder
    return resume_command(job.settings.output, saved, out, os.environ, python=sys.executable)


def _loop(
    job: Job,
    state: fzero.TrainState,
    losses: list[float],
    received: list[int],
    out: Path,
    mirror: Mirror | None,
) -> fzero.TrainState:
    """Train to the last step, or to the first signal to any rank; append to `losses`."""
    course, output = job.settings.course, job.settings.output
    progress = Progress(
        start=len(losses),
        total=course.steps,
        tokens_per_step=course.global_batch * job.context,
        shown=not output.quiet and fzero.axis_index() == 0,
    )
    stopped = False
    with progress:
        while len(losses) < course.steps and not stopped:
            state, loss = job.step(state, make_batches(job, len(losses)))
            mean, stopped = _agree(loss, received)
            losses.append(mean)
            if mirror is not None:
                mirror.update(state, extra=_facts(job, losses))
            progress.step(mean, fzero.state_bytes(state)["total"])
            due = output.save_every and len(losses) % output.save_every == 0
            if due and len(losses) < course.steps and not stopped:  # the last one is `_run`'s
                _save(job, state, losses, out)
    return state


def _agree(loss: Tensor, received: list[int]) -> tuple[float, bool]:
    """Return the mean loss, and whether any rank got a signal: one small collective.

    Ranks that get a signal at different moments must not leave the loop at different steps.
    """
    flag = torch.tensor(float(bool(received)), device=loss.device)
    mean, stopped = fzero.pmean(torch.stack((loss.float(), flag))).tolist()
    return mean, stopped > 0


def _save(job: Job, state: fzero.TrainState, losses: list[float], out: Path) -> str:
    return str(save_run(out, state, _facts(job, losses)))


def _facts(job: Job, losses: list[float]) -> dict[str, Any]:
    return {
        "settings": saved_form(job.settings),
        "text_sha256": job.corpus.sha256,
        "losses": losses,
    }


def _differences(job: Job, facts: dict[str, Any]) -> list[str]:
    """Say what makes the resumed run another one than the saved run would have been."""
    changed = changed_course(job.settings, facts["settings"])
    if facts["text_sha256"] != job.corpus.sha256:
        changed.append("the text (another Python, --text or --text-mb)")
    return [f"not an exact continuation, changed: {', '.join(changed)}"] if changed else []


def _headline(job: Job, state: fzero.TrainState, numel: int) -> list[str]:
    settings, corpus, held = job.settings, job.corpus, fzero.state_bytes(state)
    model = settings.kind.model
    processes = ", ".join(map(str, everyones(os.getpid())))
    return [
        f"GPT of {numel / 1e6:.2f} M parameters, {model.layers} layers x {model.width}, "
        f"{settings.kind.dtype}, on {fzero.axis_size()} rank(s), {job.device.type}",
        f"text: {corpus.train.numel() / 1e6:.2f} MB of {corpus.files} files, and "
        f"{corpus.valid.numel() / 1e6:.2f} MB of other files held out",
        f"step: {job.step}; {settings.course.global_batch} windows of {job.context} bytes",
        f"bytes per rank: parameters {held['parameters']:,}, optimizer {held['optimizer']:,}",
        f"process of each rank: {processes}",
    ]


def _note(job: Job, *lines: str) -> None:
    """Tell the user something that --quiet leaves out."""
    if not job.settings.output.quiet:
        _say(*lines)


def _remark(job: Job, text: str) -> None:
    """Say, where the progress is shown, what is done next."""
    if not job.settings.output.quiet and fzero.axis_index() == 0:
        print(text, file=sys.stderr, flush=True)


def _say(*lines: str) -> None:
    if fzero.axis_index() == 0:
        for line in lines:
            print(line, flush=True)
