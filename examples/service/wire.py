"""What crosses the socket of the service: lines of JSON, which are believed in nothing."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import socketserver
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME, VOCAB, WORDS, ROWS = "[A-Za-z0-9_-]{1,40}", 64, 128, 64
LINE, CONNECTIONS, IDLE_S, BEAT_S = 2**20, 100, 600, 10


class RequestError(ValueError):
    """A request that is refused. Nothing has changed."""


def need(fine: bool, seen: str, fix: str, cause: str = "a request of another form.") -> None:
    """Refuse the request if it is not fine."""
    if not fine:
        raise RequestError(f"{seen[:200]}\nUsual cause: {cause}\nFix: {fix}")


def number(x: Any, what: str, low: float, high: float, kind: Any = (int, float)) -> Any:
    """Return a number of a request. No comparison with NaN is true."""
    fine = isinstance(x, kind) and not isinstance(x, bool) and low <= x <= high
    form = f"{'an integer' if kind is int else 'a number'} from {low} to {high}."
    need(fine, f"{what} is {str(x)[:40]}.", form, "NaN, infinity, or no number.")
    return x


def name(x: Any, what: str, form: str = NAME) -> str:
    """Return a name of a request, which may become that of a folder."""
    fine = isinstance(x, str) and re.fullmatch(form, x) is not None
    need(fine, f"{what} is {str(x)[:60]!r}.", f"what matches {form}.")
    return x


def read(line: bytes) -> dict[str, Any]:
    """Return the request of a line. One that was too long has been thrown away, and is empty."""
    form = f'{{"method": ...}}, an object of JSON in one line of at most {LINE} bytes.'
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        seen = f"{error}, in {line[:40]!r}" if line else f"more than {LINE} bytes in a line"
        need(False, f"{seen}.", form, "bytes that are no JSON, or a batch in a line too long.")
    need(isinstance(request, dict), "the line is no object of JSON.", form)
    return request


def columns_of(rows: Any, keys: list[str], ranks: int) -> list[Tensor]:
    """Return for each key what the rows have, padded with zeros: [rows, longest row]."""
    form = f"a list of 1 to {ROWS} rows {{{', '.join(map(repr, keys))}: lists of one length}}."
    listed = isinstance(rows, list) and 1 <= len(rows) <= ROWS
    need(listed and all(isinstance(row, dict) for row in rows), "batch is no list of rows.", form)
    found: dict[str, list[Any]] = {key: [] for key in keys}
    for i, row in enumerate(rows):
        for key in keys:
            x, size = row.get(key), len(found["tokens"][i]) if key != "tokens" else None
            fits = isinstance(x, list) and (len(x) == size if size else 1 <= len(x) <= WORDS)
            need(fits, f"batch[{i}][{key!r}] is no list of {size or f'1 to {WORDS}'}.", form)
            what, ids = f"batch[{i}][{key!r}]", key in ("tokens", "targets")
            one = 1 if ids else 1.0  # an integer, too, may be a weight
            bounds: Any = (0, VOCAB - 1, int) if ids else (-1e30, 1e30)
            x = [number(v, f"{what}[{j}]", *bounds) * one for j, v in enumerate(x)]
            found[key].append(x)
    width, more = max(map(len, found["tokens"])), -len(rows) % ranks * [[]]
    return [torch.tensor([x + [0] * (width - len(x)) for x in found[key] + more]) for key in keys]


QUEUE: queue.Queue[tuple[bytes, Future[bytes]]] = queue.Queue()


class Connection(socketserver.StreamRequestHandler):
    """A thread of rank 0 for each connection: one line asks, one line answers."""

    timeout = IDLE_S

    def handle(self) -> None:
        """Answer until the client leaves. Half a line at the end is no request."""
        with contextlib.suppress(OSError):  # of a client that is gone
            if threading.active_count() > CONNECTIONS:
                error = {"name": "BusyError", "message": f"{CONNECTIONS} connections. Fix: wait."}
                self.wfile.write(json.dumps({"id": None, "error": error}).encode() + b"\n")
                return
            while line := self.rfile.readline(LINE):
                piece = line
                while not piece.endswith(b"\n") and (piece := self.rfile.readline(LINE)):
                    line = b""  # it is too long: the rest is read, and thrown away
                if piece:
                    answer: Future[bytes] = Future()
                    QUEUE.put((line, answer))
                    self.wfile.write(answer.result())


def serve(answer: Callable[[bytes], bytes], port: int, rank: int, ranks: int) -> None:
    """Answer on every rank, for ever, what rank 0 is asked, in the order in which it came."""
    if rank == 0:
        socketserver.ThreadingTCPServer.daemon_threads = True
        socketserver.ThreadingTCPServer.allow_reuse_address = True  # a port that was served before
        socketserver.ThreadingTCPServer.request_queue_size = CONNECTIONS
        server = socketserver.ThreadingTCPServer(("127.0.0.1", port), Connection)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"on port {server.server_address[1]}", flush=True)
    while True:
        line: list[bytes | None] = [None]
        reply: Future[bytes] = Future()
        with contextlib.suppress(queue.Empty):  # a beat: no rank waits for longer than a timeout
            if rank == 0:
                line[0], reply = QUEUE.get(timeout=BEAT_S)
        if ranks > 1:
            dist.broadcast_object_list(line)
        if line[0] is not None:
            reply.set_result(answer(line[0]))
