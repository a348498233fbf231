"""What peers make of examples/spot.py, 8 -> 3 -> 5 ranks: the table of docs/gallery/spot.md.

    python benchmarks/gallery/spot_peers.py --kept /tmp/spot --torchft /tmp/peers-venv/bin/python

The same model, rows, optimizer and number of updates; each peer's program is written as its users
write it: FSDP2 with `torch.distributed.checkpoint`, started by torchrun, and torchft's
`train_ddp.py`. Each is compared with its own run on 8 ranks that nothing disturbs.
`--kept` keeps what is measured, part by part, and goes on with it; `--torchft` is a Python that has
torchft (its own environment). Without it, its rows are left out.
"""

# ruff: noqa: E402  (the paths come before the example)
from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import importlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]
os.environ["PYTHONPATH"] = str(ROOT)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import write_report
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

spot: Any = importlib.import_module("spot")  # the example, not what draws it

START = {name: p.clone() for name, p in spot.params.items()}
EVERY = 4  # updates from one checkpoint to the next, as those of the mirror
PATIENCE_S = 200.0
WHOLE_BATCH = spot.LOGICAL * spot.ROWS


class Windows(Dataset[tuple[int, Tensor, Tensor]]):
    """The rows of the example: some bytes, and the next one. Each says its number."""

    def __len__(self) -> int:
        """Return how many there are."""
        return len(spot.text) - spot.CONTEXT

    def __getitem__(self, at: int) -> tuple[int, Tensor, Tensor]:
        """Return row `at`."""
        return at, spot.text[at : at + spot.CONTEXT], spot.text[at + spot.CONTEXT]


def tell(folder: Path, name: str, **what: Any) -> None:
    """Add a line to the log of a process."""
    with (folder / f"log-{name}").open("a") as log:
        print(json.dumps(what | {"s": time.time(), "pid": os.getpid()}), file=log)


def finish(folder: Path, name: str, params: dict[str, Tensor]) -> None:
    """Keep the last parameters."""
    torch.save({path: p.detach().clone() for path, p in params.items()}, folder / f"last-{name}")


# ---- FSDP2 with torch.distributed.checkpoint, started by torchrun --------------------------------


def newest(folder: Path) -> Path | None:
    """Return the last checkpoint that is whole: DCP writes its metadata last."""
    found = [one.parent for one in folder.glob("saved-*/.metadata")]
    return max(found, key=lambda one: int(one.name.removeprefix("saved-")), default=None)


