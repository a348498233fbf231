"""A rank of the tests as a launcher would have started it, and losses that are compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

OFFLINE = {"HF_HUB_OFFLINE": "1", "CI": "1"}  # CI: trl sends no telemetry


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """Set what torchrun sets; accelerate then takes the process group that is there."""
    from accelerate.state import AcceleratorState

    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(world_size)}
    ranks = {name: str(value) for name, value in told.items()} if world_size > 1 else {}
    with mock.patch.dict(os.environ, {**OFFLINE, **(ranks and {**ranks, **address})}):
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def folder_of_all(path: Any) -> Path:
    """Return rank 0's `path` on every rank."""
    paths = [str(path)]
    dist.broadcast_object_list(paths)
    return Path(paths[0])


def close(found: list[Any], wanted: list[Any], tol: float = 1e-10) -> None:
    """Raise unless two lists of tuples of numbers agree."""
    mine, theirs = torch.tensor(found).double(), torch.tensor(wanted).double()
    torch.testing.assert_close(mine, theirs, rtol=tol, atol=tol)
