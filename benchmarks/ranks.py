"""Start W processes on this machine and time candidates in turn, slowest rank first.

Shared by `bench_step.py` and `collectives.py`. Everything is timed the same way: in each round
every candidate runs once, in an order that rotates from round to round, after a barrier. One
number per round and candidate is kept, that of the slowest rank, since that is the one a
training job waits for. Candidates that are compared have therefore seen the same machine.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(minutes=5)

# NCCL below 2.30 refuses two ranks on one GPU of one host. NCCL_HOSTID, which differs by rank, lets
# each rank pass for a host of its own; they then talk over loopback sockets. From 2.30 on
# NCCL_MULTI_RANK_GPU_ENABLE allows it. (tests/rank_process.py sets the same.)
_SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}


def set_environment(world_size: int) -> None:
    """Set what the child processes must find in their environment before torch is imported.

    Args:
        world_size: number of ranks that share this machine.

    One thread per rank, or W ranks fight for the cores; loopback only, so that gloo does not
    pick an address it cannot reach; LOCAL_SIZE is where DeepSpeed's CPU accelerator looks for
    the number of its devices. Memory that is freed stays in the heap, so that page faults do
    not depend on which contestant has once freed a large block: see docs/performance.md.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_SIZE"] = str(world_size)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    os.environ["WORLD_SIZE"] = str(world_size)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo") -> Any:
    """Run `fn(*args)` on `world_size` fresh processes that share a process group.

    With nccl, ranks share a GPU where there are more of them than GPUs.

    Args:
        fn: a module-level function (it is pickled for the spawned processes).
        world_size: number of processes.
        *args: picklable arguments of `fn`, the same for all ranks.
        backend: torch.distributed backend: gloo, nccl, or those of the simulated device.

    Returns:
        What `fn` returned on rank 0.

    Raises:
        torch.multiprocessing.ProcessRaisedException: the first error of any rank.
    """
    (result,) = run_groups(fn, world_size, [args], backend=backend)
    return result


def run_groups(
    fn: Callable[..., Any], world_size: int, each: Sequence[Any], *, backend: str = "gloo"
) -> list[Any]:
    """Run `fn(*args)` for each of several arguments at once, each on processes of its own.

    Returns:
        What `fn` returned on rank 0 of each group of processes.

    Raises:
        torch.multiprocessing.ProcessRaisedException: the first error of any rank; all others end.
    """
    set_environment(world_size)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(at) for at in range(len(each))]
        groups: list[Any] = []
        try:
            for path, args in zip(paths, each, strict=True):
                path.mkdir()
                given = world_size, backend, str(path), fn, args
                groups.append(mp.spawn(_entry, given, nprocs=world_size, join=False))
            while not all([group.join(timeout=0.2) for group in groups]):
                pass
        finally:
            for process in (one for group in groups for one in group.processes):
                process.kill()
        return [pickle.loads((path / "result").read_bytes()) for path in paths]


def _entry(
    rank: int, world_size: int, backend: str, folder: str, fn: Callable[..., Any], args: Any
) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if world_size > torch.cuda.device_count():
            os.environ.update(_SHARED_GPU, NCCL_HOSTID=f"fzero-rank{rank}")
    if "sim" in backend:
        load_sim()
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    result = fn(*args)
    if rank == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def load_sim() -> None:
    """Register the simulated device in this process; the root of the repository is in the path."""
    from tests.device.sim import load

    load()


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int,
    device: torch.device | None = None,
) -> dict[str, list[float]]:
    """Time every candidate once per round, in rotating order.

    Args:
        candidates: name -> what to time; the same names in the same order on every rank.
        rounds: timed rounds.
        warmup: rounds before those, not kept.
        device: where the work runs; a CUDA device is synchronized before the clock is read.

    Returns:
        name -> the slowest rank's time of each round, in milliseconds; equal on all ranks.
    """
    single = {name: (candidate,) for name, candidate in candidates.items()}
    times_ms = interleave_phases(single, rounds=rounds, warmup=warmup, device=device)
    return {name: phases[0] for name, phases in times_ms.items()}


def interleave_phases(
    candidates: Mapping[str, Sequence[Callable[[], object]]],
    *,
    rounds: int,
    warmup: int,
    device: torch.device | None = None,
) -> dict[str, list[list[float]]]:
    """Like `interleave`, for candidates of several phases that are timed one after another.

    Returns:
        name -> for each phase, the slowest rank's time of each round, in milliseconds.
    """
    device = device or torch.device("cpu")
    names = list(candidates)
    count = max(map(len, candidates.values()))
    times_ms = torch.zeros(len(names), count, rounds, dtype=torch.float64, device=device)
    for step in range(warmup + rounds):
        for i in range(len(names)):
            at = (i + step) % len(names)
            for phase, run in enumerate(candidates[names[at]]):
                elapsed_ms = _time_once(run, device)
                if step >= warmup:
                    times_ms[at, phase, step - warmup] = elapsed_ms
    dist.all_reduce(times_ms, op=dist.ReduceOp.MAX)
    return dict(zip(names, times_ms.tolist(), strict=True))


def _time_once(fn: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    _wait_for(device)
    start = time.perf_counter()
    fn()
    _wait_for(device)
    return (time.perf_counter() - start) * 1e3


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
