"""`adafactor` and `shampoo`: their formulas written out on one process, at every stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.checkpoint import load, save
from fzero.optim import adafactor, from_torch, shampoo
from tests.covering import covered
from tests.optim.cases import trained
from tests.oracle import linear_loss
from tests.strategies import integers

STEPS = 5
SHAPES = {"a": (4, 6), "b": (5, 5), "c": (3, 2, 2), "d": (7,), "e": (1, 8), "f": ()}
run = partial(trained, loss=linear_loss)

States = dict[str, Any]
Update = Callable[[States, Tensor, Tensor], Tensor]


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    return {path: nn.Parameter(torch.randn(s, dtype=torch.float64)) for path, s in SHAPES.items()}


class ByFormula(torch.optim.Optimizer):
    """p' = update(state, p, g), of each parameter."""

    def __init__(self, params: Any, update: Update) -> None:
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.copy_(self.update(self.state[p], p, p.grad))


def power(x: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(x)
    return vectors @ values.clamp(min=values[-1] * 2.0**-52).pow(exponent).diag() @ vectors.T


def by_shampoo(state: States, p: Tensor, g: Tensor, *, every: int) -> Tensor:
    if g.ndim < 2:
        state["s"] = state.get("s", 1e-2) + g * g
        return p - 0.1 * g * state["s"].rsqrt()
    m, t = g.flatten(1), state.get("t", 0)
    for name, x in (("l", m @ m.T), ("r", m.T @ m)):
        state[name] = state.get(name, 1e-2 * torch.eye(len(x), dtype=x.dtype)) + x
        if t % every == 0:
            state[name + "root"] = power(state[name], -0.25)
    state["t"] = t + 1
    return p - 0.1 * (state["lroot"] @ m @ state["rroot"]).view(p.shape)


def _by(update: Any) -> Any:
    return lambda of: ByFormula([*of.values()], update)


RULES: dict[str, tuple[Any, Any]] = {
    "adafactor": (
        partial(adafactor, 0.1, weight_decay=0.1),
        lambda of: torch.optim.Adafactor([*of.values()], 0.1, weight_decay=0.1),
    ),
    "shampoo": (partial(shampoo, 0.1, eps=1e-2, batch_dims=0), _by(partial(by_shampoo, every=1))),
    "shampoo every 2": (
        partial(shampoo, 0.1, eps=1e-2, roots_every=2, batch_dims=0),
        _by(partial(by_shampoo, every=2)),
    ),
}


def generic(count: int) -> Any:
    """A loss whose gradients are of any rank."""
    torch.manual_seed(3)
    weights = {path: torch.randn(count, *s, dtype=torch.float64) for path, s in SHAPES.items()}

    def loss(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        parts = [(params[path] * weights[path][int(x)]).sum() for path in SHAPES]
        return torch.stack(parts).sum()

    return loss


@covered(name=sorted(RULES), place=[(0, 2), (1, 1), (1, 4), (2, 3), (3, 2), (3, 5)])
def test_the_numbers_are_those_of_the_formulas(name: str, place: tuple[int, int]) -> None:
    ours, plain = RULES[name]
    stage, ranks = place
    loss = generic(STEPS * ranks)
    xs = torch.arange(STEPS * ranks, dtype=torch.float64).view(STEPS, ranks)
    got, _ = trained(parameters(), ours(), xs, loss=loss, stage=stage)
    params = {path: p.detach().clone().requires_grad_() for path, p in parameters().items()}
    optimizer = plain(params)
    for some in xs:
        optimizer.zero_grad()
        torch.stack([loss(params, x) for x in some]).mean().backward()
        optimizer.step()
    for path, p in params.items():
        wanted = p.detach().expand_as(got[path])
        torch.testing.assert_close(got[path], wanted, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["adafactor", "shampoo every 2"])
def test_other_ranks_go_on_with_the_factors(name: str, tmp_path: Path) -> None:
    ours, xs = RULES[name][0], integers((STEPS, 3), 8)
    xs = xs[:, :1].expand(STEPS, 3)
    _, state = run(parameters(), ours(), xs[:3], stage=3)
    save(tmp_path, state)
    _, fresh = run(parameters(), ours(), xs[:0, :2], stage=1)
    got, _ = run(parameters(), ours(), xs[3:, :2], stage=1, state=load(tmp_path, fresh))
    want, _ = run(parameters(), ours(), xs, stage=2)
    for path, p in got.items():
        torch.testing.assert_close(p[0], want[path][0], rtol=1e-7, atol=1e-8)


def test_factors_of_large_matrices_have_their_own_shapes() -> None:
    """The trial of a rule is on a small matrix that is no more square than the large one."""
    params = {"w": torch.ones(200, 140), "v": torch.ones(131, 131)}
    got, state = run(params, shampoo(0.1), torch.ones(1, 2), stage=2)
    assert got["w"].shape == (2, 200, 140)
    shapes = [tuple(x.shape) for x in state.optimizer.owned["left"]]
    assert shapes == [(2, 200, 200), (2, 131 * 131)]


def test_what_they_need_is_a_matrix() -> None:
    assert "matrix" == from_torch(torch.optim.SGD, needs="matrix").needs == shampoo(0.1).needs
    assert fzero.optim.adafactor().needs == "matrix"
