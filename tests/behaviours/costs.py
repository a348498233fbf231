"""What a step costs: collectives, bytes on the wire, bytes held, full parameters alive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import fzero
import fzero.machine.unshard
from fzero.collectives import InFlight, start_gather

LAYERS, NUMEL = 4, 24  # NUMEL divides by 1, 2, 3 and 4: no padding
P_BYTES = LAYERS * NUMEL * 8
STAGE_2_COUNTS = {"reduce_scatter": 1, "all_gather": 1}


def chain_params() -> dict[str, Any]:
    """Layers of equal size, each a unit; fp64 ones."""
    return {"layers": [{"w": torch.ones(NUMEL, dtype=torch.float64)} for _ in range(LAYERS)]}


def chain_loss(params: Any, x: Tensor) -> Tensor:
    """Each layer is used once in forward, and its values are read once more in backward."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in params["layers"]:
        total = total + x * (layer["w"] ** 2).sum()
    return total


def steps_of(n: int, *, coalesced: bool = True) -> Callable[..., Any]:
    """A step of `n` backward passes and one update."""

    def step(state: Any, x: Tensor) -> tuple[Any, None]:
        for _ in range(n):
            state, _ = fzero.grad_and_reduce(chain_loss, state)(x)
        return fzero.apply_gradients(state), None

    return fzero.coalesce(step) if coalesced else step


def cost_of(
    step: Callable[..., Any],
    *,
    stage: int,
    ranks: int,
    params: Any = None,
    x: Tensor | None = None,
    error: type[Exception] | None = None,
    **options: Any,
) -> fzero.CollectiveLog:
    """The log of one step on virtual ranks; `error` is what it must raise."""
    sharded = fzero.simulate(fzero.shard(step, stage=stage, **options), world_size=ranks)
    state = sharded.init(params or chain_params(), fzero.optim.sgd(2.0**-8))
    x = torch.ones(ranks, dtype=torch.float64) if x is None else x
    with fzero.count_collectives() as log, pytest.raises(error) if error else nullcontext():
        sharded(state, x)
    return log


def counts(log: fzero.CollectiveLog, rank: int | None = None) -> dict[str, int]:
    """How many of each kind carried numbers: without the eight-byte agreements of stage 3."""
    return {op: count for op, count in log.counts(rank).items() if op != "agree"}


def payload_bytes(log: fzero.CollectiveLog, rank: int | None = None) -> int:
    """The bytes that one rank sends for them."""
    return log.wire_bytes(rank, ops=("all_gather", "reduce_scatter", "all_reduce", "broadcast"))


class Probe:
    """The full parameters that are alive, in bytes, at each gather, for each rank."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int, StorageWeakRef]] = []
        self.alive_at: dict[int, list[int]] = {}

    def saw(self, rank: int, full: Tensor) -> None:
        """Count a new buffer, and whatever is left of the earlier ones."""
        storage = full.untyped_storage()
        self._seen.append((rank, storage.nbytes(), StorageWeakRef(storage)))
        deadline = time.monotonic() + 0.1  # a thread of gloo may be a moment late to let go
        while self.alive(rank) > self.peak(rank) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.alive_at.setdefault(rank, []).append(self.alive(rank))

    def alive(self, rank: int) -> int:
        """Bytes of gathered buffers of this rank that something still holds."""
        return sum(size for r, size, ref in self._seen if r == rank and not ref.expired())

    def peak(self, rank: int) -> int:
        """The most that was alive at once."""
        return max(self.alive_at.get(rank, [0]))


@contextmanager
def probe_gathers() -> Iterator[Probe]:
    """Watch what stage 3 gathers while the block runs. By storage: a view keeps it alive too."""
    probe = Probe()

    def watched(shards: Any, axis: fzero.Axis, **options: Any) -> InFlight:
        flight = start_gather(shards, axis, **options)
        for full in flight.wait():
            probe.saw(axis.rank, full)
        return flight

    with mock.patch.object(fzero.machine.unshard, "start_gather", watched):
        yield probe
