"""Rules for whole matrices by name, on the ranks that own them: `adafactor`, `shampoo`, `soap`.

SOAP has for each matrix

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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero.context.current_rank import has_no_values
from fzero.errors.check import called_as, is_count, is_number, require
from fzero.machine.powersgd import hashed
from fzero.machine.stacks import check_batch_dims, in_matrices
from fzero.optim.optimizer import check_options
from fzero.optim.torch_optim import TorchOptimizer, from_torch


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
    options: dict[str, Any] = {"lr": _rate("shampoo", lr), "eps": eps}
    check_options("shampoo", options)
    require("shampoo: roots_every", roots_every, is_count, "updates, at least 1")
    check_batch_dims("shampoo", batch_dims)
    options |= {"roots_every": roots_every, "batch_dims": batch_dims}
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
    options: dict[str, Any] = {"lr": _rate("soap", lr), "betas": betas, "eps": eps}
    options["weight_decay"] = weight_decay
    check_options("soap", options)
    for name, value in (("refresh_every", refresh_every), ("max_size", max_size)):
        require(f"soap: {name}", value, is_count, "at least 1")
    check_batch_dims("soap", batch_dims)
    options |= {"betas": tuple(betas), "refresh_every": refresh_every, "max_size": max_size}
    options |= {"batch_dims": batch_dims}
    return _of(partial(Soap, **options), master_weights)


def _of(factory: Any, master_weights: bool) -> TorchOptimizer:
    return from_torch(factory, needs="matrix", master_weights=master_weights)


def _rate(name: str, lr: Any) -> float:
    require(f"{name}: lr", lr, lambda x: is_number(x) and x >= 0, "a number >= 0")
    return float(lr)


State = dict[str, Any]


class OfMatrices(torch.optim.Optimizer):
    """Steps every parameter that has a gradient by `step_matrix`; see `fzero.machine.stacks`.

    What is kept of the matrices of a stack is stacked.
    """

    def __init__(
        self, params: Iterable[Any], batch_dims: int | None = None, **options: Any
    ) -> None:
        """Take the options of the rule, for each param group."""
        stack = {} if batch_dims is None else {"batch_dims": batch_dims}
        super().__init__(params, {**options, **stack})

    @staticmethod
    def step_matrix(state: State, p: Tensor, gradient: Tensor, group: State) -> None:
        """Update one matrix, or a vector, and its state, in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient, of a stack each matrix."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state: State = self.state[p]
                count, shape = in_matrices(tuple(p.shape), group.get("batch_dims"))
                if shape == p.shape:
                    self.step_matrix(state, p, p.grad, group)
                    continue
                lead, begun = p.shape[: p.ndim - len(shape)], bool(state)
                own: list[State] = [{} for _ in range(count)]
                for name, x in state.items():
                    for i, one in enumerate(own):
                        tensor = isinstance(x, Tensor)
                        one[name] = x.flatten(0, len(lead) - 1)[i] if tensor else x
                matrices = zip(own, p.view(-1, *shape), p.grad.reshape(-1, *shape), strict=True)
                for one, matrix, g in matrices:
                    self.step_matrix(one, matrix, g, group)
                for name, x in own[0].items() if own else ():
                    if not isinstance(x, Tensor):
                        state[name] = x
                    elif not begun:
                        state[name] = torch.stack([one[name] for one in own]).view(*lead, *x.shape)


class Shampoo(OfMatrices):
    """`fzero.optim.shampoo` on whole parameters."""

    @staticmethod
    def step_matrix(state: dict[str, Any], p: Tensor, gradient: Tensor, group: Any) -> None:
        """Update one matrix, or a vector."""
        if p.ndim < 2:
            if not state:
                state.update(step=0, squares=torch.full_like(gradient, group["eps"]))
            state["step"] += 1
            state["squares"].addcmul_(gradient, gradient)
            p.sub_(group["lr"] * (gradient / state["squares"].sqrt()))
        else:
            g = gradient.flatten(1)
            if not state:
                state["step"] = 0
                for name, size in zip(_SIDES, g.shape, strict=True):
                    state[name] = group["eps"] * torch.eye(size, dtype=g.dtype, device=g.device)
                    state[f"{name}_root"] = torch.empty_like(state[name])
            state["left"].addmm_(g, g.mT)
            state["right"].addmm_(g.mT, g)
            for name in _SIDES if state["step"] % group["roots_every"] == 0 else ():
                # x^(-1/4) of a positive definite matrix
                values, vectors = torch.linalg.eigh(state[name])
                smallest = torch.finfo(g.dtype).eps * values[-1]
                root = (vectors * values.clamp(min=smallest).pow(-0.25)) @ vectors.mT
                state[f"{name}_root"].copy_(root)
            state["step"] += 1
            update = state["left_root"] @ g @ state["right_root"]
            p.sub_(group["lr"] * update.reshape(p.shape))


_SIDES = ("left", "right")
_EPS = torch.finfo(torch.float32).eps  # of all dtypes: bases are not nearer to their directions


class Soap(OfMatrices):
    """`fzero.optim.soap` on whole parameters."""

    @staticmethod
    def step_matrix(state: State, p: Tensor, gradient: Tensor, group: State) -> None:
        """Update one matrix, or a vector."""
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
            update = _rotated(torch.where(squares == 0, 0.0, update), state, back=True)
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


def _rotated(x: Tensor, state: State, *, back: bool = False) -> Tensor:
    """Return Q_L^T x Q_R; `back`: Q_L x Q_R^T."""
    if "left_basis" in state:
        x = (state["left_basis"] if back else state["left_basis"].mT) @ x
    if "right_basis" in state:
        x = x @ (state["right_basis"].mT if back else state["right_basis"])
    return x


def _without_rounding(x: Tensor) -> Tensor:
    """Return a rotated matrix with zeros for the elements, rows and columns that are rounding."""
    least = 8 * _EPS * x.square().sum().sqrt()
    x = torch.where(x.abs() <= least, 0.0, x)
    for dim in (0, 1):
        sizes = x.square().sum(1 - dim, keepdim=True).sqrt()
        x = torch.where(sizes <= x.shape[dim] ** 0.5 * least, 0.0, x)
    return x


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
