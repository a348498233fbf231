"""A derivative by an input inside of remat: energies and forces, gradient penalties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero


class Potential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).sum()


def trained(stage: int, ranks: int, around: Any) -> list[Tensor]:
    apply, params = fzero.functionalize(Potential())

    @around
    def energy_and_forces(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = apply(p, x)
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]

    def step(state: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            energy, forces = energy_and_forces(p, x)
            return energy.square() + forces.square().sum()

        state, value = fzero.grad_and_reduce(loss, state)()
        return fzero.apply_gradients(state), value

    sharded = fzero.simulate(fzero.shard(step, stage=stage), world_size=ranks)
    state = sharded.init(params, fzero.optim.adam(0.1))
    x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        state, _ = sharded(state, x.view(ranks, -1, 3))
    whole = fzero.simulate(fzero.full_params, world_size=ranks)(state)
    return [x[0] for x in whole.values()]


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (2, 2), (3, 1), (3, 3)])
def test_forces_inside_of_remat_have_the_gradients_of_those_outside(stage: int, ranks: int) -> None:
    found = trained(stage, ranks, fzero.remat)
    for mine, other in zip(found, trained(stage, ranks, lambda fn: fn), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_gradient_penalty_inside_of_remat_can_be_differentiated_again() -> None:
    def penalty(w: Tensor, x: Tensor) -> Tensor:
        x = x.detach()
        x.requires_grad = True
        return torch.autograd.grad((w * x).pow(3).sum(), x, create_graph=True)[0].square().sum()

    x, found = torch.tensor([2.0, 3.0], dtype=torch.float64), []
    for fn in (penalty, fzero.remat(penalty)):
        w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(fn(w, x), w, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), w)
        found.append((first.detach(), second))
    torch.testing.assert_close(found[0], found[1])
