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
from ranks import run_ranks, set_environment  # noqa: E402
from report import write_report  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from wire import Client  # noqa: E402

RANKS, CLIENTS, ROUNDS, STEPS, ROWS = 2, (1, 4, 16), 9, 3, 4
LORA = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
PEERS = {
    "PEFT, one process": ("plain", 1),
    "DDP": ("ddp", 2),
    "DDP, find_unused_parameters=True": ("ddp_unused", 2),
    "FSDP2": ("fsdp2", 2),
    "DeepSpeed ZeRO-2": ("deepspeed", 2),
}
CASES = {
    "alone": "a" * STEPS,
    "with b": "ab" * STEPS,
    "with b of NaN": "an" * STEPS,
    "later b": "a+bab",
}
_SERVICE = f"""The service on {RANKS} ranks, stage 3. Bytes are those of a rank, as `status`
counts them: parameters, gradients and AdamW's moments. A call is `forward_backward` of {ROWS}
rows of 16 tokens. In turn: one client after another, the median of all calls. At once: all
clients, each with its own connection and thread, ask together; the time until the last answer,
divided by the clients. Each of {ROUNDS - 1} rounds has all three numbers of clients, after one
to warm up.
"""
_PEERS = f"""Two adapters over one base, {STEPS} updates of `a`. Same bits: the digest of
`a` after `with b` (after `with b of NaN`) is that of `a` alone. Ranks agree: all ranks hold the
same `a` and the same `b` after `with b`. Of one process: the largest difference of `a` and of
`b` to PEFT's on one process with the whole batch. A later b: it is added when the first update
is done, and what is said of it is whether ranks hold the same `b` at the end. An error is its
first line.
"""


