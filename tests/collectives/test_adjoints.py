"""Adjoints are exact whatever subset of ranks has a graph at an input, or uses a result."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, sampled_from
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.adapter import Engine
from fzero.errors import AxisError, MismatchError, PhaseError
from fzero.state.logical import carried
from tests.collectives.graphs import (
    OPS,
    graph_of,
    in_one_process,
    on_rank,
    params_of,
    right,
)
from tests.strategies import seeds, stages

pytestmark = pytest.mark.filterwarnings("ignore:the loss requires")

XS = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
OPS_TOGETHER = tuple(op for op in OPS if op != "sizes")
"""Of a rank that carries several: rows of other numbers for each are refused."""

PAIR = {"image": torch.ones(2), "text": torch.ones(2)}


def each_gives_one(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Each rank gives one of two tensors, and a constant for the other."""
    rank, zeros = fzero.axis_index(), torch.zeros(2)
    image = fzero.psum(p["image"] * x if rank == 0 else zeros)
    text = fzero.psum(p["text"] * x if rank == 1 else zeros)
    return (image * text).pow(2).sum()


def each_uses_one(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Each rank uses one of two sums."""
    image, text = fzero.psum(p["image"] * x), fzero.psum(p["text"] * x)
    return (image if fzero.axis_index() == 0 else text).pow(2).sum()


class Pair(torch.nn.Module):
    """`PAIR` as a module whose output is a loss."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.image, self.text = (torch.nn.Parameter(p.clone()) for p in PAIR.values())
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(dict(self.named_parameters()), x)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (each_gives_one, {"image": [18.0, 200.0], "text": [18.0, 200.0]}),
        (each_uses_one, {"image": [16.0, 49.0], "text": [16.0, 49.0]}),
    ],
)
def test_ranks_that_give_and_use_other_things(loss: Any, wanted: Any, stage: int) -> None:
    def by_state(x: Tensor) -> Any:
        state = fzero.init(PAIR, fzero.optim.sgd(0.1), stage=stage)
        return fzero.full_gradients(fzero.grad_and_reduce(loss, state)(x)[0])

    def by_engine(x: Tensor) -> Any:
        model = Pair(loss)
        engine = Engine(model, fzero.optim.sgd(0.1), stage=stage)
        engine.backward(model(x))
        return engine.full_gradients()

    for driver in (by_state, by_engine):
        got = fzero.simulate(driver, world_size=2)(XS)
        for name, value in wanted.items():
            assert torch.equal(got[name], torch.tensor([value, value])), (driver, name)


def _checkpointed(fn: Any) -> Any:
    return lambda q: checkpoint(fn, q, use_reentrant=False)


def _on_one_rank(fn: Any) -> Any:
    return fn if fzero.axis_index() else fzero.remat(fn)


@pytest.mark.parametrize("again", [fzero.remat, _checkpointed, _on_one_rank])
def test_parts_that_only_some_ranks_run_again(again: Any) -> None:
    def sums(p: dict[str, Tensor], x: Tensor) -> Tensor:
        image, text = (again(lambda q: fzero.psum(q * x).pow(2))(q) for q in p.values())
        return (image if fzero.axis_index() == 0 else text).sum()

    def constants(p: dict[str, Tensor], x: Tensor) -> Tensor:
        """Their collectives have no adjoint, and other values."""
        image = again(lambda q: q * q * fzero.psum(x))(p["image"])
        text = again(lambda q: q * q * fzero.psum(2 * x))(p["text"])
        return (image if fzero.axis_index() == 0 else text).sum()

    def step(x: Tensor) -> Any:
        state = fzero.init(PAIR, fzero.optim.sgd(0.1), stage=2)
        state, _ = fzero.grad_and_reduce(sums, state)(x)
        of_sums = fzero.full_gradients(state)
        state, _ = fzero.grad_and_reduce(constants, state)(x)
        return of_sums, fzero.full_gradients(state)

    of_sums, both = fzero.simulate(step, world_size=2)(XS)
    for name, of_constants in (("image", [4.0, 7.0]), ("text", [8.0, 14.0])):
        wanted = torch.tensor([16.0, 49.0])
        assert torch.equal(of_sums[name], wanted.expand(2, -1))
        assert torch.equal(both[name], (wanted + torch.tensor(of_constants)).expand(2, -1))


@pytest.mark.parametrize("op", [fzero.psum, lambda x: fzero.all_to_all(x, sizes=[1, 1])[0]])
def test_a_reentrant_checkpoint_of_a_collective_is_refused(op: Any) -> None:
    """In the forward it has no graph, and in the backward nobody knows which ranks come to it."""

    def step(x: Tensor) -> Any:
        state = fzero.init(PAIR, fzero.optim.sgd(0.1), stage=2)
        loss = lambda p, x: checkpoint(  # noqa: E731
            lambda q, x: op(q * x).pow(2).sum(), p["image"], x, use_reentrant=True
        )
        return fzero.grad_and_reduce(loss, state)(x)[1]

    with pytest.raises(PhaseError, match="use_reentrant=False"):
        fzero.simulate(step, world_size=2)(XS)


