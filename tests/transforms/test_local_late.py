"""`fzero.local(delay=, mixing=)`: fragments that arrive some updates after their exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError
from fzero.machine.offload import is_on_disk
from fzero.state import Buffers, Local, Outer, outer
from tests.checkpoint.test_local_saved import late
from tests.covering import covered
from tests.ranks import run_ranks
from tests.strategies import integers, seeds
from tests.transforms.test_local import (
    PARAMS,
    ROWS,
    by_engine,
    by_function,
    data,
    error,
    linear,
    model,
    plainly,
    ranks_of,
    require_equal,
)

TIMES = [(2, 1, 1), (3, 2, 1), (3, 2, 2), (4, 2, 3), (4, 1, 2)]
"""(every, fragments, delay)."""
LATE: dict[str, Any] = {"delay": 1, "mixing": 0.5}
UNITS = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]]}  # a unit is a layer


@covered(
    mesh=["2", "3", "2x2", "1x2"],
    stage=[0, 1, 2, 3],
    times=TIMES,
    mixing=[0.0, 0.5],
    how=["engine", "function", "donating", "on disk"],
)
def test_trains_as_plain_replicas_do(
    mesh: str, stage: int, times: Any, mixing: float, how: str, tmp_path: Path
) -> None:
    every, fragments, delay = times
    replicas, shards = ranks_of(mesh)
    batches, late = data(replicas * shards, steps=9), {"delay": delay, "mixing": mixing}
    more: dict[str, Any] = {"donate": True} if how == "donating" else {}
    if how == "on disk":
        more = {"offload": fzero.Offload(optimizer="disk", folder=tmp_path)}
    train = by_engine if how in ("engine", "on disk") else by_function
    found = train(mesh, every, batches, stage, None, fragments=fragments, late=late, **more)
    plain = plainly(mesh, every, batches, fragments=UNITS[fragments], **late)
    require_equal(found, plain, shards)


@given(
    st.integers(1, 12).flatmap(
        lambda every: st.tuples(
            st.just(every), st.integers(1, every), st.integers(0, every - 1), st.integers(1, 40)
        )
    )
)
def test_every_exchange_arrives_once_and_before_the_next_one(case: Any) -> None:
    every, fragments, delay, updates = case
    local = Local(every=every, fragments=fragments, delay=delay)
    held = Outer(anchors=Buffers(), optimizers=(), weight=torch.ones(fragments), local=local)
    away: dict[int, int] = {}
    for update in range(1, updates + 1):
        held, due = outer.saw_update(held)
        for one in due:
            if isinstance(one, outer.Departure):
                assert away.setdefault(one.fragment, update) == update
            elif one.fragment in away:
                assert away.pop(one.fragment) + delay == update
    assert all(update + delay > updates for update in away.values())


# Law 16, with a delay.


@given(st.sampled_from([(2, None), (4, (2, 2)), (4, None)]), st.sampled_from([0, 2, 3]), seeds)
def test_what_arrives_late_is_data_parallelism_of_late_gradients_bit_for_bit(
    place: Any, stage: int, seed: int
) -> None:
    """With losses that are linear, SGD, outer SGD(1) and half of the own values kept.

    The anchors are then those of data parallelism at the update of the last exchange; a replica has
    half of what it had itself, and half of that.
    """
    ranks, mesh = place
    replicas, shards = mesh or (ranks, 1)
    batches = integers((5, ranks, 3), seed).float() * 4

    def step_fn(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(linear, state)(x)
        return fzero.apply_gradients(state), None

    def trained(fn: Any, steps: int) -> Any:
        run = fzero.simulate(fzero.shard(fn, stage=stage, mesh=mesh), world_size=ranks)
        state = run.init(PARAMS, fzero.optim.sgd(0.5))
        for x in batches[:steps]:
            state, _ = run(state, x)

        def both(state: Any) -> Any:
            return [fzero.full_params(state, replica=one) for one in (False, True)]

        return fzero.simulate(both, world_size=ranks)(state)

    late = fzero.local(step_fn, every=3, outer=fzero.optim.sgd(1.0), delay=2, mixing=0.5)
    apart = fzero.local(step_fn, every=8)
    anchors, own = trained(late, 5)
    (parallel, _), (_, alone) = trained(step_fn, 3), trained(apart, 5)
    for name, wanted in parallel.items():
        assert torch.equal(anchors[name], wanted), name
        half = (0.5 * alone[name].float() + 0.5 * wanted.float()).to(wanted.dtype)
        assert torch.equal(own[name], half), name
    assert replicas * shards == ranks


# Who is left out, and what crosses.


@pytest.mark.parametrize(("mesh", "stage"), [("2", 0), ("2x2", 2), ("2x2", 3)])
def test_a_replica_that_breaks_before_an_exchange_takes_what_comes(mesh: str, stage: int) -> None:
    shards = ranks_of(mesh)[1]
    batches = data(2 * shards, steps=4)
    bad = batches.clone()
    bad[1, 0] = torch.nan
    with pytest.warns(UserWarning, match="replicas \\[0\\] of 2"):
        anchors, own = by_engine(mesh, 2, bad[:3], stage, None, late=LATE)
    plain = plainly(mesh, 2, batches[:3], lambda step: [0] if step == 1 else [], **LATE)
    for found, mine, wanted in zip(anchors, own, plain.anchors, strict=True):
        torch.testing.assert_close(found[0], wanted.detach())
        assert mine.isfinite().all()


@pytest.mark.parametrize("steps", [2, 4])
def test_with_no_replica_left_nothing_comes(steps: int) -> None:
    batches = torch.full((steps, 2, ROWS, 4), torch.nan)
    with pytest.warns(UserWarning, match="the anchors stay"):
        anchors, own = by_engine("2", 2, batches, 2, None, late=LATE)
    for found, mine, wanted in zip(anchors, own, model().parameters(), strict=True):
        assert torch.equal(found[0], wanted) and torch.equal(mine[1], wanted)


@pytest.mark.parametrize("delay", [0, 1])
def test_where_all_are_left_out_all_go_back_and_nothing_comes(delay: int, tmp_path: Path) -> None:
    def body(batches: Tensor) -> None:
        module = model()
        engine = Engine(
            module,
            torch.optim.SGD(module.parameters(), 0.1),
            stage=1,
            local=Local(every=2, delay=delay),
            offload=fzero.Offload(optimizer="disk", folder=tmp_path),
        )
        for step, batch in enumerate(batches):
            if step < 2:
                engine.state = fzero.leave_out(engine.state)
            engine.backward(error(engine, batch))
            engine.step()
            held = engine.state.outer
            assert held is not None and held.coming[0].held == (step == 3 and delay == 1)
            assert all(map(is_on_disk, held.coming[0].flats))
            if step == 1:
                for found, wanted in zip(module.parameters(), model().parameters(), strict=True):
                    assert torch.equal(found, wanted)

    fzero.simulate(body, world_size=2)(data(2, steps=4).transpose(0, 1))


def test_no_more_crosses_than_without_a_delay_and_nothing_when_it_arrives() -> None:
    def sent(**options: Any) -> list[int]:
        training = late((2, 1), 0) if options else late((2, 1), 0, delay=0)
        found = []
        for step in range(6):
            with fzero.count_collectives() as log:
                training.train(step, 1)
            found.append(sum(e.wire_bytes for e in log.of(0) if e.op != "agree"))
        return found

    assert sent() == sent(delay=2) and sent()[0] == sent()[2] == 0 < sent()[1]


def train_on(rank: int, world_size: int = 2) -> Tensor:
    module = model()
    adam = torch.optim.AdamW(module.parameters(), 1e-2)
    local = Local(every=3, fragments=2, delay=2, mixing=0.5)
    engine = Engine(module, adam, stage=3, local=local)
    for batch in data(2, steps=7):
        engine.backward(error(engine, batch[rank]))
        engine.step()
    flats = [*fzero.full_params(engine.state).values(), *engine.full_parameters().values()]
    return torch.cat([x.flatten() for x in flats])


@pytest.mark.xdist_group("gloo")
def test_gloo_ranks_have_the_numbers_of_virtual_ones() -> None:
    wanted = fzero.simulate(lambda _: train_on(fzero.axis_index()), world_size=2)(torch.zeros(2))
    for rank, found in enumerate(run_ranks(train_on, 2)):
        torch.testing.assert_close(found, wanted[rank])


@pytest.mark.parametrize(
    "options", [{"delay": 4}, {"delay": -1}, {"delay": 0.5}, {"mixing": 1.0}, {"mixing": -0.1}]
)
def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(LayoutError, match=f"local: {name}"):
        fzero.local(lambda state: (state, None), every=4, **options)
    with pytest.raises(LayoutError, match=f"local: {name}"):
        Local(every=4, **options)
    with pytest.raises(LayoutError, match="arrives before"):
        fzero.local(lambda state: (state, None), every=1, delay=1)