def model_of(adapters: str) -> Any:
    """Return the base of the service, in fp32, with these adapters of PEFT."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64))
    adapted: Any = peft.get_peft_model(model, LORA, adapter_name="a")
    if "b" in adapters:
        adapted.add_adapter("b", LORA)
    return adapted


def of_adapter(model: Any, name: str) -> list[Any]:
    """Return the parameters of an adapter."""
    return [p for path, p in model.named_parameters() if f".{name}.weight" in path]


def prepared(kind: str, model: Any, adapters: str) -> tuple[Any, dict[str, Any]]:
    """Return what is called, and {adapter: what steps it}."""
    if kind == "fsdp2":
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    if kind.startswith(("ddp", "deepspeed")):  # they take what requires a gradient when they begin
        for name in adapters:
            for p in of_adapter(model, name):
                p.requires_grad_(True)
    if kind == "deepspeed":  # one engine has one optimizer
        import deepspeed  # pyright: ignore[reportMissingImports]

        both = [p for name in adapters for p in of_adapter(model, name)]
        config = {
            "train_micro_batch_size_per_gpu": ROWS // 2,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        }
        rule = torch.optim.AdamW(both, lr=1e-2, weight_decay=0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=rule, config=config)
        return engine, dict.fromkeys("ab", engine)
    rules: dict[str, Any] = {name: rule_of(model, name) for name in adapters}
    if kind.startswith("ddp"):
        model = DistributedDataParallel(model, find_unused_parameters="unused" in kind)
    return model, rules


def rule_of(model: Any, name: str) -> Any:
    """Return the optimizer of an adapter."""
    return torch.optim.AdamW(of_adapter(model, name), lr=1e-2, weight_decay=0)


def trained(kind: str, order: str) -> dict[str, Any]:
    """Train the adapters in this order; return their values, and whether ranks agree on them."""
    adapters = "a" if "+" in order else "ab"
    model, ranks = model_of(adapters), dist.get_world_size()
    called, rules = prepared(kind, model, adapters)
    draws = {name: torch.Generator().manual_seed(ord(name)) for name in "ab"}
    for name in order:
        if name == "+":  # every rank draws the same new adapter
            torch.manual_seed(1)
            model.add_adapter("b", LORA)
            if kind != "deepspeed":
                rules["b"] = rule_of(model, "b")
            continue
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
    lora = [*of_adapter(model, "a"), *of_adapter(model, "b")]
    held = [local(p) for p in model.parameters() if not any(p is x for x in lora)]
    found: dict[str, Any] = {"base": sum(x.numel() * x.element_size() for x in held)}
    for name in "ab":
        pieces = [whole(p).detach().flatten() for p in of_adapter(model, name)]
        found[name] = torch.cat(pieces).float()
        of_all = [torch.empty_like(found[name]) for _ in range(ranks)]
        dist.all_gather(of_all, found[name])
        found[f"{name} agrees"] = all(torch.equal(x, found[name]) for x in of_all)
        found[f"{name} moved"] = bool(
            sum(x.abs().sum() for x in pieces[1::2])
        )  # lora_B begins at 0
    return found


def whole(p: Any) -> Any:
    """Return all of a parameter."""
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def local(p: Any) -> Any:
    """Return what a rank holds of a parameter."""
    return p.to_local() if hasattr(p, "to_local") else p


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
        "| program | base on a rank | same bits with b | with b of NaN | ranks agree | a later b "
        "| `a`, `b` of one process |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    reference: Any = None
    for name, (kind, ranks) in PEERS.items():
        found = run_ranks(answers, ranks, kind)
        alone, beside, nan, later = found.values()
        if isinstance(alone, str):  # an error before there is anything to compare with
            lines.append(f"| {name} | - | {alone} | - | - | {of_later(later)} | - |")
            continue
        reference = reference or beside
        cells = [f"{alone['base']:,}"]
        cells += [x if isinstance(x, str) else same(alone, x) for x in (beside, nan)]
        ok = isinstance(beside, dict)
        agree = ok and beside["a agrees"] and beside["b agrees"]
        cells += ["-" if not ok else "yes" if agree else "**no**", of_later(later)]
        far = [(beside[x] - reference[x]).abs().max().item() for x in "ab"] if ok else []
        cells += [", ".join(f"{x:.1e}" for x in far) or "-"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def of_later(case: Any) -> str:
    """Say what came of an adapter that was added later."""
    if isinstance(case, str):
        return case
    if not case["b moved"]:
        return "**is not trained**, no error"
    return "ranks agree" if case["b agrees"] else "**another b on each rank**, no error"


def same(alone: Any, case: Any) -> str:
    """Say whether an adapter has its bits of alone, or how far it is from them."""
    far = (alone["a"] - case["a"]).abs().max().item()
    return "yes" if torch.equal(alone["a"], case["a"]) else f"**no**: {far:.1e} off"


def service() -> str:
    """Return the table of the service: one run, all numbers of clients."""
    free = int(subprocess.check_output([sys.executable, "-c", _FREE]))
    server = [sys.executable, str(ROOT / "examples" / "service" / "server.py"), "--stage", "3"]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free), "WORLD_SIZE": str(RANKS)}
    world |= {"PYTHONPATH": str(ROOT)}
    started, folder = [], tempfile.TemporaryDirectory()
    for rank in range(RANKS):
        env = os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [*server, "--port", "0", "--folder", folder.name]
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
    """Return the lines of the table. Each round has all numbers of clients, on one machine."""
    first, other = Client(port, "c0"), [Client(port, f"c{i}") for i in range(1, max(CLIENTS))]
    first.create(seed=0)
    found: dict[int, dict[str, list[float]]] = {n: {"turn": [], "once": []} for n in CLIENTS}
    bytes_of: dict[int, tuple[int, int]] = {}
    for round_ in range(ROUNDS):
        for number in CLIENTS:
            clients = [first, *other[: number - 1]]
            for i, one in enumerate(clients[1:]):
                one.create(seed=i)
            times = [asked(x) for x in clients]
            began = time.perf_counter()
            threads = [threading.Thread(target=asked, args=(x,)) for x in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds = (time.perf_counter() - began) / number
            each = max(max(x.status()["bytes"]) for x in clients)
            bytes_of[number] = max(first.call(method="status")["bytes"]), each
            for one in clients[1:]:
                one.delete()
            if round_:  # the first is warm-up
                found[number]["turn"] += times
                found[number]["once"].append(seconds)
    lines = [
        "| clients | base | each client | all of a rank | ms in turn | over 1 | ms at once "
        "| over 1 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    at = {n: [statistics.median(x[k]) * 1e3 for k in ("turn", "once")] for n, x in found.items()}
    for n, (base, each) in bytes_of.items():
        (turn, once), (turn_1, once_1) = at[n], at[CLIENTS[0]]
        lines.append(
            f"| {n} | {base:,} | {each:,} | {base + n * each:,} | {turn:.1f} | {turn / turn_1:.2f} "
            f"| {once:.1f} | {once / once_1:.2f} |"
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
