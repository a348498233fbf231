"""Point 13: the order of use is recorded once, and drives prefetch, release and the live bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fzero.state.coordinator_effects import Agree, Gather, Prefetch
from fzero.state.trace import Complete, Invalid, Recording
from torch import Tensor

from fzero.adapter import Engine
from fzero.collectives import CollectiveLog, count_collectives
from tests.adapter.plain import Draw, Reference, engine_of, same
from tests.adapter.stage3 import (
    WIDE,
    Chain,
    effects_of,
    live_numels,
    record_of,
    source_of,
    warned,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

LOCKSTEP = (False, True)


def back(e: Any, draw: Draw) -> None:
    e(draw(2, WIDE)).square().sum().backward()


def train(engine: Engine, rank: int, steps: range) -> None:
    for number in steps:
        back(engine, Draw(rank, number))
        engine.step()


def check_step(engine: Engine, reference: Reference, rank: int, number: int, label: str) -> None:
    wanted = reference.run(back, number)
    back(engine, Draw(rank, number))
    same(f"{label}: gradients", engine.full_gradients(), wanted, 1e-11)
    engine.step()
    same(f"{label}: updated", engine.full_parameters(), reference.step(wanted), 1e-11)


def recorded_body(rank: int, world_size: int) -> None:
    for lockstep in LOCKSTEP:
        engine = engine_of(Chain, 3, lockstep=lockstep)
        effects = effects_of(engine)
        assert record_of(engine).trace == Invalid()
        train(engine, rank, range(1))
        trace = record_of(engine).trace
        # The last layer goes on into its backward; the first one's input needs no gradient.
        assert isinstance(trace, Recording) and tuple(trace.modules) == (0, 1, 2, 3, 2, 1)
        assert not any(isinstance(effect, Prefetch | Agree) for effect in effects)
        train(engine, rank, range(1, 2))
        complete = record_of(engine).trace
        assert isinstance(complete, Complete) and complete.order.modules == (0, 1, 2, 3, 2, 1)
        assert complete.position == 6
        assert sum(isinstance(effect, Agree) for effect in effects) == 1
        train(engine, rank, range(2, 5))
        last = record_of(engine).trace
        assert isinstance(last, Complete) and last.order is complete.order
        assert sum(isinstance(effect, Agree) for effect in effects) == 1
        engine.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_first_step_records_the_order_and_from_the_second_on_it_does_not_change(
    world_size: int,
) -> None:
    run_ranks(recorded_body, world_size)


def prefetch_body(rank: int, world_size: int) -> None:
    for lockstep in LOCKSTEP:
        for bucket, ahead in ((0, 0), (25, 1), (45, 2), (1000, 3)):
            engine = engine_of(Chain, 3, prefetch_bucket_numel=bucket, lockstep=lockstep)
            train(engine, rank, range(2))
            effects = effects_of(engine)
            train(engine, rank, range(2, 3))
            asked = [x for x in effects if isinstance(x, Prefetch)]
            label = f"W={world_size}, bucket {bucket}: {effects}"
            numels = record_of(engine).units.numels
            assert all(sum(numels[u] for u in x.ids) <= bucket for x in asked), label
            assert (asked[0].ids if asked else ()) == tuple(range(1, 1 + ahead)), label
            gathered = [u for x in effects if isinstance(x, Gather) for u in x.ids]
            assert gathered == ([0] if bucket else [0, 1, 2, 3]), label  # the rest came before
            engine.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_known_order_prefetches_as_much_as_the_prefetch_bucket_holds(world_size: int) -> None:
    run_ranks(prefetch_body, world_size)


def live_body(rank: int, world_size: int) -> None:
    numel = 20 if world_size == 2 else 21
    for lockstep in LOCKSTEP:
        for most in (0, numel, 2 * numel + 1, 3 * numel, 1000):
            label = f"W={world_size}, max_live {most}, lockstep {lockstep}"
            engine = engine_of(Chain, 3, max_live_parameters_numel=most, lockstep=lockstep)
            reference = Reference(Chain, world_size)
            live = live_numels(engine)
            for number in range(3):
                check_step(engine, reference, rank, number, label)
            assert len(live) == 3 * 2 * 4, label
            assert max(live[:8]) == numel, f"{label}: while it records, one at a time: {live}"
            fits = min(4, max(1, most // numel)) * numel
            assert max(live[16:]) == fits, f"{label}: {live[16:]}"
            assert not source_of(engine).flats, label
            engine.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_live_parameters_stay_within_max_live_parameters_numel(world_size: int) -> None:
    run_ranks(live_body, world_size)


def gathers(log: CollectiveLog) -> int:
    return log.counts().get("all_gather", 0)


def reuse_body(rank: int, world_size: int) -> None:
    numel = 20 if world_size == 2 else 21
    # Elements that others use between a layer's forward and its backward: 1 layer for the
    # third, 3 layers for the second. The fourth is used on, the first is not used again.
    for lockstep in LOCKSTEP:
        for distance, again in ((0, 2), (numel, 2), (numel + 1, 1), (3 * numel + 1, 0)):
            engine = engine_of(
                Chain, 3, max_reuse_distance_numel=distance, prefetch_bucket_numel=0,
                lockstep=lockstep,
            )  # fmt: skip
            reference = Reference(Chain, world_size)
            label = f"W={world_size}, distance {distance}"
            train(engine, rank, range(2))
            for number in range(2):
                reference.step(reference.run(back, number))
            with count_collectives() as log:
                back(engine, Draw(rank, 2))
            assert gathers(log) == 4 + again, f"{label}: {log.counts()}"
            wanted = reference.run(back, 2)
            same(label, engine.full_gradients(), wanted, 1e-11)
            engine.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_used_again_within_max_reuse_distance_numel_is_not_gathered_again(
    world_size: int,
) -> None:
    run_ranks(reuse_body, world_size)


def changed_body(rank: int, world_size: int) -> None:
    for lockstep in LOCKSTEP:
        engine, reference = engine_of(Chain, 3, lockstep=lockstep), Reference(Chain, world_size)
        modules: list[Any] = [engine.module, *reference.modules]
        texts: dict[int, list[str]] = {}
        for number in range(8):
            if number == 3:  # a branch of the data is taken from here on
                for module in modules:
                    module.order = [0, 2, 1, 3, 1]
            with warned() as texts[number]:
                check_step(engine, reference, rank, number, f"step {number}, W={world_size}")
        counts = [len(texts[number]) for number in range(8)]
        assert counts == [0, 0, 0, 1, 0, 0, 0, 0], counts
        assert "'layers.2' came at place 1, where the order has 'layers.1'" in texts[3][0]
        assert "Usual cause: " in texts[3][0] and "Fix: " in texts[3][0]
        trace = record_of(engine).trace
        assert isinstance(trace, Complete) and trace.order.modules[:5] == (0, 2, 1, 3, 1)
        engine.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_another_order_gives_one_warning_is_recorded_again_and_every_value_is_right(
    world_size: int,
) -> None:
    run_ranks(changed_body, world_size)


def between(e: Any, draw: Draw) -> None:
    loss = e(draw(2, WIDE)).square().sum()
    with torch.no_grad():
        e(draw(2, WIDE))
    loss.backward()


def eval_body(rank: int, world_size: int) -> None:
    x = Draw(0, 99)(2, WIDE)
    for lockstep in LOCKSTEP:
        engine, reference = engine_of(Chain, 3, lockstep=lockstep), Reference(Chain, world_size)
        with warned() as texts:  # between the steps: the order stays valid
            for number in range(4):
                check_step(engine, reference, rank, number, f"step {number}")
                with torch.no_grad():
                    out = engine(x) if number else reference.modules[0](x)
                assert torch.allclose(out, reference.modules[0](x), rtol=1e-12), number
        assert not texts, texts
        assert isinstance(record_of(engine).trace, Complete)
        with warned() as texts:  # between a forward and its backward: it is another order
            between(engine, Draw(rank, 9))
        assert len(texts) == 1 and "order" in texts[0], texts
        same("eval between", engine.full_gradients(), reference.run(between, 9), 1e-11)
        engine.close()


def eval_first_body(rank: int, world_size: int) -> None:
    engine, reference = engine_of(Chain, 3), Reference(Chain, world_size)
    with warned() as texts:
        for number in range(5):
            with torch.no_grad():
                engine(Draw(rank, 50)(2, WIDE))
            check_step(engine, reference, rank, number, f"step {number}")
    assert len(texts) <= 1, f"{len(texts)} warnings in 5 steps: {texts[0]}"
    assert isinstance(record_of(engine).trace, Complete)
    engine.close()


def test_an_evaluation_before_every_step_warns_once_at_most() -> None:
    run_ranks(eval_first_body, 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_evaluation_between_steps_is_no_other_order_and_inside_a_step_warns_once(
    world_size: int,
) -> None:
    run_ranks(eval_body, world_size)


def nothing_left_body(rank: int, world_size: int) -> None:
    for lockstep in LOCKSTEP:
        engine = engine_of(Chain, 3, lockstep=lockstep)
        plain = Reference(Chain, 1).modules[0]
        hooks = [len(part._forward_hooks) for part in engine.module.modules()]
        for number in range(4):
            before = engine.state
            with torch.no_grad() if number % 2 else torch.inference_mode():
                out: Tensor = engine(Draw(rank, number)(2, WIDE))
            assert torch.allclose(out, plain(Draw(rank, number)(2, WIDE)), rtol=1e-12)
            record = record_of(engine)
            assert not source_of(engine).flats and not record.residency.live_numel
            assert not record.active and not record.held
            assert not engine.memory_report().live_parameters
            assert engine.hooks == before.hooks
            assert engine.state.progress == before.accumulation
            assert engine.state.buckets == before.buckets
        assert [len(part._forward_hooks) for part in engine.module.modules()] == hooks
        assert all(p.grad is None for p in engine.module.parameters())
        engine.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_forward_without_gradient_leaves_nothing_live_no_hooks_and_no_counts(
    world_size: int,
) -> None:
    run_ranks(nothing_left_body, world_size)
