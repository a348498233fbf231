"""Checkpoints of the job: the train state, and what is needed to continue exactly.

A run writes into its folder, --out or a new one:

    step-000400/   a checkpoint of fzero.checkpoint, for any number of ranks and any stage; its
                   `extra` holds the settings, the digest of the text, the losses so far and the
                   place in the data
    latest         the name of the newest of them
    run            held by the program that trains into OUT; see `train.claim`
    loss.png       the loss curve, after the last step
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import fzero
from fzero import LayoutError
from fzero.checkpoint import CheckpointError, read_extra, save

RUNS, OF_A_FOLDER = Path("runs"), "gpt-"  # a run that is given no --out goes into runs/gpt-001
LATEST = "latest"
OF_A_RUN = (LATEST, "step-*", "loss.png")  # what a run writes into its folder


def save_run(out: Path, state: fzero.TrainState, facts: dict[str, Any]) -> Path:
    """Write a checkpoint of `state` and `facts` under `out`. A collective: all ranks call it.

    `latest` names it only when it is whole.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the disk does not take it; older checkpoints are still good.
    """
    folder = out / f"step-{int(state.step):06d}"
    save(folder, state, extra=facts)
    if fzero.axis_index() == 0:
        is_there(out / LATEST)
        partial = out / f"{LATEST}.partial"
        with open(partial, "w") as file:
            file.write(folder.name)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, out / LATEST)
    return folder


def is_there(file: Path) -> bool:
    """Return whether there is a file. To open a FIFO would wait, so it is not opened.

    Raises:
        CheckpointError: something else is there: a folder, a device, a FIFO, a socket.
    """
    if file.exists() and not file.is_file():
        raise CheckpointError(
            f"{file} is no file.",
            cause="another program uses this folder.",
            fix=f"remove {file.name}, or give another --out.",
        )
    return file.is_file()


def require_writable(out: Path) -> None:
    """Raise `CheckpointError` if `out` does not take a file: now, and not after the last step."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise _unwritable(out, error.strerror or str(error)) from error


def _unwritable(out: Path, seen: str) -> CheckpointError:
    return CheckpointError(
        f"--out {out}: {seen}.",
        cause="a folder that this user may not write to, or a full disk.",
        fix="give another --out.",
    )


def numbered_folders() -> dict[int, Path]:
    """Return the folders that `new_folder` made in this working directory, by their number."""
    found = {path.name.removeprefix(OF_A_FOLDER): path for path in RUNS.glob(f"{OF_A_FOLDER}*")}
    return {int(number): path for number, path in sorted(found.items()) if number.isdecimal()}


def new_folder() -> Path:
    """Make the next of the folders runs/gpt-001, runs/gpt-002, ..., and return it.

    Raises:
        CheckpointError: the disk does not take it.
    """
    try:
        RUNS.mkdir(exist_ok=True)
        for number in itertools.count(max(numbered_folders(), default=0) + 1):
            with contextlib.suppress(FileExistsError):  # another run was quicker
                folder = RUNS / f"{OF_A_FOLDER}{number:03d}"
                folder.mkdir()
                return folder
    except OSError as error:
        raise _unwritable(RUNS, error.strerror or str(error)) from error
    raise AssertionError  # numbers do not end


def require_free(out: Path) -> None:
    """Raise `LayoutError` if `out` holds files of a run: a new one would mix its own with them."""
    found = sorted(path.name for pattern in OF_A_RUN for path in out.glob(pattern))
    if found:
        more = f" and {len(found) - 1} more" if found[1:] else ""
        raise LayoutError(
            f"--out {out} holds files of another run: {found[0]}{more}.",
            cause="a second run was started with the same --out.",
            fix=f"give another --out, or none for a new folder; --resume {out} to continue that "
            "run; or --overwrite to write into this folder, where files of the same name are "
            "replaced.",
        )


def find_checkpoint(resume: Path) -> Path:
    """Return the checkpoint that `--resume DIR` means: the latest of a run, or DIR itself."""
    latest = resume / LATEST
    return resume / latest.read_text().strip() if is_there(latest) else resume


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts that `save_run` was given.

    Raises:
        CheckpointError: there is no good checkpoint in `folder`.
        LayoutError: it is not one of this job.
    """
    facts = read_extra(folder)
    if not {"settings", "text_sha256", "losses", "order"} <= set(facts):
        raise LayoutError(
            f"--resume: the checkpoint {folder} holds no run of this job: {sorted(facts)}.",
            cause="it was saved by another program, or by an older version of this one.",
            fix="pass the --out of a run of examples/train, or a step-... folder in it.",
        )
    return facts
