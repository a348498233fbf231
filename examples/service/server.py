"""A service that trains LoRA adapters of many clients over one base in 4 bits, sharded by ZeRO.

    python examples/service/client.py  # starts this on two ranks, and tries to break it
    torchrun --nproc-per-node 2 examples/service/server.py --port 7070

Each client is a `TrainState`, which no call writes to: a request computes another state, which is
kept if all ranks have it. The protocol is in docs/gallery/adapter_service.md.
"""

import argparse
import contextlib
import hashlib
import inspect
import json
import queue
import re
import socketserver
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import optree
import peft
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fzero
from fzero.integrations.peft import functionalize_adapter, save_adapter

VOCAB, WORDS, ROWS, MOST, LINE, IDLE_S, BEAT_S = 64, 128, 64, 64, 2**20, 600, 10
DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
LOSSES: dict[str, Any] = {  # name: (what a row has beside tokens and targets, loss of each token)
    "cross_entropy": (["weights"], lambda new, w: -w * new),
    "importance_sampling": (["logprobs", "advantages"], lambda new, old, a: -a * (new - old).exp()),
    "ppo": (["logprobs", "advantages"], lambda new, old, a: -torch.minimum(
        a * (new - old).exp(), a * (new - old).exp().clamp(0.8, 1.2))),
}  # fmt: skip


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


def name(x: Any, what: str, form: str = "[A-Za-z0-9_-]{1,40}") -> str:
    """Return a name of a request, which may become that of a folder."""
    fine = isinstance(x, str) and re.fullmatch(form, x) is not None
    need(fine, f"{what} is {str(x)[:60]!r}.", f"what matches {form}.")
    return x


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
            bounds = (0, VOCAB - 1, int) if key in ("tokens", "targets") else (-1e30, 1e30)
            found[key].append(
                [number(v, f"batch[{i}][{key!r}][{j}]", *bounds) for j, v in enumerate(x)]
            )
    width, more = max(map(len, found["tokens"])), -len(rows) % ranks * [[]]
    return [torch.tensor([x + [0] * (width - len(x)) for x in found[key] + more]) for key in keys]


