"""One abstract rank does what each virtual rank does: the same collectives, bytes and shapes."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.collectives import CollectiveLog
from fzero.context.here import abstract_rank, current_ranks
from fzero.errors import AxisError
from fzero.state import NAMESPACE


def model(device: str) -> nn.Module:
    """Uneven sizes, a tied weight, a frozen one and a scalar."""
    with torch.device(device):
        made = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 7))
        made[2].weight = made[3].weight
        made[0].bias.requires_grad_(False)
        made.register_parameter("scalar", nn.Parameter(torch.ones(())))
    return made


def step_of(apply: Any, options: dict[str, Any]) -> Any:
    def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        for _ in range(2):
            state, loss = fzero.grad_and_reduce(lambda p, x: apply(p, x).pow(2).mean(), state)(x)
        return fzero.apply_gradients(state), fzero.pmean(loss)

    coalesces, clips = options.pop("coalesces"), options.pop("clips")
    step_fn = fzero.coalesce(step_fn) if coalesces else step_fn
    step_fn = fzero.clip(step_fn, max_norm=1.0) if clips else step_fn
    return fzero.shard(step_fn, **options)


def facts(log: CollectiveLog, rank: int) -> list[tuple[str, str, int, torch.dtype, int]]:
    return [(e.op, e.axis, e.numel, e.dtype, e.wire_bytes) for e in log.of(rank)]


def shapes(state: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    leaves = optree.tree_leaves(state, namespace=NAMESPACE)
    return [(tuple(x.shape), x.dtype) for x in leaves]


@settings(max_examples=20, deadline=None)
@given(
    stage=st.integers(0, 3),
    mesh=st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 1)]),
    coalesces=st.booleans(),
    clips=st.booleans(),
    donate=st.booleans(),
    data=st.data(),
)
def test_it_counts_and_holds_what_a_virtual_rank_does(
    stage: int,
    mesh: tuple[int, int],
    coalesces: bool,
    clips: bool,
    donate: bool,
    data: st.DataObject,
) -> None:
    world_size = mesh[0] * mesh[1]
    rank = data.draw(st.integers(0, world_size - 1))

    def run(device: str) -> tuple[CollectiveLog, Any]:
        apply, params = fzero.functionalize(model(device))
        options = {"stage": stage, "mesh": mesh, "donate": donate}
        step = step_of(apply, options | {"coalesces": coalesces, "clips": clips})
        filled = (lambda path, x: torch.empty_like(x)) if device == "meta" else None
        state = step.init(params, fzero.optim.adamw(1e-3), initializer=filled)
        x = torch.zeros(3, 5, device=device)
        for _ in range(2):  # the first step of stage 3 records a schedule
            state, _ = step(state, x)
        with fzero.count_collectives() as log:
            state, _ = step(state, x)
        return log, shapes(state)

    logs: dict[int, Any] = {}

    def on_rank(_: Tensor) -> Tensor:
        logs[fzero.axis_index()] = run("cpu")
        return torch.zeros(())

    fzero.simulate(on_rank, world_size=world_size)(torch.zeros(world_size, 1))
    with abstract_rank(rank, world_size):
        log, held = run("meta")
    real_log, real_held = logs[rank]
    assert held == real_held
    assert facts(log, rank) == facts(real_log, rank)
    assert current_ranks() is None


def test_values_are_refused() -> None:
    with abstract_rank(0, 3), pytest.raises(AxisError, match="3 abstract ranks was given real"):
        fzero.psum(torch.ones(2))
    with abstract_rank(1, 3):
        assert fzero.psum(torch.ones(2, device="meta")).shape == (2,)
        assert (fzero.axis_index(), fzero.axis_size()) == (1, 3)
