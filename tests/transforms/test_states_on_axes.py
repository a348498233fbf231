"""States on some axes of a mesh: experts with other values at each place, under one loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import AxisError, LayoutError
from tests.covering import covered
from tests.experts_on_axes import (
    PARAMS,
    RATE,
    after,
    batches,
    loss,
    meshes,
    mine_of,
    optimizers,
    plain,
    whole_experts,
)

MESHES = [
    fzero.Mesh({"data": 2, "expert": 2}),
    fzero.Mesh({"data": 1, "expert": 4}),
    fzero.Mesh({"data": 4, "expert": 1}),
    fzero.Mesh({"data": 2, "expert": 3}),
    fzero.Mesh({"expert": 2, "data": 2}),
]
STAGES: list[Any] = [
    0,
    1,
    2,
    {"dense": 2, "experts": 0},
    {"dense": 0, "experts": 1},
    {"dense": 3, "experts": 2},
    {"dense": 2, "experts": 3},
]


def ranks_of(mesh: fzero.Mesh) -> int:
    return torch.Size(n for _, n in mesh.axes).numel()


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def step_fn(states: Any, x: Tensor) -> tuple[Any, Tensor]:
    states, value = fzero.grad_and_reduce(loss, states)(x)
    return fzero.apply_gradients(states), value


def run_of(
    mesh: fzero.Mesh, stage: Any, step: Any = step_fn, **options: Any
) -> tuple[Any, Callable[..., Any]]:
    """The states at first, and the step, on virtual ranks."""
    sharded = fzero.shard(step, stage=stage, mesh=meshes(mesh), **options)

    def begin() -> Any:
        return sharded.init(mine_of(PARAMS, mesh), optimizers())

    ranks = ranks_of(mesh)
    return fzero.simulate(begin, world_size=ranks)(), fzero.simulate(sharded, world_size=ranks)


def require(mesh: fzero.Mesh, states: Any, wanted: Any) -> None:
    """Every rank has the dense parameters, and every line along "expert" all experts."""
    ranks = ranks_of(mesh)
    held = fzero.simulate(fzero.full_params, world_size=ranks)(states)
    for name, x in wanted["dense"].items():
        close(held["dense"][name], x.expand(ranks, *x.shape))
    for found in whole_experts(held["experts"]["up"], mesh):
        close(found, wanted["experts"]["up"])


@covered(
    mesh=MESHES,
    stage=STAGES,
    how=[
        lambda step: step,
        fzero.coalesce,
        fzero.scale_loss(scale=fzero.DynamicScale(init_scale=8.0)),
    ],
    donate=[False, True],
)
def test_three_updates_are_those_of_one_process(
    mesh: fzero.Mesh, stage: Any, how: Any, donate: bool
) -> None:
    xs = batches(ranks_of(mesh))
    losses, wanted = after(PARAMS, xs)
    states, step = run_of(mesh, stage, how(step_fn), donate=donate)
    for batch, value in zip(xs, losses, strict=True):
        states, found = step(states, batch)
        close(found.mean(), value)
    require(mesh, states, wanted)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_are_those_of_the_mean_over_all_ranks_of_the_mesh(mesh: fzero.Mesh) -> None:
    """Not of the mean over the ranks of a state: that would be off by the size of "expert"."""

    def gradient(states: Any, x: Tensor) -> tuple[Any, Any]:
        return states, fzero.full_gradients(fzero.grad_and_reduce(loss, states)(x)[0])

    (xs,) = batches(ranks_of(mesh), 1)
    wanted = torch.func.grad(plain)(PARAMS, xs)
    for stage in (0, 2, {"dense": 3, "experts": 1}, {"dense": 1, "experts": 3}):
        states, step = run_of(mesh, stage, gradient)
        _, found = step(states, xs)
        for name, g in wanted["dense"].items():
            close(found["dense"][name], g.expand(ranks_of(mesh), *g.shape))
        for g in whole_experts(found["experts"]["up"], mesh):
            close(g, wanted["experts"]["up"])


@pytest.mark.parametrize("mesh", MESHES[:4], ids=str)
def test_weights_and_sums_are_those_of_the_mesh(mesh: fzero.Mesh) -> None:
    """Each rank has a weight of its own, one of them 0; a sum is one over all ranks of the mesh."""
    ranks = ranks_of(mesh)
    (xs,) = batches(ranks, 1)
    weights = [float(rank) for rank in range(ranks)]

    def weighted(states: Any, x: Tensor) -> tuple[Any, Any]:
        weight = weights[fzero.axis_index()]
        states, _ = fzero.grad_and_reduce(loss, states, weight=weight)(x)
        return fzero.apply_gradients(states), None

    def one_process(p: Any) -> Tensor:
        each = [w * plain(p, x[None]) for w, x in zip(weights, xs, strict=True)]
        return torch.stack(each).sum() / sum(weights)

    for stage in (0, 2, {"dense": 3, "experts": 2}):
        states, step = run_of(mesh, stage, weighted)
        states, _ = step(states, xs)
        require(mesh, states, updated(torch.func.grad(one_process)(PARAMS)))
        states, step = run_of(mesh, stage, step_fn, reduce_op="sum")
        states, _ = step(states, xs)
        require(mesh, states, updated(torch.func.grad(lambda p: plain(p, xs) * ranks)(PARAMS)))


@pytest.mark.parametrize("mesh", MESHES[:4], ids=str)
def test_gradients_by_hand_are_those_of_the_mesh(mesh: fzero.Mesh) -> None:
    """This rank's own gradient, added to a state, is divided as one that a loss brings."""
    (xs,) = batches(ranks_of(mesh), 1)

    def by_hand(states: Any, x: Tensor) -> tuple[Any, None]:
        own = torch.func.grad(loss)(fzero.full_params(states), x)
        made = {name: fzero.add_gradients(one, own[name]) for name, one in states.items()}
        return fzero.apply_gradients(made), None

    for step in (by_hand, fzero.coalesce(by_hand)):
        states, run = run_of(mesh, 2, step)
        states, _ = run(states, xs)
        require(mesh, states, updated(torch.func.grad(plain)(PARAMS, xs)))


