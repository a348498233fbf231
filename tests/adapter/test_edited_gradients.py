"""What is written into `p.grad` between a backward and `step()`, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.ranks.virtual import run_ranks
from tests.adapter.nets import Odd
from tests.adapter.plain import Draw, Reference, back, engine_of, learning, same

Grads = dict[str, Tensor]
Edit = Callable[[dict[str, Any]], object]


def momentum_of(module: nn.Module) -> torch.optim.Optimizer:
    """What moves a parameter also where its gradient is zero."""
    some = learning(module).values()
    return torch.optim.SGD(some, lr=0.25, momentum=0.5, weight_decay=0.125)


def train(edit: Edit, stage: int, world_size: int, **options: Any) -> None:
    """Three updates of an engine and of a plain module, whose gradients are edited alike."""

    def body(rank: int) -> None:
        engine = engine_of(Odd, stage, momentum_of, **options)
        plain = Reference(Odd, world_size, momentum_of)
        for number in range(3):
            gradients = plain.run(back, number)
            some = learning(plain.module)
            for path, p in some.items():
                p.grad = gradients[path].clone() if path in plain.used else None
            edit(some)
            plain.optimizer.step()
            plain.used = set()
            back(engine, Draw(rank, number))
            edit(learning(engine.module))
            assert engine.step()
            same(engine.full_parameters(), plain.parameters(), 1e-12)

    run_ranks(body, world_size)


ZERO: dict[str, Edit] = {
    "zero_()": lambda p: p["a.weight"].grad.zero_(),
    ".data": lambda p: p["a.weight"].grad.data.zero_(),
    "detach()": lambda p: [p["a.weight"].grad.detach().zero_(), p["b.bias"].grad.detach_().zero_()],
    "_foreach_zero_": lambda p: torch._foreach_zero_([p["a.weight"].grad, p["c.weight"].grad]),
    "zero_grad of a part": lambda p: torch.optim.SGD([p["b.weight"]], 1.0).zero_grad(False),
    "mul_(0)": lambda p: p["a.weight"].grad.mul_(0.0),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_was_set_to_zero_is_a_gradient_of_zero(stage: int, world_size: int) -> None:
    for edit in ZERO.values():
        train(edit, stage, world_size)
