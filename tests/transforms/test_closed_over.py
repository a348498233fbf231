"""A loss that reads what its state was made of, or a parameter of another call, raises."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.errors import PhaseError
from tests.covering import covered

RULE = fzero.optim.sgd(0.5)
Loss = Callable[[Any, Any, Any, Any], Any]  # (net, apply, params, x)


def by_reentrant(net: Any, apply: Any, p: Any, x: Any) -> Any:
    learns = torch.ones_like(x, requires_grad=True)
    return apply(p, x).sum() + checkpoint(net, x * learns, use_reentrant=True).sum()


LOST: dict[str, Loss] = {
    "a weight": lambda net, apply, p, x: apply(p, x).sum() + net.weight.square().sum(),
    "the module": lambda net, apply, p, x: net(x).sum(),
    "a view": lambda net, apply, p, x: apply(p, x).sum() + net.weight.t()[0].sum(),
    "remat": lambda net, apply, p, x: apply(p, x).sum() + fzero.remat(net)(x).sum(),
    "a checkpoint": lambda net, apply, p, x: (
        apply(p, x).sum() + checkpoint(net, x, use_reentrant=False).sum()
    ),
    "a reentrant one": by_reentrant,
}


def on_ranks(step: Any, state: Any, stage: Any, ranks: int) -> Any:
    run = fzero.simulate(fzero.shard(step, stage=stage), world_size=ranks)
    return run(run.init(state, RULE), torch.ones(ranks, 3, 2))


@covered(name=[*LOST], stage=range(4), ranks=[1, 2, 4], form=["one", "aux", "several", "window"])
def test_a_gradient_of_the_module_of_the_state_raises(
    name: str, stage: int, ranks: int, form: str
) -> None:
    net = nn.Linear(2, 2)
    apply, params = fzero.functionalize(net)

    def loss(p: Any, x: Tensor) -> Any:
        value = LOST[name](net, apply, p["a"] if form == "several" else p, x)
        return (value, x) if form == "aux" else value

    def step(state: Any, x: Tensor) -> Any:
        return fzero.grad_and_reduce(loss, state, has_aux=form == "aux")(x)

    given: Any = {"a": params, "b": {"w": torch.ones(2)}} if form == "several" else params
    stages = {"a": stage, "b": 0} if form == "several" else stage
    with pytest.raises(PhaseError, match=r"reads (weight|bias) of what the state was made of"):
        on_ranks(fzero.coalesce(step) if form == "window" else step, given, stages, ranks)
    assert net.weight.grad is None and net.bias.grad is None


@pytest.mark.parametrize("stage", range(4))
def test_it_may_be_read_and_trained_elsewhere(stage: int) -> None:
    net = nn.Linear(2, 2)
    apply, params = fzero.functionalize(net)

    def loss(p: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = net.weight.square().sum()
        return apply(p, x).sum() * norm + net.bias.detach().sum()

    state, value = on_ranks(lambda s, x: fzero.grad_and_reduce(loss, s)(x), params, stage, 2)
    assert torch.allclose(value[0], loss(params, torch.ones(3, 2)))

    net(torch.ones(3, 2)).sum().backward()  # outside of a loss
    assert torch.equal(net.bias.grad, torch.full((2,), 3.0))  # type: ignore[arg-type]
    pickled = io.BytesIO()
    torch.save(net, pickled)
    saved = io.BytesIO(pickled.getvalue())
    for other in (copy.deepcopy(net), torch.load(saved, weights_only=False)):
        other.zero_grad()

        def with_other(p: Any, x: Tensor, other: Any = other) -> Tensor:
            return apply(p, x).sum() + other(x).sum()

        state = fzero.init(params, RULE, stage=stage)
        fzero.grad_and_reduce(with_other, state)(torch.ones(1, 2))
        assert torch.equal(other.bias.grad, torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", range(4))
def test_a_leaf_that_init_was_given_raises_and_is_watched_once(stage: int) -> None:
    params = {"w": torch.ones(3, requires_grad=True), "k": torch.ones(2)}
    for _ in range(2):
        state = fzero.init(params, RULE, stage=stage)
    assert len(params["w"]._backward_hooks or {}) == 1 and not params["k"]._backward_hooks
    with pytest.raises(PhaseError, match="reads w of what the state was made of"):
        fzero.grad_and_reduce(lambda p: (p["w"] * params["w"]).sum(), state)()
    torch.save(params, io.BytesIO())  # without a warning
    params["w"].sum().backward()
    assert params["w"].grad is not None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("where", ["a loss", "nowhere"])
def test_a_parameter_of_another_call_is_refused(where: str, stage: int, ranks: int) -> None:
    """At stage 3 it cannot be read; below, its gradient would go to a pass that is over."""

    def step(state: Any, x: Tensor) -> Any:
        kept: list[Tensor] = []

        def keeps(p: Any, x: Tensor) -> Tensor:
            kept.append(p["w"])
            return (p["w"] * x).sum()

        state, loss = fzero.grad_and_reduce(keeps, state)(x)

        def reads(p: Any, x: Tensor) -> Tensor:
            return (p["w"] * kept[0] * x).sum()

        if where == "a loss":
            return fzero.grad_and_reduce(reads, state)(x)
        if stage == 3 and ranks > 1:
            with pytest.raises(PhaseError, match="is over"):
                fzero.evaluate(reads, state)(x)
        (kept[0] * kept[0]).sum().backward()
        return state, loss

    with pytest.raises(PhaseError, match="is over"):
        on_ranks(step, {"w": torch.ones(2), "v": torch.ones(3)}, stage, ranks)