UNDER: dict[str, Any] = {
    "": lambda step, x: step(x),
    "vmap": lambda step, x: {name: g[0] for name, g in torch.func.vmap(step)(x[None]).items()},
    "jvp": lambda step, x: torch.func.jvp(step, (x,), (x,))[0],
}
"""What a step is called under."""


def _gradients(
    loss: Any, params: dict[str, Tensor], stage: int, xs: Tensor, under: str = ""
) -> Any:
    def step(x: Tensor) -> Any:
        state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage, bucket_bytes=16)
        return fzero.full_gradients(fzero.grad_and_reduce(loss, state)(x)[0])

    return fzero.simulate(lambda x: UNDER[under](step, x), world_size=len(xs))(xs)


@settings(max_examples=60)
@given(seed=seeds, stage=stages, inner=booleans(), under=sampled_from(sorted(UNDER)))
def test_random_losses_have_the_gradients_of_one_process(
    seed: int, stage: int, inner: bool, under: str
) -> None:
    """inner: with torch.autograd.grad in the loss, by other values and of other uses by rank."""
    random = Random(seed)
    graph = graph_of(random, inner=inner)
    params, xs = params_of(graph, random)
    got = _gradients(on_rank(graph), params, stage, xs, under)
    for name, wanted in right(graph, params, xs).items():
        torch.testing.assert_close(got[name], wanted.expand(graph.ranks, -1))


@settings(max_examples=8)
@given(seed=seeds, stage=stages, ranks=integers(1, 2))
def test_logical_ranks_have_the_gradients_of_as_many_ranks(
    seed: int, stage: int, ranks: int
) -> None:
    random = Random(seed)
    graph = graph_of(random, inner=random.random() < 0.5, ops=OPS_TOGETHER)
    params, xs = params_of(graph, random)

    def step(state: Any, x: Tensor) -> Any:
        loss = lambda p, x: on_rank(graph)(p, x.flatten())  # noqa: E731 - its one row
        state, _ = fzero.grad_and_reduce(loss, state)(x)
        return state, fzero.full_gradients(state)

    def body(x: Tensor) -> Any:
        sharded = fzero.shard(step, stage=stage, logical_ranks=graph.ranks)
        state = sharded.init(params, fzero.optim.sgd(0.1))
        rows = carried(fzero.axis_index(), ranks, graph.ranks)
        return sharded(state, xs[rows.start : rows.stop])[1]

    got = fzero.simulate(body, world_size=ranks)(torch.zeros(ranks))
    for name, wanted in right(graph, params, xs).items():
        torch.testing.assert_close(got[name], wanted.expand(ranks, -1))


@settings(max_examples=10)
@given(seed=seeds)
def test_tangents_of_random_losses(seed: int) -> None:
    """Of the loss itself, and of its gradient by a step."""
    random = Random(seed)
    graph = graph_of(random, most=3)
    (params, xs), (_, vs) = params_of(graph, random), params_of(graph, random)

    def pushed(x: Tensor, v: Tensor) -> Any:
        state = fzero.init(params, fzero.optim.sgd(0.1), stage=1)

        def gradients(x: Tensor) -> Any:
            return fzero.full_gradients(fzero.grad_and_reduce(on_rank(graph), state)(x)[0])

        value = torch.func.jvp(lambda x: on_rank(graph)(params, x), (x,), (v,))[1]
        return value, torch.func.jvp(gradients, (x,), (v,))[1]

    def losses(p: dict[str, Tensor], xs: Tensor) -> Tensor:
        return torch.stack(in_one_process(graph)([p] * graph.ranks, xs))

    def mean_gradients(xs: Tensor) -> Any:
        return torch.func.grad(lambda p: losses(p, xs).mean())(params)

    value, moved = fzero.simulate(pushed, world_size=graph.ranks)(xs, vs)
    wanted = torch.func.jvp(lambda xs: losses(params, xs), (xs,), (vs,))[1]
    torch.testing.assert_close(value, wanted)
    for name, one in torch.func.jvp(mean_gradients, (xs,), (vs,))[1].items():
        torch.testing.assert_close(moved[name], one.expand(graph.ranks, -1))


def test_a_result_that_nobody_uses_gives_no_gradient() -> None:
    """Not even zeros, which would be NaN behind a root at 0."""

    def loss(p: Tensor, x: Tensor) -> Tensor:
        fzero.psum((p - p).sqrt())
        return (p * x).sum()

    def step(x: Tensor) -> Tensor:
        state = fzero.init(torch.ones(2), fzero.optim.sgd(0.1), stage=2)
        return fzero.full_gradients(fzero.grad_and_reduce(loss, state)(x)[0])

    assert torch.equal(fzero.simulate(step, world_size=2)(XS)[0], XS.mean(0))


