"""A weight that is used several times: its gradients are added up in fp32, wherever autocast is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.adapter import Engine
from tests.autocast.mixed import LOW, STAGES, on_ranks

LR = 0.5


class Again(nn.Module):
    """One map five times, as a recurrent network has it; a bilinear one, which has no rule."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map, self.pair = nn.Linear(8, 8), nn.Bilinear(8, 8, 4)
        self.checkpointed = checkpointed

    def again(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.tanh(self.map(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        h: Any = checkpoint(self.again, x, use_reentrant=False) if self.checkpointed else None
        h = self.again(x).float() if h is None else h.float()
        return self.pair(h, h).float().square().mean()


def data(number: int) -> Tensor:
    """The same on each rank: the mean over ranks is then one process's gradient."""
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(number))


def plain(steps: int) -> dict[str, Tensor]:
    """One process, each use with a cast of its own."""
    net = Again()
    for number in range(steps):
        with torch.autocast("cpu", dtype=LOW, cache_enabled=False):
            loss = net(data(number))
        grads = torch.autograd.grad(loss, [*net.parameters()])
        for p, gradient in zip(net.parameters(), grads, strict=True):
            p.data -= LR * gradient
    return {path: p.detach() for path, p in net.named_parameters()}


def by_engine(rank: int, stage: int, whose: str, *, checkpointed: bool = False) -> Any:
    net = Again(checkpointed=checkpointed)
    options: Any = {"autocast": LOW} if whose == "ours" else {}
    engine = Engine(net, torch.optim.SGD(net.parameters(), LR), stage=stage, **options)
    for number in range(3):
        with torch.autocast("cpu", dtype=LOW, enabled=whose == "torch's"):
            loss = engine(data(number))
        loss.backward()
        engine.step()
    assert torch.is_autocast_cache_enabled() == (fzero.axis_size() == 1)
    return engine.full_parameters()


def by_function(rank: int, stage: int, whose: str, *, checkpointed: bool = False) -> Any:
    apply, params = fzero.functionalize(Again(checkpointed=checkpointed))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=LOW, enabled=whose == "torch's"):
            return apply(p, x)

    def own_loss(p: Any, x: Tensor) -> Tensor:
        return apply(p, x)

    def step_fn(state: Any, x: Tensor) -> Any:
        loss: Any = own_loss if whose == "ours" else loss_fn
        state, value = fzero.grad_and_reduce(loss, state)(x)
        return fzero.apply_gradients(state), value

    inner: Any = fzero.autocast(step_fn) if whose == "ours" else step_fn
    step: Any = fzero.shard(inner, stage=stage)
    # One dtype on the wire: what is compared is how uses are added up.
    state = fzero.init(params, fzero.optim.sgd(LR), stage=stage)
    for number in range(3):
        state, _ = step(state, data(number))
    return fzero.full_params(state)


@pytest.mark.parametrize("whose", ["ours", "torch's"])
@pytest.mark.parametrize("driver", [by_engine, by_function])
def test_every_use_has_a_gradient_of_its_own(driver: Any, whose: str) -> None:
    wanted = plain(3)
    worlds = [(2, stage) for stage in STAGES] + [(1, 0), (1, 3)]
    for world, stage in worlds:
        checkpointed = stage in (2, 3)
        run = on_ranks if world > 1 else lambda body, _, *a, **k: body(0, *a, **k)  # as a process
        found = run(driver, world, stage, whose, checkpointed=checkpointed)
        for path, value in wanted.items():
            exact = not (driver is by_engine and whose == "ours" and "map" in path)
            if exact or world == 1:
                torch.testing.assert_close(
                    found[path], value, rtol=0, atol=0, msg=f"{stage} {path}"
                )


def test_remat_recomputes_without_the_cache_of_casts() -> None:
    net = Again()
    block = fzero.remat(net.again)
    with torch.autocast("cpu", dtype=LOW):
        loss = block(data(0)).float().square().sum()
    loss.backward()
    found = net.map.weight.grad
    with torch.autocast("cpu", dtype=LOW, cache_enabled=False):
        loss = net.again(data(0)).float().square().sum()
    wanted = torch.autograd.grad(loss, net.map.weight)[0]
    assert found is not None and torch.equal(found, wanted)


def test_a_users_loss_under_autocast_keeps_no_whole_weight() -> None:
    """At stage 3 the cast stays lazy under an autocast that the loss enters, too."""
    held: list[list[str]] = []

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        def pack(saved: Tensor) -> Tensor:
            held[-1].append(type(saved).__name__)
            return saved

        held.append([])
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y)
        with torch.autocast("cpu", dtype=LOW), hooks:
            return F.linear(x.requires_grad_(), p["w"]).float().sum()

    def run(_: Tensor) -> Tensor:
        state = fzero.init({"w": torch.ones(4, 4)}, fzero.optim.sgd(LR), stage=3)
        return fzero.grad_and_reduce(lambda p: loss_fn(p, torch.ones(2, 4)), state)()[1]

    fzero.simulate(run, world_size=2)(torch.zeros(2))
    assert all("LazyParam" in names for names in held)
