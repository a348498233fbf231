"""PowerSGD where people use it: processes, a model, what it is refused with, plan, certify."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import Compress, codecs
from fzero.adapter import Engine
from fzero.errors import LayoutError
from fzero.machine.compress import memory_flats
from tests.ranks import run_ranks
from tests.transforms.test_compress import MESH
from tests.transforms.wired import (
    Odd,
    by_engine,
    each_rank,
    noise,
)

POWER = codecs.powersgd(rank=2)
ENCODED = Compress(gradients=POWER)


def weights_of(rank: int, world_size: int = 2) -> Tensor:
    states = [
        by_engine(rank, noise, 0, 3, compress=ENCODED),
        by_engine(rank, noise, 3, 3, compress=ENCODED),
    ]
    flats = [x for s in states for x in (*s.params.flats, *memory_flats(s))]
    return torch.cat([flat.flatten() for flat in flats])


@pytest.mark.xdist_group("gloo")
def test_gloo_ranks_have_the_bits_of_virtual_ones() -> None:
    wanted = each_rank(weights_of, 2)
    for rank, found in enumerate(run_ranks(weights_of, 2)):
        assert torch.equal(found, wanted[rank])


def test_a_model_as_people_have_it_trains() -> None:
    """Tied weights, a convolution, fp16 with masters and a loss scale, what nobody uses."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
            self.head.weight = self.embed.weight
            self.scale = nn.Parameter(torch.ones(()))
            self.unused = nn.Linear(9, 9)
            self.frozen = nn.Parameter(torch.ones(20, 20), requires_grad=False)

        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            return self.head(self.embed(ids)) * self.scale + self.conv(x).mean()

    torch.manual_seed(0)
    model = Net().half()
    ids, x = torch.randint(0, 50, (2, 8)), torch.randn(2, 3, 9, 9).half()

    def body(rank: int) -> Tensor:
        mine = copy.deepcopy(model)
        learns = [p for p in mine.parameters() if p.requires_grad]
        engine = Engine(
            mine, torch.optim.AdamW(learns, 1e-2), stage=3, compress=ENCODED, loss_scale="dynamic"
        )
        losses = []
        for _ in range(60):
            out = engine(ids[rank], x)
            loss = nn.functional.cross_entropy(out.float().flatten(0, -2), ids[rank].flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    losses = each_rank(body, 2).mean(0)
    assert losses[-5:].mean() < losses[:5].mean() / 2


def test_what_it_does_not_go_with_is_refused() -> None:
    def body(rank: int) -> None:
        replicas = Compress(gradients=POWER, over="replicas")
        for call in (
            lambda: Engine(Odd(), None, stage=2, compress=replicas, **MESH),
            lambda: Engine(
                Odd(), None, stage=2, compress=replicas, local=fzero.Local(every=2), **MESH
            ),
            lambda: Engine(Odd(), None, stage=3, compress=Compress(parameters=POWER)),
        ):
            with pytest.raises(LayoutError, match="powersgd"):
                call()

    each_rank(body, 4)


def test_plan_counts_the_residual_of_each_rank() -> None:
    model = nn.Linear(100, 100)
    plain, found = (
        fzero.plan(model, torch.ones(4, 100), world=8, stage=3, compress=compress)
        for compress in (None, ENCODED)
    )
    numel = sum(8 * group.shard_numel for group in found.setups[0].layout.groups)
    assert found.bytes["window"] == 4 * (numel + 2 * 100)  # the residual, and the start
    sent = 2 * (POWER.wire_bytes_of((100, 100)) + POWER.wire_bytes_of((100,))) * 7 // 8
    assert sent == {one.op: one.wire_bytes for one in found.traffic}["all_reduce"]
    assert "window" not in {kind for kind, n in plain.bytes.items() if n}


def test_certify_takes_it() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()

    few: Any = {"precisions": "fp32", "worlds": 2, "micro_batches": 2, "windows": "each"}
    few |= {"offload": "none", "drivers": "step", "clipping": "off", "buckets": "default"}
    few |= {"loss_scales": "1", "ragged": "off"}
    batches = [torch.randn(4, 6) for _ in range(16)]
    report = fzero.certify(
        nn.Linear(6, 5), loss, batches, wires=(codecs.powersgd(rank=1),), stages=(0, 2), **few
    )
    assert report, report