def fsdp2(folder: Path, kept: str, dropout: bool) -> None:
    """Train on the ranks that there are, from the last checkpoint to the last update."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = [time.time()]
    dist.broadcast_object_list(run)
    model = spot.model if dropout else without_dropout(spot.model)
    for layer in model:
        if isinstance(layer, (nn.Embedding, nn.Linear)):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spot.LR)
    rows = spot.ROWS if kept == "rank" else WHOLE_BATCH // ranks
    sampler = DistributedSampler(Windows(), shuffle=True, seed=0)
    loader = DataLoader(Windows(), batch_size=rows, sampler=sampler)

    start, saved = 0, newest(folder)
    if saved:
        params, slots = get_state_dict(model, optimizer)
        state = {"model": params, "optimizer": slots, "update": 0}
        dcp.load(state, checkpoint_id=saved)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        start = state["update"]

    def save(update: int) -> None:
        params, slots = get_state_dict(model, optimizer)
        state = {"model": params, "optimizer": slots, "update": update}
        dcp.save(state, checkpoint_id=folder / f"saved-{update}")

    model.train()
    for update, (ids, x, y) in enumerate(loader, 1):
        if update <= start:
            continue  # as a Trainer does: these batches were had
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        seen = {"update": update, "loss": mean.item() / ranks, "ids": ids.tolist()}
        tell(folder, str(rank), run=run[0], ranks=ranks, **seen)
        if update == spot.UPDATES:
            break
        stop = spot.told_to_stop(received)
        if stop or update % EVERY == 0:
            save(update)
        if stop:
            dist.destroy_process_group()
            return
    whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        finish(folder, "0", whole)
    dist.destroy_process_group()


def without_dropout(model: nn.Sequential) -> nn.Sequential:
    """Return the same layers, and no noise."""
    for layer in model:
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model


# ---- torchft: the loop of its train_ddp.py -------------------------------------------------------


def torchft(folder: Path, group: int, reduce: str) -> None:
    """Be a replica group of one process: train with the groups that there are.

    Gradients are reduced by torchft's DistributedDataParallel, or by `manager.allreduce`.
    """
    from torchft import (  # pyright: ignore[reportMissingImports]
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )
    from torchft import DistributedSampler as Sampler  # pyright: ignore[reportMissingImports]

    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    sampler = Sampler(
        Windows(), replica_rank=group, num_replica_groups=spot.LOGICAL, group_rank=0,
        num_replicas=1, shuffle=True,
    )  # fmt: skip
    loader = DataLoader(Windows(), batch_size=spot.ROWS, sampler=sampler)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    wait_for_scheduler(folder, "imported")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=2,
        load_state_dict=load_state_dict, state_dict=state_dict, replica_id=f"spot_{group}",
        timeout=timedelta(seconds=30), rank=0, world_size=1, store_addr="localhost",
        store_port=store.port, hostname="localhost", init_sync=False,
    )  # fmt: skip
    model: Any = DistributedDataParallel(manager, spot.model) if reduce == "ddp" else spot.model
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=spot.LR))
    saved, place = folder / "saved", folder / f"loader-{group}"
    if saved.exists():  # after a Ctrl-C: no group is left to be healed from
        state = torch.load(saved)
        load_state_dict(state["user"])
        manager.load_state_dict(state["manager"])
    had = int(place.read_text()) if place.exists() else 0  # batches of this group's own loader
    wait_for_scheduler(folder, "joined")

    def save() -> None:
        state = {"user": state_dict(), "manager": manager.state_dict()}
        torch.save(state, folder / "saved.part")
        (folder / "saved.part").rename(saved)

    for number, (ids, x, y) in enumerate(loader, 1):
        if number <= had:
            continue
        optimizer.zero_grad()  # starts the quorum
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if reduce == "manager":
            for work in [manager.allreduce(p.grad) for p in model.parameters()]:
                work.wait()
        before = manager.current_step()
        optimizer.step()  # if the quorum agrees
        update, error = manager.current_step(), manager.errored()
        tell(
            folder, str(group), update=update, committed=update == before + 1, loss=loss.item(),
            ids=ids.tolist(), counted=manager.is_participating(), ranks=manager.num_participants(),
            error=str(error.original_exception)[:300] if error else "",
        )  # fmt: skip
        place.with_suffix(".part").write_text(str(number))
        place.with_suffix(".part").rename(place)  # a kill must not cut it off
        if update >= spot.UPDATES:
            break
        if group == 0 and (received or update % EVERY == 0):
            save()
        if received:
            manager.shutdown(wait=False)
            return
    finish(folder, str(group), getattr(model, "module", model).state_dict())
    manager.shutdown(wait=False)


def wait_for_scheduler(folder: Path, what: str) -> None:
    """Say how far this process is, and wait until the scheduler lets it go on."""
    (folder / f"{what}-{os.getpid()}").touch()
    while not (folder / f"{what}-{os.getpid()}-go").exists():
        time.sleep(0.05)


# ---- The scheduler: what starts, kills and stops them --------------------------------------------


def log_of(folder: Path, name: str = "*") -> list[dict[str, Any]]:
    """Return what processes have told, in the order of time."""
    lines = [
        json.loads(line) | {"by": one.name.removeprefix("log-")}
        for one in folder.glob(f"log-{name}")
        for line in one.read_text().splitlines()
        if line.endswith("}")
    ]
    return sorted(lines, key=lambda line: line["s"])


def until(done: Callable[[], bool], what: str, within: float = PATIENCE_S) -> None:
    """Wait."""
    deadline = time.monotonic() + within
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {within:.0f} s")
        time.sleep(0.02)


def start(command: list[str], folder: Path, name: str, **env: str) -> subprocess.Popen[bytes]:
    """Start a process that writes what it says into a file."""
    with (folder / f"said-{name}").open("ab") as said:
        return subprocess.Popen(
            command, env=os.environ | env, stdout=said, stderr=said, start_new_session=True
        )


def end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill what is left of them, and the ranks of an agent."""
    for process in processes:
        if process.poll() is None:
            for pid in children_of(process):
                killed(pid)
            process.kill()
            process.wait()


