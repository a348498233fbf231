"""The command that continues a run which was stopped, to be copied into the same shell."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path

from train.settings import Output

HERE = Path(__file__).parent  # what Python runs: `python examples/train`
_OF_THE_FOLDER = {"out", "resume", "overwrite"}  # what the command says anew


def resume_command(
    output: Output,
    saved: Path,
    out: Path,
    environ: Mapping[str, str],
    *,
    python: str,
    program: Path = HERE,
) -> str:
    """Return the command that continues the run whose checkpoints are in `saved`.

    A checkpoint keeps the settings of model, course and split; options of the output that were
    given are repeated. Of a launcher with several machines, and of any other than torchrun, the
    environment does not tell the options: they are left to the reader, in angle brackets.

    Args:
        output: the settings of the output, of the run that was stopped.
        saved: the folder of a run, or one checkpoint in it.
        out: the folder into which the run goes on.
        environ: of this process: whether torchrun started it, and how many ranks.
        python: the interpreter, `sys.executable`.
        program: the folder of this job.

    Example:
        >>> folder = Path("runs/gpt-001")
        >>> given, job = Output(save_every=5), Path("examples/train")
        >>> resume_command(given, folder, folder, {}, python="python", program=job)
        'python examples/train --resume runs/gpt-001 --save-every 5'
    """
    words = [_short(str(program)), "--resume", str(saved)]
    if out not in (saved, saved.parent):
        words += ["--out", str(out)]
    for each in dataclasses.fields(output):
        value = getattr(output, each.name)
        if each.name in _OF_THE_FOLDER or value == each.default:
            continue
        name = each.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return f"{_launcher(environ, python)} {shlex.join(words)}"


def _launcher(environ: Mapping[str, str], python: str) -> str:
    """Return what starts the ranks: this interpreter, or torchrun as it was called."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        alone = environ.get("WORLD_SIZE", "1") == "1"
        return ("" if alone else "<the launcher, as before> ") + shlex.quote(_short(python))
    torchrun = Path(python).parent / "torchrun"
    name = (
        _short(str(torchrun))
        if torchrun.is_file()
        else f"{_short(python)} -m torch.distributed.run"
    )
    if environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return f"{name} <its options, as before>"
    options = [f"--nproc-per-node {environ.get('LOCAL_WORLD_SIZE', '1')}"]
    if environ.get("MASTER_PORT", "29500") != "29500":
        options.insert(0, "--standalone")  # the port that is free then, and not this one
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        options.append(f"--max-restarts {environ['TORCHELASTIC_MAX_RESTARTS']}")
    return " ".join([name, *options])


def _short(path: str) -> str:
    """Return a path as one types it: from the working directory, if it is below that."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
