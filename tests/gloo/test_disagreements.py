"""Ranks that are apart: at init, in a window, on other axes; told at once, on every rank."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.errors import AxisError, LayoutError
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


def linear(p: Any, x: Tensor) -> Tensor:
    return (p["a"] * x).sum()


def step(state: Any, x: Tensor) -> Any:
    state, loss = fzero.grad_and_reduce(linear, state)(x)
    return fzero.apply_gradients(state), loss


def options_body(rank: int, world_size: int) -> None:
    groups = [(lambda leaf: leaf.path == "b", {"lr": 0.5 if rank else 0.25})]
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    with pytest.raises(AxisError, match=r"optimizer of b: lr=0.25, rank 1 has .*lr=0.5"):
        fzero.init(params, fzero.optim.sgd(0.1, groups=groups), stage=0)


def raises_body(rank: int, world_size: int) -> None:
    params: Any = {"a": torch.ones(3), "b": 3 if rank == 1 else torch.ones(2)}
    kind, seen = (LayoutError, "b is a int") if rank == 1 else (AxisError, "LayoutError: .*b is a")
    with pytest.raises(kind, match=seen):
        fzero.init(params, fzero.optim.sgd(0.1), stage=2)
    module = torch.nn.Linear(2, 2)
    optimizer: Any = "adamw" if rank == 1 else torch.optim.SGD(module.parameters(), lr=0.1)
    kind, seen = (LayoutError, "'adamw'") if rank == 1 else (AxisError, "LayoutError: .*'adamw'")
    with pytest.raises(kind, match=seen):
        fzero.adapter.Engine(module, optimizer, stage=2)


def windows_body(rank: int, world_size: int) -> None:
    """Ranks that make another number of calls in a window."""

    @fzero.coalesce
    def uneven(state: Any) -> Any:
        for _ in range(1 + rank):
            state, _ = fzero.grad_and_reduce(linear, state)(torch.ones(3))
        return state, None

    calls = sum(range(1, world_size + 1)) / world_size
    places: list[tuple[int, Any]] = [(0, True), (1, True), (2, True), (3, "window"), (3, True)]
    for stage, reshard in places:
        state = fzero.init(
            {"a": torch.ones(3)}, fzero.optim.sgd(0.1), stage=stage, reshard_after_forward=reshard
        )
        if (stage, reshard) == (3, True):
            seen = "rank 0 the end of coalesce, rank 1 grad_and_reduce"
            with pytest.raises(AxisError, match=seen):
                uneven(state)
            state, _ = fzero.coalesce(step)(state, torch.ones(3))  # the old state is good
            continue
        state, _ = uneven(state)
        assert fzero.gradients(state)["a"].tolist() == [calls] * 3, f"stage {stage}, {reshard}"


def dtypes_body(rank: int, world_size: int) -> None:
    """Frozen leaves of any dtype are sent as they are."""
    kinds = (torch.int16, torch.uint16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.int64)
    for stage in (0, 3):
        params = {str(kind): torch.tensor([1, 0, 1]).to(kind) for kind in kinds}
        params["a"] = torch.ones(5)
        state = fzero.init(
            params, fzero.optim.sgd(0.1), stage=stage, trainable=lambda path: path == "a"
        )
        for name, value in fzero.full_params(state).items():
            assert value.dtype == params[name].dtype, name
            assert torch.equal(value.float(), params[name].float()), name


def traces_body(rank: int, world_size: int) -> None:
    """A donating step, traced: the graph has the update."""
    for stage in range(4):
        run = fzero.shard(step, stage=stage, donate=True)
        state = run.init({"a": torch.zeros(4)}, fzero.optim.sgd(1.0))
        leaves, treespec = optree.tree_flatten(state, namespace="fzero")
        flat = flat_step(run, treespec)
        graph = make_fx(flat)([leaf.clone() for leaf in leaves], torch.tensor(1.0))
        new = graph([leaf.clone() for leaf in leaves], torch.tensor(2.0))
        found = fzero.full_params(optree.tree_unflatten(treespec, new))
        assert found["a"].tolist() == [-2.0] * 4, f"stage {stage}"


def flat_step(run: Any, treespec: Any) -> Any:
    def flat(leaves: Any, x: Tensor) -> Any:
        new, _ = run(optree.tree_unflatten(treespec, leaves), x)
        return optree.tree_leaves(new, namespace="fzero")

    return flat


@pytest.mark.parametrize(
    "body", [options_body, raises_body, windows_body, dtypes_body, traces_body]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_ranks_do_apart_is_right_or_told(body: Any, world_size: int) -> None:
    run_ranks(body, world_size, timeout_s=60)


def axes_body(rank: int, world_size: int) -> None:
    """Two models under one loss, on two axes of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = torch.arange(6.0)
    for stages in ((3, 3), (3, 2), (1, 3), (0, 2)):
        one, two = (
            fzero.init({"w": x + 10}, fzero.optim.sgd(0.1), stage=stage, mesh=mesh[name])
            for name, stage in zip(("a", "b"), stages, strict=True)
        )

        def loss(p: Any) -> Tensor:
            return (p[0]["w"] * x).sum() * (1 + rank) + (p[1]["w"] * x).sum() * (1 + rank)

        both = fzero.grad_and_reduce(loss, (one, two))
        if stages == (3, 3):
            with pytest.raises(AxisError, match="under one loss"):
                both()
            continue
        (one, two), _ = both()
        others = {name: torch.tensor(mesh[name].mesh.tolist()) for name in ("a", "b")}
        for state, name in ((one, "a"), (two, "b")):
            share = (1.0 + others[name]).mean()
            assert torch.equal(fzero.gradients(state)["w"], x * share), name


def test_states_that_gather_as_they_go_are_on_one_axis() -> None:
    run_ranks(axes_body, 4, timeout_s=60)
