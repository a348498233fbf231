"""Codecs on the wire, by both drivers: their bytes, their sums, their memories, at every place."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fzero
from fzero import Compress, codecs
from fzero.machine.codecs import Codec
from fzero.machine.compress import memories_of, memory_flats, start_slots
from tests.covering import covered
from tests.ranks import run_ranks
from tests.transforms.codecs_tried import EVERY, POWER, REMEMBERING, Signs, each_codec
from tests.transforms.test_quantized import on_the_wire, paths
from tests.transforms.test_residual import overflowing
from tests.transforms.wired import (
    INT8,
    USED,
    Batch,
    by_engine,
    by_function,
    each_rank,
    fine,
    moved,
    noise,
    residual,
    total,
    with_gradients,
)

BOTH = [by_engine, by_function]
FLAT: dict[str, Any] = {}
MESH: dict[str, Any] = {"mesh": (2, 2)}
PARTS: dict[str, Any] = {**MESH, "optimizer_over": "all"}
PLACES: list[tuple[int, int, dict[str, Any], Any]] = [
    *((2, stage, FLAT, "all") for stage in range(4)),
    (4, 0, MESH, "all"),
    (4, 2, MESH, "all"),
    (4, 3, MESH, "replicas"),
    (4, 3, PARTS, "all"),
    (4, 1, PARTS, "replicas"),
]
"""(ranks, stage, options, over which ranks gradients are encoded)."""


@each_codec
def test_the_bytes_on_the_wire_are_those_that_the_codec_declares(codec: Codec) -> None:
    options = {"compress": Compress(gradients=codec)}
    for stage in range(4):
        driver, world_size = BOTH[stage % 2], 2 + stage % 2
        _, sent, layout = on_the_wire(driver, world_size, stage, options)
        used = [i for i in layout.trainable if stage < 3 or "unused" not in paths(layout, i)]
        shards = [layout.groups[i].shard_numel for i in used]
        parts = sum(map(codec.wire_bytes, shards)) * (world_size - 1)  # a rank's, to the others
        whole = sum(codec.wire_bytes(world_size * n) for n in shards)
        if not codec.linear:
            wanted = {"all_to_all": parts, "all_gather": 0 if stage else parts}
        elif stage:
            wanted = {"reduce_scatter": parts}
        else:
            wanted = {"all_reduce": 2 * whole * (world_size - 1) / world_size}
        for op in ("all_to_all", "reduce_scatter", "all_reduce"):
            assert abs(sent[op] - wanted.get(op, 0)) <= wanted.get(op, 0) / 100, (stage, op)
        if not stage:
            assert sent["all_gather"] == wanted.get("all_gather", 0)


def whole_numbers(rank: int, step: int) -> Batch:
    source = torch.Generator().manual_seed(10 * step + rank)
    return {p: torch.randint(-20, 21, s, generator=source).float() for p, s in USED.items()}


@covered(codec=[*REMEMBERING, POWER], place=PLACES, driver=BOTH)
def test_nothing_is_lost_and_all_ranks_have_the_same(codec: Any, place: Any, driver: Any) -> None:
    """Bit for bit where what is received has few bits, as blocks see to."""
    world_size, stage, options, over = place
    exact = codec is not POWER and not isinstance(codec, Signs)  # whose mean is any number
    over = "all" if codec is POWER else over
    data = whole_numbers if exact else fine
    wanted = total(data, world_size, 3)
    compress = Compress(gradients=codec, over=over)

    def body(rank: int) -> list[Tensor]:
        dtype = torch.float32 if exact else torch.float64
        state = driver(rank, data, stage, 3, dtype, compress=compress, **options)
        found, lost = moved(state), residual(state)
        for path in USED:
            bound = 0.0 if exact else 1e-12
            torch.testing.assert_close(found[path] + lost[path], wanted[path], rtol=0, atol=bound)
        assert any(x.any() for x in lost.values())
        if codec is POWER:  # these two are no matrices
            assert not lost["gain"].any() and not lost["blocks.1.bias"].any()
        starts = [q for _, q in start_slots(state)]
        return [*starts, *(x for _, x in sorted(fzero.full_params(state).items()))]

    for values in each_rank(body, world_size):
        assert all(torch.equal(values[0], x) for x in values)


@covered(codec=[*EVERY, POWER], place=PLACES)
def test_both_drivers_hold_the_same_bits(codec: Any, place: Any) -> None:
    world_size, stage, options, over = place
    if isinstance(codec, Signs):  # which gives zeros, that a step steps, a sign
        codec = INT8
    compress = Compress(gradients=codec, over="all" if codec is POWER else over)

    def body(rank: int) -> None:
        mine, theirs = (
            driver(rank, noise, stage, 2, compress=compress, **options) for driver in BOTH
        )
        flats = [[*s.params.flats, *memory_flats(s)] for s in (mine, theirs)]
        for x, y in zip(*flats, strict=True):
            assert torch.equal(x, y)

    each_rank(body, world_size)


def test_padding_stays_zero_whatever_a_codec_makes_of_zeros() -> None:
    """Else a norm would count it, and a checkpoint, which has none of it, would lose it."""

    def body(rank: int) -> None:
        for stage, options in ((0, FLAT), (2, FLAT), (3, MESH)):
            compress = Compress(gradients=Signs(memory=True))
            state = with_gradients(by_function, rank, noise, stage, compress=compress, **options)
            squares = [x.double().square().sum() for x in leaves(fzero.full_gradients(state))]
            norm = torch.stack(squares).sum().sqrt()
            torch.testing.assert_close(fzero.global_norm(state).double(), norm, rtol=1e-6, atol=0)

    each_rank(body, 4)


def leaves(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-9), (torch.int8, 1 / 254)])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_small_memory_loses_its_rounding_and_no_more(
    dtype: torch.dtype, unit: float, stage: int
) -> None:
    wanted = total(noise, 2, 4)
    compress = Compress(gradients=codecs.int8(memory=dtype))

    def body(rank: int) -> None:
        state = by_engine(rank, noise, stage, 4, compress=compress)
        assert {flat.dtype for flat in memory_flats(state)} == {dtype}
        elements = sum(memory.numel for memory in memories_of(state.setup))
        held = fzero.state_bytes(state)["window"]
        assert dtype.itemsize <= held / elements < 1.05 * dtype.itemsize
        found, lost = moved(state), residual(state)
        for path in USED:
            left = (found[path] + lost[path] - wanted[path]).abs().max()
            step = 5 / 127 / 2  # half of one, of |g| < 5: what a memory of it holds
            assert left <= 4 * unit * step * (1 if stage else 3)  # of each update

    def skips(rank: int) -> None:
        scale = fzero.DynamicScale(init_scale=4.0, growth_interval=1)
        mine = by_function(rank, overflowing, stage, 3, loss_scale=scale, compress=compress)
        theirs = by_function(
            rank, lambda r, step: overflowing(r, 2 * step), stage, 2, compress=compress
        )
        for x, y in zip(memory_flats(mine), memory_flats(theirs), strict=True):
            assert torch.equal(x, y) and x.any()

    each_rank(skips, 2)

    each_rank(body, 2)


def test_between_replicas_alone_is_what_crosses_encoded() -> None:
    def body(rank: int) -> None:
        compress = Compress(gradients=INT8, over="replicas")
        state = by_function(rank, noise, 2, 1, compress=compress, **MESH)
        numel = sum(group.shard_numel for group in state.setup.layout.groups if group.trainable)
        held = fzero.state_bytes(state)["window"]
        assert held == 4 * (numel + numel // 2)  # of a shard, and of half of it on its way back

    with fzero.count_collectives() as log:
        each_rank(body, 4)
    dtypes = {
        (e.op, e.axis): e.dtype for e in log.of(0) if e.op in ("reduce_scatter", "all_to_all")
    }
    assert set(dtypes.values()) == {torch.float32, torch.int8}
    assert [op for (op, _), dtype in dtypes.items() if dtype is torch.int8] == ["all_to_all"]


@pytest.mark.xdist_group("gloo")
def test_gloo_ranks_have_the_bits_of_virtual_ones() -> None:
    wanted = each_rank(all_places, 4)
    for rank, found in enumerate(run_ranks(on_gloo, 4)):
        assert torch.equal(found, wanted[rank])


def all_places(rank: int) -> Tensor:
    tried = [
        (0, FLAT, Compress(gradients=codecs.fp8())),
        (0, FLAT, Compress(gradients=codecs.bf16())),
        (2, MESH, Compress(gradients=codecs.int4())),
        (3, MESH, Compress(gradients=INT8, parameters=codecs.fp8(), over="replicas")),
        (1, PARTS, Compress(gradients=Signs(memory=True))),
    ]
    states = [
        by_engine(rank, noise, stage, 2, compress=compress, **options)
        for stage, options, compress in tried
    ]
    flats = [x for s in states for x in (*s.params.flats, *memory_flats(s))]
    return torch.cat([flat.flatten() for flat in flats])


def on_gloo(rank: int, world_size: int) -> Tensor:
    return all_places(rank)


def test_weights_go_with_codecs_that_have_no_memory() -> None:
    """Token means of other sizes, exact in bf16."""

    def step_fn(state: Any, weight: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p: (p["w"] * 8).sum(), state, weight=weight)()
        return state, fzero.full_gradients(state)["w"]

    for codec in (codecs.bf16(), codecs.int8(memory=False)):
        for stage in (0, 2, 3):
            step = fzero.shard(fzero.compress(step_fn, gradients=codec), stage=stage)
            ranks = fzero.simulate(step, world_size=2)
            state = ranks.init({"w": torch.zeros(5)}, fzero.optim.sgd(1.0))
            _, found = ranks(state, torch.tensor([1.0, 3.0]))
            assert torch.equal(found, torch.full((2, 5), 8.0))


def test_certify_takes_a_codec() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()

    model = torch.nn.Linear(6, 3)
    few: Any = {"precisions": "fp32", "worlds": 2, "micro_batches": 2, "windows": "each"}
    few |= {
        "offload": "none",
        "drivers": "step",
        "clipping": "off",
        "buckets": "default",
        "loss_scales": "1",
        "ragged": "off",
        "rules": "given",
    }
    batches = [torch.randn(4, 6) for _ in range(16)]
    for codec in (INT8, codecs.stochastic(), codecs.powersgd(rank=1)):
        report = fzero.certify(model, loss, batches, wires=(codec,), **few)
        assert report, report
