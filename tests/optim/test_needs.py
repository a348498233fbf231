"""What a rule is said to need is tried: `from_torch(..., needs=)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.optim import from_torch
from tests.optim.test_owners import STEPS, close, run
from tests.optim.torch_cases import by_torch, parameters
from tests.strategies import integers


class Base(torch.optim.Optimizer):
    """A rule as users write them, of all parameters of its group."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        for p, update in zip(params, self.updates(params), strict=True):
            p.sub_(0.05 * update)

    def updates(self, params: list[Any]) -> list[Tensor]:
        raise NotImplementedError


class ByAllNorms(Base):
    def updates(self, params: list[Any]) -> list[Tensor]:
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        return [p.grad / norm for p in params]


class Joined(Base):
    def updates(self, params: list[Any]) -> list[Tensor]:
        joined = torch.cat([p.grad.flatten() for p in params])
        return [p.grad - joined.mean() for p in params]


class ByFirst(Base):
    """It looks at the first parameter, which is there in any list but an empty one."""

    def updates(self, params: list[Any]) -> list[Tensor]:
        one = torch.ones((), dtype=params[0].dtype)
        return [one * p.grad / (1 + p.grad.norm()) for p in params]


class Drawn(Base):
    def updates(self, params: list[Any]) -> list[Tensor]:
        return [p.grad + torch.rand_like(p) for p in params]


@pytest.mark.parametrize("needs", ["element", "matrix"])
@pytest.mark.parametrize("rule", [ByAllNorms, Joined])
def test_a_rule_that_sees_all_parameters_may_not_say_that_it_needs_one(
    rule: Any, needs: Any
) -> None:
    for stage, ranks in ((0, 1), (0, 2), (2, 2)):
        with pytest.raises(LayoutError, match=f"{rule.__name__}, needs='{needs}'.*both together"):
            run(parameters(), from_torch(rule, needs=needs), torch.ones(1, ranks), stage=stage)


@pytest.mark.parametrize("place", [(0, 2), (2, 5)])
def test_a_rule_is_not_stepped_without_parameters(place: tuple[int, int]) -> None:
    stage, ranks = place
    params, xs = parameters(torch.float64), integers((STEPS, ranks), 8)
    got, _ = run(params, from_torch(ByFirst, needs="matrix"), xs, stage=stage)
    close(got, by_torch(params, xs, lambda of: ByFirst(of.values())))


def test_a_random_rule_is_believed() -> None:
    run(parameters(), from_torch(Drawn, needs="matrix"), torch.ones(1, 2), stage=2)
