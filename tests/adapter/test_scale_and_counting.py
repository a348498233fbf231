"""A static loss scale and its guard; backwards that are counted, as torch has no callback."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fzero.adapter import Engine, _events
from fzero.errors import PhaseError
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a = nn.Linear(3, 5, dtype=torch.float64)
        self.b = nn.Linear(5, 5, dtype=torch.float64)
        self.unused = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        h = self.a(x).sin()
        if reentrant is None:
            return self.b(h)
        return checkpoint(self.b, h, use_reentrant=reentrant)


def inputs(rank: int, number: int) -> Tensor:
    return torch.randn(
        2, 3, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64
    )


def reference(world_size: int, numbers: range) -> dict[str, Tensor]:
    net = Net()
    for number in numbers:
        for rank in range(world_size):
            (net(inputs(rank, number)).square().sum() / world_size).backward()
    return {
        path: torch.zeros_like(p) if p.grad is None else p.grad
        for path, p in net.named_parameters()
    }


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for path, gradient in wanted.items():
        torch.testing.assert_close(found[path], gradient, rtol=1e-11, atol=1e-12, msg=path)


def scaled(rank: int, world_size: int) -> None:
    wanted = reference(world_size, range(3))
    for stage in STAGES:
        engine = Engine(Net(), torch.optim.SGD, stage=stage, loss_scale=1024.0, bucket_bytes=64)
        early, late = (
            engine.scale(engine(inputs(rank, number)).square().sum()) for number in (0, 1)
        )
        early.backward()
        late.backward()
        x = inputs(rank, 2).requires_grad_()
        out = engine(x).square().sum()
        torch.autograd.grad(out, x, retain_graph=True)  # brings no parameter a gradient
        with pytest.raises(PhaseError, match=r"without engine\.scale; loss_scale=1024(.|\n)*Fix"):
            out.backward(retain_graph=True)
        engine.scale(out).backward()
        same(engine.full_gradients(), wanted)
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_static_scale_is_divided_out_and_a_backward_around_it_changes_nothing(
    world_size: int,
) -> None:
    run_ranks(scaled, world_size)


def counted(rank: int, world_size: int) -> None:
    given = _events.autograd_has_callbacks
    _events.autograd_has_callbacks = lambda: False
    try:
        for stage in STAGES:
            for reentrant in (None, False, True):
                engine = Engine(Net(), torch.optim.SGD, stage=stage, bucket_bytes=64)
                for number in range(2):
                    x = inputs(rank, number).requires_grad_()
                    engine(x, reentrant).square().sum().backward()
                first, second = engine(inputs(rank, 2)), engine(inputs(rank, 3))
                (first.square().sum() + second.square().sum()).backward()
                same(engine.full_gradients(), reference(world_size, range(4)))
                engine.step()
                assert engine.hooks.backward_active_depth == 0, (stage, reentrant)
                engine.close()
    finally:
        _events.autograd_has_callbacks = given


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_autograds_callback_backwards_are_counted_and_gradients_are_the_same(
    world_size: int,
) -> None:
    run_ranks(counted, world_size)
