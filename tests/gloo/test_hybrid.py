"""Meshes of two dims on real ranks: replicas of shards, in both drivers."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero.adapter import Engine, gathered, sharded_init
from fzero.checkpoint import load, save
from fzero.errors import PeerFailedError
from fzero.ranks.mesh import axis_of
from fzero.state import OptimizerOver
from tests.adapter.nets import F64, linear
from tests.adapter.on_ranks import on_ranks
from tests.adapter.plain import Draw, check_program, engine_of
from tests.failing import fails_in_backward
from tests.gpu import training as t
from tests.gpu.training import Task
from tests.ranks import run_ranks
from tests.transforms import test_local_matrix as matrix

pytestmark = pytest.mark.xdist_group("gloo")

DRIVERS = {"engine": t.by_engine, "functional step": t.by_function}
OVERS: tuple[OptimizerOver, ...] = ("shard", "all")
UNITS, SIDE = 3, 4


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@on_ranks(4)
@pytest.mark.parametrize("driver", DRIVERS)
def test_four_ranks_train_as_one_process(rank: int, world_size: int, driver: str) -> None:
    task = Task(stage=3, steps=2, backwards=3, max_norm=0.5, checkpoint="nonreentrant")
    found = DRIVERS[driver](task, rank, "cpu", two_by_two())
    t.check_close(found, t.by_hand(task, range(4), "cpu"))


# What crosses ranks.


def engine_that_counts(over: OptimizerOver) -> Counter[tuple[str, str, int]]:
    module = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(UNITS)))
    engine = Engine(
        module, torch.optim.AdamW, stage=3, mesh=two_by_two(), optimizer_over=over, max_norm=1.0
    )
    for _ in range(2):  # the first step asks
        with fzero.count_collectives() as log:
            engine(torch.ones(2, SIDE)).sum().backward()
            engine.step()
    return Counter((event.axis, event.op, event.numel) for event in log.events)


def step_that_counts(over: OptimizerOver) -> Counter[tuple[str, str, int]]:
    def step_fn(state: Any, x: Tensor) -> Any:
        def loss(params: list[Tensor], x: Tensor) -> Tensor:
            for weight in params:
                x = x @ weight.t()
            return x.sum()

        state, value = fzero.grad_and_reduce(loss, state)(x)
        return fzero.apply_gradients(state), value

    clipped = fzero.clip(step_fn, max_norm=1.0)
    step = fzero.shard(clipped, stage=3, mesh=two_by_two(), optimizer_over=over)
    state = step.init([torch.ones(SIDE, SIDE) for _ in range(UNITS)], fzero.optim.adamw(0.1))
    for _ in range(2):
        with fzero.count_collectives() as log:
            state, _ = step(state, torch.ones(2, SIDE))
    return Counter((event.axis, event.op, event.numel) for event in log.events)


COUNTING = {"engine": engine_that_counts, "functional step": step_that_counts}


@on_ranks(4)
@pytest.mark.parametrize("driver", COUNTING)
@pytest.mark.parametrize("over", OVERS)
def test_shards_are_gathered_and_scattered_in_a_replica_and_only_they_cross_replicas(
    over: OptimizerOver, driver: str
) -> None:
    """P elements in U units of S l each; the gradient of the first input is not asked for."""
    whole, shard = SIDE * SIDE, SIDE * SIDE // 2
    wanted = {
        ("shard", "all_gather", whole): UNITS + UNITS - 1,
        ("shard", "reduce_scatter", whole): UNITS,
    }
    if over == "shard":
        wanted[("replicate", "all_reduce", shard)] = UNITS
        wanted[("shard", "all_reduce", 1)] = 1  # the norm: replicas have the same gradients
    else:
        wanted[("replicate", "reduce_scatter", shard)] = UNITS
        wanted[("replicate", "all_gather", shard)] = UNITS  # of the new parameters
        wanted[("dp", "all_reduce", 1)] = 1
    found = COUNTING[driver](over)
    agreed = sum(found.pop(key) for key in list(found) if key[1] == "agree")
    assert found == wanted
    assert agreed == 4  # 3 N + 1, whatever the number of units, for N = 1 backward


# Ranks that differ.


class Experts(nn.Module):
    """Rank r uses expert r % 3, of sizes that do not divide; one weight is frozen, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear(3, 5)
        self.experts = nn.ModuleList(linear(5, n + 1) for n in range(3))
        self.fixed = nn.Parameter(torch.full((5,), 0.5, dtype=F64), requires_grad=False)
        self.unused = linear(2, 1)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](torch.tanh(self.first(x)) * self.fixed)


