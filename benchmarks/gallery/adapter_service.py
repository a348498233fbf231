"""The tables of docs/gallery/adapter_service.md: bytes and latency of the service, and peers.

    python benchmarks/gallery/adapter_service.py --out benchmarks/results

The service is that of examples/service. A peer holds two LoRA adapters of PEFT over one base, on
two ranks, with an optimizer for each, as its users would write it: `a` is trained alone, then with
`b` between its updates, then with a `b` whose loss is NaN.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples" / "service")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import peft  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from client import Client  # noqa: E402
from ranks import run_ranks, set_environment  # noqa: E402
from report import write_report  # noqa: E402

RANKS, CLIENTS, CALLS, STEPS, ROWS = 2, (1, 4, 16), 8, 3, 4
PEERS = {
    "PEFT, one process": ("plain", 1),
    "DDP": ("ddp", 2),
    "DDP, find_unused_parameters=True": ("ddp_unused", 2),
    "FSDP2": ("fsdp2", 2),
    "DeepSpeed ZeRO-2": ("deepspeed", 2),
}
CASES = {"alone": "a" * STEPS, "with b": "ab" * STEPS, "with b of NaN": "an" * STEPS}
_SERVICE = f"""The service on {RANKS} ranks, stage 3. Bytes are those of a rank, as `status` counts them: parameters,
gradients and AdamW's moments. A call is `forward_backward` of {ROWS} rows of 16 tokens. In turn: one client after
another, the median of {CALLS} rounds. At once: all clients, each with its own connection and thread, ask together; the
time until the last answer, divided by the clients.
"""
_PEERS = f"""Two adapters over one base, {STEPS} updates of `a`. Same bits: the digest of `a` after `with b` (after `with b
of NaN`) is that of `a` alone. Ranks agree: all ranks hold the same `a` and the same `b` after `with b`. Of one process:
the largest difference of `a` and of `b` to PEFT's on one process with the whole batch. An error is the first line.
"""


def model_of() -> Any:
    """Return the base of the service, in fp32, with two adapters of PEFT."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64))
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: Any = peft.get_peft_model(model, config, adapter_name="a")
    adapted.add_adapter("b", config)
    return adapted


