"""What runs in the processes of tests/ranks.py: join the group, then answer calls."""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import pkgutil
import signal
import sys
import tomllib
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def to_bytes(value: object) -> bytes:
    """Pickle a value with the memory of its tensors, which multiprocessing would share instead."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Undo `to_bytes`."""
    return torch.load(io.BytesIO(data), weights_only=False)


# NCCL below 2.30 refuses two ranks on one GPU of one host. NCCL_HOSTID, which differs by rank, lets
# each rank pass for a host of its own; they then talk over sockets, here over loopback only. From
# 2.30 on NCCL_MULTI_RANK_GPU_ENABLE allows it.
SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": LOOPBACK,
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}


def serve(
    rank: int, world_size: int, backend: str, folder: str, stack: Path, pipe: Connection
) -> None:
    """Join the process group, then answer calls until the pipe closes.

    Every answer is a tuple: ("returned", value) or ("raised", (type name, message), traceback).
    On SIGUSR1 the Python stack is written to the file `stack`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that runs the tests
    gc.freeze()  # what torch and its compiler made at import is never garbage
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        pipe.send_bytes(_answer(_join, rank, world_size, backend, folder))
        while True:
            try:
                request = pipe.recv_bytes()
            except EOFError:
                return
            pipe.send_bytes(_answer(_run, rank, world_size, request))


def ping(rank: int, world_size: int) -> float:
    """Return 2**world_size - 1 if every rank, and no stale message, takes part in a sum."""
    device = "cpu" if "cpu:" in dist.get_backend_config() else "cuda"
    x = torch.tensor(2.0**rank, device=device)
    dist.all_reduce(x)
    return x.item()


def pytest_filters() -> list[str]:
    """Return the warning filters of pyproject.toml, in pytest's notation."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    return options["ini_options"]["filterwarnings"]


def filter_warnings(lines: Sequence[str]) -> None:
    """Filter warnings as pytest would: lines of action:message:category:module, the last wins."""
    warnings.resetwarnings()
    for line in lines:
        parts: list[Any] = [*line.split(":"), "", "", ""]
        action, message, category, module = parts[:4]
        name = category if "." in category else f"builtins.{category or 'Warning'}"
        warnings.filterwarnings(action, message, pkgutil.resolve_name(name), module)


def _answer(do: Callable[..., Any], *args: Any) -> bytes:
    try:
        return to_bytes(("returned", do(*args)))
    except BaseException as error:
        seen = (type(error).__name__, str(error))
        return to_bytes(("raised", seen, traceback.format_exc()))


def share_gpu(rank: int, world_size: int) -> None:
    """Choose this rank's GPU and set what NCCL must find before its first call in this process."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if world_size > torch.cuda.device_count():
        os.environ.update(SHARED_GPU, NCCL_HOSTID=f"fzero-rank{rank}")


def load_sim() -> None:
    """Register the simulated device of tests/device in this process."""
    from tests.device.sim import load

    load()


def _join(rank: int, world_size: int, backend: str, folder: str) -> None:
    filter_warnings(pytest_filters())
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    store = dist.FileStore(f"{folder}/store", world_size)
    if "nccl" in backend:
        share_gpu(rank, world_size)
    if "sim" in backend:
        load_sim()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _run(rank: int, world_size: int, request: bytes) -> Any:
    body, args = from_bytes(request)
    torch.manual_seed(0)
    result = body(rank, world_size, *args)
    if not dist.is_initialized():
        raise RuntimeError(
            "the process group is gone.\n"
            "Usual cause: the body called destroy_process_group, or left a `with` that does.\n"
            "Fix: leave the group to run_ranks; a script under spawn_script may end its own."
        )
    return result
