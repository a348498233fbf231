"""Run a function once per rank on gloo, in warm processes, or a script under torchrun.

    def body(rank: int, world_size: int, x: torch.Tensor) -> torch.Tensor:
        x = x + rank
        dist.all_reduce(x)
        return x

    @pytest.mark.xdist_group("gloo")
    def test_sum() -> None:
        assert run_ranks(body, 2, torch.zeros(3))[0].tolist() == [1.0, 1.0, 1.0]

To start four processes that import torch costs seconds, a call to warm ones milliseconds. So the
processes of a world size, and their process group, stay for the calls that follow. What may have
left them out of step (an exception, a death, a timeout) ends them; the next call forks new ones
from a server that has imported fzero, and what torch imports late, and done nothing else.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from tests.rank_process import LOOPBACK, ROOT, from_bytes, ping, serve, to_bytes

START_TIMEOUT_S = 90.0
GRACE_S = 3.0  # for the other ranks, once one has failed: they may wait for it for ever
PING_TIMEOUT_S = 5.0


class Answer(NamedTuple):
    """How a call ended on one rank."""

    status: Literal["returned", "raised", "died", "did not answer"]
    value: Any = None  # the result, or (type name, message) of what was raised
    report: str = ""  # a traceback, an exit code, or the stack that the rank hung in


class Member(NamedTuple):
    """One rank's process, our end of its pipe, and the file that it dumps its stack to."""

    process: BaseProcess
    pipe: Connection
    stack: Path