class Service:
    """The base and the clients: every rank has one, and calls its methods in the same order.

    A public method is what a client may ask: it returns (answer, the states that are new).
    """

    def __init__(self, stage: int, folder: Path) -> None:
        self._stage, self._folder, self._axis = stage, folder, fzero.world()
        torch.manual_seed(0)
        sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=VOCAB)
        model = LlamaForCausalLM(config).requires_grad_(False).to(DEVICE)
        lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        self._apply, _ = functionalize_adapter(model, lora)  # keeps no values of the model
        base, rule = fzero.functionalize(model)[1], fzero.optim.no_optimizer()
        self._base = fzero.init(base, rule, stage=stage, frozen=fzero.codecs.nf4(block=64))
        self._clients: dict[str, fzero.TrainState] = {}

    def create(self, client: str, seed: int = 0, lr: float = 1e-2) -> Any:
        """Begin a client: a new adapter, which changes nothing yet."""
        draw = torch.Generator().manual_seed(number(seed, "seed", 0, 2**62, int))
        params = {key: torch.zeros(form.shape) for key, form in self._apply.forms.items()}
        for key in (key for key in params if "lora_A" in key):
            torch.nn.init.kaiming_uniform_(params[key], a=5**0.5, generator=draw)
        rule = fzero.optim.adamw(number(lr, "lr", 1e-8, 1), weight_decay=0)
        params = {key: x.to(DEVICE) for key, x in params.items()}
        return {}, {self._new(client): fzero.init(params, rule, stage=self._stage)}

    def fork(self, client: str, to: str) -> Any:
        """Begin a client where another one is: two names of one value; nothing is copied."""
        return {}, {self._new(to): self._state(client)}

    def delete(self, client: str) -> Any:
        """Forget a client. What it has saved stays."""
        return {}, {client: self._state(client) and None}

    def forward_backward(self, client: str, batch: Any, loss: str) -> Any:
        """Add to the client's gradient that of the loss, summed over all tokens of the batch."""
        known = isinstance(loss, str) and loss in LOSSES
        need(known, f"loss is {str(loss)[:40]!r}.", f"one of {', '.join(LOSSES)}.")
        (keys, of_tokens), ranks = LOSSES[loss], self._axis.size
        columns = columns_of(batch, ["tokens", "targets", *keys], ranks)
        share = len(columns[0]) // ranks  # rows of a rank
        mine = [x[self._axis.rank * share :][:share].to(DEVICE) for x in columns]

        def summed(p: Any, tokens: Tensor, targets: Tensor, *rest: Tensor) -> Any:
            logits = self._apply(p["base"], p["adapter"], input_ids=tokens).logits
            new = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            return of_tokens(new, *rest).sum() * ranks, new  # of ranks the mean is taken

        states = {"base": self._base, "adapter": self._state(client)}
        grad = fzero.grad_and_reduce(summed, states, has_aux=True, wrt="adapter")
        states, (value, new) = grad(*mine)
        value, norm = fzero.pmean(value).item(), fzero.global_norm(states["adapter"]).item()
        need(abs(value) + norm < float("inf"), f"loss {value}, norm of the gradient {norm}.",
             "smaller numbers, or lr. This batch is left out.", "an overflow, or divergence.")  # fmt: skip
        rows = zip(fzero.all_gather(new).tolist(), batch, strict=False)
        logprobs = [x[: len(row["tokens"])] for x, row in rows]
        return {"loss": value, "norm": norm, "logprobs": logprobs}, {client: states["adapter"]}

    def optim_step(self, client: str) -> Any:
        """Update a client by its gradient, and clear that."""
        new = fzero.apply_gradients(self._state(client))
        return {"step": int(new.step)}, {client: new}

    def sample(self, client: str, prompt: Any, max_tokens: int, seed: int) -> Any:
        """Draw tokens after a prompt, with the logarithms of their probabilities."""
        ids = columns_of([{"tokens": prompt}], ["tokens"], 1)[0].to(DEVICE)
        size, logprobs, apply = ids.shape[1], [], self._apply
        number(max_tokens, "max_tokens", 1, WORDS - size, int)
        draw = torch.Generator().manual_seed(number(seed, "seed", 0, 2**62, int))
        states = {"base": self._base, "adapter": self._state(client)}
        model = fzero.evaluate(lambda p, x: apply(p["base"], p["adapter"], input_ids=x), states)
        for _ in range(max_tokens):
            logs = model(ids).logits[0, -1].float().log_softmax(-1).cpu()
            token = int(torch.multinomial(logs.exp(), 1, generator=draw))
            ids, logprobs = torch.cat([ids, ids.new_full((1, 1), token)], 1), [*logprobs, logs[token].item()]  # fmt: skip
        return {"tokens": ids[0, size:].tolist(), "logprobs": logprobs}, {}

    def save(self, client: str, to: str) -> Any:
        """Write a checkpoint, with the two files of PEFT beside it."""
        path, state = f"{client}/{name(to, 'to')}", self._state(client)
        fzero.checkpoint.save(self._folder / path / "state", state, rng=False)
        save_adapter(self._folder / path, state, self._apply)
        return {"path": path}, {}

    def load(self, client: str, path: str) -> Any:
        """Set a client to what any client has saved: parameters, moments, number of updates."""
        where = self._folder / name(path, "path", "[A-Za-z0-9_-]{1,40}/[A-Za-z0-9_-]{1,40}")
        new = fzero.checkpoint.load(where / "state", self._state(client), rng=False)
        return {"step": int(new.step)}, {client: new}

    def status(self, client: str | None = None) -> Any:
        """Return the bytes on each rank of the base, or of a client with a digest of its bits."""
        one = self._base if client is None else self._state(client)
        held = fzero.all_gather(torch.tensor([fzero.state_bytes(one)["total"]])).tolist()
        if client is None:
            return {"clients": sorted(self._clients), "bytes": held}, {}
        tensors = [x.cpu().numpy().tobytes() for x in optree.tree_leaves(one, namespace="fzero")]
        mine = hashlib.sha256(b"".join(tensors)).digest()  # parameters, gradient, moments, counts
        all_of_it = fzero.all_gather(torch.tensor([*mine])).tolist()
        digest = hashlib.sha256(bytes(all_of_it)).hexdigest()
        return {"step": int(one.step), "bytes": held, "digest": digest}, {}

    def _state(self, client: str) -> fzero.TrainState:
        need(name(client, "client") in self._clients, f"{client!r} is no client.", "create it.")
        return self._clients[client]

    def _new(self, client: str) -> str:
        free = name(client, "client") not in self._clients and len(self._clients) < MOST
        need(free, f"{client!r} is taken, or there are {MOST} clients.", "delete one.")
        return client

    def answer(self, line: bytes) -> bytes:
        """Do what a line asks, on every rank; return the line that answers it."""
        said, new = {"id": None}, {}
        try:
            request = json.loads(line)
            need(isinstance(request, dict), "the line is no object of JSON.", '{"method": ...}.')
            said["id"] = number(request.pop("id", 0), "id", 0, 2**62, int)
            asked = str(request.pop("method", None))
            need(asked in METHODS, f"no method {asked[:40]!r}.", f"one of {', '.join(METHODS)}.")
            try:
                METHODS[asked].bind(self, **request)
            except TypeError as error:
                need(False, f"{asked}: {error}.", f"{asked}{METHODS[asked]}")
            said["result"], new = getattr(self, asked)(**request)
        except Exception as error:  # of any kind: no request ends the service
            said["error"] = {"name": type(error).__name__, "message": str(error)}
        if fzero.pmin(torch.tensor(float("result" in said))).item():
            self._clients = {k: x for k, x in (self._clients | new).items() if x is not None}
        elif said.pop("result", None) is not None:
            said["error"] = {"name": "RankError", "message": "another rank failed: nothing changed"}
        return json.dumps(said).encode() + b"\n"


