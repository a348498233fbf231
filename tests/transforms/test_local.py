"""`fzero.local`: replicas that train apart, against plain models in one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import AxisError, LayoutError, PhaseError
from tests.covering import covered
from tests.local_oracle import Replicas
from tests.strategies import integers, seeds, stages

MESHES = {"1": None, "2": None, "3": None, "2x2": (2, 2), "1x2": (1, 2), "3x1": (3, 1)}
STEPS, ROWS = 5, 4
ON_TIME: dict[str, Any] = {}  # or a delay, and what a replica keeps of its own


def ranks_of(name: str) -> tuple[int, int]:
    """(replicas, shards)."""
    mesh = MESHES[name]
    return mesh or (int(name), 1)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def data(ranks: int, steps: int = STEPS) -> Tensor:
    """[steps, ranks, ROWS, 4]: inputs and targets; another scale on each rank."""
    torch.manual_seed(2)
    return torch.randn(steps, ranks, ROWS, 4) * torch.arange(1, ranks + 1)[:, None, None]


def error(module: Any, batch: Tensor) -> Tensor:
    return ((module(batch[..., :3])[..., 0] - batch[..., 3]) ** 2).mean()


def adam_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 1e-2)


def plainly(
    mesh: str, every: int, batches: Tensor, out: Any = lambda step: [], **options: Any
) -> Replicas:
    """`out(step)`: the replicas that are not in the mean of that step."""
    plain = Replicas(model(), ranks_of(mesh)[0], every=every, inner=adam_of, **options)
    for step, batch in enumerate(batches):
        plain.update(error, batch, out=out(step))
    return plain


def by_function(
    mesh: str,
    every: int,
    batches: Tensor,
    stage: int,
    max_norm: Any,
    *,
    fragments: int = 1,
    wrap: Any = lambda fn: fn,
    out: Any = None,
    late: dict[str, Any] = ON_TIME,
    **options: Any,
) -> Any:
    """[ranks] of (anchors, own parameters), each a list of leaves."""
    apply, params = fzero.functionalize(model())
    ranks = batches.shape[1]

    def step_fn(state: Any, batch: Tensor) -> Any:
        def loss(p: Any, x: Tensor) -> Tensor:
            return error(lambda x: apply(p, x), x)

        if out is not None and bool(out(batch)):
            state = fzero.leave_out(state)
        state, _ = fzero.grad_and_reduce(loss, state)(batch)
        return fzero.apply_gradients(state), None

    def both(state: Any) -> Any:
        found = fzero.full_params(state), fzero.full_params(state, replica=True)
        return [[one[name] for name in names] for one in found]

    names = [name for name, _ in model().named_parameters()]
    clipped = wrap(fzero.clip(step_fn, max_norm=max_norm))
    local = fzero.local(clipped, every=every, fragments=fragments, **late)
    step = fzero.shard(local, stage=stage, mesh=MESHES[mesh], **options)
    run = fzero.simulate(step, world_size=ranks)
    state = run.init(params, fzero.optim.adamw(1e-2))
    for batch in batches:
        state, _ = run(state, batch)
    return fzero.simulate(both, world_size=ranks)(state)


def by_engine(
    mesh: str,
    every: int,
    batches: Tensor,
    stage: int,
    max_norm: Any,
    *,
    fragments: int = 1,
    out: Any = None,
    late: dict[str, Any] = ON_TIME,
    **options: Any,
) -> Any:
    def body(batches: Tensor) -> Any:
        module = model()
        engine = Engine(
            module,
            torch.optim.AdamW(module.parameters(), 1e-2),
            stage=stage,
            mesh=MESHES[mesh],
            local=fzero.Local(every=every, fragments=fragments, **late),
            max_norm=max_norm,
            **options,
        )
        assert (engine.axis.rank, engine.axis.size) == (fzero.axis_index(), ranks)
        for batch in batches:
            if out is not None and bool(out(batch)):
                engine.state = fzero.leave_out(engine.state)
            engine.backward(error(engine, batch))
            engine.step()
        own = [x.clone() for x in engine.full_parameters().values()]
        return list(fzero.full_params(engine.state).values()), own

    ranks = batches.shape[1]
    return fzero.simulate(body, world_size=ranks)(batches.transpose(0, 1))


@covered(
    mesh=[*MESHES],
    stage=[0, 1, 2, 3],
    every=[1, 2, 3],
    how=["engine", "function", "donating function"],
    max_norm=[None, 0.5],
)
def test_trains_as_plain_replicas_do(
    mesh: str, stage: int, every: int, how: str, max_norm: float | None
) -> None:
    replicas, shards = ranks_of(mesh)
    batches = data(replicas * shards)
    train = by_engine if how == "engine" else by_function
    options: dict[str, Any] = {"donate": True} if how.startswith("donating") else {}
    found = train(mesh, every, batches, stage, max_norm, **options)
    require_equal(found, plainly(mesh, every, batches, max_norm=max_norm), shards)


def require_equal(found: Any, plain: Replicas, shards: int) -> None:
    anchors, own = found
    for rank in range(len(anchors[0])):
        for one, wanted in zip(anchors, plain.anchors, strict=True):
            torch.testing.assert_close(one[rank], wanted.detach())
        for one, wanted in zip(own, plain.modules[rank // shards].parameters(), strict=True):
            torch.testing.assert_close(one[rank], wanted.detach())


@covered(
    mesh=["2", "2x2", "1x2"],
    stage=[0, 1, 2, 3],
    every=[2, 3, 4],
    how=[by_engine, by_function],
    donate=[False, True],
)
def test_fragments_meet_one_after_the_other(
    mesh: str, stage: int, every: int, how: Any, donate: bool
) -> None:
    replicas, shards = ranks_of(mesh)
    batches = data(replicas * shards, steps=7)
    options = {"donate": donate} if how is by_function else {}
    found = how(mesh, every, batches, stage, None, fragments=2, **options)
    plain = plainly(mesh, every, batches, fragments=[[0, 1], [2, 3]])  # a unit is a layer
    require_equal(found, plain, shards)


@pytest.mark.parametrize("how", [by_engine, by_function])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_replica_that_says_so_is_left_out(how: Any, fragments: int) -> None:
    batches = data(4)
    batches[0, 1] = 7.0  # a rank of replica 0 says so, and goes on training

    found = how("2x2", 2, batches, 2, None, fragments=fragments, out=lambda x: (x == 7).all())
    units = [[0, 1], [2, 3]] if fragments == 2 else ()
    plain = plainly("2x2", 2, batches, lambda step: [0] if step < 2 else [], fragments=units)
    require_equal(found, plain, 2)


# Law 16.

PARAMS = {
    "w": torch.tensor([1.0, 2.0, -1.0]),
    "b": torch.tensor(1.0),
    "half": torch.tensor([2.0, 1.0], dtype=torch.bfloat16),
    "e": torch.zeros(0),
    "frozen": torch.nn.Parameter(torch.tensor([3.0]), requires_grad=False),
}


def linear(params: Any, x: Tensor) -> Tensor:
    pieces = (params["w"] * x).sum() + params["b"] * x[0] * params["frozen"].sum()
    return pieces + (params["half"].float() * x[:2]).sum()


@given(
    st.sampled_from([(1, None), (2, None), (4, None), (4, (2, 2)), (2, (1, 2)), (8, (2, 4))]),
    stages,
    seeds,
    st.booleans(),
    st.booleans(),
)
def test_one_local_update_is_data_parallelism_bit_for_bit(
    place: Any, stage: int, seed: int, donate: bool, windowed: bool
) -> None:
    ranks, mesh = place
    batches = integers((2, ranks, 3), seed).float()

    def step_fn(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(linear, state)(x)
        return fzero.apply_gradients(state), None

    def trained(wrap: Any) -> Any:
        fn = wrap(fzero.coalesce(step_fn) if windowed else step_fn)
        run = fzero.simulate(
            fzero.shard(fn, stage=stage, mesh=mesh, donate=donate), world_size=ranks
        )
        state = run.init(PARAMS, fzero.optim.sgd(0.5))
        for x in batches:
            state, _ = run(state, x)
        return fzero.simulate(fzero.full_params, world_size=ranks)(state)

    local = trained(lambda fn: fzero.local(fn, every=1, outer=fzero.optim.sgd(1.0)))
    for name, wanted in trained(lambda fn: fn).items():
        assert torch.equal(local[name], wanted), name


# Replicas that are left out.


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_replica_that_is_not_finite_is_left_out_and_goes_on_from_the_anchors(stage: int) -> None:
    batches = data(4)
    bad = batches.clone()
    bad[1, 2] = float("nan")  # on one rank of replica 1

    def trained(batches: Tensor) -> Any:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = by_function("2x2", 2, batches, stage, None)
        return found, [str(one.message) for one in seen]

    (anchors, own), said = trained(bad)
    assert len(said) == 4 and all("replicas [1] of 2" in one for one in said)
    plain = Replicas(model(), 2, every=2, inner=adam_of)
    for k, batch in enumerate(batches):
        plain.update(error, batch, out=[1] if k == 1 else [])
        if k == 1:
            for kept in plain.inner[1].state.values():
                kept["exp_avg"].zero_()
                kept["exp_avg_sq"].zero_()
    for rank in range(4):
        for found, wanted in zip(anchors, plain.anchors, strict=True):
            torch.testing.assert_close(found[rank], wanted.detach())
        for found, wanted in zip(own, plain.modules[rank // 2].parameters(), strict=True):
            torch.testing.assert_close(found[rank], wanted.detach())


@pytest.mark.parametrize("how", [by_engine, by_function])
def test_all_go_back_to_the_anchors_where_no_replica_is_finite(how: Any) -> None:
    batches = torch.full((1, 2, ROWS, 4), float("nan"))
    with pytest.warns(UserWarning, match="the anchors stay"):
        anchors, own = how("2", 1, batches, 0, None)
    for found, mine, wanted in zip(anchors, own, model().parameters(), strict=True):
        assert torch.equal(found[0], wanted) and torch.equal(mine[1], wanted)


# What is refused, and what is shown.


def state_fn(state: Any) -> Any:
    return state, None


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(LayoutError, match="every=0"):
        fzero.local(state_fn, every=0)
    with pytest.raises(LayoutError, match="outer"):
        fzero.init(PARAMS, fzero.optim.sgd(1.0), stage=0, local=fzero.Local(every=2, outer=3))
    with pytest.raises(LayoutError, match="optimizer_over"):
        fzero.shard(fzero.local(state_fn, every=2), stage=1, optimizer_over="all").init(
            PARAMS, fzero.optim.sgd(1.0)
        )
    with pytest.raises(LayoutError, match="local was put around shard"):
        fzero.local(fzero.shard(state_fn, stage=0), every=2)
    with pytest.raises(PhaseError, match="made without local updates"):
        fzero.local(state_fn, every=2)(fzero.init(PARAMS, fzero.optim.sgd(1.0), stage=0))
    step = fzero.local(state_fn, every=2)
    with pytest.raises(PhaseError, match="every=2"):
        step(fzero.shard(fzero.local(state_fn, every=3), stage=0).init(PARAMS, fzero.optim.sgd(1)))
    with pytest.raises(LayoutError, match="local"):
        fzero.init(PARAMS, fzero.optim.sgd(1.0), stage=0, local=2)  # type: ignore[arg-type]


def test_a_state_of_another_mesh_is_refused() -> None:
    def body(x: Tensor) -> Any:
        step = fzero.shard(fzero.local(state_fn, every=2), stage=1, mesh=(2, 2))
        state = step.init(PARAMS, fzero.optim.sgd(1.0))
        step(state)
        fzero.shard(fzero.local(state_fn, every=2), stage=1)(state)

    with pytest.raises(AxisError, match="2 x 2 ranks"):
        fzero.simulate(body, world_size=4)(torch.zeros(4))
