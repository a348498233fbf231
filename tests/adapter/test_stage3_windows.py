"""Stage 3 in a window: parameters do not change, so they are gathered once, as far as they fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.adapter import Engine, gathered
from fzero.collectives import count_collectives
from fzero.errors import AxisError, PhaseError
from tests.adapter.plain import Draw, check_program, engine_of, order_may_change, same
from tests.adapter.stage3 import LAYER_NUMEL, WIDE, Chain, live_numels, record_of, source_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

RESHARD = {"max_reuse_distance_numel": 0}


def back(e: Any, draw: Draw) -> None:
    e(draw(2, WIDE)).square().sum().backward()


def window(engine: Engine, rank: int, number: int, count: int, kind: str = "coalesce") -> None:
    draw = Draw(rank, number)
    with getattr(engine, kind)():
        for _ in range(count):
            back(engine, draw)
    engine.step()


def live_numel(engine: Engine) -> int:
    return sum(flat.numel() for flat in source_of(engine).flats)


def bytes_body(rank: int, world_size: int) -> None:
    share = 8 * (world_size - 1)  # the bytes of an element that cross, times W
    for lockstep in (False, True):
        for kind in ("coalesce", "no_sync"):
            for count in (1, 2, 4):
                engine = engine_of(Chain, 3, lockstep=lockstep)
                window(engine, rank, 0, 2, kind)  # its first backward records the order
                with count_collectives() as log:
                    window(engine, rank, 1, count, kind)
                numels = record_of(engine).units.numels
                once = sum(numels) * share // world_size
                label = f"W={world_size}, {kind} of {count}, lockstep {lockstep}: {log.counts()}"
                assert log.wire_bytes(ops=("all_gather",)) == once, label
                assert log.wire_bytes(ops=("reduce_scatter",)) == once, label
                assert live_numel(engine) == 0, label
                engine.close()

                sharded = engine_of(Chain, 3, lockstep=lockstep, **RESHARD)
                window(sharded, rank, 0, 2, kind)
                with count_collectives() as log:
                    window(sharded, rank, 1, count, kind)
                # The last layer is in use from forward to backward; the first is not read again.
                assert log.counts()["all_gather"] == 6 * count, f"{label}: {log.counts()}"
                assert log.wire_bytes(ops=("reduce_scatter",)) == once, label
                sharded.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_window_gathers_every_unit_once_unless_what_is_reused_may_not_stay(
    world_size: int,
) -> None:
    run_ranks(bytes_body, world_size)


def bound_body(rank: int, world_size: int) -> None:
    most = 3 * (LAYER_NUMEL + LAYER_NUMEL % 2)
    engine = engine_of(Chain, 3, max_live_parameters_numel=most)
    window(engine, rank, 0, 2)
    live = live_numels(engine)
    draw = Draw(rank, 1)
    with engine.coalesce(), count_collectives() as log:
        for _ in range(3):
            back(engine, draw)
            assert 0 < live_numel(engine) <= most
    assert max(live) <= most, live
    assert 4 < log.counts()["all_gather"] < 3 * 4, log.counts()
    assert live_numel(engine) == 0
    engine.close()


def test_what_is_kept_in_a_window_stays_within_max_live_parameters_numel() -> None:
    run_ranks(bound_body, 2)


def writes_body(rank: int, world_size: int) -> None:
    """A value that is written inside a window is the one that its next forward uses."""
    engine, x = engine_of(Chain, 3), torch.ones(2, WIDE).double()

    def output() -> Tensor:
        with torch.no_grad():
            return engine(x)

    window(engine, rank, 0, 2)
    path, value = "layers.0.bias", torch.full((WIDE,), 0.5).double()
    with engine.coalesce():
        back(engine, Draw(rank, 1))
        assert live_numel(engine) > 0
        before = output()
        engine.set_full_parameter(path, value)
        once = output()
        assert not torch.equal(once, before)
        bias = engine.module.get_parameter(path)
        with gathered([bias], modify=True), torch.no_grad():
            bias.copy_(2 * value)
        assert not torch.equal(output(), once)
        engine.set_full_parameter(path, value)
        assert torch.equal(output(), once)
        back(engine, Draw(rank, 1))
    engine.step()
    engine.close()


def errors_body(rank: int, world_size: int) -> None:
    """A window that raises keeps nothing, and the next one is as it would have been."""
    one, two = engine_of(Chain, 3), engine_of(Chain, 3)
    for engine in (one, two):
        window(engine, rank, 0, 2)
    with pytest.raises(ZeroDivisionError), one.coalesce():
        back(one, Draw(rank, 1))
        raise ZeroDivisionError
    assert live_numel(one) == 0 and not record_of(one).repeats
    for engine in (one, two):
        window(engine, rank, 2, 3)
    for path, value in one.full_parameters().items():
        assert torch.equal(value, two.full_parameter(path)), path
    one.close()
    two.close()


def ragged_body(rank: int, world_size: int) -> None:
    """Ranks that keep other units, for another number of backwards, do not wait for each other."""
    engine = engine_of(Chain, 3)
    for number in range(3):
        draw = Draw(rank, number)
        with engine.coalesce(), order_may_change():
            for _ in range(1 + (rank + number) % 3):
                back(engine, draw)
            if rank == number:
                engine.module.get_submodule("layers.1")(draw(2, WIDE)).sum().backward()
        engine.step()
    assert live_numel(engine) == 0
    engine.close()


@pytest.mark.parametrize("body", [writes_body, errors_body, ragged_body])
@pytest.mark.parametrize("world_size", [2, 3])
def test_in_a_window_writes_errors_and_ranks_that_differ_are_as_outside(
    body: Any, world_size: int
) -> None:
    run_ranks(body, world_size, timeout_s=60)


def split_body(rank: int, world_size: int) -> None:
    """A window around a backward alone, and around a forward alone, changes no value."""
    values = []
    for inside in (False, True):
        engine = engine_of(Chain, 3)
        window(engine, rank, 0, 2)
        draw = Draw(rank, 1)
        if inside:
            loss = engine(draw(2, WIDE)).square().sum()
            with engine.no_sync():
                loss.backward()
                later = engine(draw(2, WIDE)).square().sum()
            later.backward()
        else:
            back(engine, draw)
            back(engine, draw)
        engine.step()
        values.append(engine.full_parameters())
        assert live_numel(engine) == 0
        engine.close()
    for path, value in values[0].items():
        assert torch.allclose(value, values[1][path], rtol=1e-12, atol=0), path


def test_a_window_may_begin_and_end_between_a_forward_and_its_backward() -> None:
    run_ranks(split_body, 2)


def uneven_program(e: Any, draw: Draw) -> None:
    for _ in range(1 + draw.rank):
        back(e, draw)


def uneven_body(rank: int, world_size: int) -> None:
    check_program(rank, world_size, Chain, uneven_program, stages=(3,), steps=3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_comes_to_its_update_serves_those_that_have_more_backwards(
    world_size: int,
) -> None:
    run_ranks(uneven_body, world_size, timeout_s=60)


def raises_body(rank: int, world_size: int) -> None:
    """One rank raises in a second backward, while the others wait for it in step()."""
    one, two = engine_of(Chain, 3), engine_of(Chain, 3)
    for engine in (one, two):
        uneven_program(engine, Draw(0, 0))
        engine.step()
    uneven_program(one, Draw(0, 1))
    if rank == 0:
        chain: Any = one.module
        chain.look = division_by_zero
        with pytest.raises(ZeroDivisionError):
            back(one, Draw(rank, 2))
        chain.look = lambda: None
    else:
        with pytest.raises(AxisError, match="rank 0 raised"):
            one.step()
    uneven_program(two, Draw(0, 1))
    for engine in (one, two):
        engine.step()
    same("after the error", one.full_parameters(), two.full_parameters(), 0)
    one.close()
    two.close()


def division_by_zero() -> None:
    raise ZeroDivisionError


def orders_body(rank: int, world_size: int) -> None:
    """Ranks that step two engines in another order are told, and nothing is lost."""
    engines = [engine_of(Chain, 3) for _ in range(2)]
    for engine in engines:
        back(engine, Draw(rank, 0))
    before = [engine.full_gradients() for engine in engines]
    mine = engines[rank % 2]
    with pytest.raises(PhaseError, match="another order on some ranks"):
        mine.step()
    for engine, wanted in zip(engines, before, strict=True):
        same("gradients", engine.full_gradients(), wanted, 0)
        assert engine.step()
        engine.close()


@pytest.mark.parametrize("body", [raises_body, orders_body])
def test_while_ranks_wait_for_all_at_an_update_errors_reach_them(body: Any) -> None:
    run_ranks(body, 2, timeout_s=60)


def plain_backward_body(rank: int, world_size: int) -> None:
    """Nobody sees that a plain loss.backward() raised on one rank; its next call tells."""
    for then in ("forward", "step", "window"):
        one, two = engine_of(Chain, 3), engine_of(Chain, 3)
        for engine in (one, two):
            back(engine, Draw(rank, 0))
            engine.step()
        loss = one(Draw(rank, 1)(2, WIDE)).square().sum()
        if rank == 0:
            weight = one.module.get_parameter("layers.1.weight")
            hook = weight.register_hook(lambda g: division_by_zero())
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            hook.remove()
        else:
            with pytest.raises(AxisError, match="rank 0 raised"):
                loss.backward()
        if then == "window":
            with one.coalesce(), two.coalesce():
                back(one, Draw(rank, 2))
                back(two, Draw(rank, 2))
        elif then == "forward":
            for engine in (one, two):
                back(engine, Draw(rank, 2))
        else:
            with pytest.raises(PhaseError, match="no gradients"):
                one.step()
            for engine in (one, two):
                back(engine, Draw(rank, 2))
        for engine in (one, two):
            engine.step()
        same(then, one.full_parameters(), two.full_parameters(), 0)
        one.close()
        two.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_other_ranks_learn_of_a_plain_backward_that_raised(world_size: int) -> None:
    run_ranks(plain_backward_body, world_size, timeout_s=60)
