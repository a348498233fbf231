"""A rank of the tests as a launcher would have started it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

OFFLINE = {"HF_HUB_OFFLINE": "1", "CI": "1"}  # CI: trl sends no telemetry


@contextmanager
def started(rank: int, world_size: int) -> Iterator[None]:
    """Set what torchrun sets; libraries then take the process group that is there."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "GROUP_RANK": 0}
    told |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": 1}
    ranks = {name: str(value) for name, value in told.items()} if world_size > 1 else {}
    with mock.patch.dict(os.environ, {**OFFLINE, "MASTER_ADDR": "127.0.0.1", **ranks}):
        yield


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """`started`, for accelerate, which keeps what it has seen."""
    from accelerate.state import AcceleratorState

    with started(rank, world_size):
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