def other_experts(e: Any, draw: Draw) -> None:
    """Another expert on each rank, and another number of backwards, reduced each by itself."""
    for number in range(1 + draw.rank % 2):
        e(draw(2, 3), (draw.rank + number) % 3).square().sum().backward()


@on_ranks(4)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("over", OVERS)
def test_ranks_may_use_other_parameters_and_make_another_number_of_backwards(
    rank: int, world_size: int, over: OptimizerOver, ordered: bool
) -> None:
    """`ordered`: the all-reduce over replicas then communicates again when it is waited for."""
    options: dict[str, Any] = {"mesh": two_by_two(), "optimizer_over": over, "ordered": ordered}
    check_program(rank, world_size, Experts, other_experts, bucket_bytes=100, **options)


@on_ranks(2)
def test_at_stage_0_too_where_sums_are_in_rank_order(rank: int, world_size: int) -> None:
    check_program(rank, world_size, Experts, other_experts, stages=(0,), ordered=True)


@on_ranks(4)
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_an_error_on_one_rank_ends_the_pass_of_all_and_the_engines_go_on(
    rank: int, world_size: int, stage: int, layer: int
) -> None:
    """Behind that layer; at the first one all reductions have started, and are not over."""
    make = lambda: nn.Sequential(*(linear(4, 4) for _ in range(5)))  # noqa: E731
    engine = engine_of(make, stage, mesh=two_by_two(), ordered=True, bucket_bytes=64)
    layers: Any = engine.module
    for attempt in range(3):
        h = layers[:layer](torch.ones(2, 4, dtype=F64, requires_grad=True))
        fails = attempt == 1 and rank == 2
        h = fails_in_backward(h, ZeroDivisionError("on purpose")) if fails else h
        loss = layers[layer:](h).sum()
        if attempt == 1:
            with pytest.raises((ZeroDivisionError, PeerFailedError)):
                engine.backward(loss)
        else:
            engine.backward(loss)
            engine.step()
    assert int(engine.state.step) == 2


# Parameters from outside.


@on_ranks(4)
@pytest.mark.parametrize("over", OVERS)
def test_parameters_and_states_are_read_and_written_whole(rank: int, over: OptimizerOver) -> None:
    mesh = two_by_two()
    with sharded_init(mesh):
        module = linear(3, 5)
    engine = Engine(
        module, torch.optim.AdamW, stage=3, mesh=mesh, optimizer_over=over, accumulate_dtype=F64
    )
    engine(torch.full((2, 3), 1.0 + rank, dtype=F64)).sum().backward()
    gradient = engine.full_gradient("weight")
    assert torch.equal(gradient, torch.full((5, 3), 2 * 2.5, dtype=F64))
    pieces = [torch.empty(0, dtype=F64)] * 4
    torch.distributed.all_gather_object(pieces, engine.local_gradient("weight"))
    # A replica's ranks have all of it, or all ranks do: rank r S + s has part s R + r then.
    order = {"shard": (0, 1), "all": (0, 2, 1, 3)}[over]
    assert torch.equal(torch.cat([pieces[r] for r in order]), gradient.flatten())
    engine.step()
    values = torch.arange(15, dtype=F64).view(5, 3)
    engine.set_full_parameter("weight", values)
    engine.set_full_optimizer_state("weight", "exp_avg", values)
    assert torch.equal(engine.full_parameter("weight"), values)
    assert torch.equal(engine.full_optimizer_state("weight", "exp_avg"), values)
    with gathered(module, modify=True, from_rank=3, mesh=mesh) as (weight, _):
        weight.mul_(rank)
    assert torch.equal(engine.full_parameter("weight"), 3 * values)
    engine.close()
    assert torch.equal(module.weight.detach(), 3 * values)


