"""Shampoo as a plain torch.optim optimizer, which steps whole parameters: on their owners."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fzero.optim._of_matrices import OfMatrices


class Shampoo(OfMatrices):
    """`fzero.optim.shampoo` on whole parameters."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        eps: float,
        roots_every: int,
        batch_dims: int | None = None,
    ) -> None:
        """Take the options of `fzero.optim.shampoo`."""
        super().__init__(params, batch_dims, lr=lr, eps=eps, roots_every=roots_every)

    @staticmethod
    def step_matrix(state: dict[str, Any], p: Tensor, gradient: Tensor, group: Any) -> None:
        """Update one matrix, or a vector."""
        if p.ndim < 2:
            p.sub_(group["lr"] * _by_squares(state, gradient, group["eps"]))
        else:
            update = _by_factors(state, _matrix(gradient), group)
            p.sub_(group["lr"] * update.reshape(p.shape))


def _by_squares(state: dict[str, Any], g: Tensor, eps: float) -> Tensor:
    if not state:
        state.update(step=0, squares=torch.full_like(g, eps))
    state["step"] += 1
    state["squares"].addcmul_(g, g)
    return g / state["squares"].sqrt()


def _by_factors(state: dict[str, Any], g: Tensor, group: dict[str, Any]) -> Tensor:
    sizes = zip(("left", "right"), g.shape, strict=True)
    if not state:
        state["step"] = 0
        for name, size in sizes:
            state[name] = group["eps"] * torch.eye(size, dtype=g.dtype, device=g.device)
            state[f"{name}_root"] = torch.empty_like(state[name])
    state["left"].addmm_(g, g.mT)
    state["right"].addmm_(g.mT, g)
    if state["step"] % group["roots_every"] == 0:
        for name in ("left", "right"):
            state[f"{name}_root"].copy_(_root(state[name]))
    state["step"] += 1
    return state["left_root"] @ g @ state["right_root"]


def _root(x: Tensor) -> Tensor:
    """x^(-1/4) of a positive definite matrix."""
    values, vectors = torch.linalg.eigh(x)
    smallest = torch.finfo(x.dtype).eps * values[-1]
    return (vectors * values.clamp(min=smallest).pow(-0.25)) @ vectors.mT


def _matrix(x: Tensor) -> Tensor:
    """[n, *t] -> [n, prod(t)]."""
    return x.flatten(1)