def forkserver() -> ForkServerContext:
    """Return what starts processes that have imported fzero, and what torch imports late."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fzero", "torch._dynamo", "hypothesis", "pytest"])
    return context


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    raises: bool = False,
    backend: str = "gloo",
    fresh: bool = False,
) -> list[Any]:
    """Call `body(rank, world_size, *args)` on every rank; return the results in rank order.

    Every call starts from seed 0 with one thread a rank, warnings being errors except for those
    that pyproject.toml exempts. Arguments and results travel as bytes, so what comes back is
    ordinary memory that no rank shares.

    Args:
        body: a module-level function of an importable module (it is pickled by name).
        world_size: number of ranks.
        *args: the same for every rank, picklable.
        timeout_s: of the call, without the start of the processes.
        raises: expect an exception on every rank, and return its (type name, message) per rank.
        backend: of the process group; with "nccl" in it every rank uses a GPU, several ranks the
            same one if there are fewer GPUs than ranks.
        fresh: in processes that no other test has used, and none will. What ranks have done before
            may change how many rounds they need: see docs/semantics.md.

    Fails the test (`pytest.fail`) with the traceback of every rank that raised, the exit code of
    every rank that died, and the stack of every rank that did not answer in time. One that waits
    for a failed rank is given 3 s, with `raises=True` the whole of `timeout_s`.
    """
    pool = Pool(world_size, backend) if fresh else _pool(world_size, backend)
    answers = pool.call(body, args, timeout_s, grace_s=timeout_s if raises else GRACE_S)
    if fresh:
        pool.stop()
    wanted = "raised" if raises else "returned"
    if any(answer.status != wanted for answer in answers):
        pool.stop()
        pytest.fail(_describe(body, answers, wanted), pytrace=False)
    if raises and not fresh and not pool.in_step():
        pool.stop()
    return [answer.value for answer in answers]


def spawn_script(
    path: str | Path,
    nproc: int,
    args: Sequence[str] = (),
    timeout_s: float = 110.0,
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --standalone --nproc-per-node nproc path *args`; return how it ended.

    `path` is a script, or "-m" with the module's name as the first of `args`; `options` are more of
    torchrun's. It runs in the root of the repository with one thread a rank. All ranks write to one
    pipe: a rank's line is whole only if it is one write. The exit status is the caller's to check.
    Fails the test, with the output, when it is not over within `timeout_s`; the ranks are stopped.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={nproc}", *options, str(path), *args]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException as error:
            process.terminate()  # not kill: torchrun stops its ranks before it goes
            out, err = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            seen = f"{' '.join(command)}\nwas not over within {timeout_s:g} s."
            pytest.fail(f"{seen}\n--- stdout ---\n{out}\n--- stderr ---\n{err}", pytrace=False)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class Pool:
    """The warm processes of one world size and backend; started when first called."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self._world_size = world_size
        self._backend = backend
        self._folder = ""
        self._members: list[Member] = []
        atexit.register(self.stop)

    def call(
        self, body: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, *, grace_s: float
    ) -> list[Answer]:
        """Run `body` on every rank; whatever interrupts this process stops the ranks too."""
        request = to_bytes((body, args))
        try:
            if not all(member.process.is_alive() for member in self._members):
                self.stop()  # one was killed while it was idle
            if not self._members:
                self._start()
            for member in self._members:
                member.pipe.send_bytes(request)
            return self._collect(timeout_s, grace_s)
        except BaseException:
            self.stop()
            raise

    def in_step(self) -> bool:
        """Return whether the ranks still agree about the collective that comes next."""
        answers = self.call(ping, (), PING_TIMEOUT_S, grace_s=0.0)
        return all(answer.value == 2.0**self._world_size - 1 for answer in answers)

    def stop(self) -> None:
        """End every process at once; the next call starts new ones."""
        members, self._members = self._members, []
        for member in members:
            member.process.kill()
        for member in members:
            member.process.join()
            member.process.close()
            member.pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="fzero-ranks-")
        context = forkserver()
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            stack = Path(self._folder, f"stack{rank}")
            process = context.Process(
                target=serve,
                args=(rank, self._world_size, self._backend, self._folder, stack, theirs),
                name=f"fzero-rank{rank}-of-{self._world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()  # else its death would not end our reads
            self._members.append(Member(process, ours, stack))
        answers = self._collect(START_TIMEOUT_S, GRACE_S)
        if any(answer.status != "returned" for answer in answers):
            self.stop()
            pytest.fail(_describe(serve, answers, "returned"), pytrace=False)

    def _collect(self, timeout_s: float, grace_s: float) -> list[Answer]:
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Answer] = {}
        waiting = {member.pipe: rank for rank, member in enumerate(self._members)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                answers[rank] = _read(self._members[rank])
                if answers[rank].status != "returned":
                    deadline = min(deadline, time.monotonic() + grace_s)
        for rank in waiting.values():
            answers[rank] = Answer("did not answer", report=_stack_of(self._members[rank]))
        return [answers[rank] for rank in range(self._world_size)]


@functools.cache
def _pool(world_size: int, backend: str) -> Pool:
    return Pool(world_size, backend)


def _read(member: Member) -> Answer:
    try:
        answer = member.pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        member.process.join()
        return Answer("died", report=f"exit code {member.process.exitcode}")
    return Answer(*from_bytes(answer))


def _stack_of(member: Member) -> str:
    """Ask a process for its Python stack; it can tell even from inside a collective."""
    pid = member.process.pid
    if pid is None or not member.stack.exists():
        return "(it had not started)"
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and not member.stack.stat().st_size:
        time.sleep(0.05)
    time.sleep(0.05)  # the dump is written in pieces
    return member.stack.read_text() or "(it could not be asked)"


def _describe(body: Callable[..., Any], answers: list[Answer], wanted: str) -> str:
    wrong = {rank: answer for rank, answer in enumerate(answers) if answer.status != wanted}
    head = f"{body.__module__}.{body.__qualname__} on {len(answers)} ranks: "
    head += "; ".join(f"rank {rank} {answer.status}" for rank, answer in wrong.items())
    head += f" ({wanted!r} was expected)."
    shown = {rank: answer.report or repr(answer.value) for rank, answer in wrong.items()}
    return "\n".join([head, *(f"--- rank {rank} ---\n{text}" for rank, text in shown.items())])
