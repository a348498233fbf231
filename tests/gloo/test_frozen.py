"""An encoded base on real ranks: the bits of the decoded one, and bytes that cross."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero
from fzero.machine.codecs import Codec, nf4
from tests.adapter import test_frozen_encoded as by_engine
from tests.adapter.on_ranks import on_ranks
from tests.transforms import test_frozen as by_steps

pytestmark = pytest.mark.xdist_group("gloo")


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_train_as_on_the_decoded_base(rank: int, world_size: int, stage: int) -> None:
    def engine(given: Codec | None, frozen: Codec | None) -> dict[str, Any]:
        made = by_engine.engine_of(by_engine.model(given), stage, frozen)
        for t in range(2):
            by_engine.update(made, 10 * t + rank)
        found = by_engine.values(made)
        made.close()
        return found

    def steps(params: Any, frozen: Codec | None) -> dict[str, Any]:
        step: Any = fzero.shard(by_steps.step_fn, stage=stage, frozen=frozen)
        state = step.init(params, fzero.optim.adamw(1e-2))
        with fzero.count_collectives() as log:
            state, _ = step(state, torch.arange(rank, rank + 5))
        sent = {e.dtype for e in log.of(rank) if any(path.endswith(".w") for path in e.paths)}
        assert sent <= ({torch.uint8} if frozen else {torch.float32})
        assert bool(sent) == (stage == 3)
        return by_steps.params_of(state)

    pairs = [
        (engine(None, nf4()), engine(nf4(), None)),
        (steps(by_steps.base(), nf4()), steps(by_steps.decoded(nf4(), by_steps.base()), None)),
    ]
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        for path, x in ours.items():
            assert torch.equal(x, theirs[path]), path