METHODS = {
    k: inspect.signature(x) for k, x in vars(Service).items() if k[0] != "_" and k != "answer"
}
QUEUE: queue.Queue[tuple[bytes, Future[bytes]]] = queue.Queue()


class Connection(socketserver.StreamRequestHandler):
    """A thread of rank 0 for each connection: one line asks, one line answers."""

    timeout = IDLE_S

    def handle(self) -> None:
        """Answer until the client leaves. A half line at the end is nobody's request."""
        with contextlib.suppress(OSError):
            while line := self.rfile.readline(LINE):
                whole = line
                while not whole.endswith(b"\n") and (whole := self.rfile.readline(LINE)):
                    line = b""  # too long: the rest of it is read, and thrown away
                if whole:
                    QUEUE.put((line, answer := Future()))
                    self.wfile.write(answer.result())


def serve(service: Service, rank: int, ranks: int) -> None:
    """Rank 0 takes requests in the order in which they came, and all ranks answer each."""
    while True:
        line: list[bytes | None] = [None]
        answer: Future[bytes] = Future()
        with contextlib.suppress(queue.Empty):  # the others wait no longer than a collective may
            if rank == 0:
                line[0], answer = QUEUE.get(timeout=BEAT_S)
        if ranks > 1:
            dist.broadcast_object_list(line)
        if line[0] is not None:
            answer.set_result(service.answer(line[0]))


def main() -> None:
    """Listen on this machine alone, until the process is ended."""
    parser, axis = argparse.ArgumentParser(), fzero.world()
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--folder", type=Path, default=Path("adapters"), help="of what is saved")
    args = parser.parse_args()
    service = Service(args.stage, args.folder)
    if axis.rank == 0:
        socketserver.ThreadingTCPServer.daemon_threads = True
        server = socketserver.ThreadingTCPServer(("127.0.0.1", args.port), Connection)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"on port {server.server_address[1]}", flush=True)
    serve(service, axis.rank, axis.size)


if __name__ == "__main__":
    main()
