"""SOAP as a plain torch.optim optimizer, which steps whole parameters: on their owners.

    L' = b2 L + (1 - b2) g g^T, and R of g^T g        Q_L, Q_R: their eigenvectors, nearly

A factor is not of full rank before it has seen enough gradients: after one, R of a wide matrix has
a null space, of which any basis is one of eigenvectors. Rounding would choose it, and Adam depends
on its basis. So what has no gradient gets a basis that is a smooth function of the rest:

    the first basis      eigenvectors of what is not rounding; their complement from fixed numbers
    the next one         QR((L + s I) Q), with a small s that leaves the complement where it is
    a rotated gradient   without what is rounding alone, which Adam would scale up; an element that
                         has had none does not move

Bases are computed in fp64, whatever the parameters are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from fzero.context.here import has_no_values
from fzero.machine.powersgd import hashed
from fzero.machine.stacks import in_matrices
from fzero.optim._of_matrices import OfMatrices, State

_SIDES = ("left", "right")
_EPS = torch.finfo(torch.float32).eps  # of all dtypes: bases are not nearer to their directions


class Soap(OfMatrices):
    """`fzero.optim.soap` on whole parameters."""

    def __init__(
        self, params: Iterable[Any], lr: float, batch_dims: int | None = None, **options: Any
    ) -> None:
        """Take the options of `fzero.optim.soap`."""
        super().__init__(params, batch_dims, lr=lr, **options)

    @staticmethod
    def kept_numel(shape: tuple[int, ...], group: State) -> int:
        """Return the elements that are kept of a parameter: two means, a factor and a basis."""
        count, shape = in_matrices(shape, group.get("batch_dims"))
        sides = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        based = [x for x in sides if x <= group["max_size"] and min(sides) > 1]
        return count * (2 * prod(shape) + sum(2 * x * x for x in based))

    @staticmethod
    def step_matrix(state: State, p: Tensor, gradient: Tensor, group: State) -> None:
        """Update one matrix, or a vector."""
        _step(state, p, gradient, group)


def _step(state: State, p: Tensor, gradient: Tensor, group: State) -> None:
    g = gradient.flatten(1) if p.ndim > 1 else gradient.view(1, -1)
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    first, second = group["betas"]
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        for name in _sides(g, group):
            state[name] = (1 - second) * _square(g, name)
            state[f"{name}_basis"] = _first_basis(state[name])
    else:
        times, mean = state["step"], state["exp_avg"].view(g.shape)
        squares = state["exp_avg_sq"].view(g.shape)
        mean.lerp_(g.to(mean.dtype), 1 - first)
        rotated = _without_rounding(_rotated(g, state))
        squares.mul_(second).add_((1 - second) * rotated * rotated)
        update = _rotated(mean.to(g.dtype), state) / (squares.sqrt() + group["eps"])
        update = _back(torch.where(squares == 0, 0.0, update), state)
        rate = group["lr"] * (1 - second**times) ** 0.5 / (1 - first**times)
        p.sub_(rate * update.view(p.shape))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        for name in _sides(g, group):
            state[name].lerp_(_square(g, name), 1 - second)
            if times % group["refresh_every"] == 0:
                _refresh(state, name, squares)
    state["step"] += 1


def _sides(g: Tensor, group: State) -> Iterator[str]:
    """Yield the sides of a matrix that have a basis of their own: none of a row or a column."""
    for name, size in zip(_SIDES, g.shape, strict=True):
        if size <= group["max_size"] and min(g.shape) > 1:
            yield name


def _square(g: Tensor, name: str) -> Tensor:
    return g @ g.mT if name == "left" else g.mT @ g


def _rotated(x: Tensor, state: State) -> Tensor:
    """Return Q_L^T x Q_R."""
    if "left_basis" in state:
        x = state["left_basis"].mT @ x
    return x @ state["right_basis"] if "right_basis" in state else x


def _without_rounding(x: Tensor) -> Tensor:
    """Return a rotated matrix with zeros for the elements, rows and columns that are rounding."""
    least = 8 * _EPS * x.square().sum().sqrt()
    x = torch.where(x.abs() <= least, 0.0, x)
    for dim in (0, 1):
        sizes = x.square().sum(1 - dim, keepdim=True).sqrt()
        x = torch.where(sizes <= x.shape[dim] ** 0.5 * least, 0.0, x)
    return x


def _back(x: Tensor, state: State) -> Tensor:
    if "left_basis" in state:
        x = state["left_basis"] @ x
    return x @ state["right_basis"].mT if "right_basis" in state else x


def _rounding(factor: Tensor) -> float:
    """What is rounding of an eigenvalue beside the largest one."""
    return 4 * factor.shape[0] ** 0.5 * torch.finfo(factor.dtype).eps


def _first_basis(factor: Tensor) -> Tensor:
    """Return eigenvectors, the largest first; then a basis of what has no gradient."""
    size = factor.shape[0]
    if has_no_values(factor):  # in a plan, as if it had all directions
        return torch.linalg.eigh(factor.double())[1].flip(1).to(factor.dtype).contiguous()
    if not bool(factor.isfinite().all()):  # which goes on as with any rule, and LAPACK raises
        return torch.eye(size, dtype=factor.dtype, device=factor.device)
    values, vectors = torch.linalg.eigh(factor.double())
    null = int((values <= _rounding(factor) * values[-1]).sum())
    found = vectors[:, null:].flip(1)
    if null:
        rest = hashed(size, null, factor.device).double()
        for _ in range(2):  # once more, for the first time leaves rounding of what is taken away
            rest = torch.linalg.qr(rest - found @ (found.mT @ rest)).Q
        found = torch.cat([found, rest], 1)
    return found.to(factor.dtype).contiguous()  # as it is kept: of LAPACK it is by columns


def _refresh(state: State, name: str, squares: Tensor) -> None:
    """Turn a basis nearer to the eigenvectors, by one step of a power iteration, largest first."""
    kept, basis = state[f"{name}_basis"], state[f"{name}_basis"].double()
    turned = state[name].double() @ basis
    values = (basis * turned).sum(0)
    largest = values.amax()
    values = torch.where(values <= _rounding(state[name]) * largest, 0.0, values)
    order = values.argsort(descending=True, stable=True)
    squares.copy_(squares.index_select(_SIDES.index(name), order))
    turned += torch.finfo(kept.dtype).eps ** 0.5 * largest * basis
    kept.copy_(torch.linalg.qr(turned.index_select(1, order)).Q)
