"""Several machines on one: an agent of torchrun with one rank for each; a machine may die.

    python examples/train/machines.py --ranks 4 --restarts 3 -- --logical-ranks 4 --mirror 10

A rank that is killed takes its machine with it: its agent, and its copies in memory. The others go
on without it; then it comes back, and all go on together. Machine 0 has the store in which agents
meet, so of that only the rank is started again. On real machines the agents are started by hand, or
by a scheduler, with the same options and the same TRAIN_LAUNCH in their environment.

What is killed is found in /proc; where there is none, a killed rank is started again at once.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

LAUNCH = "TRAIN_LAUNCH"
"""The variable that names a launch: the same on all machines, and of no other launch."""

LOOK_S = 0.1  # between two looks at the machines
AGENT_LOOKS_S = 1.0  # between an agent's looks at its rank: this program sees first that it is gone
BACK_S = 25.0  # a machine comes back when the others have run without it for so long
PATIENCE_S = 75.0  # or after this
GRACE_S = 40.0  # for ranks that are told to stop: they save

MEETING = {
    "last_call_timeout": 10,  # that those who are there wait for others
    "keep_alive_interval": 2,
    "keep_alive_max_attempt": 5,  # an agent is gone after so many intervals
}


def memory_of(environ: Mapping[str, str]) -> Path | None:
    """Return the folder in memory of a launch on several machines; None of any other.

    Example:
        >>> memory_of({}), memory_of({"TRAIN_LAUNCH": "a1"}).name
        (None, 'fzero-train-a1')
    """
    if LAUNCH not in environ:
        return None
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() else Path(tempfile.gettempdir())
    return base / f"fzero-train-{environ[LAUNCH]}"


class Child(NamedTuple):
    """A process that an agent has started."""

    pid: int
    killed: bool


def children() -> dict[int, list[Child]]:
    """Return {process: those that it has started}; also ended ones that it has not looked at yet.

    Example:
        >>> isinstance(children(), dict)
        True
    """
    found: dict[int, list[Child]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_, code = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        killed = state == "Z" and int(code) & 127 == signal.SIGKILL
        found.setdefault(int(parent), []).append(Child(int(file.parent.name), killed))
    return found


@dataclass
class Machine:
    """One of the machines: its agent, and the ranks that this has started."""

    number: int
    command: list[str]
    environ: dict[str, str]
    memory: Path
    agent: subprocess.Popen[bytes] | None = None
    ranks: list[Child] = field(default_factory=list)  # at the last look
    died_s: float = 0.0

    def start(self) -> None:
        """Start its agent."""
        self.agent = subprocess.Popen(self.command, env=self.environ, start_new_session=True)

    def look(self, found: Mapping[int, list[Child]]) -> int | None:
        """See whether it has died; return the exit code if it has ended in another way."""
        if self.agent is None:
            return None
        code = self.agent.poll()
        if code is None:
            self.ranks = found.get(self.agent.pid, [])
        gone = code == -signal.SIGKILL or any(rank.killed for rank in self.ranks)
        if not (gone and self.number):
            return code
        self.kill()
        shutil.rmtree(self.memory, ignore_errors=True)
        self.agent, self.ranks, self.died_s = None, [], time.monotonic()
        _say(f"machine {self.number} is gone")
        return None

    def kill(self) -> None:
        """End all of it at once."""
        if self.agent is not None:
            self.agent.kill()
            for rank in self.ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
            self.agent.wait()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_machines(ranks: int, restarts: int, args: Sequence[str]) -> list[Machine]:
    """Return the machines, of which none is started.

    restarts: how often ranks may die. A survivor is started again when another one dies, and at
    worst once more when that one comes back.
    """
    launch = secrets.token_hex(8)
    environ = {
        **os.environ,
        LAUNCH: launch,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    # Each round of agents has a store of its own: which restart it is differs by machine.
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    memory = memory_of(environ)
    assert memory is not None
    found = []
    for number in range(ranks):
        meeting = {**MEETING, "is_host": int(number == 0)}
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes=1:{ranks}", "--nproc-per-node=1", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={launch}", "--local-addr=127.0.0.1"),
            "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in meeting.items()),
            *(f"--max-restarts={2 * restarts}", f"--monitor-interval={AGENT_LOOKS_S}"),
            *(str(Path(__file__).parent), *args),
        ]
        name = f"machine-{number}"
        found.append(
            Machine(
                number=number,
                command=command,
                environ={**environ, "FZERO_HOST": name},
                memory=memory / name,
            )
        )
    return found


def run(machines: Sequence[Machine]) -> int:
    """Run until machine 0 has ended; return its exit code."""
    for machine in machines:
        machine.start()
    before: dict[int, set[int]] = {}  # of a machine that is gone: the ranks of the others then
    since_s: dict[int, float] = {}  # of it: since when all of them are new ones
    while True:
        found = children()
        codes = [machine.look(found) for machine in machines]
        if codes[0] is not None:
            return codes[0]
        others = [machine.ranks for machine in machines if machine.agent is not None]
        for machine in machines:
            number, now = machine.number, time.monotonic()
            if machine.agent is not None:
                continue
            then = before.setdefault(number, {rank.pid for ranks in others for rank in ranks})
            if all(any(rank.pid not in then for rank in ranks) for ranks in others):
                since_s.setdefault(number, now)
            if now - since_s.get(number, now) >= BACK_S or now - machine.died_s >= PATIENCE_S:
                before.pop(number)
                since_s.pop(number, None)
                machine.start()
                _say(f"machine {number} is back")
        time.sleep(LOOK_S)


def end(machines: Sequence[Machine]) -> None:
    """Tell the agents to stop their ranks, which save; end what does not stop."""
    agents = [machine.agent for machine in machines if machine.agent is not None]
    for agent in agents:
        if agent.poll() is None:
            agent.terminate()
    deadline = time.monotonic() + GRACE_S
    for machine in machines:
        if machine.agent is not None:
            try:
                machine.agent.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                machine.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the machines of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, required=True, help="machines, with one rank each")
    parser.add_argument("--restarts", type=int, default=3, help="how often ranks may die")
    parser.add_argument("args", nargs="*", help="of the job, after --")
    options = parser.parse_args(argv)
    machines = make_machines(options.ranks, options.restarts, options.args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = run(machines)
        deadline = time.monotonic() + GRACE_S
        agents = [machine.agent for machine in machines if machine.agent is not None]
        while any(agent.poll() is None for agent in agents) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        end(machines)
        shutil.rmtree(machines[0].memory.parent, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