def children_of(agent: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes of an agent: each is in a session of its own."""
    threads = Path(f"/proc/{agent.pid}/task").glob("*/children")
    return [int(pid) for thread in threads for pid in thread.read_text().split()]


def killed(pid: int) -> None:
    """SIGKILL a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def undisturbed(folder: Path, *options: str) -> None:
    """Run FSDP2's program on 8 ranks, from the first update to the last."""
    torchrun = torchrun_of(spot.LOGICAL, folder, *options)
    try:
        until(lambda: torchrun.poll() is not None, "the run on 8 ranks")
    finally:
        end([torchrun])
    assert torchrun.returncode == 0, (folder / "said-torchrun").read_text()[-3000:]


def torchrun_of(ranks: int, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start torchrun as a scheduler does that has this many machines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), __file__, "--be", "fsdp2", "--folder", str(folder)]
    return start([*command, *options], folder, "torchrun")


def disturbed(folder: Path, worlds: tuple[int, ...], *options: str) -> dict[str, Any]:
    """Run FSDP2's program through the trouble of the example, started again by torchrun."""
    ends = [
        launched(folder, ranks, trouble, at, *options)
        for ranks, (_, _, trouble, at) in zip(worlds, spot.TROUBLE, strict=True)
    ]
    return {"ends": ends, "said": (folder / "said-torchrun").read_text()[-6000:]}


def launched(folder: Path, ranks: int, trouble: str, at: int, *options: str) -> dict[str, Any]:
    """Run `ranks` ranks until `trouble` comes to them at update `at`; return how they ended."""
    begun, torchrun = time.time(), torchrun_of(ranks, folder, *options)

    def here() -> list[dict[str, Any]]:
        return [line for line in log_of(folder) if line["run"] > begun]

    def ended() -> bool:
        return torchrun.poll() is not None

    try:
        until(lambda: any(line["update"] >= at for line in here()) or ended(), f"update {at}")
        if trouble == "kill":
            killed(max(here(), key=lambda line: int(line["by"]))["pid"])
        elif trouble == "Ctrl-C":
            torchrun.send_signal(signal.SIGINT)
        since = time.time()
        until(ended, f"the end of {ranks} ranks")
        what = {"ranks": ranks, "trouble": trouble, "code": torchrun.returncode}
        seconds = time.time() - since
        return what | {"s": seconds, "from": min(line["update"] for line in here())}
    finally:
        end([torchrun])


