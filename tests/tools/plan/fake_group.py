"""Rank 3 of 1,024 processes whose group sends nothing: prints what it counts, as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fzero
import fzero.ranks.mesh
from tests.tools.plan.models import Case

RANK, WORLD = 3, 1024
CASES = [
    Case(stage=0),
    Case(stage=2, around={"micro_batches": 2, "coalesced": True}),
    Case(stage=3, around={"micro_batches": 2, "max_norm": 1.0}),
]


def counted(case: Case) -> Any:
    """What a step of real tensors sends over the fake group."""
    step, params = case.step(lambda state: None)
    state, batch = step.init(params, case.optimizer()), case.batch()
    for _ in range(2):
        with fzero.count_collectives() as log:
            state, _ = step(state, batch)
    return log.counts(), log.wire_bytes()


if __name__ == "__main__":
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    # The group on which ranks compare what they begin would be one of gloo, with 1,024 processes.
    fzero.ranks.mesh.copy_of = lambda group, backend=None: group
    print(json.dumps([counted(case) for case in CASES]))
