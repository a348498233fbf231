"""A gradient call inside the loss of another one: two models, each of which gets its own gradient.

The right value is that of the two calls one after another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import PhaseError
from tests.covering import covered

X = torch.arange(12.0).reshape(2, 2, 3)  # [rank, rows, 3]


def outer_params() -> dict[str, Tensor]:
    return {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}


def inner_params() -> dict[str, Tensor]:
    return {"v": torch.ones(3, 3)}


def inner_loss(p: Any, x: Tensor) -> Tensor:
    return (x @ p["v"]).sum()


def outer_loss(p: Any, x: Tensor) -> Tensor:
    return (x @ p["w"].T + p["b"]).sum()


def trained(stage: int, *, nested: bool, reads: bool = False) -> list[Tensor]:
    """Of all ranks: the params of both models after two updates."""

    def body(x: Tensor) -> Any:
        a = fzero.init(outer_params(), fzero.optim.sgd(0.5), stage=stage)
        b = fzero.init(inner_params(), fzero.optim.sgd(0.5), stage=stage)
        for _ in range(2):
            if nested:
                held = [b]

                def loss(p: Any, x: Tensor, held: list[Any] = held) -> Tensor:
                    held[0], _ = fzero.grad_and_reduce(inner_loss, held[0])(x)
                    seen = fzero.evaluate(inner_loss, held[0])(x) if reads else 0.0
                    return outer_loss(p, x) + 0 * seen

                a, _ = fzero.grad_and_reduce(loss, a)(x)
                b = held[0]
            else:
                b, _ = fzero.grad_and_reduce(inner_loss, b)(x)
                a, _ = fzero.grad_and_reduce(outer_loss, a)(x)
            a, b = fzero.apply_gradients(a), fzero.apply_gradients(b)
        return fzero.full_params(a), fzero.full_params(b)

    both = fzero.simulate(body, world_size=2)(X)
    return [*both[0].values(), *both[1].values()]


@covered(reads=[False, True], stage=range(4))
def test_each_model_gets_its_own_gradient(stage: int, reads: bool) -> None:
    found, wanted = trained(stage, nested=True, reads=reads), trained(stage, nested=False)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert not torch.equal(found[0][0], outer_params()["w"])


def test_a_parameter_that_outlives_its_loss_at_stage_3_is_refused_by_name() -> None:
    def body(x: Tensor) -> None:
        state, kept = fzero.init(outer_params(), fzero.optim.sgd(0.5), stage=3), []

        def loss(p: Any, x: Tensor) -> Tensor:
            kept.append(p["w"])
            return outer_loss(p, x)

        fzero.grad_and_reduce(loss, state)(x)
        with pytest.raises(PhaseError, match="kept beyond its call"):
            kept[0].sum()

    fzero.simulate(body, world_size=2)(X)
