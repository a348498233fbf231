"""Sum or mean, the predivide factor and the dtypes of a reduction, by both drivers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero
from fzero import Compress
from fzero.adapter import Engine
from fzero.errors import LayoutError
from fzero.machine.codecs import cast
from tests.covering import covered
from tests.strategies import same
from tests.transforms.wired import (
    DRIVERS,
    GRADIENTS,
    USED,
    Batch,
    Odd,
    by_engine,
    by_function,
    each_rank,
    moved,
    signs,
    total,
    twelves,
    with_gradients,
)

STEPS = 2
BF16 = Compress(gradients=cast(torch.bfloat16))


@covered(driver=[by_engine, by_function], op=["mean", "sum"], world_size=[1, 2, 3])
def test_sums_and_means_are_exact_at_every_stage_with_every_factor(
    driver: Any, op: str, world_size: int
) -> None:
    wanted = total(twelves, world_size, STEPS, op=op)

    def body(rank: int) -> None:
        for stage, factor in ((0, 1.0), (0, 4.0), (1, 2.0), (2, 0.5), (3, 1.0), (3, 4.0)):
            options: Any = {"reduce_op": op, "gradient_predivide_factor": factor}
            found = moved(driver(rank, twelves, stage, STEPS, **options))
            for path in USED:
                assert torch.equal(found[path], wanted[path]), (stage, factor, path)

    each_rank(body, world_size)


def large(rank: int, step: int) -> Batch:
    return signs(40000.0)


@DRIVERS
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_factor_of_the_number_of_ranks_keeps_an_fp16_sum_from_overflowing(
    driver: Any, stage: int
) -> None:
    def body(rank: int) -> None:
        half: Any = {"compress": Compress(gradients=cast(torch.float16))}
        plain = moved(driver(rank, large, stage, 1, **half))
        divided = moved(driver(rank, large, stage, 1, **half, gradient_predivide_factor=2.0))
        for path in USED:
            assert plain[path].isinf().any() or path == "gain"  # whose gradient is 0
            assert torch.equal(divided[path], large(0, 0)[path])

    each_rank(body, 2)


def tiny(rank: int, step: int) -> Batch:
    return signs(2.0**-24)  # nothing smaller is a number in fp16


@DRIVERS
@pytest.mark.parametrize("stage", [0, 2])
def test_the_mean_loses_no_small_fp16_gradient(driver: Any, stage: int) -> None:
    def body(rank: int) -> None:
        half: Any = {"compress": Compress(gradients=cast(torch.float16))}
        found = fzero.gradients(with_gradients(driver, rank, tiny, stage, **half))
        for path in USED:
            assert torch.equal(found[path], tiny(0, 0)[path]), path

    each_rank(body, 2)


@DRIVERS
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_wire_has_the_communication_dtype_and_the_state_the_accumulation_dtype(
    driver: Any, stage: int
) -> None:
    options: Any = {"compress": BF16, "accumulate_dtype": torch.float64}

    def body(rank: int) -> None:
        state = with_gradients(driver, rank, twelves, stage, **options)
        assert {flat.dtype for flat in state.gradients.flats} == {torch.float64}

    with fzero.count_collectives() as log:
        each_rank(body, 2)
    op = "reduce_scatter" if stage else "all_reduce"
    assert {event.dtype for event in log.of(0) if event.op == op} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {"reduce_op": "sum", "accumulate_dtype": torch.bfloat16}),
        (1, {"gradient_predivide_factor": 3.0, "compress": BF16}),
        (2, {"reduce_op": "sum", "compress": BF16}),
        (3, {"gradient_predivide_factor": 3.0, "accumulate_dtype": torch.bfloat16}),
    ],
)
def test_both_drivers_hold_the_same_bits(options: dict[str, Any], stage: int) -> None:
    def body(rank: int) -> None:
        mine, theirs = (d(rank, twelves, stage, **options) for d in (by_engine, by_function))
        same([*mine.params.flats], [*theirs.params.flats])

    each_rank(body, 3)


def test_on_one_rank_nothing_is_rounded_for_the_wire() -> None:
    seventh = {path: value / 7 for path, value in signs(1.0).items()}
    options: Any = {"compress": BF16, "gradient_predivide_factor": 3.0}
    for driver in (by_engine, by_function):
        plain = driver(0, lambda rank, step: seventh, 2)
        others: list[dict[str, Any]] = [
            options,
            {"reduce_op": "sum"},
            GRADIENTS,
        ]
        for other in others:
            found = driver(0, lambda rank, step: seventh, 2, **other)
            same([*found.params.flats], [*plain.params.flats])
    state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=2, **options)
    state, _ = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(
        torch.tensor(1 / 7, requires_grad=True)  # by collectives that can be differentiated
    )
    assert torch.equal(fzero.gradients(state)["w"], torch.full((2,), 1 / 7))


REFUSED: list[tuple[int, dict[str, Any], str]] = [
    (2, {"reduce_op": "avg"}, "reduce_op='avg'"),
    (2, {"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0"),
    (2, {"gradient_predivide_factor": True}, "gradient_predivide_factor=True"),
    (2, {"gradient_predivide_factor": float("inf")}, "gradient_predivide_factor=inf"),
    (2, {"accumulate_dtype": torch.int8}, "accumulate_dtype=torch.int8"),
]


@pytest.mark.parametrize(("stage", "options", "seen"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_is_refused_by_both_drivers_by_name(
    stage: int, options: dict[str, Any], seen: str
) -> None:
    params, rule = {"w": torch.ones(2)}, fzero.optim.sgd(1.0)
    with pytest.raises(LayoutError, match="Fix: ") as by_init:
        fzero.init(params, rule, stage=stage, **options)
    with pytest.raises(LayoutError, match="Fix: ") as by_shard:
        fzero.shard(lambda state: (state, None), stage=stage, **options).init(params, rule)
    module = Odd()
    with pytest.raises(LayoutError, match="Fix: ") as by_the_engine:
        Engine(module, None, stage=stage, **options)
    for error in (by_init, by_shard, by_the_engine):
        assert str(error.value).startswith(seen)
    Engine(module, None, stage=stage).close()  # nothing was touched
