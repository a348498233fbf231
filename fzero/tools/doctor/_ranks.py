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
from types import TracebackType
from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from fzero.errors import AxisError
from fzero.tools.doctor._check import CollectiveCheck, Finding, run_check, worst

START_S = 600.0  # to import torch, and to find each other


class _Ended(Exception):
    """A rank ended without an answer; the finding tells how."""


class _Rank(NamedTuple):
    process: BaseProcess
    pipe: Connection


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
        with _Ranks(world, timeout_s) as ranks:
            while left:
                check = left.pop(0)
                try:
                    yield worst(ranks.ask(check, timeout_s))
                except _Ended as ended:
                    yield ended.args[0]
                    break


class _Ranks:
    """W processes in one gloo group, from `__enter__` to `__exit__`."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self._world, self._timeout_s = world, timeout_s
        self._ranks: list[_Rank] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        context = mp.get_context("spawn")
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fzero-doctor-"))
        with self._stack:  # closes all if a start fails
            for rank in range(self._world):
                ours, theirs = context.Pipe()
                args = (rank, self._world, f"{folder}/store", self._timeout_s, theirs)
                process = context.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()  # so that the pipe closes with the process
                self._ranks.append(_Rank(process, ours))
                self._stack.callback(_end, self._ranks[-1])
            self._started()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def ask(self, check: CollectiveCheck, timeout_s: float) -> list[Finding]:
        """Return every rank's finding."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it has ended: the answer says so
                rank.pipe.send(check)
        return [self._answer(i, timeout_s) for i in range(self._world)]

    def _answer(self, index: int, timeout_s: float) -> Finding:
        process, pipe = self._ranks[index]
        if pipe.poll(timeout_s):
            with contextlib.suppress(EOFError, OSError):
                return pipe.recv()
            process.join(10)
            seen = f"rank {index} ended with exit code {process.exitcode}"
            found = Finding(verdict="crashed", seen=seen)
        else:
            found = Finding(verdict="hung", seen=f"rank {index} gives no answer in {timeout_s:g} s")
        for rank in self._ranks:  # the others wait for it
            rank.process.kill()
        raise _Ended(found)

    def _started(self) -> None:
        try:
            found = worst([self._answer(i, START_S) for i in range(self._world)])
        except _Ended as ended:
            found = ended.args[0]
        if found.verdict != "right":
            raise AxisError(
                f"{self._world} ranks on gloo cannot start here: {found.seen}.",
                cause="a host name that leads to no address of this machine, or a sandbox "
                "without sockets.",
                fix="export GLOO_SOCKET_IFNAME=lo, and run it again.",
            )


def _end(rank: _Rank) -> None:
    rank.pipe.close()  # a rank that waits for its next check ends by itself
    rank.process.join(5)
    if rank.process.is_alive():
        rank.process.kill()
        rank.process.join()


def _serve(rank: int, world: int, store: str, timeout_s: float, pipe: Connection) -> None:
    """Join the group, then answer checks until the pipe closes."""
    warnings.simplefilter("ignore")  # what is deprecated in torch is not what is looked for
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        files = dist.FileStore(store, world)
        wait = datetime.timedelta(seconds=2 * timeout_s)  # who asks gives up before
        dist.init_process_group("gloo", store=files, rank=rank, world_size=world, timeout=wait)
        pipe.send(Finding(verdict="right"))
    except Exception as error:
        pipe.send(Finding(verdict="crashed", seen=f"rank {rank}: {error}"))
        return
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(run_check(pipe.recv(), rank, world))
    dist.destroy_process_group()
