"""States on some axes of a mesh of processes: as on virtual ranks, and none waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero.errors import FzeroError
from tests.experts_on_axes import (
    PARAMS,
    after,
    batches,
    loss,
    meshes,
    mine_of,
    optimizers,
    whole_experts,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

SIZES = [{"data": 2, "expert": 2}, {"data": 1, "expert": 4}, {"expert": 2, "data": 2}]


def step_fn(states: Any, x: Tensor) -> Any:
    states, value = fzero.grad_and_reduce(loss, states)(x)
    return fzero.apply_gradients(states), value


def train(rank: int, world_size: int, sizes: Any, stage: Any, by_torch: bool) -> Any:
    """Full parameters after three updates; two kinds of mesh."""
    axes = sizes
    if by_torch:
        axes = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    mesh = fzero.Mesh(axes)
    step = fzero.shard(step_fn, stage=stage, mesh=meshes(mesh), donate=True)
    states = step.init(mine_of(PARAMS, mesh), optimizers())
    for batch in batches(world_size):
        states, _ = step(states, batch[rank])
    return fzero.full_params(states), states["experts"].params.flats[0].numel()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("stage", [2, {"dense": 3, "experts": 1}, {"dense": 1, "experts": 3}])
def test_three_updates_are_those_of_one_process(sizes: Any, stage: Any) -> None:
    mesh = fzero.Mesh(sizes)
    _, wanted = after(PARAMS, batches(4))
    found = run_ranks(train, 4, sizes, stage, stage == 2)
    for held, _ in found:
        for name, x in wanted["dense"].items():
            torch.testing.assert_close(held["dense"][name], x, rtol=1e-12, atol=1e-12)
    stacked = torch.stack([held["experts"]["up"] for held, _ in found])
    for experts in whole_experts(stacked, mesh):
        torch.testing.assert_close(experts, wanted["experts"]["up"], rtol=1e-12, atol=1e-12)


def skips(rank: int, world_size: int) -> Any:
    """Ranks read an expert's parameters, at stage 3, only where it has rows; others go on."""
    mesh = fzero.Mesh(SIZES[0])
    params = {
        "dense": {"w": torch.ones(2, dtype=torch.float64)},
        "experts": {"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2).double()},
    }

    def some(p: Any, x: Tensor) -> Tensor:
        h = x * p["dense"]["w"]
        if rank in (0, 3):  # of each line along "data" one rank
            h = h * p["experts"]["a"]
        h = fzero.all_to_all(h, axis="expert")
        if rank == 2:
            h = h * p["experts"]["b"]
        return fzero.all_to_all(h, axis="expert").sum()

    def gradient(states: Any, x: Tensor) -> Any:
        return states, fzero.full_gradients(fzero.grad_and_reduce(some, states)(x)[0])

    apart: Any = {"units": lambda path: path}
    step = fzero.shard(gradient, stage={"dense": 2, "experts": 3}, mesh=meshes(mesh), **apart)
    states = step.init(params, fzero.optim.sgd(0.5))
    return step(states, torch.tensor([1.0, 2.0], dtype=torch.float64) + rank)[1]


def test_a_rank_may_leave_out_an_expert_of_stage_3() -> None:
    found = run_ranks(skips, 4)
    p = [torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    w, a0, a1, b0 = p  # a, b of the two places along "expert"; nobody reads the second b
    xs = [torch.tensor([1.0, 2.0], dtype=torch.float64) + r for r in range(4)]
    h = [x * w for x in xs]
    h[0], h[3] = h[0] * a0, h[3] * a1
    for one, other in ((0, 1), (2, 3)):
        x, y = h[one], h[other]
        h[one], h[other] = torch.stack([x[0], y[0]]), torch.stack([x[1], y[1]])
    h[2] = h[2] * b0
    total = torch.stack(h).sum() / 4
    grads = [*torch.autograd.grad(total, p), torch.zeros(2, dtype=torch.float64)]
    for rank, got in enumerate(found):
        a, b = (grads[1], grads[3]) if rank % 2 == 0 else (grads[2], grads[4])
        torch.testing.assert_close(got["dense"]["w"], grads[0])
        for name, g in (("a", a), ("b", b)):
            torch.testing.assert_close(got["experts"][name], g)


def one_raises(rank: int, world_size: int) -> str:
    mesh = fzero.Mesh(SIZES[0])

    def fails(p: Any, x: Tensor) -> Tensor:
        if rank == 1:
            raise FzeroError("rank 1 had enough.", cause="a test.", fix="none.")
        return loss(p, x)

    step = fzero.shard(lambda s, x: fzero.grad_and_reduce(fails, s)(x), stage=2, mesh=meshes(mesh))
    states = step.init(mine_of(PARAMS, mesh), optimizers())
    try:
        step(states, batches(world_size)[0, rank])
    except FzeroError as error:
        return str(error)
    return "nothing was raised"


def test_a_rank_that_raises_in_the_loss_is_named_at_every_place() -> None:
    said = run_ranks(one_raises, 4)
    assert "had enough" in said[1]
    assert all("the step raised on rank [1]" in said[rank] for rank in (0, 2, 3)), said
