"""A service that trains LoRA adapters of many clients over one base in 4 bits, sharded by ZeRO.

    python examples/service/client.py  # starts this on two ranks, and tries to break it
    torchrun --nproc-per-node 2 examples/service/server.py --port 7070

Each client is a `TrainState`, which no call writes to: a request computes another state, which is
kept if all ranks have it. The protocol is in docs/gallery/adapter_service.md, sockets in `wire.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import optree
import peft
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from wire import NAME, VOCAB, WORDS, columns_of, name, need, number, read, serve

import fzero
from fzero.integrations.peft import functionalize_adapter, save_adapter

CLIENTS, SEEDS = 64, 2**62
DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
POLICY = ["logprobs", "advantages"]
LOSSES: dict[str, Any] = {  # name: (what a row has beside tokens and targets, loss of each token)
    "cross_entropy": (["weights"], lambda new, weight: -weight * new),
    "importance_sampling": (POLICY, lambda new, old, a: -a * (new - old).exp()),
    "ppo": (POLICY, lambda new, old, a: -clipped((new - old).exp(), a)),
}


def clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return the objective of PPO, of each token."""
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


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
        draw = torch.Generator().manual_seed(number(seed, "seed", 0, SEEDS, int))
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
        finite, seen = abs(value) + norm < float("inf"), f"loss {value}, norm {norm}."
        need(finite, seen, "smaller numbers. This batch is left out.", "overflow, divergence.")
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
        draw = torch.Generator().manual_seed(number(seed, "seed", 0, SEEDS, int))
        states = {"base": self._base, "adapter": self._state(client)}
        model = fzero.evaluate(lambda p, x: apply(p["base"], p["adapter"], input_ids=x), states)
        for _ in range(max_tokens):
            logs = model(ids).logits[0, -1].float().log_softmax(-1).cpu()
            token = torch.multinomial(logs.exp(), 1, generator=draw)
            logprobs.append(logs[token].item())
            ids = torch.cat([ids, token.to(DEVICE)[None]], 1)
        return {"tokens": ids[0, size:].tolist(), "logprobs": logprobs}, {}

    def save(self, client: str, to: str) -> Any:
        """Write a checkpoint, with the two files of PEFT beside it."""
        path, state = f"{client}/{name(to, 'to')}", self._state(client)
        fzero.checkpoint.save(self._folder / path / "state", state, rng=False)
        save_adapter(self._folder / path, state, self._apply)
        return {"path": path}, {}

    def load(self, client: str, path: str) -> Any:
        """Set a client to what any client has saved: parameters, moments, number of updates."""
        where = self._folder / name(path, "path", f"{NAME}/{NAME}")
        new = fzero.checkpoint.load(where / "state", self._state(client), rng=False)
        return {"step": int(new.step)}, {client: new}

    def status(self, client: str | None = None) -> Any:
        """Return the bytes on each rank of the base, or of a client with a digest of its bits."""
        one: Any = self._base if client is None else self._state(client)
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
        free = name(client, "client") not in self._clients and len(self._clients) < CLIENTS
        need(free, f"{client!r} is taken, or there are {CLIENTS} clients.", "delete one.")
        return client

    def answer(self, line: bytes) -> bytes:
        """Do what a line asks, on every rank; return the line that answers it."""
        said: dict[str, Any] = {"id": None}
        new: dict[str, Any] = {}
        try:
            request = read(line)
            said["id"] = number(request.pop("id", 0), "id", 0, SEEDS, int)
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
            said["error"] = {"name": "RankError", "message": "another rank failed."}
        return json.dumps(said).encode() + b"\n"


METHODS = {k: inspect.signature(x) for k, x in vars(Service).items() if k[0] != "_"}
del METHODS["answer"]


def main() -> None:
    """Serve until the process is ended."""
    parser, axis = argparse.ArgumentParser(), fzero.world()
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--port", type=int, default=0, help="on this machine; 0: any that is free")
    parser.add_argument("--folder", type=Path, default=Path("adapters"), help="of what is saved")
    args = parser.parse_args()
    serve(Service(args.stage, args.folder).answer, args.port, axis.rank, axis.size)


if __name__ == "__main__":
    main()