def elastic(folder: Path) -> dict[str, Any]:
    """Run FSDP2's program by torchrun's elastic agents, one for each machine: 8, then 3, then 5.

    Five agents are killed with their ranks; then one rank, while two agents join; then a Ctrl-C
    comes to all five, which are started again.
    """
    agents: list[subprocess.Popen[bytes]] = []
    ends: list[dict[str, Any]] = []

    def join(count: int, port: int) -> None:
        for _ in range(count):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "3:8"]
            command += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", str(port)]
            command += ["--rdzv-endpoint", f"localhost:{port}", "--max-restarts", "10"]
            command += [__file__, "--be", "fsdp2", "--folder", str(folder)]
            agents.append(start(command, folder, f"agent-{len(agents)}"))

    def after(trouble: str, at: int, since: float) -> None:
        """Wait for the first update after the trouble, and for the update of the next trouble."""
        until(
            lambda: any(line.get("run", 0) > since for line in log_of(folder))
            or all(agent.poll() is not None for agent in agents),
            f"an update after {trouble}", 400,
        )  # fmt: skip
        first = next((line for line in log_of(folder) if line.get("run", 0) > since), None)
        ends.append(
            {"trouble": trouble, "ranks": first and first["ranks"],
             "s": first and first["s"] - since, "from": first and first["update"]}
        )  # fmt: skip
        until(
            lambda: any(
                line["update"] >= at and line["run"] > since for line in log_of(folder)
            )
            or all(agent.poll() is not None for agent in agents),
            f"update {at}", 400,
        )  # fmt: skip

    try:
        since = time.time()
        join(1, 29571)  # the store of the rendezvous is in the first agent: it is never killed
        time.sleep(3)
        join(7, 29571)
        after("the start", spot.TROUBLE[0][3], since)
        since = time.time()
        end(agents[3:])
        after("5 of 8 agents and ranks are killed", spot.TROUBLE[1][3], since)
        since = time.time()
        join(2, 29571)
        killed(max(log_of(folder), key=lambda line: (line["run"], line["by"]))["pid"])
        after("1 of 3 ranks is killed, 2 agents join", spot.TROUBLE[2][3], since)
        since = time.time()
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGINT)
        until(lambda: all(agent.poll() is not None for agent in agents), "the end by Ctrl-C", 120)
        join(1, 29572)
        time.sleep(3)
        join(4, 29572)
        after("Ctrl-C, and 5 agents are started", spot.UPDATES, since)
        until(lambda: all(agent.poll() is not None for agent in agents), "the end", 120)
    except TimeoutError as error:
        ends.append({"trouble": str(error)})
    finally:
        end(agents)
    said = "".join(one.read_text()[-3000:] for one in sorted(folder.glob("said-agent-*")))
    return {"ends": ends, "said": said}


def of_fzero(folder: Path) -> dict[str, Any]:
    """Run the example, which compares with its own undisturbed run."""
    command = [sys.executable, str(ROOT / "examples/spot.py"), "--log", str(folder / "log.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    runs = json.loads((folder / "log.json").read_text())
    losses = {one["update"]: one["loss"] for one in runs["quiet"]}
    return {
        "code": done.returncode,
        "said": done.stdout.splitlines(),
        "losses": max(abs(one["loss"] - losses[one["update"]]) for one in runs["troubled"]),
        "again": len(runs["troubled"]) - spot.UPDATES,
    }


def survivors(peer: str, folder: Path) -> dict[str, Any]:
    """Kill one of 8 ranks that no agent looks after: how do the other seven end, and when?"""
    (folder / "x").mkdir()
    place = folder / "x"
    if peer == "fzero":
        ranks = spot.launch(spot.LOGICAL, 3, place)
    else:
        ranks = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        for rank in range(spot.LOGICAL):
            command = [sys.executable, __file__, "--be", "fsdp2", "--folder", str(place)]
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)}
            ranks.append(
                start(command, place, str(rank), WORLD_SIZE=str(spot.LOGICAL), **meet)
            )  # fmt: skip
    seen = (lambda: spot.read_log(place)) if peer == "fzero" else (lambda: log_of(place, "0"))
    try:
        until(lambda: any(line["update"] >= spot.TROUBLE[0][3] for line in seen()), "update 16")
        ranks[-1].kill()
        ranks[-1].wait()
        begun, left = time.time(), dict(enumerate(ranks[:-1]))
        ended: list[dict[str, Any]] = []
        while left and time.time() - begun < 180:
            for rank in [rank for rank, one in left.items() if one.poll() is not None]:
                code = left.pop(rank).returncode
                ended.append({"rank": rank, "code": code, "s": time.time() - begun})
            time.sleep(0.02)
    finally:
        end([one for one in ranks if one.poll() is None])
    errors = [place / "errors"] if peer == "fzero" else sorted(place.glob("said-*"))
    return {"ended": ended, "left": sorted(left), "said": [one.read_text() for one in errors]}


