"""Small steps to prove, with a change in the loss or in the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fzero
from tests.descends import descends

PARAMS = {"w": torch.ones(4, 4), "v": torch.ones(4)}


def loss(p: Any, x: Tensor) -> Tensor:
    return (x @ p["w"] + p["v"]).pow(2).mean()


def proof_of(
    step_fn: Callable[..., Any],
    optimizer: Any = None,
    *,
    world: int = 2,
    stage: int = 2,
    x: Tensor | None = None,
    params: Any = PARAMS,
    **options: Any,
) -> fzero.tools.Proof:
    step = fzero.shard(step_fn, stage=stage)
    state = step.init(params, optimizer or fzero.optim.sgd(0.1))
    return fzero.prove(step, state, torch.zeros(3, 4) if x is None else x, world=world, **options)


def of_loss(times: Callable[[Tensor], Any], **options: Any) -> fzero.tools.Proof:
    """The loss, times a number that may be made in any way."""
    return proof_of(descends(lambda p, x: loss(p, x) * times(x)), **options)


def of_update(change: Callable[[Tensor], Tensor], **options: Any) -> fzero.tools.Proof:
    """The mean gradients are changed before the update."""

    def step_fn(state: Any, x: Tensor) -> Any:
        state, value = fzero.grad_and_reduce(loss, state)(x)
        flats = tuple(change(flat) for flat in state.gradients.flats)
        gradients = dataclasses.replace(state.gradients, flats=flats)
        return fzero.apply_gradients(state.replace(gradients=gradients)), value

    return proof_of(step_fn, **options)


def why(proof: fzero.tools.Proof) -> str:
    assert not proof.proved and str(proof).startswith("Not proved")
    return f"{proof.unshown[0].why} {proof.unshown[0].line}"
