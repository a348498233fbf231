"""torch's own checkpoints inside a loss, and functions that run a backward of their own."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.transforms.functionalize import functionalize
from tests.behaviours.costs import probe_gathers
from tests.behaviours.networks import Place, assert_every_rank, at_every_place
from tests.covering import covered


class Blocks(nn.Module):
    """Checkpointed blocks, one of them twice; the first one's input depends on no parameter."""

    def __init__(self, *, reentrant: bool, whole: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.reentrant, self.whole = reentrant, whole

    def forward(self, x: Tensor) -> Tensor:
        def random(x: Tensor, layer: nn.Module) -> Tensor:
            return F.dropout(torch.tanh(layer(x)), 0.5, self.training)

        x = x.clone().requires_grad_()
        for layer in [*self.layers, self.layers[0]]:
            block = layer if self.whole else functools.partial(random, layer=layer)
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("ranks", [1, 2])
@at_every_place
@covered(reentrant=[False, True], whole=[False, True])
def test_a_checkpointed_module_needs_no_edit(
    place: Place, ranks: int, reentrant: bool, whole: bool
) -> None:
    """And nothing that was gathered for it is left."""
    module = Blocks(reentrant=reentrant, whole=whole)
    apply, params = functionalize(module)
    xs = torch.randn(ranks, 3, 4, dtype=torch.float64)
    for x in xs:
        torch.manual_seed(5)
        for _ in range(2):
            (module(x).square().mean() / ranks).backward()
    want = {path: p.grad for path, p in module.named_parameters() if p.grad is not None}
    assert want.keys() == params.keys()

    def run(x: Tensor) -> Any:
        state = fzero.init(params, fzero.optim.sgd(0.1), **place)
        for _ in range(2):  # the second call may not find what the first one left
            state, _ = fzero.grad_and_reduce(lambda p, x: apply(p, x).square().mean(), state)(x)
        return fzero.gradients(state)

    torch.manual_seed(5)
    with probe_gathers() as probe:
        assert_every_rank(fzero.simulate(run, world_size=ranks)(xs), want)
    assert all(probe.alive(rank) == 0 for rank in range(ranks))


@covered(reentrant=[False, True], whole=[False, True])
def test_a_backward_recomputes_with_the_parameters_of_its_own_forward(
    reentrant: bool, whole: bool
) -> None:
    """Two forwards, then two backwards, as cached contrastive learning does; on two threads."""
    apply, params = functionalize(Blocks(reentrant=reentrant, whole=whole).eval())
    x = torch.randn(3, 4, dtype=torch.float64)

    def leaves(scale: float) -> dict[str, Tensor]:
        return {k: (v * scale).requires_grad_() for k, v in params.items()}

    def alone(scale: float) -> list[Tensor | None]:
        own = leaves(scale)
        apply(own, x).square().sum().backward()
        return [p.grad for p in own.values()]

    def together(scale: float) -> list[list[Tensor | None]]:
        both = [leaves(scale), leaves(scale + 1)]
        losses = [apply(own, x).square().sum() for own in both]
        for loss in losses:
            loss.backward()
        return [[p.grad for p in own.values()] for own in both]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(together, (1.0, 3.0)))
    for scale, grads in zip((1.0, 2.0, 3.0, 4.0), [*found[0], *found[1]], strict=True):
        for got, want in zip(grads, alone(scale), strict=True):
            assert got is not None and want is not None and torch.equal(got, want)


class Inner(torch.autograd.Function):
    """x -> x^2, and a backward of its own for a weight that is no input of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.local = (weight * 3).sum()
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.local.backward()
        return 2 * x * dy, None


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_leaves_get_their_gradients_as_from_a_backward(ranks: int) -> None:
    def run(_: Tensor) -> Any:
        outside = torch.ones(2, requires_grad=True)
        outside.grad = torch.tensor([7.0, 7.0])
        state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(0.1), stage=2)

        def loss(p: Any) -> Tensor:
            return Inner.apply(outside, p["w"]).sum() + p["w"].sum()

        state, _ = fzero.grad_and_reduce(loss, state)()
        return fzero.gradients(state)["w"], outside.grad

    found, outside = fzero.simulate(run, world_size=ranks)(torch.zeros(ranks))
    assert found[0].tolist() == [4.0, 4.0]
    assert outside[0].tolist() == [7.0 + 2.0, 7.0 + 2.0]  # added to what was there
