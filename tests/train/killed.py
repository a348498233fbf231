"""Runs of the job on several machines whose ranks are killed; by hand, as many as one likes:

python -m tests.train.killed --kills 5 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.rank_process import LOOPBACK, ROOT

sys.path.append(str(ROOT / "examples"))  # pytest has it by pyproject.toml

from tests.train.runs import ARGS
from train.machines import children

LOGICAL = ["--logical-ranks", "4"]
RANKS = 4


@dataclass
class Killed:
    """A run on four machines, and what has been done to it."""

    out: Path
    steps: int
    restarts: int
    every: int = 10
    done: list[str] = field(default_factory=list)  # each kill, and where the run was

    def __enter__(self) -> Killed:
        """Start it."""
        job = [*ARGS, *LOGICAL, "--steps", str(self.steps), "--mirror", str(self.every)]
        command = [sys.executable, str(ROOT / "examples/train/machines.py")]
        command += ["--ranks", str(RANKS), "--restarts", str(self.restarts), "--"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": LOOPBACK}
        self.log = self.out.with_suffix(".log")
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *job, "--out", str(self.out)],
                cwd=ROOT,
                env=environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *error: object) -> None:
        """Stop it, if it runs still."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(90)

    def told(self) -> str:
        """Return all that it has said."""
        return self.log.read_text()

    def step(self) -> int:
        """Return the last step that was shown."""
        shown = re.findall(r"^step (\d+)/", self.told(), re.MULTILINE)
        return int(shown[-1]) if shown else 0

    def ranks(self) -> list[int]:
        """Return the processes of the ranks, by the time at which their agents were started."""
        found = children()
        agents = sorted(agent.pid for agent in found.get(self.process.pid, []))
        return [rank.pid for agent in agents for rank in found.get(agent, [])]

    def wait_for(self, what: Callable[[], bool], seconds: float) -> bool:
        """Wait until `what` is true; return whether it is, in that time, before the run ended."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if what():
                return True
            time.sleep(0.1)
        return False

    def kill(self, rank: int) -> None:
        """Kill a rank by its process."""
        shown = [line for line in self.told().splitlines() if line.strip()]
        self.done.append(f"process {rank}, after {shown[-1]!r:.70}" if shown else f"{rank}")
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def main() -> int:
    """Kill ranks at random moments; say how the run ended, and with which digest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    which, began = random.Random(options.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with Killed(Path(folder) / "run", options.steps, options.kills) as run:
            for _ in range(options.kills):
                run.wait_for(lambda: len(run.ranks()) == RANKS, 300)
                time.sleep(which.uniform(0, 40))
                ranks = run.ranks()
                if not ranks:
                    break
                run.kill(which.choice(ranks))
                print(f"{time.monotonic() - began:.0f} s: {run.done[-1]}", flush=True)
                time.sleep(2)
            run.process.wait(900)
        told = run.told()
        for line in told.splitlines():
            if re.match(r"machine|restored|resumed|GPT|last loss|fzero", line):
                print("   ", line)
        print(f"{len(run.done)} kills, exit code {run.process.returncode}")
        if run.process.returncode:
            print(told[-6000:])
    return run.process.returncode


if __name__ == "__main__":
    sys.exit(main())
