"""The collectives as users call them inside a step or a loss: any dim, any pytree-free tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.collectives._functions import gather_many, reduce_many, scatter_many
from fzero.errors import AxisError, LayoutError
from fzero.ranks.mesh import Axis, ambient

AxisLike = Axis | str
"""An axis, or the name of the one that the running step is on."""


def all_gather(x: Tensor, axis: AxisLike | None = None, *, dim: int = 0) -> Tensor:
    """y = concat_r(x_r): [.., l, ..] -> [.., W l, ..] along `dim`, in rank order.

    transpose   dx = reduce_scatter(dy): the cotangents of all ranks are summed.
    valid when  every rank calls it with the same shape. Differentiable in every mode of
    torch.func, to any order; `torch.func.linearize` raises `AxisError`, and on virtual ranks
    torch's error of nested forward mode.

    `axis` defaults to the axis of the step that runs now, or else the world; its name, "dp" if
    the mesh gives no other, says the same. The name of one dim of a mesh of two is that dim.
    Raises `AxisError` for another name.

    Example:
        >>> import torch, fzero
        >>> fzero.simulate(fzero.all_gather, world_size=2)(torch.tensor([[1.0], [2.0]]))
        tensor([[1., 2.],
                [1., 2.]])
    """
    front = _at_least_1d("all_gather", x).movedim(dim, 0)
    name = _named("all_gather", x, dim)
    return gather_many([front], _axis("all_gather", axis), name=name)[0].movedim(0, dim)


def reduce_scatter(
    x: Tensor, axis: AxisLike | None = None, *, dim: int = 0, ordered: bool = False
) -> Tensor:
    """y_r = shard r of sum_s(x_s): [.., W l, ..] -> [.., l, ..] along `dim`.

    The first half of `all_reduce`. transpose: all_gather. Always a sum; divide visibly for a
    mean. 16-bit floats are summed in fp32 where the backend's lowering allows it (gloo, virtual
    ranks); `ordered=True` sums in rank order on every backend.

    Raises `LayoutError` if the size of `dim` is not a multiple of the number of ranks.

    Example:
        >>> import torch, fzero
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> fzero.simulate(fzero.reduce_scatter, world_size=2)(x)
        tensor([[4.],
                [6.]])
    """
    axis = _axis("reduce_scatter", axis)
    front = _at_least_1d("reduce_scatter", x).movedim(dim, 0)
    if front.shape[0] % axis.size:
        raise LayoutError(
            f"reduce_scatter: dim {dim} of shape {tuple(x.shape)} does not divide by the "
            f"{axis.size} ranks of the axis.",
            cause="a tensor that was not padded to a multiple of the ranks.",
            fix="pad the dim, or use all_reduce.",
        )
    name = _named("reduce_scatter", x, dim)
    return scatter_many([front], axis, ordered=ordered, name=name)[0].movedim(0, dim)


def all_reduce(x: Tensor | float, axis: AxisLike | None = None, *, ordered: bool = False) -> Tensor:
    """y = sum_r(x_r): the same shape, on every rank. transpose: all_reduce.

    Always a sum; `pmean` is the visible division. See `reduce_scatter` for `ordered` and 16-bit
    floats, `all_gather` for `axis`.

    Example:
        >>> import torch, fzero
        >>> fzero.simulate(fzero.all_reduce, world_size=3)(torch.tensor([1.0, 2.0, 3.0]))
        tensor([6., 6., 6.])
    """
    axis = _axis("all_reduce", axis)
    return reduce_many([_as_tensor(x)], axis, ordered=ordered, name="all_reduce")[0]


def pmean(x: Tensor | float, axis: AxisLike | None = None) -> Tensor:
    """y = sum_r(x_r) / W, for floating tensors; also for the loss that a step returns.

    Example:
        >>> import torch, fzero
        >>> fzero.simulate(fzero.pmean, world_size=2)(torch.tensor([1.0, 2.0]))
        tensor([1.5000, 1.5000])
    """
    axis = _axis("pmean", axis)
    return reduce_many([_as_tensor(x)], axis, name="all_reduce of pmean")[0] / axis.size


psum = all_reduce
psum_scatter = reduce_scatter


def _axis(name: str, axis: AxisLike | None) -> Axis:
    """Return the axis that a caller means; by name, it can be the ambient one only."""
    if isinstance(axis, Axis):
        return axis
    here = ambient()
    if axis is None or axis == here.name:
        return here
    parts = () if here.dims is None else (here.replicas, here.shards)
    if named := [part for part in parts if part.name == axis]:
        return named[0]
    raise AxisError(
        f"{name}: axis={axis!r}, and the axis here is {here}.",
        cause="the name of another mesh dim, or a mesh or a group in place of an axis.",
        fix=f'leave it out, write "{here.name}", or pass an fzero.Axis.',
    )


def _named(op: str, x: Tensor, dim: int) -> str:
    """The name of a call, as ranks compare it; shapes are shown with `dim` in front."""
    return f"{op} along dim {dim % x.ndim}" if dim % x.ndim else op


def _as_tensor(x: Tensor | float) -> Tensor:
    if isinstance(x, Tensor):
        return x
    try:
        return torch.as_tensor(x, dtype=torch.get_default_dtype())
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutError(
            f"psum and pmean take a tensor or a number, and got a {type(x).__name__}.",
            cause="a dict or a tuple of losses or metrics.",
            fix="call it for each, optree.tree_map(fzero.pmean, x), or once for torch.stack(...).",
        ) from error


def _at_least_1d(name: str, x: Tensor) -> Tensor:
    if x.ndim:
        return x
    raise LayoutError(
        f"{name} got a scalar tensor.",
        cause="a loss or a counter was passed where a vector is expected.",
        fix=f"use x.reshape(1) with {name}, or psum / pmean for a scalar.",
    )
