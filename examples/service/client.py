"""A client of the service of adapters, by the standard library; run, it tries to break the service.

python examples/service/client.py --ranks 2 --stage 3
"""

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any


class ServiceError(RuntimeError):
    """What the service answers to a request that it refuses."""


class Client:
    """`Client(port, "me").forward_backward(batch=..., loss=...)`: one connection, one adapter."""

    def __init__(self, port: int, name: str) -> None:
        self.name, self.file = name, socket.create_connection(("127.0.0.1", port)).makefile("rwb")

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


def disturb(port: int, number: int) -> None:
    """Be a bad client: numbers that are none, rows that do not fit, half a line, any bytes."""
    bad, row = Client(port, f"bad{number}"), {"tokens": [1], "targets": [2], "weights": [1e30]}
    bad.create(lr=1.0)
    bad.optim_step() if bad.forward_backward(
        batch=[row | {"weights": [1e18]}], loss="cross_entropy"
    ) else 0
    for wrong in (
        {"weights": [float("nan")]},
        {"tokens": [64]},
        {"weights": []},
        {"weights": [1e30]},
    ):
        try:
            bad.forward_backward(batch=[row | wrong], loss="cross_entropy")
        except ServiceError:
            continue
        raise SystemExit(f"{wrong} was taken")
    for sent in (b"\x00\xff\n", b"[" * 10**5 + b"\n", b"{" + b"x" * 10**7 + b"\n", b'{"half'):
        raw = socket.create_connection(("127.0.0.1", port))
        raw.sendall(sent)
        raw.close()  # before the answer


def main() -> None:
    """Start the service, and fail if a claim is not so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", default="3", help="ZeRO stage of base and adapters")
    args, server = parser.parse_args(), str(Path(__file__).with_name("server.py"))
    run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}"]
    run = [*run, "--standalone", server, "--stage", args.stage, "--folder"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen([*run, folder], stdout=subprocess.PIPE, text=True)
        try:
            said = process.stdout.readline()
            check(int(re.findall(r"on port (\d+)", said)[0]), args.ranks)
        finally:
            process.terminate()
            process.wait()


def check(port: int, ranks: int) -> None:
    """Train three clients alone, then beside each other and bad ones; compare all their bits."""
    alone = [train(port, f"{x}-alone") for x in "abc"]
    found: dict[str, str] = {}
    calls = [lambda x=x: found.update({x: train(port, f"{x}-among")}) for x in "abc"]
    calls += [lambda i=i: disturb(port, i) for i in range(2)]
    threads = [threading.Thread(target=call) for call in random.sample(calls, len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    among = [found.get(x) for x in "abc"]
    me = Client(port, "a-among")
    me.save(to="first")
    me.fork(to="copy")
    copy = Client(port, "copy")
    copy.load(path="a-among/first")
    base, one = me.call(method="status")["bytes"], me.status()
    print(f"{ranks} rank(s): {base} bytes of the base, {one['bytes']} of each client")
    print(f"check: bits of 3 clients among 5 are those of each alone: {among == alone}")
    if among != alone or copy.status()["digest"] != one["digest"]:
        raise SystemExit("a client has other bits than alone")


if __name__ == "__main__":
    main()
