"""Checkpoints of the job: the train state, and what is needed to continue exactly.

A run writes into its folder OUT:

    step-000400/   a checkpoint of fzero.checkpoint, for any number of ranks and any stage; its
                   `extra` holds the settings, the digest of the text and the losses so far
    latest         the name of the newest of them
    run            held by the program that trains into OUT; see `fzero.job.claim`
    loss.png       the loss curve, after the last step
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import fzero
from fzero.checkpoint import CheckpointError, read_extra, save
from fzero.checkpoint._disk import is_there, put_text, read_text
from fzero.errors import LayoutError

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
        put_text(out / LATEST, folder.name, through=out / f"{LATEST}.partial")
    return folder


def require_writable(out: Path) -> None:
    """Raise `CheckpointError` if `out` does not take a file: now, and not after the last step."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise CheckpointError(
            f"--out {out}: {error.strerror or error}.",
            cause="a folder that this user may not write to, or a full disk.",
            fix="give another --out.",
        ) from error


def require_free(out: Path) -> None:
    """Raise `LayoutError` if `out` holds files of a run: a new one would mix its own with them."""
    found = sorted(path.name for pattern in OF_A_RUN for path in out.glob(pattern))
    if found:
        more = f" and {len(found) - 1} more" if found[1:] else ""
        raise LayoutError(
            f"--out {out} holds files of another run: {found[0]}{more}.",
            cause="a second run was started with the same --out, or without one.",
            fix=f"give another --out; --resume {out} to continue that run; or --overwrite to "
            "write into this folder, where files of the same name are replaced.",
        )


def find_checkpoint(resume: Path) -> Path:
    """Return the checkpoint that `--resume DIR` means: the latest of a run, or DIR itself."""
    latest = resume / LATEST
    return resume / read_text(latest).strip() if is_there(latest) else resume


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts that `save_run` was given.

    Raises:
        CheckpointError: there is no good checkpoint in `folder`.
        LayoutError: it is not one of this job.
    """
    facts = read_extra(folder)
    if not {"settings", "text_sha256", "losses"} <= set(facts):
        raise LayoutError(
            f"--resume: the checkpoint {folder} holds no run of this job: {sorted(facts)}.",
            cause="it was saved by another program.",
            fix="pass the --out of a `python -m fzero train`, or a step-... folder in it.",
        )
    return facts
