"""Named axes on real ranks: both drivers, every kind of mesh, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero.adapter import Engine
from fzero.errors import AxisError, MismatchError
from fzero.ranks.mesh import axis_of
from tests.descends import descends
from tests.ranks import run_ranks
from tests.strategies import integers, same

pytestmark = pytest.mark.xdist_group("gloo")

AXES = {"data": 2, "seq": 2}
RATE = 2.0**-9


def mesh_of(kind: str) -> Any:
    if kind == "names":
        return AXES
    if kind == "names, with copies":
        return fzero.Mesh(AXES, replicate="data")
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "seq"))
    if kind == "two dims":  # as before there were names: the first dim holds copies
        return made
    return fzero.Mesh(made, replicate=["data"] if kind == "a DeviceMesh, with copies" else ())


KINDS = (
    "names",
    "names, with copies",
    "two dims",
    "a DeviceMesh",
    "a DeviceMesh, with copies",
)


def moves(x: Tensor, data: Any = "data", seq: Any = "seq") -> Tensor:
    """A function of all of a line's x along "seq": each collective in it, over both axes."""
    y = fzero.all_to_all(x, split_dim=1, concat_dim=0, axis=seq)
    y = fzero.ppermute(y, [(0, 1), (1, 0)], axis=seq) * (1 + fzero.axis_index(data))
    y = fzero.all_to_all(y, split_dim=0, concat_dim=1, axis=seq)
    z, received = fzero.all_to_all(y, sizes=[2, 0], axis=seq)
    y, _ = fzero.all_to_all(z, sizes=received, axis=seq)
    top = fzero.pmax(y.detach(), data)
    return fzero.psum(y, seq) * fzero.axis_size(seq) + fzero.pmean(y * top, data)


def moved(xs: Tensor) -> Tensor:
    """The same of all x, [data, seq, 2, 4], by a formula."""
    lines = xs.flatten(1, 2).unflatten(2, (2, 2)).movedim(2, 1)  # [data, seq, 4, 2]: its columns
    lines = lines.flip(1) * torch.tensor([1.0, 2.0]).double().view(2, 1, 1, 1)
    y = lines.movedim(1, 2).flatten(2, 3).unflatten(1, (2, 2))  # [data, seq, 2, 4]
    top = y.detach().amax(0, keepdim=True)
    return y.sum(1, keepdim=True) * 2 + (y * top).mean(0, keepdim=True)


def loss(p: Any, x: Tensor) -> Tensor:
    return (moves(x * p["w"]) * p["w"]).sum()


def by_step(rank: int, world_size: int, kind: str, stage: int, params: Any, xs: Tensor) -> Any:
    """Full parameters after an update, and how many collectives of each axis there were."""
    step = fzero.shard(descends(loss), stage=stage, mesh=mesh_of(kind))
    state = step.init(params, fzero.optim.sgd(RATE))
    with fzero.count_collectives() as log:
        state, _ = step(state, xs[rank])
    of_axis = {axis: log.counts(rank, axis=axis) for axis in ("data", "seq")}
    return fzero.full_params(state)["w"], of_axis


class Moves(nn.Module):
    """In an engine the names of its mesh are not known: the module is told the axes themselves."""

    def __init__(self, w: Tensor, axis: fzero.Axis) -> None:
        super().__init__()
        self.w, self.axis = nn.Parameter(w.clone()), axis

    def forward(self, x: Tensor) -> Tensor:
        data, seq = self.axis.along("data"), self.axis.along("seq")
        return (moves(x * self.w, data, seq) * self.w).sum()


def by_engine(rank: int, world_size: int, kind: str, stage: int, params: Any, xs: Tensor) -> Any:
    module = Moves(params["w"], axis_of(mesh_of(kind)))
    engine = Engine(
        module, torch.optim.SGD(module.parameters(), RATE), stage=stage, mesh=mesh_of(kind)
    )
    assert engine.axis.names[1:] == ("data", "seq")
    engine.backward(engine(xs[rank]))
    engine.step()
    return fzero.full_params(engine.state)["w"], None


def wanted(params: Any, xs: Tensor) -> Tensor:
    def total(w: Tensor) -> Tensor:
        return (moved(xs.view(2, 2, 2, 4) * w) * w).sum() / 4

    return params["w"] - RATE * torch.func.grad(total)(params["w"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("driver", [by_step, by_engine])
@pytest.mark.parametrize("stage", [1, 3])
def test_on_four_ranks_a_step_is_that_of_one_process(kind: str, driver: Any, stage: int) -> None:
    params, xs = {"w": integers((4,), 1)}, integers((4, 2, 4), 2)
    want, found = wanted(params, xs), run_ranks(driver, 4, kind, stage, params, xs)
    for w, of_axis in found:
        same(w, want)
        if of_axis is not None and kind in ("names", "a DeviceMesh"):
            assert of_axis == {
                "data": {"pmax": 1, "all_reduce": 2},
                "seq": {"all_to_all": 8, "ppermute": 2, "all_reduce": 2},
            }


def one_line_differs(rank: int, world_size: int) -> list[str]:
    """Along "seq" shapes are equal; between lines they may differ; the call is one everywhere."""
    seq = fzero.Mesh(AXES).axis.along("seq")
    same(fzero.all_gather(torch.ones(1 + rank // 2), seq), torch.ones(2 + 2 * (rank // 2)))
    found = []
    for call in (
        lambda: fzero.all_to_all(torch.ones(2, 1 + (rank == 3)), axis=seq),
        lambda: fzero.ppermute(torch.ones(1), [(0, rank // 2)], axis=seq),
    ):
        try:
            call()
            found.append("nothing was raised")
        except MismatchError as error:
            found.append(str(error))
    bad = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "seq"))
    with pytest.raises(AxisError, match="the axes that hold copies come first"):
        fzero.Mesh(bad, replicate="seq")
    with pytest.raises(AxisError, match="without names"):
        fzero.Mesh(init_device_mesh("cpu", (2, 2)))
    return found


def test_ranks_of_one_line_that_differ_are_named() -> None:
    for shapes, pairs in run_ranks(one_line_differs, 4):
        assert "along dim 0[(2, 1, 1) float32] over 'seq'; rank 3: " in shapes, shapes
        assert "rank 0: ppermute by [(0, 0)]" in pairs and "rank 2: ppermute by [(0, 1)]" in pairs
