"""PowerSGD on the wire, by both drivers: the algorithm, its bytes, and what waits in its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import Compress, codecs
from fzero.adapter import Engine
from fzero.machine.compress import memory_flats, start_slots
from tests.covering import covered
from tests.transforms import test_residual as wrong
from tests.transforms.test_compress import BOTH, MESH, PARTS
from tests.transforms.test_quantized import on_the_wire
from tests.transforms.wired import (
    DRIVERS,
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
    with_gradients,
)

POWER = codecs.powersgd(rank=2)
ENCODED = Compress(gradients=POWER)
FLAT: dict[str, Any] = {}
PLACES: list[tuple[int, int, dict[str, Any]]] = [
    *((2, stage, FLAT) for stage in range(4)),
    (3, 2, {"bucket_bytes": 64}),
    (4, 0, MESH),
    (4, 3, MESH),
    (4, 1, PARTS),
]
"""(ranks, stage, options)."""


@covered(place=PLACES, driver=BOTH)
def test_nothing_is_lost_and_all_ranks_have_the_same(place: Any, driver: Any) -> None:
    world_size, stage, options = place
    wanted = total(fine, world_size, 3)

    def body(rank: int) -> list[Tensor]:
        state = driver(rank, fine, stage, 3, torch.float64, compress=ENCODED, **options)
        found, lost = moved(state), residual(state)
        for path in USED:
            torch.testing.assert_close(found[path] + lost[path], wanted[path], rtol=0, atol=1e-12)
        for path in ("wide", "blocks.0.weight", "blocks.1.weight"):
            assert lost[path].any()
        for path in ("gain", "blocks.1.bias"):  # no matrices
            assert not lost[path].any()
        starts = [q for _, q in start_slots(state)]
        return [*starts, *(x for _, x in sorted(fzero.full_params(state).items()))]

    for values in each_rank(body, world_size):
        assert all(torch.equal(values[0], x) for x in values)


@covered(place=PLACES)
def test_both_drivers_hold_the_same_bits(place: Any) -> None:
    world_size, stage, options = place

    def body(rank: int) -> None:
        mine, theirs = (
            driver(rank, noise, stage, 2, compress=ENCODED, **options) for driver in BOTH
        )
        flats = [[*s.params.flats, *memory_flats(s)] for s in (mine, theirs)]
        for x, y in zip(*flats, strict=True):
            assert torch.equal(x, y)

    each_rank(body, world_size)


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


@DRIVERS
@pytest.mark.parametrize("stage", [0, 3])
def test_a_skipped_update_leaves_no_trace(driver: Any, stage: int) -> None:
    """Not in the residual, and not in where factors start from."""

    def body(rank: int) -> None:
        scale = fzero.DynamicScale(init_scale=4.0, growth_interval=1)
        mine = driver(rank, wrong.overflowing, stage, 3, loss_scale=scale, compress=ENCODED)
        theirs = driver(
            rank,
            lambda r, step: wrong.overflowing(r, 2 * step),
            stage,
            2,
            loss_scale=scale,
            compress=ENCODED,
        )
        assert int(mine.step) == 2
        flats = [[*s.params.flats, *memory_flats(s)] for s in (mine, theirs)]
        for x, y in zip(*flats, strict=True):
            assert torch.equal(x, y) and x.isfinite().all()

    each_rank(body, 2)


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


def test_a_nan_stays_out_of_what_is_kept_and_is_seen_in_the_gradient() -> None:
    def bad(rank: int, step: int) -> Any:
        found = dict(noise(rank, step))
        if rank == 0:
            found["wide"] = torch.where(found["wide"] > 2, torch.nan, found["wide"])
        return found

    def body(rank: int) -> None:
        for driver in BOTH:
            state = with_gradients(driver, rank, bad, 2, compress=ENCODED)
            assert all(flat.isfinite().all() for flat in memory_flats(state))
            found = fzero.gradients(state)
            assert found["wide"].isnan().all() and found["blocks.1.bias"].isfinite().all()

    each_rank(body, 2)


@covered(train=[wrong.in_a_window, wrong.in_micro_batches, wrong.in_other_numbers], stage=[0, 2, 3])
def test_however_ranks_go_updates_lack_the_last_residual_and_nothing_else(
    train: Any, stage: int
) -> None:
    options = wrong.MICRO if train is wrong.in_micro_batches else {}

    def body(rank: int) -> None:
        module = Odd(torch.float64)
        sgd = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], LR)
        engine = Engine(module, sgd, stage=stage, compress=ENCODED, **options)
        given = train(engine, rank)
        found, left = moved(engine.state), residual(engine.state)
        for path in USED:
            wanted = torch.stack([fine(*one)[path] for one in given]).sum(0) / 2
            torch.testing.assert_close(found[path] + left[path], wanted, rtol=0, atol=1e-12)

    each_rank(body, 2)


def test_what_ranks_differ_by_does_not_add_up() -> None:
    """Each rank has its own constant gradient: what is left of it stays a few times of its size."""
    left = []
    for steps in (10, 40):

        def body(rank: int, steps: int = steps) -> Tensor:
            state = by_function(rank, lambda r, _: noise(r, 0), 1, steps, compress=ENCODED)
            return memory_flats(state)[0].abs().max()

        left.append(float(each_rank(body, 2).max()))
    assert left[1] < 1.5 * left[0]


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
