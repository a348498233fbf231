"""Train until the last rank kills itself in a backward; the others write how they ended.

    torchrun --nproc-per-node 2 -m tests.gpu.killed <stage> <cuda, sim or cpu>

A line for each rank that is left: "rank 0 after 0.3 s: LostRankError: ...".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import fzero
from tests.failing import in_backward
from tests.gpu import training as t
from tests.rank_process import load_sim, share_gpu


def die() -> None:
    """End this process at once."""
    Path(sys.argv[3]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    stage, device = int(sys.argv[1]), sys.argv[2]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torchrun ends the others when a rank is gone; they are to end by themselves first.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if device == "cuda":
        share_gpu(rank, size)
    if device == "sim":
        load_sim()
    fzero.world()
    task = t.Task(stage=stage)
    engine = t.make_engine(task, t.make_model(task, device))
    try:
        for step in range(4):
            loss = t.loss_of(engine, t.make_batch(device, step=step, at=0, rank=rank))
            engine.backward(in_backward(loss, die) if step == 2 and rank == size - 1 else loss)
            engine.step()
        engine.full_state_dict()
    except Exception as error:
        seconds = time.time() - float(Path(sys.argv[3]).read_text())
        text = str(error).replace("\n", " | ")
        sys.stdout.write(f"rank {rank} after {seconds:.1f} s: {type(error).__name__}: {text}\n")
        sys.stdout.flush()
        os._exit(3)
    sys.stdout.write(f"rank {rank} went on\n")


if __name__ == "__main__":
    main()
