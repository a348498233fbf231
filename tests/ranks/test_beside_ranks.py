"""Threads and processes that are no ranks: a collective in one is right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fzero
from fzero.context.current_rank import abstract_rank
from fzero.errors import AxisError
from fzero.ranks import mesh

ASKS: dict[str, Callable[[], Any]] = {
    "psum": lambda: fzero.psum(1.0),
    "all_gather": lambda: fzero.all_gather(torch.ones(1)),
    "axis_index": fzero.axis_index,
    "axis_size": fzero.axis_size,
    "init": lambda: fzero.init({"w": torch.ones(1)}, fzero.optim.sgd(0.1), stage=0),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_thread_beside_virtual_ranks_is_refused(name: str) -> None:
    """It is no rank, and would be the only one: nothing would be summed."""
    with ThreadPoolExecutor(1, "old") as old:
        old.submit(ASKS[name]).result()  # where no virtual ranks run

        def in_a_thread(x: Tensor) -> Tensor:
            old.submit(ASKS[name]).result()
            return x

        with pytest.raises(AxisError, match=r"in the thread 'old_0', while virtual ranks run"):
            fzero.simulate(in_a_thread, world_size=2)(torch.ones(2))
        old.submit(ASKS[name]).result()  # again


def test_a_thread_in_a_backward_of_virtual_ranks_is_refused() -> None:
    def loss(p: Any) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return p["w"].sum() * pool.submit(fzero.pmean, 1.0).result()

    def step(x: Tensor) -> Tensor:
        state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1), stage=2)
        return fzero.grad_and_reduce(loss, state)()[1] * x

    with pytest.raises(AxisError, match="while virtual ranks run"):
        fzero.simulate(step, world_size=2)(torch.ones(2))
    assert step(torch.ones(())) == 3.0  # on one rank it is right


def test_a_thread_beside_logical_ranks_is_refused() -> None:
    """They run as virtual ranks where the loss calls a collective."""

    def loss(p: Any, x: Tensor) -> Tensor:
        fzero.psum(x.sum())
        with ThreadPoolExecutor(1) as pool:
            return p["w"].sum() * pool.submit(fzero.pmean, x.sum()).result()

    step = fzero.shard(
        lambda s, x: fzero.grad_and_reduce(loss, s)(x), stage=0, logical_ranks=2, seed=0
    )
    state = step.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1))
    with pytest.raises(AxisError, match="while virtual ranks run"):
        step(state, torch.ones(2, 1))


def test_an_axis_of_virtual_ranks_in_another_thread_is_refused_by_the_same_name() -> None:
    def in_a_thread(x: Tensor) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(fzero.psum, x, mesh.world()).result()

    with pytest.raises(AxisError, match="while virtual ranks run"):
        fzero.simulate(in_a_thread, world_size=2)(torch.ones(2))


class Rows(Dataset[Any]):
    def __init__(self, asks: Callable[[], Any]) -> None:
        self.asks = asks

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Tensor:
        return torch.as_tensor(self.asks()) + i


def loaded(asks: Callable[[], Any], workers: int = 1) -> Tensor:
    context = "fork" if workers else None
    rows = DataLoader(Rows(asks), num_workers=workers, multiprocessing_context=context)
    return torch.cat([x.flatten() for x in rows])


def test_a_forked_worker_of_a_virtual_rank_knows_it_and_calls_no_collective() -> None:
    index = fzero.simulate(lambda: loaded(fzero.axis_index), world_size=2)()
    assert index.tolist() == [[0, 1], [1, 2]]
    with pytest.raises(AxisError, match=r"all_reduce\[\(\) float32\] in process .* forked from "):
        fzero.simulate(lambda: loaded(ASKS["psum"]), world_size=2)()
    # In the rank itself, and in a worker of the only rank, it is right.
    assert loaded(ASKS["psum"]).tolist() == [1.0, 2.0]
    found = fzero.simulate(lambda: loaded(ASKS["psum"], workers=0), world_size=2)()
    assert found.tolist() == [[2.0, 3.0]] * 2


def test_a_worker_that_was_spawned_does_not_take_itself_for_the_only_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does one that was forked before the ranks have met: it would wait for the others."""
    monkeypatch.setattr(mesh, "get_worker_info", lambda: "worker 0")
    monkeypatch.setattr(mesh, "was_forked", lambda: False)
    for name in ("psum", "axis_index", "init"):
        with pytest.raises(AxisError, match="which does not know"):
            ASKS[name]()
    monkeypatch.setattr(mesh, "was_forked", lambda: True)
    assert fzero.psum(1.0) == 1.0
    for key, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(AxisError, match="which does not know"):
        fzero.psum(1.0)


def test_a_thread_beside_a_rank_that_is_planned_is_refused() -> None:
    """It would be left out of what is counted."""
    with (
        abstract_rank(0, 2),
        ThreadPoolExecutor(1) as pool,
        pytest.raises(AxisError, match="while virtual ranks run"),
    ):
        pool.submit(fzero.axis_size).result()
