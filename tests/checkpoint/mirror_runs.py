"""A training on forked ranks with a mirror, of which ranks are killed; run as a program.

One process imports torch, and forks the ranks of each attempt: a restart takes a second, and not
ten. What the ranks have done is in files, for they die: a line for each update, with its digest.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fzero
from fzero.checkpoint import Mirror
from tests.checkpoint.trainings import Style, Trainer, total
from tests.strategies import integers

EVERY = 3
ROWS = 12  # of all ranks together, on 1, 2, 3 or 4 of them


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run."""

    folder: str
    ranks: list[int]  # of each attempt; the last number is that of all later ones
    style: Style
    stage: int
    rule: str = "adamw"
    updates: int = 12
    hosts: int = 1
    kills: int = 0  # at random moments
    wiped: list[str] = field(default_factory=list)  # hosts, after the first kill


class Run(Trainer):
    """A training whose loss draws a random number, the same on all ranks."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.style, plan.stage, plan.rule, seed=1, loss=total)
        torch.manual_seed(5)

    def restore(self, mirror: Mirror) -> dict[str, Any]:
        if self.engine is not None:
            return mirror.restore(self.engine)[1]
        self._state, extra = mirror.restore(self._state)
        return extra

    def one(self, number: int, mirror: Mirror) -> None:
        rows = integers((ROWS, 3), number, torch.float32) * int(torch.randint(1, 3, ()))
        mine = rows.chunk(fzero.axis_size())[fzero.axis_index()]
        if self.engine is None:
            self._state, _ = self.step(self._state, mine)
        else:
            self.loss(self.engine(mine)).backward()
            self.engine.step()
        mirror.update(self.engine or self.state, extra={"next": number + 1})

    def digest(self) -> int:
        params = fzero.full_params(self.state)
        raw = [params[path].detach().view(torch.uint8).numpy().tobytes() for path in sorted(params)]
        return zlib.crc32(b"".join(raw))


def train(plan: Plan, rank: int, ranks: int, store: str, log: Path) -> None:
    """One rank of one attempt."""
    os.environ["FZERO_HOST"] = f"host{rank * plan.hosts // ranks}"
    torch.set_num_threads(1)
    store_of_ranks = dist.FileStore(store, ranks)
    dist.init_process_group("gloo", store=store_of_ranks, rank=rank, world_size=ranks)
    run = Run(plan)
    with Mirror(Path(plan.folder) / "mirror", every=EVERY) as mirror, log.open("a") as file:
        began = time.perf_counter()
        first = run.restore(mirror).get("next", 0)
        print("restored", first, time.perf_counter() - began, file=file, flush=True)
        for number in range(first, plan.updates):
            run.one(number, mirror)
            print("update", number + 1, run.digest(), file=file, flush=True)
    run.end()
    dist.destroy_process_group()


def attempt(plan: Plan, number: int, moments: random.Random | None) -> tuple[list[int], list[Path]]:
    """Fork the ranks; kill one at a random moment, and then the others; return their ends."""
    folder = Path(plan.folder)
    folder.mkdir(exist_ok=True)
    ranks = plan.ranks[min(number, len(plan.ranks) - 1)]
    logs = [folder / f"log-{number}-{rank}" for rank in range(ranks)]
    pids = []
    for rank in range(ranks):
        logs[rank].touch()
        pid = os.fork()
        if not pid:
            end = 1
            try:
                train(plan, rank, ranks, f"{folder}/store-{number}", logs[rank])
                end = 0
            finally:
                sys.stderr.flush()
                os._exit(end)
        pids.append(pid)
    if moments is not None:
        _wait_for_moment(plan, logs, pids, moments)
        os.kill(moments.choice(pids), signal.SIGKILL)
        time.sleep(moments.uniform(0.0, 0.1))  # then the launcher sees it
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], logs


def _wait_for_moment(
    plan: Plan, logs: Sequence[Path], pids: Sequence[int], moments: random.Random
) -> None:
    """Wait for a random update of a random rank, and then for a part of a step; or less."""
    if moments.random() < 0.1:
        time.sleep(moments.uniform(0.0, 0.5))  # while it starts
        return
    log, lines = moments.choice(logs), moments.randint(1, 1 + 2 * EVERY)
    until = time.monotonic() + 60
    while len(log.read_text().splitlines()) < lines and time.monotonic() < until:
        if os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break  # it has come to the end
        time.sleep(0.0005)
    time.sleep(moments.uniform(0.0, 0.03))


def run(plan: Plan) -> dict[str, Any]:
    """Return what came of all attempts."""
    moments, attempts = random.Random(f"{plan.style} {plan.stage}"), []
    for number in range(plan.kills + 1):
        if number == 1:
            for host in plan.wiped:
                shutil.rmtree(Path(plan.folder) / "mirror" / host, ignore_errors=True)
        ends, logs = attempt(plan, number, moments if number < plan.kills else None)
        lines = [[line.split() for line in log.read_text().splitlines()] for log in logs]
        attempts.append({"ends": ends, "ranks": [_of_rank(some) for some in lines]})
        if not any(ends):
            break
    left = [str(path) for path in Path(plan.folder).glob("mirror/**/*")]
    return {"attempts": attempts, "left": left}


def _of_rank(lines: list[list[str]]) -> dict[str, Any]:
    """What a rank of an attempt has written."""
    restored = next(((int(n), float(s)) for kind, n, s in lines if kind == "restored"), None)
    return {
        "restored": restored,
        "digests": {int(n): int(x) for kind, n, x in lines if kind == "update"},
    }


def results_of(plans: Sequence[Plan], *, timeout_s: float = 120) -> list[dict[str, Any]]:
    """Run plans in a new process, one after the other; return what came of each."""
    command = [sys.executable, "-m", "tests.checkpoint.mirror_runs"]
    text = json.dumps([asdict(plan) for plan in plans])
    done = subprocess.run([*command, text], capture_output=True, text=True, timeout=timeout_s)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps([run(Plan(**one)) for one in json.loads(sys.argv[1])]))
