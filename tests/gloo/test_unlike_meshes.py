"""Processes whose meshes differ by rank, by order or by name, and what was forked from them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from select import select
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero.adapter import Engine
from fzero.errors import AxisError, MismatchError
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

SGD = fzero.optim.sgd(0.5)
AXES = {"data": 2, "expert": 2}


def made(mesh: Any, stage: int = 2) -> Any:
    return fzero.init({"w": torch.arange(4.0)}, SGD, stage=stage, mesh=mesh)


def on_another_part(rank: int, world_size: int) -> list[Any]:
    """Rank 1 makes its state elsewhere: once before the groups of the parts, once after."""
    mesh = fzero.Mesh(AXES)
    pairs = [("data", "expert"), ("data", None), (None, "data"), ("expert", "data")]
    said = []
    for _ in range(2):
        for pair in pairs:
            name = pair[rank == 1]
            with pytest.raises(MismatchError, match="the ranks disagree about") as raised:
                made(mesh if name is None else mesh[name])
            said.append(str(raised.value))
        states = {"dense": made(mesh), "experts": made(mesh["data"], 3)}
        assert fzero.full_params(states["experts"])["w"].tolist() == [0, 1, 2, 3]
    other = made({"expert": 2, "data": 2})

    def loss(p: Any) -> Tensor:
        return fzero.psum(p[0]["w"], "data").sum()

    for both in ([made(mesh), other], [other, made(mesh)]):
        with pytest.raises(AxisError, match="states of two meshes"):
            fzero.grad_and_reduce(loss, both)()
    total = fzero.grad_and_reduce(loss, [made(mesh), made(None, 3)])()[1]
    return [said[0], total.item()]


def test_a_rank_that_makes_its_state_on_another_part_is_told_at_once() -> None:
    found = run_ranks(on_another_part, 4, timeout_s=60)
    assert all(text == found[0][0] and total == 12.0 for text, total in found)
    assert "rank 0 has a state on axis 'data'" in found[0][0]
    assert "rank 1 has a state on axis 'expert'" in found[0][0]


def orders_and_names(rank: int, world_size: int) -> Any:
    for ranks in ([1, 0], [[1, 0]], [[1], [0]]):
        names = ("r", "s")[-torch.tensor(ranks).ndim :]
        turned = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        for mesh in (turned, fzero.Mesh(turned)):
            with pytest.raises(AxisError, match=r"of the ranks \[[\s\S]*in another order"):
                made(mesh)
    found = []
    for ranks in ([[0, 1]], [[0], [1]]):
        both = DeviceMesh("cpu", ranks, mesh_dim_names=("r", "s"))

        def loss(p: Any) -> tuple[Tensor, list[float]]:
            return p["w"].sum(), [fzero.psum(1.0 + rank, name).item() for name in ("r", "s")]

        found.append(fzero.grad_and_reduce(loss, made(both), has_aux=True)()[1][1])
    local = fzero.local(lambda s: (s, None), every=2, outer=fzero.optim.sgd(1.0))
    one_replica = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("r", "s"))
    fzero.shard(local, stage=2, mesh=one_replica).init({"w": torch.ones(2)}, SGD)
    return found


def test_ranks_in_another_order_are_refused_and_both_dims_have_names() -> None:
    found = run_ranks(orders_and_names, 2)
    assert found == [[[1.0, 3.0], [3.0, 1.0]], [[2.0, 3.0], [3.0, 2.0]]]


class Given(nn.Module):
    """A module that gives its parameter to a collective as it is."""

    def __init__(self, collective: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.collective = nn.Parameter(torch.arange(4.0)), collective

    def forward(self, x: Tensor) -> Tensor:
        y = self.collective(self.w)
        return (y * torch.arange(1.0, 1 + y.numel()).view(y.shape)).sum() * x


COLLECTIVES: list[Callable[[Tensor], Tensor]] = [
    fzero.psum,
    fzero.psum_scatter,
    fzero.all_to_all,
    lambda w: fzero.all_gather(w.view(2, 2), dim=1),
    lambda w: fzero.all_to_all(w, sizes=[1, 3])[0],
    lambda w: fzero.ppermute(w, [(0, 1), (1, 0)]),
    lambda w: fzero.pmax(w.detach()) * w,
]


def given_to_collectives(rank: int, world_size: int) -> None:
    for collective in COLLECTIVES:
        found = []
        for stage in (0, 3):
            engine = Engine(Given(collective), torch.optim.SGD, stage=stage)
            value = engine(torch.tensor(1.0 + rank))
            value.backward()
            found.append((value.detach(), engine.full_gradient("w")))
            engine.close()
            apply, params = fzero.functionalize(Given(collective))
            state = fzero.init(params, SGD, stage=stage)
            state, value = fzero.grad_and_reduce(apply, state)(torch.tensor(1.0 + rank))
            found.append((value, fzero.full_gradients(state)["w"]))
        for one in found[1:]:
            torch.testing.assert_close(one, found[0])
        assert fzero.psum(1.0) == 2.0  # the group is whole


def test_a_parameter_of_stage_3_is_gathered_for_a_collective() -> None:
    run_ranks(given_to_collectives, 2)


def in_child(asks: Callable[[], Any]) -> str:
    """What a child that is forked says; it does not wait."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = str(asks())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said[:900].encode())
        os._exit(0)
    if not select([reads], [], [], 20)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(writes)
    said = os.read(reads, 1000).decode()
    os.close(reads)
    os.waitpid(child, 0)
    return said


def forked(rank: int, world_size: int) -> list[str]:
    state, along = made(None, 3), fzero.Mesh(AXES).axis.along("data")
    fzero.psum(1.0, along)
    said = [
        in_child(lambda: fzero.psum(1.0)),
        in_child(lambda: fzero.psum(1.0, along)),
        in_child(lambda: fzero.all_to_all(torch.ones(4), sizes=[1] * 4)),
        in_child(lambda: fzero.full_params(state)),
        in_child(lambda: fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()),
        in_child(lambda: made(None)),
    ]
    assert all(f"which was forked from rank {rank}." in text for text in said), said
    assert in_child(lambda: (fzero.axis_index(), along.rank)) == f"({rank}, {rank // 2})"
    assert fzero.psum(1.0) == 4.0
    return said


def test_a_process_that_was_forked_from_a_rank_calls_no_collective() -> None:
    run_ranks(forked, 4, timeout_s=90)
