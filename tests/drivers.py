"""One training by each driver, of a module whose output is the loss: an update for each batch.

What both must be equal to, without fzero, is in tests/oracle.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.state import TrainState

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def by_engine(module: nn.Module, batches: Iterable[Any], make: Make, **options: Any) -> Engine:
    """The engine after its updates, by `make(parameters that learn)`."""
    engine = Engine(module, make([p for p in module.parameters() if p.requires_grad]), **options)
    for batch in batches:
        engine.backward(engine(batch))
        engine.step()
    return engine


def by_steps(
    module: nn.Module,
    batches: Iterable[Any],
    rule: fzero.optim.Optimizer,
    *,
    wrap: Callable[[Any], Any] = lambda step: step,
    **options: Any,
) -> TrainState:
    """The state after the updates of a donating functional step, in the transforms of `wrap`."""
    apply, params = fzero.functionalize(module)

    def step_fn(state: Any, batch: Any) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p: apply(p, batch), state)()
        return fzero.apply_gradients(state), loss

    step: Any = fzero.shard(wrap(step_fn), donate=True, **options)
    state = step.init(params, rule)
    for batch in batches:
        state, _ = step(state, batch)
    return state


def each_rank(body: Callable[[int], Any], world_size: int) -> Any:
    """What `body(rank)` returns on virtual ranks, stacked."""
    zeros: Tensor = torch.zeros(world_size)
    return fzero.simulate(lambda _: body(fzero.axis_index()), world_size=world_size)(zeros)
