"""Meshes of two dims on virtual ranks: what each rank holds, and that no number changes.

Programs, drivers and checkpoints on such meshes are among the random ones of test_interleavings,
test_same_bits and test_law9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.ranks.mesh import Dims, Runtime
from fzero.state import OptimizerOver
from tests.covering import covered
from tests.descends import descends
from tests.oracle import mean_gradient, square_loss
from tests.strategies import integers, on_rank, same
from tests.transforms.steps import LR, sgd

Sizes = tuple[int, int]
MESHES: tuple[Sizes, ...] = ((2, 2), (4, 1), (1, 4), (2, 3), (3, 2))
OVERS: tuple[OptimizerOver, ...] = ("shard", "all")
PARAMS = {
    "w": integers((5, 3)),
    "frozen": torch.nn.Parameter(integers((3,)), requires_grad=False),
    "b": integers(()),
    "half": integers((7,), dtype=torch.bfloat16),
    "empty": integers((0, 2)),
}


def virtual(fn: Callable[..., Any], mesh: Sizes) -> Callable[..., Any]:
    return fzero.simulate(fn, world_size=mesh[0] * mesh[1])


ADAM = fzero.optim.adam(LR)


def state_on(
    mesh: Sizes, stage: int, over: OptimizerOver, params: Any = PARAMS, optimizer: Any = ADAM
) -> Any:
    """A stacked state; to be used inside `virtual`."""
    step = fzero.shard(lambda state: (state, None), stage=stage, mesh=mesh, optimizer_over=over)
    return virtual(step, mesh).init(params, optimizer)


@covered(over=[*OVERS], mesh=[*MESHES])
def test_gradient_and_norm_are_those_of_one_process(mesh: Sizes, over: OptimizerOver) -> None:
    ranks = mesh[0] * mesh[1]
    batches = integers((ranks,), seed=5)
    batches[-1] += 12 - batches.sum() % 12  # so that the mean over ranks is exact
    wanted = mean_gradient(square_loss, PARAMS, list(batches))
    flat = torch.cat([g.double().flatten() for g in wanted.values() if g is not None])

    def gradient(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(square_loss, state)(x)
        found = fzero.gradients(state), fzero.global_norm(state)
        twice = fzero.add_gradients(state, found[0], reduced=True)
        return *found, fzero.gradients(twice)

    for stage in range(4):
        found, norm, twice = virtual(gradient, mesh)(state_on(mesh, stage, over), batches)
        for name, value in wanted.items():
            for rank in range(ranks if value is not None else 0):
                assert torch.equal(found[name][rank].double(), value.double()), (stage, name)
                assert torch.equal(twice[name][rank], 2 * found[name][rank]), (stage, name)
        assert torch.allclose(norm.double(), flat.norm(), rtol=1e-6), stage


# P elements on R x S ranks: in params, gradients and each moment of Adam.
HELD: dict[tuple[OptimizerOver, int], tuple[int, int]] = {
    ("shard", 0): (96, 96),
    ("shard", 1): (96, 96 // 3),
    ("shard", 2): (96, 96 // 3),
    ("shard", 3): (96 // 3, 96 // 3),
    ("all", 0): (96, 96),
    ("all", 1): (96, 96 // 6),
    ("all", 2): (96, 96 // 6),
    ("all", 3): (96 // 3, 96 // 6),
}


@pytest.mark.parametrize(("over", "stage"), HELD)
def test_each_rank_holds_its_part(over: OptimizerOver, stage: int) -> None:
    state = state_on((2, 3), stage, over, {"w": torch.arange(96.0)})
    params, part = HELD[over, stage]

    def reduced(state: Any, x: Tensor) -> Any:
        return fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)[0]

    state = virtual(reduced, (2, 3))(state, torch.ones(6))
    flats = [*state.gradients.flats, *(flat for some in state.optimizer.moments for flat in some)]
    assert [flat.shape for flat in state.params.flats] == [(6, params)]
    assert [flat.shape for flat in flats] == [(6, part)] * 3
    for rank in range(6 if stage == 3 else 0):
        mine = state.params.flats[0][rank]
        assert torch.equal(mine, torch.arange(96.0).view(3, 32)[rank % 3])


@pytest.mark.parametrize("over", OVERS)
def test_bytes_on_the_wire_are_those_of_theory(over: OptimizerOver) -> None:
    """A step at stage 2, P bytes: the same for both choices, whatever the memory is."""
    (replicas, shards), whole = (2, 3), 4 * 96

    def step_fn(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        return fzero.apply_gradients(state), loss

    step = fzero.shard(step_fn, stage=2, mesh=(replicas, shards), optimizer_over=over)
    step = fzero.simulate(step, world_size=6)
    state = step.init({"w": torch.ones(96)}, sgd())
    with fzero.count_collectives() as log:
        step(state, torch.ones(6))
    for rank in range(6):
        across = 2 * (whole // shards) * (replicas - 1) // replicas
        assert log.wire_bytes(rank, axis="replicate") == across
        assert log.wire_bytes(rank, axis="shard") == 2 * whole * (shards - 1) // shards
        assert log.counts(rank, axis="dp") == {"agree": 3}  # 2 N + 1


def test_one_replica_is_the_plain_mesh() -> None:
    def make(**options: Any) -> Any:
        step = fzero.shard(lambda state: (state, None), stage=3, **options)
        return fzero.simulate(step, world_size=4).init(PARAMS, sgd())

    plain, one = make(), make(mesh=(1, 4))
    assert plain.setup == one.setup
    same(one, plain)
    assert repr(plain).startswith("TrainState(stage=3, axis 'dp' (virtual, 4 ranks)")
    assert "(virtual, 2 x 2 ranks)" in repr(make(mesh=(2, 2)))


@pytest.mark.parametrize("stage", [2, 3])
def test_derivatives_of_a_step_are_those_on_a_plain_mesh(stage: int) -> None:
    """By each rank's batch, through the reduction, the update and the gather of the parameters."""
    params = {"w": torch.linspace(-1, 1, 11, dtype=torch.float64)}

    def derivative(state: Any, x: Tensor) -> Tensor:
        def after(x: Tensor) -> Tensor:
            loss = fzero.grad_and_reduce(lambda p: (p["w"] * x).sin().sum(), state)
            return fzero.full_params(fzero.apply_gradients(loss()[0]))["w"].cos().sum()

        return torch.func.grad(after)(x)

    x = torch.linspace(0.5, 2, 4, dtype=torch.float64)
    plain = state_on((1, 4), stage, "shard", params, sgd())
    wanted = virtual(derivative, (1, 4))(plain, x)
    assert wanted.abs().min() > 1e-6
    for mesh in ((2, 2), (4, 1)):
        for over in OVERS:
            state = state_on(mesh, stage, over, params, sgd())
            found = virtual(derivative, mesh)(state, x)
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("over", OVERS)
def test_an_overflow_on_one_rank_skips_the_update_of_both_replicas(over: OptimizerOver) -> None:
    step_fn = descends(lambda p, x: (p["w"] * x).sum())
    scaled = fzero.scale_loss(step_fn, "dynamic")
    for stage in range(4):
        step = fzero.shard(scaled, stage=stage, mesh=(2, 2), optimizer_over=over)
        step = fzero.simulate(step, world_size=4)
        state = step.init({"w": torch.ones(21)}, fzero.optim.sgd(0.5))
        state, _ = step(state, torch.tensor([1.0, 1.0, 1.0, float("inf")]))
        assert state.step.tolist() == [0] * 4
        state, _ = step(state, torch.ones(4))
        full = virtual(fzero.full_params, (2, 2))(state)["w"]
        assert state.step.tolist() == [1] * 4 and torch.equal(full, torch.full((4, 21), 0.5))