def prepared(kind: str, model: Any) -> tuple[Any, dict[str, Any]]:
    """Return what is called, and {adapter: what steps it}."""
    of = {
        name: [p for path, p in model.named_parameters() if f".{name}.weight" in path]
        for name in "ab"
    }
    if kind == "fsdp2":
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        of = {
            name: [p for path, p in model.named_parameters() if f".{name}.weight" in path]
            for name in "ab"
        }
    if kind == "deepspeed":
        import deepspeed  # pyright: ignore[reportMissingImports]

        for p in [*of["a"], *of["b"]]:
            p.requires_grad_(True)  # one engine has one optimizer, which has both
        config = {
            "train_micro_batch_size_per_gpu": ROWS // 2,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        }
        both = torch.optim.AdamW([*of["a"], *of["b"]], lr=1e-2, weight_decay=0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=both, config=config)
        return engine, {"a": engine, "b": engine}
    rules: dict[str, Any] = {
        name: torch.optim.AdamW(of[name], lr=1e-2, weight_decay=0) for name in "ab"
    }
    if kind.startswith("ddp"):
        for p in [*of["a"], *of["b"]]:
            p.requires_grad_(True)  # DDP reduces what requires a gradient when it is made
        return DistributedDataParallel(model, find_unused_parameters="unused" in kind), rules
    return model, rules


def trained(kind: str, order: str) -> dict[str, Any]:
    """Train the adapters in this order; return their values, and whether ranks agree on them."""
    model, ranks = model_of(), dist.get_world_size()
    called, rules = prepared(kind, model)
    draws = {name: torch.Generator().manual_seed(ord(name)) for name in "ab"}
    for name in order:
        adapter = "a" if name == "a" else "b"
        model.set_adapter(adapter)
        if kind == "deepspeed":
            for path, p in model.named_parameters():
                p.requires_grad_("lora_" in path)
        ids = torch.randint(64, (ROWS, 16), generator=draws[adapter])
        mine = ids[dist.get_rank() :: ranks]
        loss = called(input_ids=mine, labels=mine).loss * (float("nan") if name == "n" else 1.0)
        called.backward(loss) if kind == "deepspeed" else loss.backward()
        rules[adapter].step()
        if kind != "deepspeed":
            rules[adapter].zero_grad()
    found: dict[str, Any] = {"agree": True}
    for name in "ab":
        pieces = [
            p.full_tensor() if hasattr(p, "full_tensor") else p
            for path, p in sorted(model.named_parameters())
            if f".{name}.weight" in path
        ]
        value = torch.cat([x.detach().flatten() for x in pieces]).float()
        of_all = [torch.empty_like(value) for _ in range(ranks)]
        dist.all_gather(of_all, value)
        found["agree"] &= all(torch.equal(x, value) for x in of_all)
        found[name] = value
    held = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    lora = {id(p) for path, p in model.named_parameters() if "lora_" in path}
    found["base"] = sum(
        x.numel() * x.element_size()
        for x, p in zip(held, model.parameters(), strict=True)
        if id(p) not in lora
    )
    return found


def answers(kind: str) -> dict[str, Any]:
    """Return for each case what came of it: values, or the error."""
    found = {}
    for case, order in CASES.items():
        try:
            found[case] = trained(kind, order)
        except Exception as error:  # whatever it answers is the answer
            found[case] = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    return found


def peers() -> str:
    """Return the table of the peers."""
    lines = [
        "| program | bytes of the base on a rank | same bits with b | same bits with b of NaN | ranks agree | `a`, `b` of one process |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    whole: Any = None
    for name, (kind, ranks) in PEERS.items():
        try:
            found = run_ranks(answers, ranks, kind)
        except Exception as error:
            found = dict.fromkeys(CASES, str(error).strip().splitlines()[-1][:150])
        whole = whole or found["with b"]
        alone, beside, nan = found.values()
        cells = []
        for case in (beside, nan):
            bad = next((x for x in (alone, case) if isinstance(x, str)), None)
            cells.append(bad or ("yes" if torch.equal(alone["a"], case["a"]) else off(alone, case)))
        ok = isinstance(beside, dict)
        base = alone["base"] if isinstance(alone, dict) else "-"
        near = [f"{(beside[x] - whole[x]).abs().max().item():.1e}" for x in "ab"] if ok else "-"
        agree = ("yes" if beside["agree"] else "**no**") if ok else "-"
        lines.append(f"| {name} | {base:,} | {cells[0]} | {cells[1]} | {agree} | {', '.join(near)} |" if ok else f"| {name} | {base} | {cells[0]} | {cells[1]} | - | - |")
    return "\n".join(lines) + "\n"


def off(alone: Any, case: Any) -> str:
    """Say how far an adapter is from itself alone."""
    return f"**no**: {(alone['a'] - case['a']).abs().max().item():.1e} off"


def service() -> str:
    """Return the table of the service: one run, all numbers of clients."""
    free = int(subprocess.check_output([sys.executable, "-c", _FREE]))
    server = [sys.executable, str(ROOT / "examples" / "service" / "server.py"), "--stage", "3"]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free), "WORLD_SIZE": str(RANKS)}
    world |= {"PYTHONPATH": str(ROOT)}
    started, folder = [], tempfile.TemporaryDirectory()
    for rank in range(RANKS):
        env = os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [*server, "--folder", folder.name]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    try:
        said = re.match(r"on port (\d+)", started[0].stdout.readline())
        return rows_of(int(said[1])) if said else ""
    finally:
        for process in started:
            process.terminate()
            process.communicate()
        folder.cleanup()


_FREE = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1])"


def asked(me: Client) -> float:
    """Return the seconds of one forward_backward."""
    row = {"tokens": [1] * 16, "targets": [2] * 16, "weights": [1.0] * 16}
    began = time.perf_counter()
    me.forward_backward(batch=[row] * ROWS, loss="cross_entropy")
    return time.perf_counter() - began


def rows_of(port: int) -> str:
    """Return the lines of the table, the clients being added as it goes."""
    lines = [
        "| clients | base | each client | all of a rank | ms in turn | over 1 client | ms at once | over 1 client |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    clients: list[Client] = []
    firsts: tuple[float, float] | None = None
    for number in CLIENTS:
        for i in range(len(clients), number):
            clients.append(Client(port, f"c{i}"))
            clients[-1].create(seed=i)
            asked(clients[-1])  # warm
        base = max(clients[0].call(method="status")["bytes"])
        each = max(max(x.status()["bytes"]) for x in clients)
        turn, once = [], []
        for _ in range(CALLS):
            turn.append(statistics.median(asked(x) for x in clients))
            began = time.perf_counter()
            threads = [threading.Thread(target=asked, args=(x,)) for x in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            once.append((time.perf_counter() - began) / number)
        a, b = statistics.median(turn) * 1e3, statistics.median(once) * 1e3
        firsts = firsts or (a, b)
        total = base + number * each
        lines.append(
            f"| {number} | {base:,} | {each:,} | {total:,} | {a:.1f} | {a / firsts[0]:.2f} | "
            f"{b:.1f} | {b / firsts[1]:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    set_environment(RANKS)
    del os.environ["WORLD_SIZE"]
    tables = [service(), _PEERS, peers()]
    path = write_report(args.out, "gallery-adapter-service", tables, intro=_SERVICE)
    print(path.read_text())


if __name__ == "__main__":
    main()
