"""Virtual ranks: many of them are as one, what each one costs, and that they share nothing."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import collectives as c
from fzero.collectives import lowering as _lowering
from fzero.ranks.mesh import Axis, axis_of
from tests.collectives.maps import gathered, reduced, scattered
from tests.covering import covered
from tests.strategies import everywhere, integers, on_rank, same

SHAPES = {"w1": (5, 3), "b1": (5,), "w2": (2, 5), "b2": (2,)}
PARAMS = {name: integers(shape, i, torch.float32) for i, (name, shape) in enumerate(SHAPES.items())}


def loss_fn(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The squared error of an MLP, of integers; times W: the mean over ranks is then a sum."""
    hidden = F.linear(x, p["w1"], p["b1"]).relu()
    error = F.linear(hidden, p["w2"], p["b2"]) - y
    return error.square().sum() * fzero.axis_size()


def step_fn(state: Any, x: Tensor, y: Tensor) -> Any:
    state, _ = fzero.grad_and_reduce(loss_fn, state)(x, y)
    gradients = fzero.full_gradients(state)  # AdamW's first update has little more than their signs
    return fzero.apply_gradients(state), gradients


def trained(ranks: int, samples: int, steps: int = 1) -> tuple[Any, Any]:
    """Full parameters and gradients of every rank, after AdamW at stage 3."""
    run = fzero.simulate(fzero.shard(step_fn, stage=3), world_size=ranks)
    x = integers((ranks, samples // ranks, 3), 1, torch.float32)
    y = integers((ranks, samples // ranks, 2), 2, torch.float32)
    state, gradients = run.init(PARAMS, fzero.optim.adamw(0.125)), None
    for _ in range(steps):
        state, gradients = run(state, x, y)
    return fzero.simulate(fzero.full_params, world_size=ranks)(state), gradients


@pytest.mark.parametrize("ranks", [96, pytest.param(1024, marks=pytest.mark.slow)])
def test_many_ranks_have_the_bits_of_one(ranks: int) -> None:
    alone, got = on_rank(trained(1, 2 * ranks), 0), trained(ranks, 2 * ranks)
    everywhere(got, alone, ranks)
    assert all(g.count_nonzero() for g in alone[1].values())


def work_of(ranks: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What all ranks together do in init, a step that asks, one that replays, and full_params."""
    work: Counter[str] = Counter()

    def noted(_frame: Any, event: str, _argument: Any) -> None:
        work[event] += 1

    def counted(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(parts: Any, *args: Any) -> Any:
            work[name] += len(parts)
            return fn(parts, *args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(_lowering, "sum_in_order", counted("summed", _lowering.sum_in_order))
        patch.setattr(torch, "cat", counted("concatenated", torch.cat))
        threading.setprofile(noted)
        try:
            trained(ranks, 2 * ranks, steps=2)
        finally:
            threading.setprofile(None)
    return work


def test_what_each_rank_does_does_not_grow_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls of Python and of C, generators that go on, and tensors that are added or joined."""
    work_of(2, monkeypatch)  # what a process does once
    few, many = (work_of(ranks, monkeypatch) for ranks in (4, 32))
    assert {*few} == {*many} >= {"call", "c_call", "summed", "concatenated"}
    for event in few:
        assert many[event] / 32 < 1.05 * few[event] / 4, event


def in_place(x: Tensor, axis: Axis) -> Tensor:
    """The rows of all ranks, gathered into the buffer that this rank has its own rows in."""
    full = x.new_full((axis.size * len(x), *x.shape[1:]), 99)
    full.narrow(0, axis.rank * len(x), len(x)).copy_(x)
    c.start_gather_in_place([full], axis).wait()
    return full


def exchanged(xs: Tensor) -> Tensor:
    """y_r = concat(chunk r of x_0, chunk r of x_1, ..)."""
    ranks = len(xs)
    return xs.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(1, 2)


def from_first(xs: Tensor) -> Tensor:
    """y_r = x_0."""
    return torch.stack([xs[0]] * len(xs))


COLLECTIVES: dict[str, tuple[Callable[[Tensor, Axis], Tensor], Callable[[Tensor], Tensor]]] = {
    "all_gather": (fzero.all_gather, gathered),
    "start_gather": (lambda x, axis: c.start_gather([x], axis).wait()[0], gathered),
    "start_gather_in_place": (in_place, gathered),
    "reduce_scatter": (fzero.reduce_scatter, scattered),
    "start_scatter": (lambda x, axis: c.start_scatter([x], axis).wait()[0], scattered),
    "all_reduce": (fzero.all_reduce, reduced),
    "start_reduce": (lambda x, axis: c.start_reduce([x.clone()], axis).wait()[0], reduced),
    "start_all_to_all": (lambda x, axis: c.start_all_to_all([x], axis).wait()[0], exchanged),
    "broadcast": (lambda x, axis: c.broadcast([x], axis, 0)[0], from_first),
}


@covered(name=[*COLLECTIVES], replicas=[1, 2])
def test_a_rank_may_write_into_what_it_hands_in_and_what_it_gets(name: str, replicas: int) -> None:
    """Each rank does so before the next one has its turn; over all ranks, and over a part."""
    run, formula = COLLECTIVES[name]
    ranks = 2 * replicas

    def body(x: Tensor) -> Tensor:
        x, axis = x.clone(), axis_of((replicas, 2)).shards
        y = run(x, axis)
        x.fill_(99.0)
        assert y._version == 0 or name == "start_gather_in_place"  # else autograd of a peer fails
        return y.add_(100 * fzero.axis_index())

    xs = integers((ranks, 4, 3), 5)
    want = torch.cat([formula(part) for part in xs.split(2)])
    same(
        fzero.simulate(body, world_size=ranks)(xs), want + 100 * torch.arange(ranks)[:, None, None]
    )


def test_what_ranks_tell_each_other_is_a_list_of_their_own() -> None:
    def body() -> list[Tensor]:
        told = c.gather_objects(fzero.axis_index(), fzero.world())
        told.append(len(told))
        return [torch.tensor(told)]

    everywhere(fzero.simulate(body, world_size=3)(), [torch.tensor([0, 1, 2, 3])], 3)


@pytest.mark.parametrize("room", [0, 2])
def test_a_system_without_room_for_the_ranks_is_named_and_none_is_left(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, start = threading.active_count(), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if threading.active_count() - before == room:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    ran: list[int] = []
    with pytest.raises(fzero.AxisError, match=rf"^{room} of 4 virtual ranks [\s\S]*Fix: .*pids"):
        fzero.simulate(lambda: ran.append(fzero.axis_index()), world_size=4)()
    assert not ran and threading.active_count() == before


def test_a_sum_that_cannot_be_made_raises_on_every_rank() -> None:
    def summed() -> Tensor:
        return fzero.psum(torch.ones(2, dtype=torch.float8_e4m3fn))

    def caught() -> Tensor:
        with pytest.raises(RuntimeError, match="not implemented"):
            summed()
        return fzero.psum(1.0)

    everywhere(fzero.simulate(caught, world_size=3)(), torch.tensor(3.0), 3)
    with pytest.raises(RuntimeError, match="not implemented") as raised:
        fzero.simulate(summed, world_size=3)()
    assert raised.value.__notes__ == ["(raised on virtual rank 0 of 3)"]
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.name for frame in frames].count("summed") == 1  # of one rank, not of all