# Which meshes.


def meshes_body(rank: int, world_size: int) -> Any:
    def trained(mesh: Any) -> Any:
        state = fzero.init({"w": torch.zeros(16)}, fzero.optim.sgd(1.0), stage=3, mesh=mesh)
        loss = fzero.grad_and_reduce(lambda p: (p["w"] * (1 + rank)).sum(), state)
        state = fzero.apply_gradients(loss()[0])
        return fzero.full_params(state)["w"][0].item(), state.params.flats[0].numel()

    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "inner"))
    axis = axis_of(named)
    sums = []
    state = fzero.init({"w": torch.zeros(2)}, fzero.optim.sgd(1.0), stage=3, mesh=named)

    def loss(params: Any) -> Tensor:
        sums.extend(fzero.psum(float(rank), name).item() for name in (None, "dp", "inner"))
        return params["w"].sum()

    fzero.grad_and_reduce(loss, state)()
    assert axis_of((2, 2)) == axis_of(two_by_two()) and axis.shards.size == 2
    return trained((2, 2)), trained((4, 1)), trained(cube["replicate", "shard"]), sums


def test_a_mesh_is_sizes_or_two_dims_of_a_larger_one_and_its_dims_have_names() -> None:
    found = run_ranks(meshes_body, 4)
    for rank, (plain, replicated, half, sums) in enumerate(found):
        assert plain == (-2.5, 8) and replicated == (-2.5, 16)
        assert half == (-1.5 if rank < 2 else -3.5, 16)
        assert sums == [6.0, float(2 * (rank % 2) + 2), float(4 * (rank // 2) + 1)]


def refused_body(rank: int, world_size: int) -> None:
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))
    crossed = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    for mesh in (cube, crossed):
        with pytest.raises(fzero.AxisError, match=r'two, mesh\["replicate", "shard"\]'):
            fzero.init({"w": torch.zeros(2)}, fzero.optim.sgd(1.0), stage=3, mesh=mesh)
    with pytest.raises(fzero.AxisError, match=r"2 x 2 ranks.*4 x 1 ranks"):
        sizes = (2, 2) if rank == 0 else (4, 1)
        fzero.init({"w": torch.zeros(2)}, fzero.optim.sgd(1.0), stage=3, mesh=sizes)


def test_meshes_that_do_not_fit_are_refused_on_every_rank() -> None:
    run_ranks(refused_body, 4)


@on_ranks(4)
def test_replicas_that_train_apart_have_owners_of_their_own(rank: int, world_size: int) -> None:
    """Of the inner rule and of the outer one; saved, and resumed with the same bits."""
    (ours, inner), (outer, plain_outer) = matrix.CASES["both soap"]
    batches = matrix.data(4)
    local = fzero.Local(every=matrix.EVERY, outer=outer)

    def trained(some: Tensor, before: Any = None, keep: Any = None) -> dict[str, Tensor]:
        engine = Engine(matrix.model(), ours(), stage=2, mesh=two_by_two(), local=local)
        if before is not None:
            load(before, engine)
        for batch in some[:, rank]:
            engine.backward(matrix.error(engine, batch))
            engine.step()
        if keep is not None:
            save(keep, engine)
        return fzero.full_params(engine.state)

    names: list[Any] = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(names)
    whole = trained(batches)
    trained(batches[:3], keep=names[0])
    after = trained(batches[3:], before=names[0])
    plain = matrix.plainly("2x2", batches, inner, outer=plain_outer)
    for (path, x), wanted in zip(whole.items(), plain.anchors, strict=True):
        torch.testing.assert_close(x, wanted.detach(), rtol=1e-7, atol=1e-9)
        assert torch.equal(after[path], x)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(names[0])
