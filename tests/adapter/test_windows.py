"""N backwards and one reduction; accumulation, managed and not.

A window changes no value, whatever the options, and costs the collectives of one backward.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fzero.adapter import Engine
from fzero.collectives import CollectiveLog, count_collectives
from fzero.errors import PhaseError
from tests.adapter.nets import Adapted, Checkpointed, Experts, Net, Tied
from tests.adapter.plain import (
    STAGES,
    Draw,
    Plain,
    Reference,
    check_program,
    engine_of,
    order_may_change,
    same,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


def back(e: Any, draw: Draw, count: int = 1) -> None:
    for _ in range(count):
        e(draw(2, 3)).square().sum().backward()


def window_program(e: Any, draw: Draw) -> None:
    with e.coalesce():
        back(e, draw, 3)
    with e.no_sync():
        back(e, draw, 2)
    with e.coalesce():
        losses = [e(draw(2, 3)).square().sum() for _ in range(2)]
        losses[1].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
    back(e, draw)
    with e.coalesce():
        pass
    with e.no_sync():
        back(e, draw)


OPTIONS = [
    {"bucket_bytes": size, "contiguous_gradients": contiguous, "overlap": overlap}
    for size, contiguous, overlap in itertools.product(
        (8, 150, 2**22), (True, False), (True, False)
    )
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_windows_change_no_value_whatever_the_buckets_are(world_size: int) -> None:
    run_ranks(all_options, world_size)


def all_options(rank: int, world_size: int) -> None:
    for options in OPTIONS if world_size == 2 else OPTIONS[::5]:
        check_program(rank, world_size, Net, window_program, **options)


def ids(e: Any, draw: Draw) -> None:
    with e.coalesce():
        for _ in range(2):
            x = draw(5).abs().mul(3).long().clamp(max=6)
            torch.nn.functional.cross_entropy(e(x), x).backward()


def experts(e: Any, draw: Draw) -> None:
    with e.coalesce():
        for i in range(3):
            e(draw(2, 3), (draw.rank * i) % 4 if draw.rank else -1).square().sum().backward()


def parts(e: Any, draw: Draw) -> None:
    with e.coalesce():
        e.module.a(draw(2, 3)).square().sum().backward()
    with e.coalesce():
        back(e, draw)
        e.module.c(draw(2, 3)).square().sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_windows_over_tied_frozen_unused_and_checkpointed_parts_change_no_value(
    world_size: int,
) -> None:
    run_ranks(all_models, world_size)


def all_models(rank: int, world_size: int) -> None:
    small = {"bucket_bytes": 8, "overlap": False}
    for options in ({}, small) if world_size == 2 else (small,):
        check_program(rank, world_size, Tied, ids, **options)
        check_program(rank, world_size, Adapted, window_program, **options)
        check_program(rank, world_size, Experts, experts, **options)
        check_program(rank, world_size, Net, parts, **options)
        check_program(
            rank, world_size, lambda: Checkpointed(reentrant=True, outside=True), window_program
        )


def counted(program: Callable[[], None]) -> tuple[dict[str, int], int]:
    """The reductions of `program`, and the bytes of them."""
    with count_collectives() as log, order_may_change():
        program()
    return reductions(log)


def reductions(log: CollectiveLog) -> tuple[dict[str, int], int]:
    ops = {op: n for op, n in log.counts().items() if op in ("reduce_scatter", "all_reduce")}
    return ops, log.wire_bytes(ops=("reduce_scatter", "all_reduce"))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_window_of_any_length_costs_the_collectives_of_one_backward(world_size: int) -> None:
    run_ranks(count_windows, world_size)


def count_windows(rank: int, world_size: int) -> None:
    for stage, options in itertools.product(STAGES, (OPTIONS[0], OPTIONS[-4], OPTIONS[-1])):
        e, draw = engine_of(Net, stage, **options), Draw(rank, 0)
        one = counted(lambda e=e, draw=draw: back(e, draw))
        assert one[1] > 0
        e.zero_grad()
        for count in (1, 2, 5):

            def window(kind: str, count: int = count, e: Engine = e, draw: Draw = draw) -> None:
                with getattr(e, kind)():
                    back(e, draw, count)
                e.step()

            for kind in ("coalesce", "no_sync"):
                seen = counted(functools.partial(window, kind))
                assert seen == one, f"stage {stage}, {kind}, {count} backwards, {options}"
        with e.coalesce():
            pass
        assert counted(lambda e=e: e.zero_grad()) == ({}, 0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_may_have_another_number_of_backwards_in_a_window_even_none(world_size: int) -> None:
    run_ranks(ragged, world_size, timeout_s=20)


def ragged(rank: int, world_size: int) -> None:
    def program(e: Any, draw: Draw) -> None:
        with e.coalesce():
            back(e, draw, (draw.rank + 1) % 3 % world_size)
        with e.no_sync():
            back(e, draw, draw.rank)

    check_program(rank, world_size, Net, program)


@pytest.mark.parametrize("world_size", [1, 2])
def test_in_a_window_what_would_break_it_is_refused_and_nothing_is_lost(world_size: int) -> None:
    run_ranks(refusals, world_size)


def refusals(rank: int, world_size: int) -> None:
    for stage, kind in itertools.product(STAGES, ("coalesce", "no_sync")):
        e, plain = engine_of(Net, stage), Reference(Net, world_size)
        wanted = plain.run(lambda e, draw: back(e, draw, 3), 0)
        draw, refused = Draw(rank, 0), {}
        back(e, draw)
        with getattr(e, kind)():
            back(e, draw)
            calls: dict[str, Callable[[], Any]] = {
                "step()": e.step,
                "full_gradients()": e.full_gradients,
                "full_gradient()": lambda e=e: e.full_gradient("a.weight"),
                "global_grad_norm": lambda e=e: e.global_grad_norm,
                "coalesce()": lambda e=e: e.coalesce().__enter__(),
                "no_sync()": lambda e=e: e.no_sync().__enter__(),
            }
            for name, call in calls.items():
                with count_collectives() as log, pytest.raises(PhaseError) as caught:
                    call()
                refused[name] = str(caught.value)
                assert not log.events, f"{name}: {log.counts()}"
            back(e, draw)
        for name, text in refused.items():
            assert text.startswith(f"{name} inside a window"), text
            assert "Usual cause: " in text and "Fix: " in text
        same(f"stage {stage}, {kind}", e.full_gradients(), wanted, 1e-11)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_window_that_raises_brings_nothing_and_leaves_what_was_before(world_size: int) -> None:
    run_ranks(raise_in_windows, world_size)


def raise_in_windows(rank: int, world_size: int) -> None:
    befores = {"nothing": 0, "reduced": 1, "waiting": 2}
    for stage, kind, before in itertools.product(STAGES, ("coalesce", "no_sync"), befores):

        def start(e: Any, draw: Draw, before: str = before) -> None:
            if before == "reduced":
                back(e, draw)
            elif before == "waiting":
                with e.no_sync():
                    back(e, draw, 2)

        label = f"stage {stage}, {kind}, {before}"
        e, plain = engine_of(Net, stage, bucket_bytes=8), Reference(Net, world_size)
        draw = Draw(rank, 0)
        start(e, draw)
        records = e.state.progress
        with (
            count_collectives() as log,
            order_may_change(),
            pytest.raises(KeyError, match="in the window"),
            getattr(e, kind)(),
        ):
            back(e, Draw(rank, 77), 2)
            raise KeyError("in the window")
        assert reductions(log) == ({}, 0), label
        assert e.state.progress == records, f"{label}: {e.state.progress}"
        wanted = plain.run(lambda e, draw, start=start: (start(e, draw), back(e, draw))[0], 0)
        with e.coalesce():
            back(e, draw)
        same(label, e.full_gradients(), wanted, 1e-11)


@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_grad_throws_away_what_waited_before_a_window_and_in_it(world_size: int) -> None:
    run_ranks(clear_in_windows, world_size)


def clear_in_windows(rank: int, world_size: int) -> None:
    def program(e: Any, draw: Draw) -> None:
        clear = e.module.zero_grad if isinstance(e, Plain) else e.zero_grad
        back(e, draw)
        with e.no_sync():
            back(e, draw)
        for kind in (e.no_sync, e.coalesce):
            with kind():
                back(e, draw)
                clear()
                back(e, draw, 2)

    check_program(rank, world_size, Net, program)
    for stage in STAGES:
        e = engine_of(Net, stage)
        with e.no_sync():
            back(e, Draw(rank, 0))
        with e.no_sync():
            e.zero_grad()
        with pytest.raises(PhaseError, match="no gradients"):
            e.step()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clipping_sees_the_sum_of_all_windows(world_size: int) -> None:
    run_ranks(clip_windows, world_size)


def clip_windows(rank: int, world_size: int) -> None:
    for stage, max_norm in itertools.product(STAGES, (0.5, 1e6)):
        e = engine_of(Net, stage, max_norm=max_norm, bucket_bytes=100)
        plain = Reference(Net, world_size)
        gradients = plain.run(window_program, 0)
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        with order_may_change():
            window_program(e, Draw(rank, 0))
        assert torch.allclose(e.global_grad_norm.double(), norm, rtol=1e-6)
        e.step()
        factor = min(1.0, max_norm / (norm.item() + 1e-6))
        clipped = {path: g * factor for path, g in gradients.items()}
        same(f"stage {stage}", e.full_parameters(), plain.step(clipped), 1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_managed_and_unmanaged_accumulation_update_from_the_sum_or_the_mean(
    world_size: int,
) -> None:
    run_ranks(accumulate, world_size)


def accumulate(rank: int, world_size: int) -> None:
    for stage, average, wrapped in itertools.product(STAGES, (False, True), (False, True)):
        managed = engine_of(
            Net, stage, gradient_accumulation_steps=3, average_micro_batches=average
        )
        free = engine_of(Net, stage, average_micro_batches=average)
        for e, counts in ((managed, (3, 3)), (free, (2, 1, 4))):
            plain = Reference(Net, world_size)
            for number, count in enumerate(counts):
                draw = Draw(rank, number)
                for i in range(count):
                    with e.no_sync() if wrapped and i < count - 1 else e.coalesce():
                        back(e, draw)
                    if e is managed and i < count - 1:
                        assert e.step() is False
                wanted = plain.run(lambda e, draw, n=count: back(e, draw, n), number)
                scaled = {p: g / (count if average else 1) for p, g in wanted.items()}
                label = f"stage {stage}, {average=}, {wrapped=}, {e is managed}"
                same(f"{label}: gradients", e.full_gradients(), scaled, 1e-11)
                assert e.step() is True
                same(label, e.full_parameters(), plain.step(scaled), 1e-11)


def test_ranks_that_average_over_other_numbers_of_backwards_stay_equal() -> None:
    found = run_ranks(average_ragged, 2, timeout_s=20)
    assert found[0] == found[1]


def average_ragged(rank: int, world_size: int) -> list[list[float]]:
    found = []
    for stage in (0, 1, 2):
        e = engine_of(Net, stage, average_micro_batches=True)
        with e.coalesce():
            back(e, Draw(rank, 0), rank + 1)
        e.step()
        found += [p.detach().flatten().tolist() for p in e.module.parameters()]
    return found