def with_torchft(python: str, folder: Path, reduce: str, trouble: bool) -> dict[str, Any]:
    """Run torchft's program by a lighthouse and 8 groups, with the trouble of the example or none.

    Five of 8 groups are killed; one of 3, while 3 join; then a Ctrl-C comes to all, which are
    started again. Groups that will join are started before, and wait: so what is measured does not
    depend on how long a process takes to start.
    """
    port, groups, events = "29581", {}, []
    house = [str(Path(python).parent / "torchft_lighthouse"), "--min_replicas", "2"]
    house += ["--bind", f"[::]:{port}", "--join_timeout_ms", "10000"]
    running = [start(house, folder, "lighthouse")]

    def ready(numbers: Iterable[int]) -> dict[int, subprocess.Popen[bytes]]:
        """Start groups; they wait before they have a manager."""
        found = {}
        for group in numbers:
            command = [python, __file__, "--be", "torchft", "--folder", str(folder)]
            command += ["--reduce", reduce]
            meet = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "RUST_BACKTRACE": "0"}
            found[group] = start([*command, "--group", str(group)], folder, str(group), **meet)
        running.extend(found.values())
        await_all(found, "imported")
        return found

    def await_all(here: dict[int, subprocess.Popen[bytes]], what: str) -> None:
        until(
            lambda: all(
                (folder / f"{what}-{one.pid}").exists() or one.poll() is not None
                for one in here.values()
            ),
            what,
        )

    def go(here: dict[int, subprocess.Popen[bytes]]) -> None:
        """Let groups have a manager, and when all have one, train."""
        for what in ("imported", "joined"):
            await_all(here, what)
            for one in here.values():
                (folder / f"{what}-{one.pid}-go").touch()

    def all_ended() -> bool:
        return all(one.poll() is not None for one in groups.values())

    def wait_until(update: int) -> None:
        until(
            lambda: (
                all_ended()
                or any(line["update"] >= update and line["committed"] for line in log_of(folder))
            ),
            f"update {update}",
        )
        if all_ended():
            raise InterruptedError("all groups that were left have ended")

    def note(what: str, **more: Any) -> None:
        events.append({"what": what, "s": time.time()} | more)

    try:
        groups |= ready(range(spot.LOGICAL))
        later = ready((2, 3, 4)) if trouble else {}
        go(groups)
        if trouble:
            wait_until(spot.TROUBLE[0][3])
            note("5 of 8 groups are killed")
            for group in range(3, 8):
                killed(groups.pop(group).pid)
            wait_until(spot.TROUBLE[1][3])
            note("1 of 3 groups is killed, 3 join")
            killed(groups.pop(2).pid)
            go(later)
            groups |= later
            wait_until(spot.TROUBLE[2][3])
            note("Ctrl-C")
            for one in groups.values():
                one.send_signal(signal.SIGINT)
            until(all_ended, "Ctrl-C's end")
            note("all have ended", codes=[one.returncode for one in groups.values()])
            groups |= ready(range(5))
            note("5 are started again")
            go(groups)
        until(all_ended, "the end")
        note("the end", codes=[one.returncode for one in groups.values()])
    except (TimeoutError, InterruptedError) as error:
        note(str(error), codes={group: one.poll() for group, one in groups.items()})
    finally:
        end(running)
    wrong = ("Error", "error", "exception")
    said = [line for one in sorted(folder.glob("said-[0-9]")) for line in said_by(one)]
    return {"events": events, "said": [line for line in said if any(x in line for x in wrong)][:40]}


def said_by(path: Path) -> list[str]:
    """Return the lines of a log, each with the process and not too long."""
    return [f"{path.name}: {line[:400]}" for line in path.read_text().splitlines()]