def test_the_gradient_of_a_tangent_of_three_ranks() -> None:
    def second(x: Tensor) -> Tensor:
        push = lambda x: torch.func.jvp(lambda x: fzero.psum(x) * 2, (x,), (x,))[1].sum()  # noqa: E731
        return torch.func.grad(push)(x)

    got = fzero.simulate(second, world_size=3)(torch.ones(3, 2))
    assert torch.equal(got, torch.full((3, 2), 6.0))


@pytest.mark.parametrize(
    ("by", "says"),
    [
        (torch.autograd.grad, r"in the backward of call 1[\s\S]*engine.backward"),
        (torch.func.grad, r"of your own comes to other[\s\S]*grad_and_reduce"),
    ],
)
def test_a_derivative_of_ones_own_that_differs_by_rank_raises_by_name(by: Any, says: str) -> None:
    def one(x: Tensor) -> Tensor:
        y = fzero.psum(x * 2)
        return y.sum() if fzero.axis_index() == 0 else x.sum() + y.detach().sum()

    def body(x: Tensor) -> Any:
        if by is torch.func.grad:
            return by(one)(x)
        x = x.clone().requires_grad_()
        return by(one(x), x)[0]

    with pytest.raises(AxisError, match=says):
        fzero.simulate(body, world_size=2)(XS)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_derivative_in_a_loss_that_only_some_ranks_take_raises_on_all(stage: int) -> None:
    """Also where another one comes to the same collective later, on another rank."""

    def loss(p: Any, x: Tensor) -> Tensor:
        image = fzero.psum(p["image"] * x).pow(2)
        if fzero.axis_index() == 0:
            (found,) = torch.autograd.grad(image.sum(), [p["image"]], create_graph=True)
            return found.sum()
        return fzero.psum(image).sum()

    def step(x: Tensor) -> Any:
        state = fzero.init(PAIR, fzero.optim.sgd(0.1), stage=stage)
        return fzero.grad_and_reduce(loss, state)(x)[1]

    with pytest.raises(MismatchError, match=r"torch\.autograd\.grad in a loss that has called 1"):
        fzero.simulate(step, world_size=2)(XS)


def _uses_or_gives(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One rank uses a sum, the other differentiates by what it gave: neither has a way there."""
    image, text = p["image"] * x, p["text"] * x
    total = fzero.psum(image)
    used = fzero.axis_index() == 0
    root = (text * text + total * total if used else image * image).sum()
    return (torch.autograd.grad(root, text if used else image, create_graph=True)[0] * x).sum()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("under", sorted(UNDER))
def test_a_derivative_to_which_no_rank_alone_has_a_way(under: str, stage: int) -> None:
    got = _gradients(_uses_or_gives, PAIR, stage, XS, under)
    assert torch.equal(got["image"], torch.tensor([[21.0, 60.0]] * 2))
    assert torch.equal(got["text"], torch.tensor([[1.0, 4.0]] * 2))


def test_in_a_func_grad_of_ones_own_it_raises_on_all_ranks() -> None:
    with pytest.raises(MismatchError, match=r"inside of a torch\.func\.grad"):
        fzero.simulate(lambda x: torch.func.grad(_uses_or_gives)(PAIR, x), world_size=2)(XS)


def test_a_func_grad_of_ones_own_of_which_some_ranks_give_the_input_raises() -> None:
    """The rank that uses the sum gave it nothing: the adjoint would come to no rank."""

    def loss(p: Tensor, x: Tensor) -> Tensor:
        first = fzero.axis_index() == 0

        def inner(q: Tensor) -> Tensor:
            total = fzero.psum(q * x if first else x).pow(2).sum()
            return (q * q).sum() + (total.detach() if first else total)

        return (torch.func.grad(inner)(p) * x).sum()

    def step(x: Tensor) -> Any:
        state = fzero.init(torch.ones(2), fzero.optim.sgd(0.1), stage=1)
        return fzero.grad_and_reduce(loss, state)(x)[1]

    with pytest.raises(MismatchError, match=r"grad \(or vjp\) of your own"):
        fzero.simulate(step, world_size=2)(XS)


def test_transforms_that_ranks_nest_otherwise_raise_on_all() -> None:
    def body(x: Tensor) -> Any:
        if fzero.axis_index():
            return torch.func.grad(lambda x: fzero.psum(x).sum())(x)
        return fzero.psum(x)

    with pytest.raises(MismatchError, match=r"other transforms of torch\.func"):
        fzero.simulate(body, world_size=2)(XS)