@pytest.mark.parametrize("stages", [(0, 2), (2, 1), (3, 1), (3, 3)])
def test_one_loss_over_models_on_two_meshes_of_the_same_ranks(stages: Sizes) -> None:
    def losses(x: Tensor) -> Any:
        def make(numel: int, stage: int, mesh: Any) -> Any:
            return fzero.init([torch.ones(numel)], sgd(), stage=stage, mesh=mesh)

        states = [make(5, stages[0], None), make(7, stages[1], (2, 2))]
        states, _ = fzero.grad_and_reduce(lambda p: p[0][0].sum() * p[1][0].sum() * x, states)()
        states = fzero.apply_gradients(states)
        return [fzero.full_params(state)[0] for state in states]

    one, other = fzero.simulate(losses, world_size=4)(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert torch.equal(one, torch.full((4, 5), 1 - LR * 7 * 3))
    assert torch.equal(other, torch.full((4, 7), 1 - LR * 5 * 3))


def test_a_dim_of_the_mesh_has_a_name_in_the_loss() -> None:
    def sums(state: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Any:
            names = ("dp", "replicate", "shard")
            found = torch.stack([fzero.psum(x, name) for name in names])
            return (params["w"] * fzero.pmean(x, "shard")).sum(), found

        return fzero.grad_and_reduce(loss, state, has_aux=True)()[1][1]

    state = state_on((2, 2), 3, "shard", {"w": torch.ones(3)})
    found = virtual(sums, (2, 2))(state, torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert found.tolist() == [[15, 5, 3], [15, 10, 3], [15, 5, 12], [15, 10, 12]]
    with pytest.raises(fzero.AxisError, match=r"axis='model', and the axis here is .*2 x 2"):
        virtual(
            lambda state: fzero.grad_and_reduce(lambda p: fzero.psum(p["w"], "model"), state)(),
            (2, 2),
        )(state)


@pytest.mark.parametrize("mesh", [(3, 2), (2, 2, 1), (0, 4), (True, 4), (4.0, 1)])
def test_sizes_that_are_not_those_of_the_world_are_refused(mesh: Any) -> None:
    with pytest.raises(fzero.AxisError, match=r"there are 4 ranks[^`]*replicas x shards = ranks"):
        virtual(lambda x: fzero.init(PARAMS, sgd(), stage=3, mesh=mesh), (2, 2))(torch.ones(4))


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(fzero.AxisError, match="mesh is a list"):
        fzero.init(PARAMS, sgd(), stage=3, mesh=[1, 1])  # type: ignore[arg-type]
    with pytest.raises(fzero.AxisError, match=r"size=3[^`]*replicas=2"):
        fzero.Axis(size=3, runtime=Runtime.VIRTUAL, dims=Dims(2))


def test_a_state_of_another_mesh_is_refused_by_a_step_and_by_an_engine() -> None:
    state = state_on((2, 2), 3, "shard", {"weight": torch.ones(1, 8), "bias": torch.ones(1)})
    step = fzero.shard(lambda state: (state, None), stage=3, mesh=(4, 1))
    with pytest.raises(fzero.AxisError, match=r"2 x 2 ranks\) was given to a step on .*4 x 1"):
        virtual(step, (2, 2))(state)

    def adopt(state: Any) -> None:
        engine = fzero.adapter.Engine(
            torch.nn.Linear(8, 1), torch.optim.SGD, stage=3, mesh=(2, 2), optimizer_over="all"
        )
        engine.state = state

    with pytest.raises(fzero.LayoutError, match=r"optimizer sharded;.*optimizer sharded over all"):
        virtual(adopt, (2, 2))(state)
    assert on_rank(state, 0).step == 0  # as it was
