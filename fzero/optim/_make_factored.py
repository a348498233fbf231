"""Rules for whole matrices by name: `adafactor`, `shampoo`, `soap`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fzero.errors.check import called_as, is_count, is_number, require
from fzero.machine.stacks import check_batch_dims
from fzero.optim._factored import Shampoo
from fzero.optim._from_torch import from_torch
from fzero.optim._soap import Soap
from fzero.optim._torch import TorchOptimizer


@called_as("adafactor(1e-2)")
def adafactor(
    lr: float = 1e-2,
    *,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    master_weights: bool = True,
) -> TorchOptimizer:
    """p' = (1 - lr weight_decay) p - a u / max(1, rms(u) / d),  u = g / sqrt(r c^T / mean(r)).

    r and c are means of the squares of rows and columns of g (of a vector: of its elements), which
    an update keeps to 1 - t^beta2_decay; a = max(eps[1], rms(p)) min(lr, 1 / sqrt(t)). It is
    torch.optim.Adafactor, on the ranks that own whole parameters; they keep r and c.

    Args:
        lr: a number, at most which a step is.
        beta2_decay: a negative number.
        eps: the smallest square, None for that of the dtype, and the smallest size of a parameter.
        d: the root mean square that an update is clipped to.
        weight_decay: 0 for none; it is decoupled.
        master_weights: as in `fzero.optim.adamw`.

    Returns:
        The optimizer, for `fzero.init`, `step.init`, `Engine` and `fzero.optim.partition`. An
        update by it cannot be differentiated or traced. Options are those of its `instance`.

    Raises:
        LayoutError: for an lr that is no number >= 0.

    Source: Shazeer and Stern, "Adafactor", arXiv 1804.04235.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.ones(2, 3)}, adafactor(0.1), stage=0)
        >>> state, _ = fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()
        >>> sorted(fzero.apply_gradients(state).optimizer.owned)
        ['col_var', 'row_var']
    """
    options: dict[str, Any] = {"lr": _rate("adafactor", lr), "beta2_decay": beta2_decay}
    options |= {"eps": eps, "d": d, "weight_decay": weight_decay}
    return _of(partial(torch.optim.Adafactor, **options), master_weights)


@called_as("shampoo(1e-3)")
def shampoo(
    lr: float,
    *,
    eps: float = 1e-6,
    roots_every: int = 1,
    batch_dims: int | None = None,
    master_weights: bool = True,
) -> TorchOptimizer:
    """L += g g^T,  R += g^T g,  p' = p - lr L^(-1/4) g R^(-1/4).

    L and R begin at eps I. A vector is divided by the root of the sum of its squares (Adagrad). The
    owner of a parameter keeps L, R and their roots.

    Args:
        lr: a number.
        eps: with which the factors begin.
        roots_every: updates after which the roots are computed again.
        batch_dims: of parameters of 3 or more dims, how many of the first count matrices: 1 for a
            stack of experts [E, out, in], each of which is then one by itself; 0 for one matrix of
            the first dim by the others. None: convolutions of torch.nn are one, others raise.
        master_weights: as in `fzero.optim.adamw`.

    Returns:
        As `adafactor`.

    Raises:
        LayoutError: for an option of another kind.

    Source: Gupta, Koren and Singer, "Shampoo", arXiv 1802.09568, algorithm 1.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.zeros(2, 2)}, shampoo(1.0, eps=0.0), stage=0)
        >>> state, _ = fzero.grad_and_reduce(lambda p: 4 * p["w"].trace(), state)()
        >>> fzero.full_params(fzero.apply_gradients(state))["w"].diagonal().round(decimals=3)
        tensor([-1., -1.])
    """
    require("shampoo: eps", eps, lambda x: is_number(x) and x >= 0, "a number >= 0")
    require("shampoo: roots_every", roots_every, is_count, "updates, at least 1")
    check_batch_dims("shampoo", batch_dims)
    options: dict[str, Any] = {"lr": _rate("shampoo", lr), "eps": eps, "roots_every": roots_every}
    options |= {"batch_dims": batch_dims}
    return _of(partial(Shampoo, **options), master_weights)


@called_as("soap(3e-3)")
def soap(
    lr: float = 3e-3,
    *,
    betas: tuple[float, float] = (0.95, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    refresh_every: int = 10,
    max_size: int = 10_000,
    batch_dims: int | None = None,
    master_weights: bool = True,
) -> TorchOptimizer:
    """Adam in the basis of Shampoo: p' = (1 - lr weight_decay) (p - a Q_L u Q_R^T).

    u = Q_L^T m Q_R / (sqrt(v) + eps), of m, the mean of gradients, and v, that of the squares of
    Q_L^T g Q_R; a = lr sqrt(1 - b2^t) / (1 - b1^t). Q_L and Q_R are eigenvectors of the means of
    g g^T and g^T g: of the first gradient, and every `refresh_every` updates a step nearer to those
    of now, by a QR decomposition. The first update makes these and moves nothing, so t counts from
    the second. Vectors, matrices of one row or column, and sides of more than `max_size` have no
    basis. The owner of a parameter keeps all of it.

    A factor of few gradients has a null space, of which any basis is one of eigenvectors: it gets
    one made of fixed numbers, so that rounding chooses none.

    Args:
        lr: a number.
        betas: how much of m, and of v and the factors, an update keeps.
        eps: added to the root of v.
        weight_decay: 0 for none; it is decoupled.
        refresh_every: updates after which the bases are turned.
        max_size: of a side that has a basis: it keeps two matrices of that size.
        batch_dims: of parameters of 3 or more dims, how many of the first count matrices: 1 for a
            stack of experts [E, out, in], each of which is then one by itself; 0 for one matrix of
            the first dim by the others. None: convolutions of torch.nn are one, others raise.
        master_weights: as in `fzero.optim.adamw`.

    Returns:
        As `adafactor`.

    Raises:
        LayoutError: for an option of another kind.

    Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321,
    algorithm 3.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.zeros(2, 2)}, soap(1.0, weight_decay=0.0), stage=0)
        >>> for _ in range(2):
        ...     state, _ = fzero.grad_and_reduce(lambda p: 4 * p["w"].trace(), state)()
        ...     state = fzero.apply_gradients(state)
        >>> fzero.full_params(state)["w"].diagonal().round(decimals=3)
        tensor([-1., -1.])
    """
    require("soap: eps", eps, lambda x: is_number(x) and x >= 0, "a number >= 0")
    require("soap: weight_decay", weight_decay, lambda x: is_number(x) and x >= 0, "a number >= 0")
    require("soap: betas", betas, _are_betas, "two numbers, from 0 to below 1")
    for name, value in (("refresh_every", refresh_every), ("max_size", max_size)):
        require(f"soap: {name}", value, is_count, "at least 1")
    options: dict[str, Any] = {"lr": _rate("soap", lr), "betas": tuple(betas), "eps": eps}
    check_batch_dims("soap", batch_dims)
    options |= {"weight_decay": weight_decay, "refresh_every": refresh_every, "max_size": max_size}
    options |= {"batch_dims": batch_dims}
    return _of(partial(Soap, **options), master_weights)


def _are_betas(x: Any) -> bool:
    pair = isinstance(x, tuple | list) and len(x) == 2
    return pair and all(is_number(beta) and 0 <= beta < 1 for beta in x)


def _of(factory: Any, master_weights: bool) -> TorchOptimizer:
    return from_torch(factory, needs="matrix", master_weights=master_weights)


def _rate(name: str, lr: Any) -> float:
    require(f"{name}: lr", lr, lambda x: is_number(x) and x >= 0, "a number >= 0")
    return float(lr)
