"""A client of the service of adapters, by the standard library; run, it tries to break the service.

python examples/service/client.py --ranks 2 --stage 3
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class ServiceError(RuntimeError):
    """What the service answers to a request that it refuses."""


class Client:
    """`Client(port, "me").forward_backward(batch=..., loss=...)`: one connection, one adapter."""

    def __init__(self, port: int, name: str) -> None:
        self.name = name
        with socket.create_connection(("127.0.0.1", port)) as connection:
            self.file = connection.makefile("rwb")  # the connection ends with its file

    def __getattr__(self, method: str) -> Any:
        return lambda **given: self.call(method=method, client=self.name, **given)

    def call(self, **request: Any) -> Any:
        """Send one request, and wait for its answer."""
        self.file.write(json.dumps(request).encode() + b"\n")
        self.file.flush()
        answer = json.loads(self.file.readline())
        if "error" in answer:
            raise ServiceError(f"{answer['error']['name']}: {answer['error']['message']}")
        return answer["result"]


def train(port: int, name: str, steps: int = 3) -> str:
    """Train one adapter on texts of its seed, by two losses; return the digest of all its bits."""
    me, draw = Client(port, name), random.Random(name[0])
    me.create(seed=ord(name[0]), lr=1e-2)
    for step in range(steps):
        tokens = [[draw.randrange(64) for _ in range(draw.randint(2, 9))] for _ in range(5)]
        rows = [
            {"tokens": x[:-1], "targets": x[1:], "weights": [1.0] * (len(x) - 1)} for x in tokens
        ]
        said = me.forward_backward(batch=rows, loss="cross_entropy")
        new = me.sample(prompt=tokens[0], max_tokens=4, seed=step)["tokens"]
        for row, old in zip(rows, said["logprobs"], strict=True):
            row |= {"logprobs": old, "advantages": [sum(new) / 100 - 1.0] * len(old)}
        me.forward_backward(batch=rows, loss="ppo")
        me.optim_step()
    return me.status()["digest"]


def disturb(port: int, name: str) -> str:
    """Be a bad client: numbers that are none, rows that do not fit, half a line, any bytes."""
    bad, row = Client(port, name), {"tokens": [1], "targets": [2], "weights": [1e18]}
    bad.create(lr=1.0)
    bad.forward_backward(batch=[row], loss="cross_entropy")
    bad.optim_step()
    for wrong in ({"weights": [math.nan]}, {"weights": [1e30]}, {"weights": []}, {"tokens": [64]}):
        try:
            bad.forward_backward(batch=[row | wrong], loss="cross_entropy")
        except ServiceError:
            continue
        raise SystemExit(f"{wrong} was taken")
    for sent in (b"\x00\xff\n", b"[" * 10**5 + b"\n", b"{" + b"x" * 10**7 + b"\n", b'{"half'):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(sent)  # and away, before the answer
    bad.delete()
    return "refused"


@contextlib.contextmanager
def service(ranks: int, stage: int) -> Iterator[int]:
    """Run the service on some ranks of this machine; give its port."""
    folder, server = tempfile.TemporaryDirectory(), str(Path(__file__).with_name("server.py"))
    with socket.create_server(("127.0.0.1", 0)) as free:  # where the ranks meet each other
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    world |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    command, started = [sys.executable, server, "--stage", str(stage), "--folder", folder.name], []
    for rank in range(ranks):
        env = os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    try:
        said = re.match(r"on port (\d+)", started[0].stdout.readline())
        if said is None:
            raise SystemExit("the service has not begun: see above")
        yield int(said[1])
    finally:
        for process in reversed(started):  # rank 0 last: the others wait for it
            process.kill()
        for process in started:
            process.communicate()
        folder.cleanup()


def check(port: int) -> None:
    """Train three clients alone, then beside each other and bad ones; compare all their bits."""
    alone = {name: train(port, f"{name}-alone") for name in "abc"}
    for turn in range(2):
        found: dict[str, str] = {}

        def run(task: Any, name: str, turn: int = turn, found: Any = found) -> None:
            found[name] = task(port, f"{name}{turn}")

        tasks = [(train, "a"), (train, "b"), (train, "c"), (disturb, "bad"), (disturb, "worse")]
        threads = [threading.Thread(target=run, args=x) for x in random.sample(tasks, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if found != alone | {"bad": "refused", "worse": "refused"}:
            raise SystemExit(f"other bits than alone: {found}, alone {alone}")
    one, copy = Client(port, "a0"), Client(port, "copy")
    one.save(to="first")
    one.fork(to="copy")
    copy.load(path="a0/first")
    if not one.status()["digest"] == copy.status()["digest"] == alone["a"]:
        raise SystemExit("a client that was saved, forked and loaded has other bits")
    base, held = one.call(method="status")["bytes"], one.status()["bytes"]
    print(f"bytes on each rank: base {base}, each client {held}")
    print(f"check: 3 clients among 5 have the bits of each alone, on {len(base)} rank(s)")


def main() -> None:
    """Start the service, and fail if a claim is not so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    args = parser.parse_args()
    with service(args.ranks, args.stage) as port:
        check(port)


if __name__ == "__main__":
    main()
