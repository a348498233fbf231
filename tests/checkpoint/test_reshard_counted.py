"""What `fzero.reshard` sends, and holds: counted from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero.state import NAMESPACE
from tests.checkpoint.states import ADAM
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks

LAYERS, NUMEL = 6, 30_000
UNIT, MODEL = 4 * NUMEL, 4 * LAYERS * NUMEL
COPIES = 3  # parameters, and two moments


def params() -> dict[str, Any]:
    return {"layers": [{"w": torch.full((NUMEL,), float(i))} for i in range(LAYERS)]}


def held_bytes(state: Any) -> int:
    leaves = optree.tree_leaves(state, namespace=NAMESPACE)
    return sum(x.untyped_storage().nbytes() for x in leaves if isinstance(x, Tensor))


def moves() -> Iterator[tuple[int, int, bool]]:
    """Yield (stage before, stage after, whether the mesh changes)."""
    for before, after in ((0, 3), (3, 0), (1, 3), (3, 1), (3, 3)):
        for changes in (False, True):
            yield before, after, changes


def _move(rank: int, size: int) -> None:
    two = DeviceMesh("cpu", [0, 1])
    for before, after, changes in moves():
        for old, new in ((None, two), (two, None)) if changes else ((None, None),):
            is_old, is_new = old is None or rank < 2, new is None or rank < 2
            state = fzero.init(params(), ADAM, stage=before, mesh=old) if is_old else None
            new_ranks = 3 if new is None else 2
            part = sum(MODEL / (new_ranks if after >= least else 1) for least in (3, 1, 1)) * is_new
            live = LiveBytes()
            what = live.at_most(part + 2 * UNIT + 4096, f"{before, after, old, new}")
            with fzero.count_collectives() as log, live, what:
                made: Any = fzero.reshard(state, stage=after, mesh=new or fzero.world())
            assert (held_bytes(made) if is_new else 0) >= part
            counts = log.counts()
            counts.pop("agree", None)
            assert set(counts) <= {"all_to_all"}
            assert counts.get("all_to_all", 0) <= COPIES * LAYERS + 1
            del made, state


def test_a_rank_holds_two_units_beyond_its_parts_and_moves_by_all_to_alls_alone() -> None:
    run_ranks(_move, 3, timeout_s=120)