def updated(gradient: Any) -> Any:
    """The parameters after one update by a gradient."""
    rate = {"dense": RATE, "experts": RATE / 2}
    return {
        name: {key: x - rate[name] * gradient[name][key] for key, x in tree.items()}
        for name, tree in PARAMS.items()
    }


def test_a_step_is_differentiable_by_its_arguments() -> None:
    """As all of torch.func does: the derivative of an update by the batch, through both states."""
    mesh = MESHES[0]
    (xs,) = batches(4, 1)

    def after_update(states: Any, x: Tensor) -> tuple[Any, Tensor]:
        def total(x: Tensor) -> Tensor:
            made, _ = fzero.grad_and_reduce(loss, states)(x)
            found = fzero.full_gradients(made)
            return (found["dense"]["w"] ** 2).sum() + (found["experts"]["up"] ** 2).sum()

        return states, torch.func.grad(total)(x)

    def of_all(xs: Tensor) -> Tensor:
        found = torch.func.grad(plain)(PARAMS, xs)
        # All four ranks have the dense gradient, and two of them each expert's.
        return 4 * (found["dense"]["w"] ** 2).sum() + 2 * (found["experts"]["up"] ** 2).sum()

    wanted = torch.func.grad(of_all)(xs)
    states, step = run_of(mesh, 2, after_update)
    close(step(states, xs)[1], wanted)


@pytest.mark.parametrize("stage", [0, 2, {"dense": 2, "experts": 3}], ids=str)
@pytest.mark.parametrize("mesh", MESHES[:3], ids=str)
def test_the_norm_that_clips_is_that_of_all_experts(mesh: fzero.Mesh, stage: Any) -> None:
    """Of each state over all places of the mesh: whatever the number of experts of a rank."""
    bound, ranks, seen = 0.5, ranks_of(mesh), dict[Any, Tensor]()
    (xs,) = batches(ranks, 1)
    gradient = torch.func.grad(plain)(PARAMS, xs)

    def reduced(slots: Any, grads: Any, ctx: fzero.Context) -> Any:
        both = torch.stack([ctx.norm(grads), ctx.sum(grads)])
        seen.setdefault((fzero.axis_index(), *grads), both)  # it is called again to be tested
        return slots, grads

    def clipped(tree: Any) -> Any:
        norm = torch.cat([x.flatten() for x in tree.values()]).norm()
        return {key: x * (bound / (norm + 1e-6)).clamp(max=1) for key, x in tree.items()}

    def step(states: Any, x: Tensor) -> Any:
        states, _ = fzero.grad_and_reduce(loss, states)(x)
        norms = {name: fzero.global_norm(one) for name, one in states.items()}
        return fzero.apply_gradients(states), norms

    looks = fzero.transform(name="looks", reduced=reduced)
    states, run = run_of(mesh, stage, looks(fzero.clip(step, max_norm=bound)))
    states, norms = run(states, xs)
    wanted = {name: clipped(tree) for name, tree in gradient.items()}
    require(mesh, states, updated(wanted))
    for name, tree in gradient.items():
        norm = torch.cat([x.flatten() for x in tree.values()]).norm()
        close(norms[name], norm.expand(ranks))
        flat = torch.cat([x.flatten() for x in wanted[name].values()])
        both = torch.stack([flat.norm(), flat.sum()])
        assert sum(torch.allclose(x, both, rtol=1e-9) for x in seen.values()) == ranks, name


@pytest.mark.parametrize("stage", [0, 2, {"dense": 2, "experts": 3}], ids=str)
def test_an_overflow_at_one_place_is_one_of_all_places(stage: Any) -> None:
    """Else ranks that an exchange connects would go on with other loss scales."""
    mesh = MESHES[0]

    def overflows(p: Any, x: Tensor) -> Tensor:
        factor = torch.inf if fzero.axis_index("expert") else 0.0
        return loss(p, x) + factor * p["experts"]["up"].sum()

    def step(states: Any, x: Tensor) -> Any:
        states, _ = fzero.grad_and_reduce(overflows, states)(x)
        return fzero.apply_gradients(states), None

    how = fzero.scale_loss(scale=fzero.DynamicScale(init_scale=8.0))
    states, run = run_of(mesh, stage, how(step))
    states, _ = run(states, batches(4, 1)[0])
    assert states["experts"].step.tolist() == [0] * 4 and states["dense"].step.tolist() == [1] * 4
    assert states["experts"].scale.scale.tolist() == [4.0] * 4


