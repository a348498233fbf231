"""Meshes of named axes: which ranks a name means, for each collective, on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.context.current_rank import abstract_rank
from fzero.errors import AxisError
from fzero.ranks.mesh import axis_of
from tests.descends import descends
from tests.strategies import integers, same, seeds

AXES = [
    {"data": 2, "seq": 2},
    {"data": 3, "seq": 1},
    {"data": 1, "seq": 4},
    {"replica": 2, "data": 1, "seq": 3},
    {"a": 2, "b": 2, "c": 2},
]


def on_mesh(axes: dict[str, int], fn: Callable[..., Any], *stacked: Tensor) -> Any:
    """`fn(params, *xs)` as a loss's body on the mesh: what each rank returns, stacked."""
    found: dict[int, Any] = {}

    def loss(p: Any, *xs: Tensor) -> Tensor:
        found[fzero.axis_index()] = fn(*xs)
        return p["w"].sum()

    size = torch.Size(axes.values()).numel()
    step = fzero.simulate(fzero.shard(descends(loss), stage=2, mesh=axes), world_size=size)
    state = step.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1))
    step(state, *stacked)
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_the_last_axis_is_the_fastest(axes: dict[str, int]) -> None:
    got = on_mesh(axes, lambda: {a: (fzero.axis_index(a), fzero.axis_size(a)) for a in axes})
    for rank, places in enumerate(got):
        want = torch.unravel_index(torch.tensor(rank), tuple(axes.values()))
        assert places == {a: (int(i), axes[a]) for a, i in zip(axes, want, strict=True)}


@given(axes=st.sampled_from(AXES), at=st.integers(0, 2), seed=seeds)
def test_each_collective_over_one_axis(axes: dict[str, int], at: int, seed: int) -> None:
    """It is what it is on that many ranks, at each place of the other axes."""
    names, shape = [*axes], [*axes.values()]
    name = names[at % len(names)]
    size, dim = axes[name], at % len(names)
    world = torch.Size(shape).numel()
    xs = integers((world, 2 * size, 2), seed)
    ring = [(r, (r + 1) % size) for r in range(size)]

    def every(x: Tensor) -> dict[str, Tensor]:
        return {
            "psum": fzero.psum(x, name),
            "pmean": fzero.pmean(x, axis=name),
            "all_gather": fzero.all_gather(x, name),
            "psum_scatter": fzero.psum_scatter(x, axis=name),
            "all_to_all": fzero.all_to_all(x, axis=name),
            "ppermute": fzero.ppermute(x, ring, axis=name),
            "pmax": fzero.pmax(x, name),
            "pmin": fzero.pmin(x, axis=name),
            "sizes": fzero.all_to_all(x, sizes=[len(x)] + [0] * (size - 1), axis=name)[0],
            "gradient": torch.func.grad(lambda x: (fzero.psum(x, name) ** 2 / 2).sum())(x),
        }

    got = on_mesh(axes, every, xs)
    grid = xs.view(*shape, *xs.shape[1:]).movedim(dim, 0).flatten(1, len(shape) - 1)
    if len(shape) == 1:
        grid = grid[:, None]
    places = torch.arange(world).view(shape).movedim(dim, 0).reshape(size, -1)
    for line in range(places.shape[1]):
        ranks, x = places[:, line].tolist(), grid[:, line]
        total = x.sum(0)
        for r, rank in enumerate(ranks):
            same(got[rank]["psum"], total)
            same(got[rank]["pmean"], total / size)
            same(got[rank]["all_gather"], x.flatten(0, 1))
            same(got[rank]["psum_scatter"], total.chunk(size)[r])
            same(got[rank]["all_to_all"], torch.cat([one.chunk(size)[r] for one in x]))
            same(got[rank]["ppermute"], x[r - 1])
            same(got[rank]["pmax"], x.amax(0))
            same(got[rank]["pmin"], x.amin(0))
            same(got[rank]["sizes"], x.flatten(0, 1) if r == 0 else x[0, :0])
            same(got[rank]["gradient"], size * total)


STAGES = [0, 1, 2, 3]
MESHES: list[Any] = [
    {"data": 2, "seq": 2},
    fzero.Mesh({"data": 2, "seq": 2}, replicate="data"),
    fzero.Mesh({"replica": 2, "data": 1, "seq": 2}, replicate=("replica", "data")),
    {"seq": 4},
]


def squared(p: Any, x: Tensor) -> Tensor:
    """A loss that needs all of the sequence: rank's piece of x, and the total over "seq"."""
    total = fzero.psum(x @ p["w"], "seq")
    return ((x @ p["w"] + p["b"]) * total).sum()


