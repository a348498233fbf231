"""An encoded base on real ranks: the bits of the decoded one, and bytes that cross."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.machine.codecs import Codec, nf4
from tests.adapter import test_frozen_encoded as by_engine
from tests.adapter.on_ranks import on_ranks
from tests.live_bytes import LiveBytes
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


@on_ranks(2)
def test_a_gathered_unit_is_bytes_and_one_decoded_leaf(rank: int, world_size: int) -> None:
    width, layers = 256, 6
    draw = torch.Generator().manual_seed(0)
    params = {
        f"{i}": {
            "w": nn.Parameter(torch.randn(width, width, generator=draw), requires_grad=False),
            "v": nn.Parameter(torch.randn(width, width, generator=draw), requires_grad=False),
            "up": torch.zeros(2, width),
        }
        for i in range(layers)
    }
    one, between = width * width * 4, list[int]()

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in p.values():
            x = torch.tanh(x @ layer["w"] @ layer["v"] + x[:, :2] @ layer["up"])
        between.append(live.settled(before + one))
        return x.sum()

    state = fzero.init(
        params, fzero.optim.sgd(0.1), stage=3, frozen=nf4(), reshard_after_forward=False
    )
    with LiveBytes() as live:
        before = live.alive()
        with live.at_most(before + 6 * one, "one decoded leaf, and the bytes of all"):
            fzero.grad_and_reduce(loss, state)(torch.ones(2, width))
    whole = layers * 2 * nf4().wire_bytes(width * width)  # all units stay gathered: encoded
    assert whole < between[0] - before < whole + 3 * one