def test_numbers_of_ctx_normal_are_others_at_each_place() -> None:
    found: dict[int, Tensor] = {}

    def reduced(slots: Any, grads: Any, ctx: fzero.Context) -> Any:
        if "up" in grads:
            found.setdefault(fzero.axis_index(), ctx.normal("up"))  # later calls are tests of it
        return slots, grads

    noise = fzero.transform(name="noise", reduced=reduced)
    states, run = run_of(MESHES[0], {"dense": 2, "experts": 0}, noise(step_fn))
    run(states, batches(4, 1)[0])
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def test_a_loss_of_the_experts_alone_is_a_mean_over_the_mesh() -> None:
    """And knows its axes by name; so does `evaluate`."""
    mesh = MESHES[0]

    def alone(p: Any, x: Tensor) -> Tensor:
        assert (fzero.axis_size(), fzero.axis_size("expert")) == (4, 2)
        return (fzero.psum(p["up"].sum(), "expert") * x.sum()) / 2

    def gradient(state: Any, x: Tensor) -> Any:
        value = fzero.evaluate(alone, state)(x)
        made, same_value = fzero.grad_and_reduce(alone, state)(x)
        close(value, same_value)
        return fzero.full_gradients(made)["up"]

    def run(x: Tensor) -> Any:
        up = {"up": torch.ones(3, dtype=torch.float64)}
        return gradient(fzero.init(up, fzero.optim.sgd(0.5), stage=2, mesh=mesh["data"]), x)

    xs = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    found = fzero.simulate(run, world_size=4)(xs)
    close(found, torch.full((4, 3), float(xs.sum()) / 2 / 4, dtype=torch.float64))


def begin(stage: Any = 2, mesh: Any = None, **options: Any) -> Any:
    def make() -> Any:
        return fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage, mesh=mesh, **options)

    return fzero.simulate(make, world_size=4)()


def two_meshes() -> Any:
    def run(x: Tensor) -> Any:
        w = {"w": torch.ones(2)}
        dense = fzero.init(w, fzero.optim.sgd(0.5), stage=2, mesh=MESHES[1])
        other = fzero.init(w, fzero.optim.sgd(0.5), stage=2, mesh=MESHES[0]["data"])
        return fzero.grad_and_reduce(lambda p, x: (p[0]["w"] + p[1]["w"]).sum(), [dense, other])(x)

    return fzero.simulate(run, world_size=4)(torch.ones(4))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "another name": (lambda: MESHES[0]["seq"], AxisError, r"\['seq'\][\s\S]*name axes of"),
    "a gap": (
        lambda: fzero.Mesh({"a": 2, "b": 2, "c": 2})["a", "c"],
        AxisError,
        "do not follow each other",
    ),
    "copies": (
        lambda: fzero.Mesh({"a": 2, "b": 2}, replicate="a")["b"],
        AxisError,
        "some axes hold copies",
    ),
    "both at stage 3": (
        lambda: run_of(MESHES[0], 3)[1](run_of(MESHES[0], 3)[0], batches(4, 1)[0]),
        AxisError,
        r"states of stage 3 on .* and on[\s\S]*all but one of them at stages 0 to 2",
    ),
    "two meshes": (two_meshes, AxisError, r"on a part of[\s\S]*make both on one mesh"),
    "local updates": (
        lambda: begin(mesh=MESHES[0]["data"], local=fzero.Local(every=2)),
        AxisError,
        "local updates: .* is a part of a mesh",
    ),
    "logical ranks": (
        lambda: begin(mesh=MESHES[0]["data"], logical_ranks=4),
        AxisError,
        "logical_ranks=: .* is a part of a mesh",
    ),
    "other keys": (
        lambda: begin(mesh={"dense": MESHES[0], "expert": MESHES[0]["data"]}),
        LayoutError,
        "the parameters do not fit the meshes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()


def test_an_engine_refuses_a_part_of_a_mesh() -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(AxisError, match=r"Engine: .* is a part of a mesh"):
        fzero.adapter.Engine(module, torch.optim.SGD, stage=2, mesh=MESHES[0]["data"])


def test_a_part_is_of_axes_that_follow_each_other() -> None:
    mesh = fzero.Mesh({"expert": 2, "data": 2, "seq": 1})
    part = mesh["data", "seq"]
    assert str(part) == "Mesh({'expert': 2, 'data': 2, 'seq': 1})['data', 'seq']"
    assert mesh["expert", "data", "seq"] is mesh

    def place() -> Any:
        axis = part.axis
        assert axis.along("data").size == 2
        return axis.rank + 10 * int(axis.place == "expert=1of2")

    assert fzero.simulate(place, world_size=4)().tolist() == [0, 1, 10, 11]
