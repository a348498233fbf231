"""States of every kind for the plots: any layout, stage and number of ranks, by Hypothesis."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.state import OptimizerOver, TrainState

SHAPES = ((), (1,), (3,), (2, 3), (5,), (0,), (2, 0), (4, 4))


class Case(NamedTuple):
    """A model of arange parameters, where each element is its own number, starting at 1."""

    params: dict[str, Tensor]
    stage: int
    ranks: int
    bucket_bytes: int
    replicas: int = 1  # which divide the ranks
    over: OptimizerOver = "shard"

    @property
    def mesh(self) -> tuple[int, int]:
        return self.replicas, self.ranks // self.replicas


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Uneven, scalar, empty and frozen leaves, one of which learns; in units and in buckets."""
    leaves = draw(
        st.lists(st.tuples(st.sampled_from(SHAPES), st.booleans()), min_size=1, max_size=6).filter(
            lambda some: not all(frozen for _, frozen in some)
        )
    )
    params, number = {}, 1
    for i, (shape, frozen) in enumerate(leaves):
        numel = torch.Size(shape).numel()
        values = torch.arange(number, number + numel, dtype=torch.float64).reshape(shape)
        params[f"{i // 2}.leaf{i}"] = nn.Parameter(values, False) if frozen else values
        number += numel
    stage, ranks = draw(st.integers(0, 3)), draw(st.integers(1, 5))
    replicas = math.gcd(draw(st.integers(1, 4)), ranks)
    over: OptimizerOver = draw(st.sampled_from(["shard", "all"]))
    bucket_bytes = draw(st.sampled_from((8, 64, 4096)))
    return Case(params, stage, ranks, bucket_bytes, replicas, over)


def loss_fn(params: Any) -> Tensor:
    """Return sum p^2 / 2, whose gradient is p itself."""
    return sum((p.square().sum() for p in params.values()), torch.zeros(())) / 2


def stacked_states(case: Case) -> tuple[TrainState, TrainState, TrainState]:
    """Return the stacked state at first, inside a window, and with reduced gradients."""

    @fzero.coalesce
    def step_fn(state: TrainState) -> tuple[TrainState, TrainState]:
        state, _ = fzero.grad_and_reduce(loss_fn, state)()
        return state, state

    step = fzero.shard(
        step_fn,
        stage=case.stage,
        bucket_bytes=case.bucket_bytes,
        mesh=case.mesh,
        optimizer_over=case.over,
    )
    step = fzero.simulate(step, world_size=case.ranks)
    first = step.init(case.params, fzero.optim.adam(0.1))
    reduced, inside = step(first)
    return first, inside, reduced
