"""Both ends of the socket of the service of adapters, and what tries it: the standard library."""

import asyncio
import contextlib
import json
import math
import random
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LINE, CONNECTIONS, IDLE_S, BEAT_S = 2**20, 100, 600, 1
GONE = '{"error": {"name": "Gone", "message": "the service has closed the connection: it has ended,\
 has too many connections, or a line was too long or too late."}}'


def need(fine: Any, seen: str) -> None:
    """Refuse the request if it is not fine. Nothing has changed."""
    if not fine:
        raise ValueError(seen[:200])


async def serve(answer: Callable[[bytes | None], Any], port: int | None) -> None:
    """Answer lines until the process is ended; without a port, until the trial is over."""
    places = asyncio.Semaphore(CONNECTIONS)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError):
            if places.locked():
                return
            async with places:
                while True:  # until it leaves, is idle, or sends half a line or one too long
                    async with asyncio.timeout(IDLE_S):
                        line = await reader.readline()
                        if not line.endswith(b"\n"):
                            return
                        writer.write(answer(line))
                        await writer.drain()
                    await asyncio.sleep(0)  # the others' turn

    server = await asyncio.start_server(connected, "127.0.0.1", port or 0, limit=LINE)
    number = server.sockets[0].getsockname()[1]
    print(f"on port {number}", flush=True)
    work = asyncio.to_thread(check, number) if port is None else asyncio.Event().wait()
    trial = asyncio.ensure_future(work)
    while not trial.done():
        await asyncio.wait([trial], timeout=BEAT_S)
        answer(b"")  # no rank waits for longer than a timeout
    answer(None)
    trial.result()


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
        answer = json.loads(self.file.readline() or GONE)
        if "error" in answer:
            raise ServiceError("{name}: {message}".format(**answer["error"]))
        return answer["result"]


def train(me: Client, seed: int) -> list[int]:
    """Train an adapter on texts of its seed, by two losses; return the digest of all its bits."""
    me.create(seed=seed)
    draw = random.Random(seed)
    for step in range(3):
        texts = [[draw.randrange(64) for _ in range(draw.randint(2, 9))] for _ in range(5)]
        rows = [{"tokens": x[:-1], "targets": x[1:], "weights": [1] * len(x[1:])} for x in texts]
        logprobs = me.forward_backward(batch=rows, loss="cross_entropy")["logprobs"]
        new = me.sample(prompt=texts[0], max_tokens=4, seed=step)["tokens"]
        for row, old in zip(rows, logprobs, strict=True):
            row |= {"logprobs": old, "advantages": [sum(new) / 100 - 1] * len(old)}
        me.forward_backward(batch=rows, loss="ppo")
        me.optim_step()
    return me.status()["digest"]


def disturb(me: Client) -> None:
    """Be a bad client: send what overflows, NaN, what is no number, and half a line."""
    me.create(lr=1)
    for weight in (1e18, 1e30, math.nan, "1"):
        row = {"tokens": [1], "targets": [2], "weights": [weight]}
        with contextlib.suppress(ServiceError):
            me.forward_backward(batch=[row], loss="cross_entropy")
            me.optim_step()
    me.file.write(b'{"half')
    me.file.close()


def check(port: int) -> None:
    """Train three clients alone, then at once, beside a bad one; compare all their bits."""
    alone = [train(Client(port, f"alone{seed}"), seed) for seed in range(3)]
    among = [Client(port, f"among{seed}") for seed in range(3)]
    with ThreadPoolExecutor() as pool:
        bad = pool.submit(disturb, Client(port, "bad"))
        found = [*pool.map(train, among, range(3))]
    bad.result()
    assert found == alone, f"other bits than alone: {found}, alone {alone}"
    me, twin, copy = among[0], Client(port, "twin"), Client(port, "copy")
    me.fork(to="twin")
    copy.create(seed=9)
    copy.load(path=me.save(to="first")["path"])
    assert twin.status() == copy.status() == me.status(), "a fork or a save has other bits"
    base, held = me.call(method="status")["bytes"], me.status()["bytes"]
    print(f"bytes on each rank: base {base}, each client {held}")
    print(f"check: 3 clients among 4 have the bits of each alone, on {len(base)} rank(s)")
