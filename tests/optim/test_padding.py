"""No rule makes anything of what lies between the leaves of a flat, and behind the last one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.optim import from_torch
from tests.strategies import integers

RANKS = 3
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: fzero.optim.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda: fzero.optim.adam(0.1),
    "adamw": lambda: fzero.optim.adamw(0.1),
    "lion": lambda: fzero.optim.lion(0.1),
    **{
        kind.__name__: partial(from_torch, partial(kind, lr=0.1))
        for kind in (
            torch.optim.SGD,
            torch.optim.AdamW,
            torch.optim.Adagrad,
            torch.optim.Adadelta,
            torch.optim.Adamax,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.RMSprop,
            torch.optim.ASGD,
        )
    },
}


def padding_of(layout: fzero.state.Layout, index: int) -> Tensor:
    """Where no leaf of a group is, [W l]."""
    free = torch.ones(layout.full_numel(index), dtype=torch.bool)
    group = layout.groups[index]
    for leaf, offset in zip(group.leaves, group.offsets, strict=True):
        free[offset : offset + layout.leaves[leaf].numel] = False
    return free


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_padding_stays_zero_in_parameters_gradients_and_masters_and_finite_in_states(
    name: str, stage: int, dtype: torch.dtype
) -> None:
    """Also on ranks that have nothing but padding. (Adamax keeps max(0, eps) there.)"""
    params = {
        "a.v": integers((5,), 1, dtype) + 0.5,
        "a.w": integers((7, 3), 2, dtype) + 0.5,
        "b": torch.tensor(2.0, dtype=dtype),
    }

    def loss(p: Any) -> Tensor:
        total = sum(((x.float() ** 2).sum() for x in p.values()), torch.zeros(()))
        return total * (1 + fzero.axis_index())

    def step_fn(state: Any) -> tuple[Any, Any]:
        state, _ = fzero.grad_and_reduce(loss, state)()
        return fzero.apply_gradients(state), state.gradients.flats

    step = fzero.clip(step_fn, max_norm=1.0)
    run = fzero.simulate(fzero.shard(step, stage=stage), world_size=RANKS)
    state = run.init(params, OPTIMIZERS[name]())
    gradients: Any = ()
    for _ in range(3):
        state, gradients = run(state)

    layout = state.setup.layout
    for index in range(len(layout.groups)):
        free = padding_of(layout, index)
        assert free.any()

        def padding(x: Tensor, free: Tensor = free) -> Tensor:
            """Of a shard, or of all, of each rank."""
            return x[free.view(RANKS, -1) if x.numel() == free.numel() else free.expand(RANKS, -1)]

        masters = [x for x in state.optimizer.masters[index : index + 1] if x.numel()]
        for x in (gradients[index], state.params.flats[index], *masters):
            assert not padding(x).any()
        for x in states_of(state.optimizer, index):
            assert padding(x).isfinite().all()


def states_of(optimizer: Any, index: int) -> list[Tensor]:
    """The moments or slots of one group, [W, l] each."""
    kept = optimizer.slots.values() if hasattr(optimizer, "slots") else optimizer.moments
    return [each[index] for each in kept if each[index].dim() == 2]
