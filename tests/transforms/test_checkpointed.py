"""torch's own checkpoints inside a loss, and functions that run a backward of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.functional import functionalize

RESHARDS: tuple[Any, ...] = (True, False, "window")
PLACES: list[tuple[int, int, Any]] = [
    *[(0, 1, True), (0, 2, True), (2, 2, True)],
    *[(3, 2, reshard) for reshard in RESHARDS],
]


class Blocks(nn.Module):
    """Checkpointed blocks; the first one's input depends on no parameter."""

    def __init__(self, *, reentrant: bool, whole: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.reentrant, self.whole = reentrant, whole

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            block = layer if self.whole else lambda y, layer=layer: torch.tanh(layer(y))
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize(("stage", "ranks", "reshard"), PLACES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_checkpointed_module_needs_no_edit(
    stage: int, ranks: int, reshard: Any, reentrant: bool, whole: bool
) -> None:
    torch.manual_seed(3)
    module = Blocks(reentrant=reentrant, whole=whole)
    x = torch.randn(ranks, 3, 4, dtype=torch.float64)
    for one in x:
        (module(one).square().mean() / ranks).backward()
    wanted = {path: p.grad for path, p in module.named_parameters()}
    apply, params = functionalize(module)

    def run(x: Tensor) -> Any:
        state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage, reshard_after_forward=reshard)
        for _ in range(2):  # the second call may not find what the first one left
            state, _ = fzero.grad_and_reduce(lambda p, x: apply(p, x).square().mean(), state)(x)
        return fzero.gradients(state)

    for path, found in fzero.simulate(run, world_size=ranks)(x).items():
        want = wanted[path]
        assert want is not None
        assert torch.allclose(found[0], 2 * want, rtol=1e-11), path


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_backward_recomputes_with_the_parameters_of_its_own_forward(
    reentrant: bool, whole: bool
) -> None:
    """Two forwards, then two backwards, as cached contrastive learning does; on two threads."""
    apply, params = functionalize(Blocks(reentrant=reentrant, whole=whole))
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


def test_a_loss_by_no_parameter_of_the_state_is_told() -> None:
    module = nn.Linear(2, 1)
    _, params = functionalize(module)
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=0)
    with pytest.warns(UserWarning, match="by no parameter of the state"):
        fzero.grad_and_reduce(lambda p, x: module(x).sum(), state)(torch.ones(2))
