"""Collectives of the user's with other shapes, dtypes or names on some rank: all ranks raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import AxisError, FzeroError, MismatchError
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

PARAMS = {name: torch.full((n,), float(n)) for name, n in (("a.w", 3), ("b.w", 4), ("c.w", 5))}
Call = Callable[[int, Tensor], Tensor]  # (rank, a tensor [2, 3] of the loss) -> a tensor

CALLS: dict[str, tuple[Call, str, str]] = {  # and what rank 0 and the last rank are said to call
    "psum": (
        lambda last, x: fzero.psum(x.T if last else x),
        "all_reduce[(2, 3) float32]",
        "all_reduce[(3, 2) float32]",
    ),
    "pmean": (
        lambda last, x: fzero.pmean(x.sum(last)),
        "all_reduce of pmean[(3,) float32]",
        "all_reduce of pmean[(2,) float32]",
    ),
    "a mean": (
        lambda last, x: fzero.pmean(x) if last else fzero.psum(x),
        "all_reduce[(2, 3) float32]",
        "all_reduce of pmean[(2, 3) float32]",
    ),
    "a dtype": (
        lambda last, x: fzero.psum(x.double() if last else x),
        "all_reduce[(2, 3) float32]",
        "all_reduce[(2, 3) float64]",
    ),
    "rows": (
        lambda last, x: fzero.all_gather(torch.cat([x, x[:1]]) if last else x),
        "all_gather[(2, 3) float32]",
        "all_gather[(3, 3) float32]",
    ),
    "no rows": (
        lambda last, x: fzero.all_gather(x[:0] if last else x),
        "all_gather[(2, 3) float32]",
        "all_gather[(0, 3) float32]",
    ),
    "a dim": (
        lambda last, x: fzero.all_gather(x[:, :2], dim=last),
        "all_gather[(2, 2) float32]",
        "all_gather along dim 1[(2, 2) float32]",
    ),
    "psum_scatter": (
        lambda last, x: fzero.psum_scatter(x.repeat(fzero.axis_size() * (1 + last), 1)),
        "reduce_scatter[(",
        "reduce_scatter[(",
    ),
    "an order": (
        lambda last, x: fzero.psum(x, ordered=bool(last)),
        "all_reduce[(2, 3) float32]",
        "all_reduce in rank order[(2, 3) float32]",
    ),
    "another one": (
        lambda last, x: fzero.all_gather(x) if last else fzero.psum(x),
        "all_reduce[(2, 3) float32]",
        "all_gather[(2, 3) float32]",
    ),
}
PLACES: dict[str, dict[str, Any]] = {
    "in a window": {"window": True},
    "under remat": {"remat": True},
    "of an argument that learns": {"learns": True},
    "in an evaluation": {"evaluates": True},
    "plain": {},
}


def loss_of(call: Call, last: int, remat: bool) -> Any:
    def loss(p: Any, x: Tensor) -> Tensor:
        def inner(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
            return call(last, a.sum() * x).sum() * b.sum()

        made = (fzero.remat(inner) if remat else inner)(p["a.w"], p["b.w"], x)
        return made + p["c.w"].sum()

    return loss


def raised(run: Callable[[], Any]) -> str:
    try:
        run()
    except MismatchError as error:
        assert isinstance(error, AxisError)
        return str(error)
    return "nothing was raised"


def mismatches(rank: int, world_size: int, stage: int, names: list[str]) -> list[str]:
    last, found = int(rank == world_size - 1), []
    for name in names:
        call, x = CALLS[name][0], torch.ones(2, 3)
        found.append(raised(lambda call=call, x=x: call(last, x)))  # outside of a step
        state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage)
        for place in PLACES.values():
            loss = loss_of(call, last, place.get("remat", False))

            def step(state: Any, x: Tensor, loss: Any = loss, place: Any = place) -> Any:
                if place.get("evaluates"):
                    return state, fzero.evaluate(loss, state)(x)
                return fzero.grad_and_reduce(loss, state)(x)

            x = torch.ones(2, 3, requires_grad=place.get("learns", False))
            run = fzero.coalesce(step) if place.get("window") else step
            found.append(raised(lambda run=run, x=x, state=state: run(state, x)))
    return [*found, right_again(rank, world_size, stage)]


def right_again(rank: int, world_size: int, stage: int) -> str:
    """After all of that the ranks are in step, and values and gradients are right."""
    x = torch.full((2, 3), 1.0 + rank)
    total = sum(range(1, world_size + 1))
    state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage)
    loss = loss_of(lambda last, x: fzero.psum(x), 0, False)
    state, value = fzero.grad_and_reduce(loss, state)(x)
    grads = fzero.gradients(state)
    assert torch.equal(fzero.psum(x), torch.full((2, 3), float(total)))
    assert float(value) == 9.0 * total * 6 * 16 + 25
    assert torch.equal(grads["a.w"], torch.full((3,), total * 6 * 16.0)), grads
    return "right"


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_is_told_both_shapes(ranks: int, stage: int) -> None:
    names = [*CALLS] if ranks == 2 else ["psum", "rows", "no rows"]
    for found in run_ranks(mismatches, ranks, stage, names, timeout_s=60):
        assert found.pop() == "right"
        count = 1 + len(PLACES)
        for number, name in enumerate(names):
            for message in found[number * count : (number + 1) * count]:
                _, first, other = CALLS[name]
                said = f"rank 0: {first}", f"rank {ranks - 1}: {other}", "Usual cause: ", "Fix: "
                assert all(part in message for part in said), (name, message)


def another_call(rank: int, world_size: int, stage: int) -> list[str]:
    """One rank calls a collective that the other does not, before another call of both."""
    state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage)

    def extra(p: Any, x: Tensor) -> Tensor:
        value = p["a.w"].sum() * x.sum() + p["c.w"].sum()
        return value + fzero.psum(p["b.w"].sum()) if rank else value

    def outside() -> None:
        if rank:
            fzero.psum(torch.ones(2))
        fzero.gradients(fzero.grad_and_reduce(lambda p: p["a.w"].sum(), state)()[0])

    found = []
    for run in (
        lambda: fzero.gradients(fzero.grad_and_reduce(extra, state)(torch.ones(2))[0]),
        outside,
    ):
        try:
            run()
            found.append("nothing was raised")
        except FzeroError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_collective_that_another_rank_does_not_call_is_named(stage: int) -> None:
    for found in run_ranks(another_call, 2, stage, timeout_s=30):
        assert all("a collective of the user's" in message for message in found), found


def second_order(rank: int, world_size: int, stage: int) -> tuple[str, Tensor]:
    """The backward's own collectives come together, too: a product with the Hessian."""
    x = torch.full((3,), 1.0 + rank)

    def f(x: Tensor) -> Tensor:
        return fzero.psum(x**3).sum() ** 2

    product = torch.func.jvp(torch.func.grad(f), (x,), (torch.ones(3),))[1]
    bad = raised(lambda: torch.func.grad(lambda x: fzero.psum(x[: 2 + rank] ** 3).sum())(x))
    return bad, product


