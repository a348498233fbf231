"""N backwards and one reduction; accumulation, managed and not.

That a window changes no value is held by test_module_kinds.py for each kind of module, and by
test_random_programs.py for windows in any order, with errors and zero_grad() in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from fzero.adapter import Engine
from fzero.collectives import CollectiveLog, count_collectives
from fzero.errors import PhaseError
from fzero.ranks.virtual import run_ranks
from tests.adapter.nets import Net
from tests.adapter.on_ranks import Place, at_places, each_stage, on_ranks
from tests.adapter.plain import (
    Draw,
    back,
    engine_of,
    same,
)

each_kind = pytest.mark.parametrize("kind", ["coalesce", "no_sync"])


def backs(e: Any, draw: Draw, count: int) -> None:
    for _ in range(count):
        back(e, draw)


def reductions(log: CollectiveLog) -> tuple[dict[str, int], int]:
    """How many there were, and their bytes."""
    ops = {op: n for op, n in log.counts().items() if op in ("reduce_scatter", "all_reduce")}
    return ops, log.wire_bytes(ops=("reduce_scatter", "all_reduce"))


def counted(program: Callable[[], Any]) -> tuple[dict[str, int], int]:
    with count_collectives() as log:
        program()
    return reductions(log)


@on_ranks(2, pytest.param(3, marks=pytest.mark.slow))
@each_stage
@each_kind
@pytest.mark.parametrize("bucket_bytes", [8, 2**22])
def test_a_window_of_any_length_costs_the_collectives_of_one_backward(
    rank: int, stage: int, kind: str, bucket_bytes: int
) -> None:
    e, draw = engine_of(Net, stage, bucket_bytes=bucket_bytes), Draw(rank, 0)
    one = counted(lambda: back(e, draw))
    assert one[1] > 0
    e.zero_grad()

    def window(count: int) -> None:
        with getattr(e, kind)():
            backs(e, draw, count)
        e.step()

    for count in (1, 2, 5):
        assert counted(functools.partial(window, count)) == one, f"{count} backwards"
    with getattr(e, kind)():
        pass
    assert counted(e.zero_grad) == ({}, 0)


REFUSED: dict[str, Callable[[Engine], Any]] = {
    "step()": lambda e: e.step(),
    "full_gradients()": lambda e: e.full_gradients(),
    "full_gradient()": lambda e: e.full_gradient("a.weight"),
    "global_grad_norm": lambda e: e.global_grad_norm,
    "coalesce()": lambda e: e.coalesce().__enter__(),
    "no_sync()": lambda e: e.no_sync().__enter__(),
}


@at_places(1, 2)
@each_kind
def test_in_a_window_what_would_break_it_is_refused_and_nothing_is_lost(
    at: Place, kind: str
) -> None:
    (e, plain), draw = at.both(Net), at.draw(0)
    back(e, draw)
    with getattr(e, kind)():
        back(e, draw)
        for name, call in REFUSED.items():
            with count_collectives() as log, pytest.raises(PhaseError) as caught:
                call(e)
            text = str(caught.value)
            assert text.startswith(f"{name} inside a window"), text
            assert "Usual cause: " in text and "Fix: " in text
            assert not log.events, f"{name}: {log.counts()}"
        back(e, draw)
    same(e.full_gradients(), plain.run(lambda e, draw: backs(e, draw, 3), 0))


@at_places(1, 2)
@each_kind
def test_a_window_that_raises_reduces_nothing_and_leaves_the_records_as_they_were(
    at: Place, kind: str
) -> None:
    e, draw = at.engine(Net, bucket_bytes=8), at.draw(0)
    back(e, draw)
    with e.no_sync():
        back(e, draw)
    records = e.state.progress
    with (
        count_collectives() as log,
        pytest.raises(KeyError, match="in the window"),
        getattr(e, kind)(),
    ):
        backs(e, draw, 2)
        raise KeyError("in the window")
    assert reductions(log) == ({}, 0)
    assert e.state.progress == records


@at_places(1, 2)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("kind", ["coalesce", "no_sync"])
@pytest.mark.parametrize(("managed", "counts"), [(True, (3, 3)), (False, (2, 1, 4))])
def test_managed_and_unmanaged_accumulation_update_from_the_sum_or_the_mean(
    at: Place, average: bool, kind: str, managed: bool, counts: tuple[int, ...]
) -> None:
    options: Any = {"gradient_accumulation_steps": 3} if managed else {}
    e = at.engine(Net, average_micro_batches=average, **options)
    plain = at.plain(Net)
    for number, count in enumerate(counts):
        draw = at.draw(number)
        for i in range(count):
            last = i == count - 1
            with e.coalesce() if last else getattr(e, kind)():
                back(e, draw)
            if managed and not last:
                assert e.step() is False
        summed = plain.run(lambda e, draw, n=count: backs(e, draw, n), number)
        wanted = {path: g / (count if average else 1) for path, g in summed.items()}
        same(e.full_gradients(), wanted, label="gradients")
        assert e.step() is True
        same(e.full_parameters(), plain.step(wanted), label="updated")


@on_ranks(2, pytest.param(3, marks=pytest.mark.slow))
@each_stage
@pytest.mark.parametrize("bucket_bytes", [8, 2**22])
def test_accumulation_by_no_sync_costs_one_reduction_at_every_update(
    rank: int, stage: int, bucket_bytes: int
) -> None:
    e, draw = engine_of(Net, stage, bucket_bytes=bucket_bytes), Draw(rank, 0)

    def accumulate() -> None:
        with e.no_sync():
            back(e, draw)
        back(e, draw)

    costs = []
    for _ in range(4):  # the first one records what the others replay
        costs.append(counted(accumulate))
        e.step()
    assert costs == [counted(lambda: back(e, draw))] * 4


class Caught(Exception):
    """What a loop catches outside of a window."""


def by_error(e: Any, window: Any, draw: Draw) -> None:
    with suppress(Caught), window():
        back(e, draw)
        back(e, draw)
        raise Caught


def by_the_end_of_a_loader(e: Any, window: Any, draw: Draw) -> None:
    batches = iter([1, 2])
    with suppress(StopIteration), window():
        for _ in range(3):
            next(batches)
            back(e, draw)


def by_a_break(e: Any, window: Any, draw: Draw) -> None:
    def batches() -> Any:
        with window():
            yield from range(5)

    some = batches()
    for number in some:
        back(e, draw)
        if number == 1:
            break
    some.close()


@pytest.mark.parametrize("leave", [by_error, by_the_end_of_a_loader, by_a_break])
@pytest.mark.parametrize("name", ["no_sync", "coalesce"])
@pytest.mark.parametrize("stage", [0, 3])
def test_backwards_that_an_exception_has_dropped_are_told_by_the_next_backward_or_step(
    leave: Callable[..., None], name: str, stage: int
) -> None:
    def body(rank: int) -> list[str]:
        e, said = engine_of(Net, stage), list[str]()

        def saying(call: Callable[[], Any]) -> None:
            try:
                call()
            except UserWarning as error:  # warnings are errors here
                said.append(str(error).partition("\n")[0])

        back(e, Draw(rank, 0))
        before = e.full_gradients()
        leave(e, getattr(e, name), Draw(rank, 1))
        saying(e.step)
        same(e.full_gradients(), before, 0.0)
        assert e.step()
        leave(e, getattr(e, name), Draw(rank, 1))
        saying(lambda: back(e, Draw(rank, 2)))
        leave(e, getattr(e, name), Draw(rank, 1))
        e.zero_grad()  # they are not wanted
        back(e, Draw(rank, 2))
        assert e.step()
        return said

    error = {by_error: "Caught", by_a_break: "GeneratorExit"}.get(leave, "StopIteration")
    one = f"{error} left a {name}() block, and the gradients of its 2 backwards were dropped."
    assert run_ranks(body, 2) == 2 * [[one, one]]
