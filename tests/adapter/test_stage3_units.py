"""Points 13 to 17 at stage 3: what is gathered as one, what stays, what crosses ranks, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import Engine, LeafSpec
from fzero.collectives import count_collectives
from tests.adapter.nets import (
    Checkpointed,
    Experts,
    Foreign,
    Net,
    Shared,
    Tied,
    linear,
)
from tests.adapter.plain import Draw, check_program, engine_of
from tests.adapter.stage3 import (
    WIDE,
    Chain,
    live_numels,
    record_of,
    source_of,
    warned,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

LOCKSTEP = (False, True)
NO_LIMITS: dict[str, Any] = {}
TIGHT = {"prefetch_bucket_numel": 0, "max_live_parameters_numel": 0, "max_reuse_distance_numel": 0}
KEPT = {"persistence_threshold_numel": 9, "prefetch_bucket_numel": 20}


def back(e: Any, draw: Draw) -> None:
    e(draw(2, WIDE)).square().sum().backward()


def train(engine: Engine, rank: int, steps: range) -> None:
    for number in steps:
        back(engine, Draw(rank, number))
        engine.step()


class Sizes(Chain):
    """Units of 20, 20, 20, 20 and, by themselves, 4 and 1 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDE).double())
        self.shift = nn.Parameter(torch.zeros(1).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale) + self.shift.sum()


def persistence_body(rank: int, world_size: int) -> None:
    fits = 5 if world_size == 2 else 7  # the one of 4, padded, and no more
    cases = (
        ({}, set()),
        (
            {"persistence_threshold_numel": 6},  # the biases, beside weights that do not persist
            {"scale#0", "shift#1", "layers.0#3", "layers.1#5", "layers.2#7", "layers.3#9"},
        ),
        (
            {"persistence_threshold_numel": 6, "model_persistence_threshold_numel": fits},
            {"scale#0"},
        ),
        ({"persistence_threshold_numel": 10**6}, {*record_names(Sizes, rank)}),
    )
    for options, names in cases:
        engine = engine_of(Sizes, 3, **options)
        units = record_of(engine).units
        assert {units.names[u] for u in units.persistent} == names, f"{options}: {units}"
        small = sum(units.numels[u] for u in units.persistent)
        live = live_numels(engine)
        with count_collectives() as log:
            back(engine, Draw(rank, 0))  # the first step
        assert min(live) >= small, f"{options}: {live}"
        sizes = [event.numel for event in log.of() if event.op == "all_gather"]
        moving = {n for u, n in enumerate(units.numels) if u not in units.persistent}
        for numel in {units.numels[u] for u in units.persistent} - moving:
            count = sum(units.numels[u] == numel for u in units.persistent)
            assert sizes.count(numel) == count, f"{options}: {sizes}"  # each once
        assert sum(flat.numel() for flat in source_of(engine).flats) == small, options
        engine.step()  # stale: they come again with the next forward
        assert not source_of(engine).flats, options
        engine.close()
        check_program(rank, world_size, Sizes, back, stages=(3,), steps=3, **options)


def record_names(make: Any, rank: int) -> tuple[str, ...]:
    engine = engine_of(make, 3)
    names = record_of(engine).units.names
    engine.close()
    return names


@pytest.mark.parametrize("world_size", [2, 3])
def test_small_parameters_stay_gathered_from_the_first_step_until_they_are_updated(
    world_size: int,
) -> None:
    run_ranks(persistence_body, world_size)


def bytes_body(rank: int, world_size: int) -> None:
    for lockstep in LOCKSTEP:
        for limits in (NO_LIMITS, TIGHT):
            engine = engine_of(Chain, 3, lockstep=lockstep, **limits)
            numels = record_of(engine).units.numels
            one_way = sum(8 * n * (world_size - 1) // world_size for n in numels)
            last = 8 * numels[0] * (world_size - 1) // world_size
            for number in range(4):
                label = f"W={world_size}, lockstep {lockstep}, {limits}, step {number}"
                with count_collectives() as log:
                    back(engine, Draw(rank, number))
                counts = log.counts()
                # The last layer is in use from forward to backward; the first is not read again.
                again = 2 if limits is TIGHT or number < 1 else 0
                gathered = log.wire_bytes(ops=("all_gather",))
                if limits is TIGHT or number == 0:
                    assert counts["all_gather"] == 4 + again, f"{label}: {counts}"
                    assert gathered == one_way + again * last <= 2 * one_way, label
                if limits is NO_LIMITS and number >= 1:
                    assert counts["all_gather"] == 4, f"{label}: {counts}"
                    assert gathered == one_way, label
                assert counts["reduce_scatter"] == 4, f"{label}: {counts}"
                assert log.wire_bytes(ops=("reduce_scatter",)) == one_way, label
                others = set(counts) - {"all_gather", "reduce_scatter"}
                agreed = counts.get("agree", 0)  # in lockstep on the order, when it is complete
                assert others <= {"agree"} and (not lockstep or agreed <= (number == 1)), label
                engine.step()
            engine.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_unit_is_gathered_at_most_twice_and_reduced_once_and_kept_ones_cost_less(
    world_size: int,
) -> None:
    run_ranks(bytes_body, world_size)


def tied_program(e: Any, draw: Draw) -> None:
    ids = draw.whole(5, dtype=torch.int64).abs()
    e(ids).square().sum().backward()


def foreign_program(e: Any, draw: Draw) -> None:
    out, own = e(draw(2, 3))
    (out.square().sum() * own.sum()).backward()


def several_program(e: Any, draw: Draw) -> None:
    x, y = draw(2, 3), draw(3, 3)
    first, second = e(x), e(y)
    first.square().sum().backward()
    second.square().sum().backward()


def shared_program(e: Any, draw: Draw) -> None:
    one, two = e(draw(2, 2)), e(draw(3, 2))
    (one.sum() * two.square().sum()).backward()


def penalty_program(e: Any, draw: Draw) -> None:
    x = draw(2, 3).requires_grad_()
    out = e(x)
    slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    (out.square().mean() + (slope.norm() - 1).square()).backward()


def plain_program(e: Any, draw: Draw) -> None:
    e(draw(2, 3).requires_grad_()).square().sum().backward()


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "tied": (Tied, tied_program),
    "foreign": (Foreign, foreign_program),
    "shared": (Shared, shared_program),
    "several": (Net, several_program),
    "penalty": (Net, penalty_program),
    "reentrant": (lambda: Checkpointed(reentrant=True, outside=True), plain_program),
    "non-reentrant": (lambda: Checkpointed(reentrant=False, outside=True), plain_program),
}


