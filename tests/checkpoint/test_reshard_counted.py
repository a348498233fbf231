"""What `fzero.reshard` sends, and holds: counted from outside."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero.state import NAMESPACE
from tests.checkpoint.states import ADAM, make
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks

LAYERS, NUMEL = 6, 30_000
UNIT, MODEL = 4 * NUMEL, 4 * LAYERS * NUMEL
COPIES = 3  # parameters, and two moments
# Stage before, stage after, whether the mesh changes.
MOVES = ((0, 3, True), (3, 0, False), (3, 0, True), (1, 3, False), (3, 1, True))


def params() -> dict[str, Any]:
    return {"layers": [{"w": torch.full((NUMEL,), float(i))} for i in range(LAYERS)]}


def held_bytes(state: Any) -> int:
    leaves = optree.tree_leaves(state, namespace=NAMESPACE)
    return sum(x.untyped_storage().nbytes() for x in leaves if isinstance(x, Tensor))


def _move(rank: int, size: int) -> None:
    two = DeviceMesh("cpu", [0, 1])
    for before, after, changes in MOVES:
        for old, new in ((None, two), (two, None)) if changes else ((None, None),):
            is_old, is_new = old is None or rank < 2, new is None or rank < 2
            state = fzero.init(params(), ADAM, stage=before, mesh=old) if is_old else None
            new_ranks = 3 if new is None else 2
            part = sum(MODEL / (new_ranks if after >= least else 1) for least in (3, 1, 1)) * is_new
            live = LiveBytes()
            what = live.at_most(part + UNIT + 4096, f"{before, after, old, new}")
            with fzero.count_collectives() as log, live, what:
                made: Any = fzero.reshard(state, stage=after, mesh=new or fzero.world())
            assert (held_bytes(made) if is_new else 0) >= part
            counts = log.counts()
            counts.pop("agree", None)
            assert set(counts) <= {"all_to_all"}
            assert counts.get("all_to_all", 0) <= COPIES * LAYERS + 1
            del made, state


@pytest.mark.xdist_group("gloo")
def test_a_rank_holds_one_unit_beyond_its_parts_and_moves_by_all_to_alls_alone() -> None:
    run_ranks(_move, 3, timeout_s=120)


@pytest.mark.parametrize(
    ("ranks", "stage", "to", "size", "crossing"),
    [
        (3, 0, 3, 3, 0),  # all is there
        (3, 2, 1, 3, 0),
        (3, 1, 3, 3, 0),  # the same shards of each leaf, which is a bucket
        (3, 3, 0, 3, 3 * COPIES * 2 / 3),  # each of 3 ranks lacks two thirds
        (3, 3, 1, 3, 3 * 2 / 3),  # of the parameters alone
        (2, 0, 0, 5, 3 * COPIES),  # three ranks come
        (3, 3, 3, 1, COPIES * 2 / 3),
        (1, 3, 3, 3, COPIES * 2 / 3),
    ],
)
def test_what_crosses_ranks_is_what_they_lack(
    ranks: int, stage: int, to: int, size: int, crossing: float
) -> None:
    state = make(params(), stage=stage, ranks=ranks)
    with fzero.count_collectives() as log:
        fzero.reshard(state, stage=to, mesh=(1, size))
    sent = [event for event in log.events if event.op == "all_to_all"]
    assert len(sent) == len(log.events)
    assert sum(event.wire_bytes for event in sent) == crossing * MODEL
    batches = log.counts().get("all_to_all", 0)
    assert (batches > 0) == (crossing > 0) and batches <= LAYERS * COPIES
    assert all(event.wire_bytes <= max(ranks, size) * UNIT for event in sent)
