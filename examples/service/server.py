"""A service that trains LoRA adapters of many clients over one base in 4 bits, sharded by ZeRO.

    torchrun --nproc-per-node 2 examples/service/server.py --stage 3  # or alone: is tried, and ends
    torchrun --nproc-per-node 2 examples/service/server.py --port 7070  # serves

Each client is a `TrainState`, which no call writes to: a request computes another state, which is
kept if all ranks have it. `wire.py` has the sockets, docs/gallery/adapter_service.md the protocol.
"""

import argparse
import asyncio
import hashlib
import json
import re
import traceback
from typing import Any

import optree
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from wire import need, serve

import fzero
from fzero.integrations.peft import functionalize_adapter, save_adapter

VOCAB, WORDS, ROWS, CLIENTS = 64, 128, 64, 64
NAME, POLICY = "[A-Za-z0-9_-]{1,40}", ["logprobs", "advantages"]
DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
REFUSED = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, fzero.FzeroError)
HELP = "\nUsual cause: an unknown name, or another form.\nFix: see docs/gallery/adapter_service.md."
LOSSES: dict[str, Any] = {  # what a row has beside tokens and targets; the loss of each token
    "cross_entropy": (["weights"], lambda new, weight: -weight * new),
    "importance_sampling": (POLICY, lambda new, old, a: -a * (new - old).exp()),
    "ppo": (POLICY, lambda new, old, a: -((r := (new - old).exp()) * a).min(r.clamp(0.8, 1.2) * a)),
}


def table_of(batch: Any, ranks: int, *keys: str) -> torch.Tensor:
    """Return [rows, longest row, keys], padded with zeros, for ranks. Two keys are of tokens."""
    need(isinstance(batch, list) and 1 <= len(batch) <= ROWS, f"batch: no list of 1 to {ROWS}")
    rows = [[*zip(*(row[key] for key in keys), strict=True)] for row in batch]
    need(all(1 <= len(x) <= WORDS for x in rows), f"batch: a row has not 1 to {WORDS} tokens")
    tensors = [torch.tensor(x, dtype=torch.float32) for x in rows]
    tensors += [tensors[0][:0]] * (-len(tensors) % ranks)  # each rank has as many rows
    table = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(DEVICE)
    need(table.ndim == 3 and table.abs().max() <= 1e30, "batch: NaN, infinity, beyond 1e30")
    ids = table[..., :2].long() % VOCAB
    need((ids == table[..., :2]).all(), f"batch: tokens are integers from 0 to {VOCAB - 1}")
    return table