def programs_body(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        make, program = PROGRAMS[name]
        for lockstep in LOCKSTEP:
            for limits in (NO_LIMITS, TIGHT, KEPT):
                check_program(
                    rank, world_size, make, program, stages=(3,), steps=3,
                    lockstep=lockstep, **limits,
                )  # fmt: skip


@pytest.mark.parametrize("names", [["tied", "foreign"], ["shared", "several"], ["penalty"]])
def test_parameters_used_elsewhere_or_often_are_right_with_every_limit_and_in_lockstep(
    names: list[str],
) -> None:
    run_ranks(programs_body, 2, names)


def test_checkpointed_parts_are_right_with_every_limit_and_in_lockstep() -> None:
    run_ranks(programs_body, 2, ["reentrant", "non-reentrant"])


@pytest.mark.slow
def test_all_of_it_on_three_ranks() -> None:
    run_ranks(programs_body, 3, list(PROGRAMS), timeout_s=110.0)


class Moe(nn.Module):
    """Experts below two modules; a layer before them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.block = linear(3, 30), nn.ModuleDict({"moe": Experts()})

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.block["moe"](self.before(x)[:, :3], which)


SPECS = {
    "class": LeafSpec(classes=Experts),
    "class name": LeafSpec(classes="Experts"),
    "name": LeafSpec(names="block.moe"),
    "suffix": LeafSpec(name_suffixes="moe"),
    "granularity": LeafSpec(granularity_threshold_numel=11),
}


def moe_program(e: Any, draw: Draw) -> None:
    which = int(draw.whole(1).abs()) % 4 if draw.rank else -1
    e(draw(2, 3), which).square().sum().backward()
    e(draw(2, 3), draw.rank).square().sum().backward()


def leaf_body(rank: int, world_size: int) -> None:
    for kind, spec in SPECS.items():
        engine = engine_of(Moe, 3, leaf_modules=spec)
        names = record_of(engine).modules.names
        assert names == ("before", "block.moe"), f"{kind}: {names}"
        with count_collectives() as log:
            engine(Draw(rank, 0)(2, 3), rank).sum().backward()
        assert log.counts()["reduce_scatter"] == 2, f"{kind}: {log.counts()}"
        engine.close()
    for options in ({}, {"leaf_modules": SPECS["name"]}):
        for limits in (NO_LIMITS, TIGHT):
            check_program(
                rank, world_size, Moe, moe_program, stages=(3,), steps=3, **options, **limits
            )


@pytest.mark.parametrize("world_size", [2, 3])
def test_experts_chosen_by_rank_do_not_hang_with_a_leaf_of_any_spec_and_without_one(
    world_size: int,
) -> None:
    run_ranks(leaf_body, world_size)


def lockstep_leaf_body(rank: int, world_size: int) -> None:
    with warned() as texts:  # as one leaf, experts are used in the same order everywhere
        engine = engine_of(Moe, 3, leaf_modules=SPECS["class"], lockstep=True)
        for number in range(3):
            with count_collectives() as log:
                engine(Draw(rank, number)(2, 3), (rank + number) % 4).square().sum().backward()
            assert "agree" not in log.counts() or number == 1, log.counts()
            engine.step()
        engine.close()
    assert not texts, texts
    check_program(
        rank, world_size, Moe, lockstep_program, stages=(3,), steps=3,
        leaf_modules=SPECS["class"], lockstep=True,
    )  # fmt: skip


def lockstep_program(e: Any, draw: Draw) -> None:
    e(draw(2, 3), draw.rank).square().sum().backward()


def test_experts_in_one_leaf_keep_in_step_without_agreeing_before_each_collective() -> None:
    run_ranks(lockstep_leaf_body, 2)
