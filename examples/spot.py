"""Spot machines: 8 ranks, then 3, then 5, two of them killed and a Ctrl-C: the bits of no trouble.

    python examples/spot.py                                # starts and kills its ranks itself
    torchrun --nproc-per-node 4 examples/spot.py --stage 3    # no trouble: the same digest

A machine that is taken away takes its rank. The others end, what the scheduler has left is started
again, and goes on from the mirror, the copies in the memory of hosts; after a Ctrl-C from a
checkpoint. Logical ranks make each update the same on any number of ranks: rows, dropout, sums.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fzero

LOGICAL, ROWS, CONTEXT, UPDATES, LR = 8, 15, 8, 60, 3e-3
PATIENCE_S = 120.0
# Ranks, ZeRO stage, and what ends them at which update: a rank is killed, or all get a Ctrl-C.
TROUBLE: tuple[tuple[int, int, str, int], ...] = (
    (8, 3, "kill", 16),
    (3, 2, "kill", 30),
    (5, 3, "Ctrl-C", 44),
    (5, 1, "", UPDATES),
)

torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Embedding(256, 16), nn.Flatten(-2), nn.Linear(16 * CONTEXT, 96), nn.GELU()]
model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(96, 256))
apply, params = fzero.functionalize(model)
text = torch.tensor(list(inspect.getsource(argparse).encode()))  # what is learned: to go on
first = fzero.data.Order(len(text) - CONTEXT, batch_size=ROWS, logical_ranks=LOGICAL, seed=0)


def loss_fn(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return how badly the next byte is told; the mean over the rows of one logical rank."""
    return F.cross_entropy(apply(params, x), y)


def step_fn(state: fzero.TrainState, x: Tensor, y: Tensor) -> tuple[fzero.TrainState, Tensor]:
    """Make one update. Nothing here knows how many ranks there are."""
    state, loss = fzero.grad_and_reduce(loss_fn, state)(x, y)
    return fzero.apply_gradients(state), loss


def digest(state: fzero.TrainState) -> str:
    """Return a hash of every bit of the parameters and of what Adam keeps."""
    found = hashlib.sha256()
    for tree in (fzero.full_params(state), *fzero.slots(state, "optimizer").values()):
        for name in sorted(tree):
            found.update(tree[name].detach().numpy().tobytes())
    return found.hexdigest()[:16]


def told_to_stop(received: list[int]) -> bool:
    """Return whether any rank was: all ranks stop after the same update."""
    if fzero.world().size == 1:
        return bool(received)
    flag = torch.tensor(len(received))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def train(stage: int, folder: Path) -> str | None:
    """Go on from what is in `folder` to the last update; return the digest, None after a Ctrl-C."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    step = fzero.shard(step_fn, stage=stage, logical_ranks=LOGICAL, seed=0)
    state, saved, extra = step.init(params, fzero.optim.adamw(LR)), folder / "saved", {}
    if saved.exists():
        state, extra = fzero.checkpoint.load_with_extra(saved, state)
    with fzero.checkpoint.Mirror(folder / "mirror", every=4) as mirror:
        state, copied = mirror.restore(state)  # as it is, and {}, where there are no copies
        extra = copied or extra
        order = first.resumed(extra.get("order"))
        while order.position < UPDATES and not told_to_stop(received):
            rows, order = order.next()  # those of this rank's logical ranks
            ids = torch.tensor(rows)
            x = text[ids.unsqueeze(1) + torch.arange(CONTEXT)]
            state, loss = step(state, x, text[ids + CONTEXT])
            extra = {"order": order}
            if fzero.world().rank == 0:
                with (folder / "log").open("a") as log:
                    seen = {"update": order.position, "loss": loss.item(), "s": time.time()}
                    print(json.dumps(seen | {"ranks": fzero.world().size}), file=log)
            mirror.update(state, extra=extra)
        if order.position < UPDATES:
            fzero.checkpoint.save(saved, state, extra=extra)
    signal.signal(signal.SIGINT, before)
    return digest(state) if order.position == UPDATES else None


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return what rank 0 has told of each update; those that were made twice are there twice."""
    lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def launch(ranks: int, stage: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Start a process for each rank, as a scheduler does on that many machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, __file__, "--stage", str(stage), "--folder", str(folder)]
    with (folder / "errors").open("a") as errors:
        return [
            subprocess.Popen(
                command, env=os.environ | meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip


def run(ranks: int, stage: int, end: str, at: int, folder: Path) -> str:
    """Run `ranks` ranks until `end` comes to them at update `at`; return what rank 0 printed."""
    machines, deadline = launch(ranks, stage, folder), time.monotonic() + PATIENCE_S
    try:
        while not any(seen["update"] >= at for seen in read_log(folder)):
            if time.monotonic() > deadline or machines[0].poll() is not None:
                break  # it has failed, or is at its end
            time.sleep(0.02)
        if end == "kill":
            machines[-1].kill()  # SIGKILL: nothing is saved, nothing is said
            machines[-1].wait()
            return ""  # and so the others are of no use: they end below
        for machine in machines:
            if end == "Ctrl-C":
                machine.send_signal(signal.SIGINT)
        said = machines[0].communicate(timeout=max(deadline - time.monotonic(), 1))[0]
        if any(machine.wait(timeout=PATIENCE_S) for machine in machines):
            raise SystemExit(f"{ranks} ranks failed:\n{(folder / 'errors').read_text()[-3000:]}")
        return said
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()


def main() -> None:
    """Be a rank; or start and stop ranks, and fail if the digest is another one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--folder", type=Path, help="of the run, which a rank goes on with")
    parser.add_argument("--log", type=Path, help="copy what was told of each update into this file")
    args = parser.parse_args()
    if args.folder:  # a rank of those below; on real machines a scheduler starts it
        dist.init_process_group("gloo")
        print(train(args.stage, args.folder) or "stopped by Ctrl-C, and saved")
        dist.destroy_process_group()
        return
    memory = Path("/dev/shm")  # of the host: it outlives processes
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as parent:
        ranks, place = fzero.world().size, [parent]
        if ranks > 1:  # torchrun started several: they share the folder of rank 0
            dist.broadcast_object_list(place)
        quiet, troubled = Path(place[0], "quiet"), Path(parent, "troubled")
        quiet.mkdir(mode=0o700, exist_ok=True)
        troubled.mkdir(mode=0o700)
        wanted = train(args.stage, quiet)
        if fzero.world().rank == 0:
            print(f"no trouble, {ranks} rank(s): digest {wanted}")
        if ranks > 1:
            dist.barrier()  # the folder goes when all are done
            return
        for count, stage, end, at in TROUBLE:
            said = run(count, stage, end, at, troubled).strip()
            print(f"{count} ranks, stage {stage}: {end or 'the end'} at update {at}. {said}")
        seen, straight = read_log(troubled), {one["update"]: one for one in read_log(quiet)}
        if args.log:
            args.log.write_text(json.dumps({"troubled": seen, "quiet": [*straight.values()]}))
    same = all(one["loss"] == straight[one["update"]]["loss"] for one in seen)
    again = len(seen) - UPDATES
    print(f"loss {seen[0]['loss']:.3f} to {seen[-1]['loss']:.3f}; {again} updates were made twice")
    print(f"check: {len(seen)} losses and the digest are those of no trouble: {same}, {said}")
    if not (same and said == wanted):
        raise SystemExit("not the same bits")


if __name__ == "__main__":
    main()
