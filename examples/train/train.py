"""The main job: train a byte-level GPT on the Python standard library, on any number of ranks.

The global batch is what an optimizer step averages over: logical ranks x micro-batches x
accumulated parts x sequences in one backward pass. It is the option; the last factor is derived.
So a run sees the same samples at the same steps on any number of ranks, and computes the same bits;
one that is split into other passes is the same run up to the rounding of sums in another order.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero.checkpoint import Mirror, load
from fzero.data import Order
from train.again import resume_command
from train.claim import begun_before, claimed
from train.finish import finish
from train.machines import memory_of
from train.progress import Progress
from train.ranks import any_rank, any_signal, by_first, everyones
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

STOPPED_TOO_S = 60  # on several machines an agent looks for a machine that comes back in less


def train(given: dict[str, Any]) -> int:
    """Run the job with the options that were `given`; return the signal that ended it, or 0.

    With `resume`, the parameters after the last step are those of a run that was never stopped,
    bit for bit, on any number of ranks. Ranks that a launcher started again (torchrun
    --max-restarts) resume by themselves.

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
    torch.set_num_threads(settings.course.threads)  # as many on any number of ranks: the same bits
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
        memory = memory_of(os.environ)
        mirror = Mirror(memory, every=output.mirror) if output.mirror else None
        if mirror is not None:
            until_saved.enter_context(mirror)
        state, losses, order = _go_on(job, state, folder, facts, mirror)
        before = len(facts.get("losses", []))
        _note(job, *_headline(job, state, numel))
        if before >= steps:
            more = f"    {_resume(job, folder, out)} --steps {2 * before}"
            _say(f"this run is finished: its {before} steps are done; for {before} more:", more)
        state, order = _loop(job, state, losses, order, received, out, mirror)
        if len(losses) > before:
            _say(f"checkpoint: {_save(job, state, losses, order, out)}")
            folder = find_checkpoint(out)
        until_saved.close()
        lines = None
        if not any_rank(bool(received)):
            curve = out / "loss.png" if output.plot else None
            note = functools.partial(_remark, job)
            lines = finish(job, state, losses, curve=curve, received=received, note=note)
    if lines is None:
        _say_how_to_continue(job, len(losses), folder, out)
        if memory is not None and not received:
            time.sleep(STOPPED_TOO_S)  # to end before the agent's signal would be a success
        return received[0] if received else 0
    _say(*lines)
    return 0


def _go_on(
    job: Job,
    state: fzero.TrainState,
    folder: Path | None,
    facts: dict[str, Any],
    mirror: Mirror | None,
) -> tuple[fzero.TrainState, list[float], Order]:
    """Return where the run goes on, its losses and its data: from memory, or the checkpoint."""
    losses = list(facts.get("losses", []))
    if mirror is not None:
        held, extra = mirror.restore(state)
        if len(extra.get("losses", [])) > len(losses):
            _note(job, f"restored step {len(extra['losses'])} from memory")
            return held, list(extra["losses"]), job.order.resumed(extra["order"])
    if not folder:
        return state, losses, job.order
    state, other = load(folder, state), _differences(job, facts)
    _note(job, f"resumed {folder}", *other)
    saved = facts["order"]
    order = replace(job.order, position=saved["position"]) if other else job.order.resumed(saved)
    return state, losses, order


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
    order: Order,
    received: list[int],
    out: Path,
    mirror: Mirror | None,
) -> tuple[fzero.TrainState, Order]:
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
            state, loss = job.step(state, make_batches(job, order))
            order = order.after()
            losses.append(loss.item())  # the mean of all logical ranks, on every rank
            stopped = any_signal(received, loss.device)
            if mirror is not None:
                mirror.update(state, extra=_facts(job, losses, order))
            progress.step(losses[-1], fzero.state_bytes(state)["total"])
            due = output.save_every and len(losses) % output.save_every == 0
            if due and len(losses) < course.steps and not stopped:  # the last one is `_run`'s
                _save(job, state, losses, order, out)
    return state, order


def _save(job: Job, state: fzero.TrainState, losses: list[float], order: Order, out: Path) -> str:
    return str(save_run(out, state, _facts(job, losses, order)))


def _facts(job: Job, losses: list[float], order: Order) -> dict[str, Any]:
    return {
        "settings": saved_form(job.settings),
        "text_sha256": job.corpus.sha256,
        "losses": losses,
        "order": order,
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
    processes = ", ".join(f"{r}: {pid}" for r, pid in enumerate(everyones(os.getpid())))
    return [
        f"GPT of {numel / 1e6:.2f} M parameters, {model.layers} layers x {model.width}, "
        f"{settings.kind.dtype}, on {fzero.axis_size()} rank(s), {job.device.type}",
        f"{settings.kind.logical_ranks} logical ranks, {settings.course.threads} thread(s) each: "
        "the same bits on any number of ranks up to that",
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
