"""Points 14 and 15: small parameters persist each by itself; a foreign one is named by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fzero.adapter import Engine
from fzero.errors import LayoutError
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


class Net(nn.Module):
    """`b` uses the weight of `c`, which nothing else does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = (nn.Linear(4, 4).double() for _ in range(3))
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.b(self.act(self.a(x))), self.c.weight)


def small_ones(rank: int, world_size: int) -> None:
    engine = Engine(Net(), torch.optim.SGD, stage=3, persistence_threshold_numel=4)
    live = []
    engine.module.act.register_forward_hook(
        lambda *_: live.append(engine.state.coordinator.residency.live_numel)
    )
    for _ in range(2):  # from the first step on
        engine(torch.ones(1, 4).double()).sum().backward()
        engine.step()
    biases, weight = 3 * 4, 16
    assert live[0] == biases + weight, live
    capped = Engine(
        Net(),
        torch.optim.SGD,
        stage=3,
        persistence_threshold_numel=4,
        model_persistence_threshold_numel=8,
        prefetch_bucket_numel=0,
    )
    with torch.no_grad():
        capped(torch.ones(1, 4).double())
    units = capped.state.coordinator.units
    assert sum(units.numels[unit] for unit in units.persistent) == 8


def test_small_parameters_persist_beside_large_ones_of_their_module() -> None:
    run_ranks(small_ones, 2)


def by_hand(rank: int, world_size: int) -> None:
    net = Net()
    engine = Engine(net, torch.optim.SGD, stage=3)
    engine.register_external(net.b, net.c.weight)
    fetched = engine.state.coordinator.modules
    of_b = fetched.needs[fetched.names.index("b")]
    assert {engine.state.coordinator.units.names[u].split("#")[0] for u in of_b} == {"b", "c"}
    with pytest.raises(LayoutError, match=r"the module has none(.|\n)*Fix"):
        engine.register_external(net.act, net.c.weight)
    with pytest.raises(LayoutError, match="not this engine's"):
        engine.register_external(net.b, torch.ones(2))
    plain = Net()
    for number in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(number)).double()
        engine(x).square().sum().backward()
        plain(x).square().sum().backward()
        wanted = {path: p.grad for path, p in plain.named_parameters() if p.grad is not None}
        found = engine.full_gradients()
        for path, gradient in wanted.items():
            torch.testing.assert_close(found[path], gradient, rtol=1e-12, atol=1e-12)
    Engine(Net(), torch.optim.SGD, stage=2).register_external(net.b, torch.ones(2))  # no need


def test_a_foreign_parameter_named_by_hand_is_gathered_with_the_module_that_uses_it() -> None:
    run_ranks(by_hand, 2)