# ---- How far from the undisturbed run ------------------------------------------------------------


def line_of(log: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return what went into the last parameters: of each update, the lines of all ranks.

    FSDP2: those of the run that made the update last, for what came before is thrown away. torchft:
    those of groups whose gradients were counted, in an update that was committed.
    """
    found: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    for line in log:
        if not (line.get("committed", True) and line.get("counted", True)):
            continue
        before = found[line["update"]]
        if before and line.get("run", 0) > before[0].get("run", 0):
            before.clear()
        before.append(line)
    return dict(sorted(found.items()))


def losses_of(line: dict[int, list[dict[str, Any]]]) -> list[float]:
    """Return the loss of each update, the mean over its rows."""
    return [sum(one["loss"] for one in lines) / len(lines) for lines in line.values()]


def evaluated(path: Path) -> float:
    """Return the loss of the last parameters over the text, without dropout."""
    model = copy.deepcopy(spot.model).eval()
    model.load_state_dict(torch.load(path))
    ids = torch.arange(len(Windows()))
    with torch.no_grad():
        x = spot.text[ids.unsqueeze(1) + torch.arange(spot.CONTEXT)]
        return F.cross_entropy(model(x), spot.text[ids + spot.CONTEXT]).item()


def compared(quiet: Path, troubled: Path) -> dict[str, Any]:
    """Compare a run with the undisturbed one."""
    last = sorted(troubled.glob("last-*"))
    if not last or not list(quiet.glob("last-*")):
        return {"error": "the run did not come to its end"}
    wanted, logs = sorted(quiet.glob("last-*"))[0], (log_of(quiet), log_of(troubled))
    lines = [line_of(log) for log in logs]
    ids = [
        collections.Counter(row for line in one.values() for x in line for row in x["ids"])
        for one in lines
    ]
    losses = [losses_of(one) for one in lines]
    runs: dict[float, set[int]] = collections.defaultdict(set)
    for one in logs[1]:
        if one.get("committed", True):
            runs[one.get("run", 0)].add(one["update"])
    once, whole = torch.load(wanted), torch.load(last[0])
    return {
        "parameters": apart(whole, once),
        "groups": max(apart(torch.load(one), whole) for one in last),
        "moved": apart(once, START),
        "losses": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "evaluated": [evaluated(wanted), evaluated(last[0])],
        "rows": [sum(one.values()) for one in ids],
        "twice": [sum(1 for count in one.values() if count > 1) for one in ids],
        "never": len(ids[0].keys() - ids[1].keys()),
        "other": len(ids[1].keys() - ids[0].keys()),
        "again": sum(map(len, runs.values())) - spot.UPDATES,
        "tries": sum(not one.get("committed", True) for one in logs[1] if one["by"] == "0"),
        "rows of an update": [sum(len(x["ids"]) for x in line) for line in lines[1].values()],
    }


def apart(a: dict[str, Tensor], b: Any) -> float:
    """Return the largest absolute difference."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


ROWS = {  # of the table: what it is called, the run, and the undisturbed one
    "FSDP2 and DCP, 15 rows a rank": ("fsdp2-rank", "fsdp2-quiet"),
    "FSDP2 and DCP, 120 rows an update": ("fsdp2-whole", "fsdp2-quiet"),
    "the same, without dropout": ("fsdp2-whole-no-dropout", "fsdp2-quiet-no-dropout"),
    "FSDP2 and DCP, always 8 ranks": ("fsdp2-8", "fsdp2-quiet"),
    "the same, without dropout ": ("fsdp2-8-no-dropout", "fsdp2-quiet-no-dropout"),
    "torchft, `manager.allreduce`": ("torchft-manager", "torchft-manager-quiet"),
    "torchft, its DistributedDataParallel": ("torchft-ddp", "torchft-ddp-quiet"),
    "torchft, undisturbed, once more": ("torchft-manager-quiet-again", "torchft-manager-quiet"),
}
RESULTS = ROOT / "benchmarks" / "results"
INTRO = """The trouble of examples/spot.py: 8 ranks, a SIGKILL at update 16, 3 ranks, a SIGKILL at
update 30, 5 ranks, a Ctrl-C at update 44, 5 ranks to update 60. Of torchft 5 of 8 groups are
killed, then 1 of 3 while 3 join; the Ctrl-C ends all. Checkpoints are saved every 4 updates, and
after the Ctrl-C. `parameters`, `losses`: the largest absolute difference from the run of the same
peer on 8 ranks that nothing disturbed, of the parameters at the end and of the loss of an update;
in brackets how far the undisturbed run moves a parameter. `text`: the loss over the text at the
end, undisturbed and disturbed. `rows`: those whose gradients are in the last parameters, of 7200;
how many of them twice, and how many of the undisturbed run's never. `again`: updates that were made
a second time. `not committed`: tries of torchft's group 0. The machine had other work as well.
"""


def table(kept: Path) -> str:
    """Return the table of what the trouble has changed."""
    names = "| | parameters | losses | text | rows | twice | never | again | not committed |"
    here = of_part(kept, "fzero")
    same = here["said"][-1].rsplit(": ", 1)[-1]
    fzero = f"fzero: digest {same} | 0 | {here['losses']:g} | the same | 7200 | 0 | 0"
    lines = [names, "|---" * 9 + "|", f"| {fzero} | {here['again']} | |"]
    for name, (run, quiet) in ROWS.items():
        if not of_part(kept, run):
            continue
        one = compared(kept / quiet, kept / run)
        if "error" in one:
            lines.append(f"| {name} | {one['error']} | | | | | | | |")
            continue
        cells = [
            f"{one['parameters']:.1e} ({one['moved']:.2f})", f"{one['losses']:.1e}",
            " and ".join(f"{loss:.4f}" for loss in one["evaluated"]), one["rows"][1],
            one["twice"][1], one["never"], one["again"], one["tries"] if "torchft" in run else "",
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def of_part(kept: Path, name: str) -> dict[str, Any]:
    """Return what was measured of a part; {} if nothing was."""
    done = kept / name / "done.json"
    return json.loads(done.read_text()) or {"quiet": True} if done.exists() else {}


def ends(kept: Path) -> str:
    """Return how the ranks ended that were not killed, and what they said."""
    found = ["\n## What the other ranks do when one of 8 is killed, without an agent\n"]
    for peer in ("fzero", "fsdp2"):
        one = of_part(kept, f"survivors-{peer}")
        seconds = ", ".join(f"{each['s']:.1f}" for each in one["ended"])
        codes = sorted({each["code"] for each in one["ended"]})
        found.append(f"{peer}: {len(one['ended'])} of 7 ended by themselves, after {seconds} s,")
        found.append(f"with exit codes {codes}; {len(one['left'])} were left after 180 s:\n")
        found += [*errors_of("\n".join(one["said"])), ""]
    found.append("\n## Runs by torchrun: how long it took to end after the trouble\n")
    for run in (run for run, _ in ROWS.values() if run.startswith("fsdp2")):
        for each in of_part(kept, run).get("ends", ()):
            said = f"- {run}: {each['ranks']} ranks from update {each['from']};"
            said += f" {each['trouble'] or 'the end'}; code {each['code']}"
            found.append(f"{said} after {each['s']:.1f} s")
    if elastic := of_part(kept, "elastic"):
        found.append("\n## torchrun's elastic agents\n")
        found += [f"- {each}" for each in elastic["ends"]]
    for name in ("torchft-manager", "torchft-ddp", "torchft-ddp-again", "torchft-ddp-third"):
        if one := of_part(kept, name):
            found.append(f"\n## {name}\n")
            for each in one["events"]:
                seconds = each["s"] - one["events"][0]["s"]
                found.append(f"- {seconds:.1f} s: {each['what']} {each.get('codes', '')}")
            done = [line for line in log_of(kept / name, "0") if line["committed"]]
            for before, after in itertools.pairwise(done):
                if (seconds := after["s"] - before["s"]) > 1:
                    found.append(f"- group 0 waited {seconds:.1f} s for update {after['update']}")
            found += ["", *errors_of("\n".join(one["said"]))]
    return "\n".join(found) + "\n"


def errors_of(said: str) -> list[str]:
    """Return the last lines of tracebacks, each once, with numbers of ports and ranks left out."""
    found = dict[str, None]()
    for line in said.splitlines():
        if match := re.search(r"((?:[\w.]+\.)?\w*Error): (.*)|(AssertionError)$", line):
            told = match[0].partition(" This is typically caused")[0]  # what gloo adds
            found[re.sub(r"\[(\d+\.){3}\d+\]:\d+(\$\d+)?|rank [0-6]\b", "...", told)[:330]] = None
    return [f"    {line}" for line in found][:12]


def parts(torchft_python: str | None) -> dict[str, Callable[[Path], Any]]:
    """Return what there is to measure; each is given an empty folder."""
    whole, none = ("--batch", "whole"), ("--dropout", "0")
    worlds = tuple(ranks for ranks, *_ in spot.TROUBLE)
    found: dict[str, Callable[[Path], Any]] = {
        "fsdp2-quiet": undisturbed,
        "fsdp2-rank": lambda folder: disturbed(folder, worlds),
        "fsdp2-whole": lambda folder: disturbed(folder, worlds, *whole),
        "fsdp2-8": lambda folder: disturbed(folder, (8, 8, 8, 8)),
        "fsdp2-quiet-no-dropout": lambda folder: undisturbed(folder, *none),
        "fsdp2-whole-no-dropout": lambda folder: disturbed(folder, worlds, *whole, *none),
        "fsdp2-8-no-dropout": lambda folder: disturbed(folder, (8, 8, 8, 8), *none),
        "fzero": of_fzero,
        "survivors-fzero": lambda folder: survivors("fzero", folder),
        "survivors-fsdp2": lambda folder: survivors("fsdp2", folder),
        "elastic": elastic,
    }
    quiet = ("ddp-quiet", "manager-quiet", "manager-quiet-again") if torchft_python else ()
    troubled = ("ddp", "ddp-again", "ddp-third", "manager") if torchft_python else ()
    for name in (*quiet, *troubled):
        found[f"torchft-{name}"] = functools.partial(
            with_torchft, str(torchft_python), reduce=name.split("-")[0], trouble=name in troubled
        )
    return found


def main() -> None:
    """Be a rank of a peer's program; or measure all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kept", type=Path, default=Path("/tmp/spot-peers"))
    parser.add_argument("--torchft", help="a Python that has torchft")
    parser.add_argument("--part", help="measure this part alone, and write no result")
    parser.add_argument("--be", choices=("fsdp2", "torchft"), help="be a rank, as is done below")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--batch", choices=("rank", "whole"), default="rank")
    parser.add_argument("--dropout", type=int, default=1)
    parser.add_argument("--group", type=int)
    parser.add_argument("--reduce", choices=("ddp", "manager"), default="ddp")
    args = parser.parse_args()
    if args.be == "fsdp2":
        return fsdp2(args.folder, args.batch, bool(args.dropout))
    if args.be == "torchft":
        return torchft(args.folder, args.group, args.reduce)
    for name, measure in parts(args.torchft).items():
        if args.part in (None, name) and not (args.kept / name / "done.json").exists():
            (args.kept / name).mkdir(parents=True)
            measured = measure(args.kept / name)
            (args.kept / name / "done.json").write_text(json.dumps(measured, indent=1))
            print(f"{name} is measured", flush=True)
    if not args.part:
        tables = [table(args.kept), ends(args.kept)]
        print(write_report(RESULTS, "gallery-spot-peers", tables, intro=INTRO).read_text())


if __name__ == "__main__":
    main()