def squared_of_all(p: Any, pieces: Tensor) -> Tensor:
    """The mean over ranks of it; pieces: [data, seq, n, 2]."""
    each = pieces @ p["w"]
    return ((each + p["b"]) * each.sum(1, keepdim=True)).sum() / pieces.shape[:2].numel()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_is_that_of_one_process_whatever_holds_copies(stage: int, mesh: Any) -> None:
    params = {"w": integers((2, 3), 1), "b": integers((3,), 2)}
    xs = integers((4, 3, 2), 3)
    rate = 2.0**-6
    step = fzero.simulate(fzero.shard(descends(squared), stage=stage, mesh=mesh), world_size=4)
    state = step.init(params, fzero.optim.sgd(rate))
    state, _ = step(state, xs)
    seq = 4 if isinstance(mesh, dict) and "data" not in mesh else 2
    gradient = torch.func.grad(squared_of_all)(params, xs.view(-1, seq, 3, 2))
    want = {name: p - rate * gradient[name] for name, p in params.items()}
    full = fzero.simulate(fzero.full_params, world_size=4)(state)
    for name, p in want.items():
        same(full[name], p.expand(4, *p.shape))


def test_axes_have_a_name_for_all_ranks_and_for_what_holds_copies() -> None:
    def axes_of(mesh: Any) -> Any:
        axis = axis_of(mesh)
        return axis.name, axis.names, str(axis), axis.replicas.size, axis.shards.size

    for mesh, want in {
        fzero.Mesh({"data": 2, "seq": 3}): (
            "dp",
            ("dp", "data", "seq"),
            "axis 'dp' (virtual, data 2 x seq 3 ranks)",
            1,
            6,
        ),
        fzero.Mesh({"dp": 2, "sp": 3}, replicate="dp"): (
            "dp_sp",
            ("dp_sp", "dp", "sp"),
            "axis 'dp_sp' (virtual, dp 2 x sp 3 ranks in 2 replicas)",
            2,
            3,
        ),
        fzero.Mesh({"sp": 6}): ("sp", ("sp",), "axis 'sp' (virtual, 6 ranks)", 1, 6),
    }.items():
        with abstract_rank(0, 6):
            assert axes_of(mesh) == want
    assert eval(repr(fzero.Mesh({"a": 2, "b": 1}, replicate="a")), {"Mesh": fzero.Mesh}) == (
        fzero.Mesh({"a": 2, "b": 1}, replicate=["a"])
    )


def test_an_axis_is_known_outside_of_a_step_by_its_mesh() -> None:
    """As a loader needs it: which rows, and which piece of each, does this rank read?"""
    mesh = fzero.Mesh({"data": 2, "seq": 2})

    def mine(x: Tensor) -> Tensor:
        with pytest.raises(AxisError, match=r"no mesh is known by its names[\s\S]*Mesh\(...\)"):
            fzero.psum(x, "seq")
        seq = mesh.axis.along("seq")
        return fzero.psum(x, seq) + 100 * fzero.axis_index(seq) + 1000 * fzero.axis_size(seq)

    got = fzero.simulate(mine, world_size=4)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert got.tolist() == [2003.0, 2103.0, 2007.0, 2107.0]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no ranks": (lambda: fzero.Mesh({"a": 0}), r"axes \[\('a', 0\)\][\s\S]*Fix: give names"),
    "nothing": (lambda: fzero.Mesh({}), "axes {}"),
    "no names": (lambda: fzero.Mesh((2, 2)), r"axes \(2, 2\)"),  # type: ignore
    "an unknown copy": (
        lambda: fzero.Mesh({"a": 2, "b": 2}, replicate="c"),
        r"replicate=\('c',\)[\s\S]*\['c'\] is no axis",
    ),
    "copies that come last": (
        lambda: fzero.Mesh({"a": 2, "b": 2}, replicate="b"),
        r"replicate=\('b',\)[\s\S]*Fix: give the axes as \['b', 'a'\]",
    ),
    "another world": (
        lambda: fzero.init([torch.ones(1)], fzero.optim.sgd(1.0), stage=1, mesh={"a": 2, "b": 2}),
        "has 4 ranks, and there are 1",
    ),
    "no axis": (lambda: axis_of({"a": 1}).along("b"), r"axis='b', and the axis here is axis 'a'"),
    "an index": (lambda: fzero.axis_index("tp"), "axis_index: axis='tp', and the axis here"),
    "a size": (lambda: fzero.axis_size("tp"), "axis_size: axis='tp', and the axis here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mesh_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(AxisError, match=message):
        call()


def test_local_updates_ask_which_axis_trains_apart() -> None:
    def step(mesh: Any) -> Any:
        apart = fzero.local(descends(lambda p, x: fzero.psum(p["w"].sum() * x, "seq")), every=1)
        return fzero.simulate(fzero.shard(apart, stage=1, mesh=mesh), world_size=4)

    params, sgd = {"w": torch.ones(3)}, fzero.optim.sgd(0.5)
    with pytest.raises(AxisError, match=r"Fix: fzero.Mesh\(.*replicate=\"data\"\)"):
        step({"data": 2, "seq": 2}).init(params, sgd)
    run = step(fzero.Mesh({"data": 2, "seq": 2}, replicate="data"))
    _, value = run(run.init(params, sgd), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert value.tolist() == [9.0, 9.0, 21.0, 21.0]
