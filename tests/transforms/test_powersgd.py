"""PowerSGD on the wire, by both drivers: the algorithm, its bytes, and what waits in its memory."""

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
from tests.transforms.codecs_tried import POWER
from tests.transforms.test_compress import BOTH, MESH
from tests.transforms.test_quantized import on_the_wire
from tests.transforms.wired import (
    LR,
    USED,
    Odd,
    by_engine,
    by_function,
    each_rank,
    fine,
    moved,
    noise,
    residual,
    total,
)

ENCODED = Compress(gradients=POWER)


def by_the_paper(steps: int, world_size: int) -> dict[str, Tensor]:
    """Algorithm 1 for each matrix of `Odd`, or its transposed: the sums of what is received."""
    q = {p: POWER.start(max(s), 2).double() for p, s in USED.items() if POWER.rank_of(tuple(s))}
    tall = {p for p in q if USED[p][0] > USED[p][1]}
    assert len(q) == 3 and tall == {"blocks.0.weight"}
    left = {(r, p): torch.zeros(s).double() for r in range(world_size) for p, s in USED.items()}
    sums = {p: torch.zeros(s).double() for p, s in USED.items()}
    for step in range(steps):
        for path in USED:
            ms = [left[r, path] + fine(r, step)[path] for r in range(world_size)]
            mean = torch.stack(ms).mean(0)
            if path in q:
                basis = torch.linalg.qr((mean.T if path in tall else mean) @ q[path]).Q
                onto = basis @ basis.T
                q[path] = (mean.T if path in tall else mean).T @ basis
                for r in range(world_size):
                    received = ms[r] @ onto if path in tall else onto @ ms[r]
                    left[r, path] = ms[r] - received
                mean = mean @ onto if path in tall else onto @ mean
            sums[path] += mean
    return sums


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (3, 2), (4, 3)])
def test_it_is_the_algorithm_of_the_paper(world_size: int, stage: int) -> None:
    wanted = by_the_paper(4, world_size)

    def body(rank: int) -> None:
        state = by_function(rank, fine, stage, 4, torch.float64, compress=ENCODED)
        found = moved(state)
        for path in USED:
            torch.testing.assert_close(found[path], wanted[path], rtol=0, atol=1e-9)

    each_rank(body, world_size)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_bytes_on_the_wire_are_those_that_the_codec_declares(stage: int) -> None:
    driver, world_size = BOTH[stage % 2], 2 + stage % 2
    _, sent, layout = on_the_wire(driver, world_size, stage, {"compress": ENCODED})
    shapes = [leaf.shape for leaf in layout.leaves if leaf.path in USED]
    shapes += [leaf.shape for leaf in layout.leaves if leaf.path == "unused" and stage < 3]
    whole = sum(map(POWER.wire_bytes_of, shapes))
    assert sent["all_reduce"] == pytest.approx(2 * whole * (world_size - 1) / world_size, rel=0.01)
    assert not sent["all_to_all"] and not sent["reduce_scatter"]
    plain = sum(4 * shape.numel() for shape in map(torch.Size, shapes))
    assert whole < plain / 2.5


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_that_raises_leaves_no_trace(stage: int) -> None:
    """Though some of its buckets are reduced by then, on all ranks."""

    def body(rank: int) -> list[list[Tensor]]:
        found = []
        for breaks in (False, True):
            module = Odd()
            learns = [p for p in module.parameters() if p.requires_grad]
            sgd = torch.optim.SGD(learns, LR)
            engine = Engine(module, sgd, stage=stage, compress=ENCODED, bucket_bytes=64)
            for step in range(3):
                if breaks and step == 1:
                    x = torch.ones((), requires_grad=True)
                    x.register_hook(lambda _: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        (engine(noise(rank, 7)) * x.clone()).backward()
                engine(noise(rank, step)).backward()
                engine.step()
            state = engine.state
            found.append([*state.params.flats, *memory_flats(state)])
        return found

    for mine, theirs in zip(*each_rank(body, 2), strict=True):
        assert torch.equal(mine, theirs)


def test_what_ranks_differ_by_does_not_add_up() -> None:
    """Each rank has its own constant gradient: what is left of it stays a few times of its size."""
    left = []
    for steps in (10, 40):

        def body(rank: int, steps: int = steps) -> Tensor:
            state = by_function(rank, lambda r, _: noise(r, 0), 1, steps, compress=ENCODED)
            return memory_flats(state)[0].abs().max()

        left.append(float(each_rank(body, 2).max()))
    assert left[1] < 1.5 * left[0]


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


def weights_of(rank: int, world_size: int = 2) -> Tensor:
    states = [by_engine(rank, noise, stage, 3, compress=ENCODED) for stage in (0, 3)]
    return torch.cat([x.flatten() for s in states for x in (*s.params.flats, *memory_flats(s))])


@pytest.mark.xdist_group("gloo")
def test_two_gloo_ranks_have_the_bits_of_virtual_ones() -> None:
    """Two: gloo sums more of them in another order."""
    wanted = each_rank(weights_of, 2)
    for rank, found in enumerate(run_ranks(weights_of, 2)):
        assert torch.equal(found, wanted[rank])


def test_small_memories_keep_their_dtype() -> None:
    wanted = total(noise, 2, 3)
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.int8, 1 / 127)):
        compress = Compress(gradients=codecs.powersgd(rank=2, memory=dtype))

        def body(rank: int, compress: Any = compress, dtype: Any = dtype) -> Tensor:
            state = by_engine(rank, noise, 2, 3, compress=compress)
            kept = memory_flats(state)[: len(state.setup.layout.trainable)]
            assert {flat.dtype for flat in kept} == {dtype}
            found, lost = moved(state), residual(state)
            off = [(found[p] + lost[p] - wanted[p]).abs().max() for p in USED]
            return torch.stack(off).max()

        assert float(each_rank(body, 2).max()) < 3 * 8 * unit  # of three updates, of |e| < 8