class Service:
    """The base and the clients. A method returns (what is answered, the states that are new)."""

    def __init__(self, stage: int, folder: str) -> None:
        self._stage, self._folder, self._axis = stage, folder, fzero.world()
        torch.manual_seed(0)
        sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=VOCAB))
        base, rule = fzero.functionalize(model.to(DEVICE))[1], fzero.optim.no_optimizer()
        lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        self._apply, _ = functionalize_adapter(model, lora)  # keeps no values of the model
        self._base = fzero.init(base, rule, stage=stage, frozen=fzero.codecs.nf4(block=64))
        self._clients: dict[str, fzero.TrainState] = {}

    def create(self, client: str, seed: int = 0, lr: float = 1e-2) -> Any:
        """Begin a client: a new adapter, which changes nothing yet."""
        draw, forms = torch.Generator(DEVICE).manual_seed(seed), self._apply.forms
        params = {key: torch.zeros(form.shape, device=DEVICE) for key, form in forms.items()}
        for key in (key for key in params if "lora_A" in key):
            torch.nn.init.kaiming_uniform_(params[key], a=5**0.5, generator=draw)
        rule = fzero.optim.adamw(lr, weight_decay=0)
        return {}, {self._new(client): fzero.init(params, rule, stage=self._stage)}

    def fork(self, client: str, to: str) -> Any:
        """Begin a client where another one is: two names of one value; nothing is copied."""
        return {}, {self._new(to): self._clients[client]}

    def delete(self, client: str) -> Any:
        """Forget a client. What it has saved stays."""
        return {"step": int(self._clients[client].step)}, {client: None}

    def forward_backward(self, client: str, batch: Any, loss: str) -> Any:
        """Add to the client's gradient that of the loss, summed over all tokens of the batch."""
        (keys, loss_of), ranks = LOSSES[loss], self._axis.size
        mine = table_of(batch, ranks, "tokens", "targets", *keys).chunk(ranks)[self._axis.rank]

        def summed(p: Any, tokens: Any, targets: Any, *rest: Any) -> Any:
            logits = self._apply(p["base"], p["adapter"], input_ids=tokens.long()).logits
            new = logits.float().log_softmax(-1).gather(-1, targets.long()[..., None])[..., 0]
            return loss_of(new, *rest).sum() * ranks, new  # of ranks the mean is taken

        states = {"base": self._base, "adapter": self._clients[client]}
        grad = fzero.grad_and_reduce(summed, states, has_aux=True, wrt="adapter")
        states, (value, new) = grad(*mine.unbind(-1))
        found = fzero.pmean(value), fzero.global_norm(states["adapter"]), fzero.all_gather(new)
        value, norm, new = (x.tolist() for x in found)
        need(all(x.isfinite().all() for x in found), f"loss {value}, norm {norm}: overflow")
        logprobs = [x[: len(row["tokens"])] for x, row in zip(new, batch, strict=False)]
        return {"loss": value, "norm": norm, "logprobs": logprobs}, {client: states["adapter"]}

    def optim_step(self, client: str) -> Any:
        """Update a client by its gradient, and clear that."""
        new = fzero.apply_gradients(self._clients[client])
        return {"step": int(new.step)}, {client: new}

    def sample(self, client: str, prompt: Any, max_tokens: int, seed: int = 0) -> Any:
        """Draw tokens after a prompt, with the logarithms of their probabilities."""
        ids, logprobs = table_of([{"tokens": prompt}], 1, "tokens")[..., 0].long(), []
        size, draw = ids.shape[1], torch.Generator(DEVICE).manual_seed(seed)
        need(size + max_tokens <= WORDS, f"{size} + {max_tokens} tokens: {WORDS} are the most")
        states, apply = {"base": self._base, "adapter": self._clients[client]}, self._apply
        model = fzero.evaluate(lambda p, x: apply(p["base"], p["adapter"], input_ids=x), states)
        for _ in range(max_tokens):
            new = model(ids).logits[0, -1].float().log_softmax(-1)
            ids = torch.cat([ids, torch.multinomial(new.exp(), 1, generator=draw)[None]], 1)
            logprobs.append(new[ids[0, -1]].item())
        return {"tokens": ids[0, size:].tolist(), "logprobs": logprobs}, {}

    def save(self, client: str, to: str) -> Any:
        """Write a checkpoint, with the two files of PEFT beside it."""
        need(re.fullmatch(NAME, to), f"to is {to!r}: a name matches {NAME}")
        folder, state = f"{self._folder}/{client}/{to}", self._clients[client]
        fzero.checkpoint.save(f"{folder}/state", state, rng=False)
        save_adapter(folder, state, self._apply)
        return {"path": f"{client}/{to}"}, {}

    def load(self, client: str, path: str) -> Any:
        """Set a client to what any client has saved: parameters, moments, number of updates."""
        need(re.fullmatch(f"{NAME}/{NAME}", path), f"path is {path!r}: it is client/name")
        folder = f"{self._folder}/{path}/state"
        new = fzero.checkpoint.load(folder, self._clients[client], rng=False)
        return {"step": int(new.step)}, {client: new}

    def status(self, client: str | None = None) -> Any:
        """Return the bytes and a digest of all bits on each rank, of a client or of the base."""
        one: Any = self._base if client is None else self._clients[client]
        bits = [x.cpu().numpy().tobytes() for x in optree.tree_leaves(one, namespace="fzero")]
        digest = int.from_bytes(hashlib.sha256(b"".join(bits)).digest()[:6])
        mine = torch.tensor([[fzero.state_bytes(one)["total"], digest]], device=DEVICE)
        held, digest = fzero.all_gather(mine).T.tolist()
        found = {"step": int(one.step), "bytes": held, "digest": digest}
        return found if client else {**found, "clients": sorted(self._clients)}, {}

    def _new(self, client: str) -> str:
        free = client not in self._clients and len(self._clients) < CLIENTS
        need(free and re.fullmatch(NAME, client), f"{client!r} is taken, or no name, or too many")
        return client

    def __call__(self, line: bytes | None = None) -> bytes | None:
        """Do on every rank what rank 0 is asked; return the line that answers it."""
        asked: list[Any] = [line]
        if self._axis.size > 1:
            torch.distributed.broadcast_object_list(asked)
        if not asked[0]:  # the end; or nothing yet, so that no rank waits for too long
            return asked[0]
        said, new = dict[str, Any](id=None), dict[str, Any]()
        try:
            request = {**json.loads(asked[0])}
            number, method = request.pop("id", 0), request.pop("method", None)
            need(isinstance(number, int | str), "id: no integer, and no text")
            said["id"] = number
            need(method in vars(Service) and method[0] != "_", f"there is no method {method!r}")
            said["result"], new = getattr(self, method)(**request)
        except Exception as error:  # of any kind: no request ends the service
            text = str(error) + HELP * (not isinstance(error, fzero.FzeroError))
            said["error"] = {"name": type(error).__name__, "message": text}
            if not isinstance(error, REFUSED):
                traceback.print_exc()
        done = torch.tensor([int("result" in said)], device=DEVICE)
        try:
            done = fzero.all_gather(done).tolist()
        except fzero.MismatchError:  # others were in the middle of it; they have failed now, too
            done = fzero.all_gather(done).tolist()
        if all(done):
            self._clients = {k: x for k, x in (self._clients | new).items() if x is not None}
        elif said.pop("result", None) is not None:
            more = "Usual cause: its disk or memory is full.\nFix: see what it has printed."
            error = f"rank {done.index(0)} failed alone; nothing has changed.\n{more}"
            said["error"] = {"name": "RankError", "message": error}
        return json.dumps(said).encode() + b"\n"


def main() -> None:
    """Be a rank of the service."""
    parser, rank = argparse.ArgumentParser(), fzero.world().rank
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--port", type=int, help="on this machine; 0: any; none: try the service")
    parser.add_argument("--folder", default="/tmp/fzero-service", help="of what is saved")
    args = parser.parse_args()
    service = Service(args.stage, args.folder)
    if rank == 0:
        asyncio.run(serve(service, args.port))
    while rank and service() is not None:
        pass


if __name__ == "__main__":
    main()
