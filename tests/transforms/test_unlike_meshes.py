"""States on unlike meshes, or on unlike parts of one: what they mean together is right, or refused.

And what is asked of one mesh by its names, however it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import AxisError, LayoutError
from tests.strategies import same

MESH = fzero.Mesh({"data": 2, "expert": 2})
SGD = fzero.optim.sgd(0.5)
Run = Callable[..., Any]


def on(ranks: int, run: Run, *args: Any) -> Any:
    return fzero.simulate(run, world_size=ranks)(*args)


def made(w: Tensor, mesh: Any, stage: int = 2) -> Any:
    return fzero.init({"w": w}, SGD, stage=stage, mesh=mesh)


# Two states, leaf by leaf.


def both_parts(stage: int, other: Any) -> Tensor:
    """p + q, of experts at each place along "expert", and of a state that is elsewhere."""

    def run() -> Tensor:
        p = made(torch.zeros(8) + fzero.axis_index() % 2, MESH["data"], stage)
        q = made(10 * torch.arange(8.0), other, stage)
        given = q if stage < 4 else fzero.full_params(q)
        return fzero.full_params(fzero.map_params(lambda p, q: p + q, p, given))["w"]

    return on(4, run)


@pytest.mark.parametrize("stage", range(4))
def test_map_params_of_states_on_unlike_parts_is_refused(stage: int) -> None:
    """Their shards are equally long, and have other elements."""
    with pytest.raises(LayoutError, match=r"axis 'expert'.* beside one on axis 'data'[^`]*full_p"):
        both_parts(stage, MESH["expert"])


@pytest.mark.parametrize("stage", range(4))
def test_map_params_of_states_on_one_part_is_right_by_whatever_name(stage: int) -> None:
    wanted = 10 * torch.arange(8.0) + (torch.arange(4) % 2)[:, None]
    same(both_parts(stage, MESH["data"]), wanted)
    same(both_parts(stage, fzero.Mesh({"d": 2, "e": 2})["d"]), wanted)


def test_whole_values_are_parallel_to_a_state_on_any_part() -> None:
    def run() -> Tensor:
        p, q = made(torch.zeros(8), MESH["data"], 3), made(torch.arange(8.0), MESH["expert"], 3)
        return fzero.full_params(fzero.map_params(torch.add, p, fzero.full_params(q)))["w"]

    same(on(4, run), torch.arange(8.0).expand(4, 8))


# Two states under one loss: which axis is meant.


def of_two(first: Any, second: Any, axis: str | None, how: str, keys: str = "ab") -> Any:
    """psum(p x) of a state on the mesh `first`, beside one on `second`; keys say which is first."""

    def run(x: Tensor) -> Any:
        states = {keys[0]: made(torch.ones(2), first), keys[1]: made(torch.ones(2), second)}

        def loss(p: Any) -> Tensor:
            return (fzero.psum(p[keys[0]]["w"] * x, axis) * p[keys[1]]["w"]).sum() ** 2

        if how == "evaluate":
            return fzero.evaluate(loss, states)()
        if how == "step":
            step = fzero.shard(
                lambda s: (s, fzero.psum(x, axis)), stage=2, mesh={keys[0]: first, keys[1]: second}
            )
            return step(states)[1]
        new, value = fzero.grad_and_reduce(loss, states)()
        return value, fzero.full_gradients(new)[keys[0]]["w"]

    return on(4, run, torch.arange(4.0))


HOW = ("gradient", "evaluate", "step")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("keys", ["ab", "ba"])
@pytest.mark.parametrize(
    ("meshes", "axis"),
    [
        (({"a": 2, "b": 2}, {"b": 2, "a": 2}), "a"),
        (((2, 2), (4, 1)), "shard"),
        (({"data": 4}, {"data": 2, "seq": 2}), "data"),
    ],
)
def test_a_name_that_two_meshes_have_for_other_ranks_is_refused(
    meshes: Any, axis: str, keys: str, how: str
) -> None:
    """It would be that of the state whose key comes first."""
    with pytest.raises(AxisError, match=rf"axis='{axis}' in a loss or[^`]*two meshes"):
        of_two(meshes[0], meshes[1], axis, how, keys)


@pytest.mark.parametrize("how", HOW)
def test_what_all_meshes_mean_alike_is_right_in_either_order(how: str) -> None:
    pairs = [({"a": 2, "b": 2}, {"b": 2, "a": 2}, None), (None, {"a": 2, "b": 2}, "a")]
    pairs += [((2, 2), None, "shard"), ({"data": 4}, None, "data"), ({"data": 4}, (2, 2), "shard")]
    for first, second, axis in pairs:
        one = of_two(first, second, axis, how, "ab")
        other = of_two(first, second, axis, how, "ba")
        assert all(map(torch.equal, one, other))
    same(of_two((2, 2), None, None, "step"), torch.full((4,), 6.0))


# A mesh by its names.


@pytest.mark.parametrize("names", [0, None, slice(0, 1), ["data", 0], ()], ids=str)
def test_a_part_without_a_name_is_refused(names: Any) -> None:
    with pytest.raises(AxisError, match=r"name axes of \['data', 'expert'\]"):
        MESH[names]


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (2, 2)])
def test_the_dims_of_a_mesh_have_names_whatever_their_sizes(sizes: tuple[int, int]) -> None:
    def run(x: Tensor) -> Any:
        def loss(p: Any) -> tuple[Tensor, Tensor]:
            sums = [fzero.psum(x, name) for name in ("replicate", "shard")]
            return p["w"].sum(), torch.stack(sums)

        return fzero.grad_and_reduce(loss, made(torch.ones(2), sizes), has_aux=True)()[1][1]

    grid = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(sizes)
    wanted = [grid.sum(dim, keepdim=True).expand(sizes).flatten() for dim in (0, 1)]
    same(on(4, run, grid.flatten()), torch.stack(wanted, 1))


@pytest.mark.parametrize("by", ["leaf", "row"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_norms_by_leaf_and_row_are_over_all_places(stage: int, by: Any) -> None:
    grads = {"a": torch.arange(12.0).view(4, 3, 1), "b": torch.ones(4, 5)}  # by place, then a leaf
    seen: dict[int, Any] = {}

    def reduced(slots: Any, given: Any, ctx: fzero.Context) -> Any:
        found = ctx.norm(given, by=by)
        first = {k: x.expand_as(given[k]) for k, x in found.items()}
        seen.setdefault(fzero.axis_index(), first)  # later calls are tests of it
        return slots, given

    mesh = fzero.Mesh({"data": 2, "expert": 4})

    def run() -> Tensor:
        place = mesh.axis.along("expert").rank
        mine = {k: x[place] for k, x in grads.items()}

        def step(state: Any) -> Any:
            state, _ = fzero.grad_and_reduce(
                lambda p: sum(8 / 2 * (p[k] * mine[k]).sum() for k in p), state
            )()
            return fzero.apply_gradients(state), fzero.axis_index()

        noted = fzero.transform(name="noted", reduced=reduced)(step)
        step = fzero.shard(noted, stage=stage, mesh=mesh["data"])
        return step(step.init(mine, SGD))[1]

    on(8, run)
    for key, x in grads.items():
        rows = x.square().flatten(2 if by == "row" and x.ndim > 2 else 1).sum(-1).sum(0).sqrt()
        wanted = set(rows.flatten().tolist())
        found = {y.item() for one in seen.values() for y in one[key].unique()}
        assert sorted(found) == pytest.approx(sorted(wanted)), key


# A parameter of stage 3, given to a collective as it is.

COLLECTIVES: dict[str, Run] = {
    "psum": fzero.psum,
    "pmean": fzero.pmean,
    "all_gather": lambda w: fzero.all_gather(w.view(2, 3), dim=1),
    "psum_scatter": fzero.psum_scatter,
    "all_to_all": fzero.all_to_all,
    "all_to_all by sizes": lambda w: fzero.all_to_all(w, sizes=[2, 4])[0],
    "ppermute": lambda w: fzero.ppermute(w, [(0, 1), (1, 0)]),
    "pmax": lambda w: fzero.pmax(w.detach()) * w,
    "of a view": lambda w: fzero.psum(w.view(2, 3).T[1:]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_parameter_of_stage_3_is_gathered_for_a_collective(name: str) -> None:
    def run(x: Tensor, stage: int) -> Any:
        def loss(p: Any) -> Tensor:
            y = COLLECTIVES[name](p["w"])
            return (y * torch.arange(1.0, 1 + y.numel()).view(y.shape)).sum() * x

        state = made(torch.arange(6.0), None, stage)
        new, value = fzero.grad_and_reduce(loss, state)()
        return value, fzero.full_gradients(new)["w"], fzero.evaluate(loss, state)()

    x = torch.tensor([1.0, 4.0])
    for found, wanted in zip(
        on(2, lambda x: run(x, 3), x), on(2, lambda x: run(x, 0), x), strict=True
    ):
        same(found, wanted)


# A rank that has padding alone.


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("where", ["map_params", "updated"])
def test_a_derivative_through_pieces_where_ranks_have_padding_alone(
    where: str, stage: int, ranks: int
) -> None:
    def run(t: Tensor) -> Any:
        def after(t: Tensor) -> Tensor:
            def step_fn(state: Any) -> Any:
                if where == "map_params":
                    state = fzero.map_params(lambda p: p * t, state)
                half = fzero.grad_and_reduce(
                    lambda p: ((p["b"] ** 2).sum() + p["w"] ** 2) / 4, state
                )
                return fzero.apply_gradients(half()[0]), None

            def updated(slots: Any, params: Any, ctx: fzero.Context) -> Any:
                return slots, {k: p * t for k, p in params.items()}

            at_end = fzero.transform(name="times", updated=updated)
            fn: Any = step_fn if where == "map_params" else at_end(step_fn)
            step = fzero.shard(fn, stage=stage)
            state, _ = step(step.init({"b": torch.ones(2), "w": torch.tensor(1.0)}, SGD))
            full = fzero.full_params(state)
            return full["b"].sum() + full["w"]

        pair: Any = torch.func.jvp(after, (t,), (torch.ones(()),))
        return torch.stack([*pair, torch.func.grad(after)(t)])

    # Each rank's own t moves its own pieces, whatever ranks they are on.
    value, along, back = on(ranks, run, torch.full((ranks,), 2.0)).unbind(1)
    same(value, torch.full((ranks,), 4.5))
    same(along, torch.full((ranks,), 2.25))
    assert back.sum() == 2.25 * ranks


# A state of virtual ranks at another stage.


@pytest.mark.parametrize(
    "mesh", [{"a": 2, "b": 2}, fzero.Mesh({"a": 2, "b": 2}, replicate="a"), (2, 2), None], ids=str
)
def test_reshard_of_a_stack_keeps_its_mesh_and_takes_another(mesh: Any) -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p: (p["w"] * x).sum(), state)()
        return fzero.apply_gradients(state), fzero.axis_size()

    def step(stage: int, mesh: Any) -> Any:
        return fzero.simulate(fzero.shard(step_fn, stage=stage, mesh=mesh), world_size=4)

    x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    state = step(2, mesh).init({"w": torch.zeros(5)}, SGD)
    moved: Any = fzero.reshard(state, stage=3)
    assert moved.mesh == state.mesh
    same(on(4, fzero.full_params, step(3, mesh)(moved, x)[0])["w"], torch.full((4, 5), -1.5))
    other: Any = fzero.Mesh({"seq": 2, "data": 2})
    same(
        on(4, fzero.full_params, step(2, other)(fzero.reshard(moved, 2, other), x)[0])["w"],
        torch.full((4, 5), -1.5),
    )
    with pytest.raises(AxisError, match=r"fzero.reshard\(state, mesh=...\) takes the mesh"):
        step(2, other)(state, x)
    six: Any = fzero.reshard(state, mesh={"a": 3, "b": 2})
    assert dict(six.mesh.named) == {"a": 3, "b": 2}
    with pytest.raises(AxisError, match="is a part of a mesh"):
        fzero.reshard(state, mesh=other["seq"])