def test_a_transform_around_it_is_right_and_told_of_shapes() -> None:
    found = run_ranks(second_order, 2, 0, timeout_s=30)
    for bad, _ in found:
        assert "rank 0: all_reduce[(2,) float32]; rank 1: all_reduce[(3,) float32]" in bad
    want = fzero.simulate(
        lambda x: torch.func.jvp(
            torch.func.grad(lambda x: fzero.psum(x**3).sum() ** 2), (x,), (torch.ones(3),)
        )[1],
        world_size=2,
    )(torch.tensor([[1.0] * 3, [2.0] * 3]))
    assert all(torch.equal(mine[1], right) for mine, right in zip(found, want, strict=True))


def parts_of_a_mesh(rank: int, world_size: int) -> list[Any]:
    """Over one dim of a mesh replicas may have shapes of their own, and raise together."""

    def step(state: Any, rows: int) -> Any:
        return state, fzero.all_gather(torch.full((rows,), float(rank)), state.mesh.shards)

    sharded = fzero.shard(step, stage=2, mesh=(2, 2))
    state = sharded.init(PARAMS, fzero.optim.sgd(0.5))
    _, whole = sharded(state, 2 + rank // 2)
    return [whole, raised(lambda: sharded(state, 2 + (rank == 3)))]


def test_over_a_dim_of_a_mesh_each_part_has_shapes_of_its_own() -> None:
    for rank, (whole, bad) in enumerate(run_ranks(parts_of_a_mesh, 4, timeout_s=30)):
        first = float(rank // 2 * 2)
        assert whole.tolist() == [first] * (2 + rank // 2) + [first + 1] * (2 + rank // 2)
        assert "all_gather[(2,) float32] over 'shard'; rank 3: all_gather[(3,) float32] over" in bad
