"""One program at a time writes into the folder of a run; a restarted one goes on with its own.

Rank 0 holds a lock (flock) on the file `run` for as long as it lives, and writes into it which
launch it belongs to. A launcher that starts its ranks again after one of them died, as
`torchrun --max-restarts` does, is the same launch: it goes on with the run that it finds.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fzero import LayoutError
from train.machines import LAUNCH
from train.saving import is_there

CLAIM = "run"


def launch_of(environ: Mapping[str, str]) -> str:
    """Name the launch of this process: the same after a restart; "" without a launcher.

    A launch on several machines has a name in its environment (`train.machines`). Of others, those
    that were given the same id, or none, differ by their agent, which is the parent of the ranks.

    Example:
        >>> launch_of({})
        ''
    """
    if LAUNCH in environ:
        return environ[LAUNCH]
    run = environ.get("TORCHELASTIC_RUN_ID")
    return "" if run is None else f"{run} {socket.gethostname()} {os.getppid()}"


def begun_before(folders: Iterable[Path], environ: Mapping[str, str]) -> Path | None:
    """Return that of `folders` in which this launch, which was restarted, has begun a run.

    None if the launch was not restarted, or has begun a run in none of them. On several machines
    the agent of this rank may be a new one, which has restarted nothing.
    """
    if LAUNCH not in environ and environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    files = (folder / CLAIM for folder in folders)
    mine = (file for file in files if is_there(file) and file.read_text() == launch_of(environ))
    return next((file.parent for file in mine), None)


@contextmanager
def claimed(out: Path, environ: Mapping[str, str]) -> Iterator[None]:
    """Hold the folder `out` for the block. Where the file system has no locks, nothing holds it.

    Raises:
        LayoutError: another program holds it.
        CheckpointError: what stands in the place of its file is no file.
    """
    is_there(out / CLAIM)
    with open(out / CLAIM, "a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LayoutError(
                f"--out {out} is in use: another program trains into it.",
                cause="a second run was started with the same --out or --resume.",
                fix="give another --out, or end the other run first.",
            ) from None
        except OSError:
            pass  # no locks
        held.truncate(0)
        held.write(launch_of(environ))
        held.flush()
        yield
