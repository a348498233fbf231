"""Ranks that are apart: at init, in a window, on other axes; told at once, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero.errors import AxisError, LayoutError
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

PARAMS = {"a": torch.ones(3), "b": torch.ones(2)}


def linear(p: Any, x: Tensor) -> Tensor:
    return (p["a"] * x).sum()


def init_differently(rank: int, world_size: int, what: str, stage: int) -> None:
    """Make the state from something that is other on the last rank."""
    odd = rank == world_size - 1
    params = dict(PARAMS)
    lr = 0.5 if odd and what == "options" else 0.25
    groups = [(lambda leaf: leaf.path == "b", {"lr": lr})]
    if odd and what == "shape":
        params["b"] = torch.ones(4)
    if odd and what == "stage":
        stage = (stage + 1) % 4
    fzero.init(params, fzero.optim.sgd(0.1, groups=groups), stage=stage)


SEEN = {
    "shape": ("rank 0 has b (2,)", "has b (4,)"),
    "stage": ("rank 0 has stage", "has stage"),
    "options": ("optimizer of b: lr=0.25", "lr=0.5"),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", SEEN)
def test_ranks_that_disagree_at_init_are_told_the_same_words(what: str, ranks: int) -> None:
    for stage in range(4):
        errors = run_ranks(init_differently, ranks, what, stage, raises=True, timeout_s=20)
        for kind, message in errors:
            assert kind == "MismatchError"
            for part in (*SEEN[what], f"rank {ranks - 1} has", "Usual cause: ", "Fix: "):
                assert part in message, message


def raise_at_init(rank: int, world_size: int) -> None:
    params: Any = PARAMS | ({"b": 3} if rank == 1 else {})
    kind, seen = (LayoutError, "b is a int") if rank == 1 else (AxisError, "LayoutError: .*b is a")
    with pytest.raises(kind, match=seen):
        fzero.init(params, fzero.optim.sgd(0.1), stage=2)
    module = torch.nn.Linear(2, 2)
    optimizer: Any = "adamw" if rank == 1 else torch.optim.SGD(module.parameters(), lr=0.1)
    kind, seen = (LayoutError, "'adamw'") if rank == 1 else (AxisError, "LayoutError: .*'adamw'")
    with pytest.raises(kind, match=seen):
        fzero.adapter.Engine(module, optimizer, stage=2)


def call_more_often_in_a_window(rank: int, world_size: int) -> None:
    def uneven(state: Any, calls: int) -> Any:
        for _ in range(calls):
            state, _ = fzero.grad_and_reduce(linear, state)(torch.ones(3))
        return state, None

    step, mean = fzero.coalesce(uneven), (world_size + 1) / 2
    places: list[tuple[int, Any]] = [(0, True), (1, True), (2, True), (3, "window"), (3, True)]
    for stage, reshard in places:
        params = {"a": torch.ones(3)}
        state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage, reshard_after_forward=reshard)
        if (stage, reshard) == (3, True):
            seen = "rank 0 the end of coalesce, rank 1 grad_and_reduce"
            with pytest.raises(AxisError, match=seen):
                step(state, 1 + rank)
            step(state, 2)  # the old state is good
        else:
            state, _ = step(state, 1 + rank)
            assert fzero.gradients(state)["a"].tolist() == [mean] * 3, f"stage {stage}, {reshard}"


def send_frozen_leaves_of_any_dtype(rank: int, world_size: int) -> None:
    """They are sent as they are, with the values of rank 0."""
    kinds = (torch.int16, torch.uint16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.int64)
    for stage in (0, 3):
        bits = torch.tensor([1, 0, 1])
        params = {str(kind): (bits if rank == 0 else 1 - bits).to(kind) for kind in kinds}
        state = fzero.init(
            params | PARAMS, fzero.optim.sgd(0.1), stage=stage, trainable=lambda path: path == "a"
        )
        held = fzero.full_params(state)
        for kind in kinds:
            assert held[str(kind)].dtype == kind
            assert torch.equal(held[str(kind)].float(), bits.float()), kind


@pytest.mark.smoke
@pytest.mark.parametrize(
    "body", [raise_at_init, call_more_often_in_a_window, send_frozen_leaves_of_any_dtype]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_ranks_do_apart_is_right_or_told(body: Any, world_size: int) -> None:
    run_ranks(body, world_size)


def two_axes(rank: int, world_size: int) -> None:
    """Two models under one loss, on two axes of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = torch.arange(6.0)

    def loss(p: Any) -> Tensor:
        return ((p[0]["w"] * x).sum() + (p[1]["w"] * x).sum()) * (1 + rank)

    for stages in ((3, 3), (3, 2), (1, 3), (0, 2)):
        states = tuple(
            fzero.init({"w": x + 10}, fzero.optim.sgd(0.1), stage=stage, mesh=mesh[name])
            for name, stage in zip(("a", "b"), stages, strict=True)
        )
        both = fzero.grad_and_reduce(loss, states)
        if stages == (3, 3):
            with pytest.raises(AxisError, match="under one loss"):
                both()
            continue
        for state, name in zip(both()[0], ("a", "b"), strict=True):
            share = (1.0 + torch.tensor(mesh[name].mesh.tolist())).mean()
            assert torch.equal(fzero.gradients(state)["w"], x * share), name


def test_states_that_gather_as_they_go_are_on_one_axis() -> None:
    run_ranks(two_axes, 4)
