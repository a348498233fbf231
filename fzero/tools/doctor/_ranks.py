"""Run checks on ranks in separate processes of this machine, which may crash or hang."""

from __future__ import annotations

import contextlib
import datetime
import logging
import multiprocessing as mp
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from fzero.errors import AxisError
from fzero.tools.doctor._check import CollectiveCheck, Finding, run_check, worst

START_S = 600.0  # to import torch, and to find each other
_Ranks = list[tuple[BaseProcess, Connection]]


def findings(
    checks: Sequence[CollectiveCheck], *, world: int, timeout_s: float
) -> Iterator[Finding]:
    """Yield the finding of each check, in order.

    Where a rank crashes, or gives no answer in `timeout_s` seconds, that is the finding, and the
    checks that follow run on new ranks.

    Raises `AxisError` where ranks cannot start, or do not find each other.
    """
    left = list(checks)
    while left:
        with _started(left, world, timeout_s) as ranks:
            found = _answer(ranks, START_S)
            if found.verdict != "right":
                raise AxisError(
                    f"{world} ranks on gloo cannot start here: {found.seen}.",
                    cause="a host name that leads to no address of this machine, or a sandbox "
                    "without sockets.",
                    fix="export GLOO_SOCKET_IFNAME=lo, and run it again.",
                )
            while left and found.verdict not in ("crashed", "hung"):
                del left[0]
                found = _answer(ranks, timeout_s)
                yield found


@contextlib.contextmanager
def _started(checks: list[CollectiveCheck], world: int, timeout_s: float) -> Iterator[_Ranks]:
    """Start W processes that run the checks one after another; they are killed at the end."""
    context = mp.get_context("spawn")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fzero-doctor-"))
        ranks: _Ranks = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            args = (rank, world, f"{folder}/store", timeout_s, checks, theirs)
            process = context.Process(target=_run, args=args, daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            theirs.close()  # so that the pipe closes with the process
            ranks.append((process, ours))
        yield ranks


def _answer(ranks: _Ranks, seconds: float) -> Finding:
    """Return the worst of the next findings of all ranks; how a rank ended, if it has none."""
    found = []
    for rank, (process, pipe) in enumerate(ranks):
        if not pipe.poll(seconds):
            seen = f"rank {rank} gives no answer in {seconds:g} s"
            return Finding(verdict="hung", seen=seen)
        try:
            found.append(pipe.recv())
        except (EOFError, OSError):
            process.join(10)
            seen = f"rank {rank} ended with exit code {process.exitcode}"
            return Finding(verdict="crashed", seen=seen)
    return worst(found)


def _run(
    rank: int,
    world: int,
    store: str,
    timeout_s: float,
    checks: list[CollectiveCheck],
    pipe: Connection,
) -> None:
    """Join the group, say so, and send the finding of each check."""
    warnings.simplefilter("ignore")  # what is deprecated in torch is not what is looked for
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        files = dist.FileStore(store, world)
        wait = datetime.timedelta(seconds=2 * timeout_s)  # who asks gives up before
        dist.init_process_group("gloo", store=files, rank=rank, world_size=world, timeout=wait)
    except Exception as error:
        pipe.send(Finding(verdict="crashed", seen=f"rank {rank}: {error}"))
        return
    pipe.send(Finding(verdict="right"))
    for check in checks:
        pipe.send(run_check(check, rank, world))
    dist.destroy_process_group()
