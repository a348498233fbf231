"""The collectives as users call them inside a step or a loss: any dim, any pytree-free tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from fzero.collectives.autograd import (
    LinearMap,
    apply_map,
    extremum,
    gather_many,
    reduce_many,
    scatter_many,
)
from fzero.collectives.logical_groups import fold_rows
from fzero.collectives.performer import rows_of_ranks
from fzero.context.current_rank import has_no_values, is_abstract
from fzero.context.modes import is_recorded, without_transforms
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.ranks.mesh import (
    Axis,
    Carried,
    MetInLoss,
    Runs,
    Runtime,
    ambient,
    axis_named,
    carried_here,
    outside_of_graphs,
)
from fzero.state import logical

_TORCH: Any = torch

AxisLike = Axis | str
"""An axis, or the name of one of the running step: of all its ranks, or of a part of its mesh."""

Sizes = Sequence[int] | Tensor
"""How many rows go to each rank: W whole numbers."""


@outside_of_graphs
def all_gather(x: Tensor, axis: AxisLike | None = None, *, dim: int = 0) -> Tensor:
    """y = concat_r(x_r): [.., l, ..] -> [.., W l, ..] along `dim`, in rank order.

    transpose   dx = reduce_scatter(dy): the cotangents of all ranks are summed.
    valid when  every rank calls it with the same shape. Differentiable in every mode of
    torch.func, to any order; `torch.func.linearize` raises `AxisError`, and on virtual ranks
    torch's error of nested forward mode.

    `axis` defaults to all ranks of the step that runs now, or else the world; their name, "dp" if
    the mesh gives no other, says the same. The name of one axis of a mesh is the ranks along it.
    Raises `AxisError` for another name.

    Example:
        >>> import torch, fzero
        >>> fzero.simulate(fzero.all_gather, world_size=2)(torch.tensor([[1.0], [2.0]]))
        tensor([[1., 2.],
                [1., 2.]])
    """
    front = _at_least_1d("all_gather", x).movedim(dim, 0)
    name = _named("all_gather", x, dim)
    over = _axis("all_gather", axis)
    return gather_many([front], over, ordered=_in_order(), name=name)[0].movedim(0, dim)


@outside_of_graphs
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
    ordered = ordered or _in_order()
    return scatter_many([front], axis, ordered=ordered, name=name)[0].movedim(0, dim)


@outside_of_graphs
def all_reduce(x: Tensor | float, axis: AxisLike | None = None, *, ordered: bool = False) -> Tensor:
    """y = sum_r(x_r): the same shape, on every rank. transpose: all_reduce.

    Always a sum; `pmean` is the visible division. See `reduce_scatter` for `ordered` and 16-bit
    floats, `all_gather` for `axis`.

    With `logical_ranks=`, in a step and outside of a loss, the axis is to be named: `axis="dp"`
    adds up what ranks have divided among them, such as numbers of rows. What each of them has
    whole, such as the loss, counts once for each rank there, of which a step knows no number: so
    without an axis it raises `PhaseError`. `pmean` counts it for each logical rank of a rank.

    Example:
        >>> import torch, fzero
        >>> fzero.simulate(fzero.all_reduce, world_size=3)(torch.tensor([1.0, 2.0, 3.0]))
        tensor([6., 6., 6.])
    """
    over = _axis("all_reduce", axis)
    if axis is None and (carried := _carried_by_step()) is not None:
        raise PhaseError(
            f"psum of a value of each rank, in a step of {carried.size} logical ranks on "
            f"{over.size} ranks.",
            cause="a sum that would depend on the number of ranks, or count rows once for each "
            "logical rank.",
            fix=f'of what ranks have divided among them, as rows: fzero.psum(x, axis="{over.name}")'
            "; of a value of each logical rank, fzero.logical_mean(aux) or a psum in the loss; "
            "the loss of grad_and_reduce is the mean over all of them already.",
        )
    axis, ordered = over, ordered or _in_order()
    return reduce_many([_as_tensor(x)], axis, ordered=ordered, name="all_reduce")[0]


@outside_of_graphs
def pmean(x: Tensor | float, axis: AxisLike | None = None) -> Tensor:
    """y = sum_r(x_r) / W, for floating tensors; also for the loss that a step returns.

    Example:
        >>> import torch, fzero
        >>> fzero.simulate(fzero.pmean, world_size=2)(torch.tensor([1.0, 2.0]))
        tensor([1.5000, 1.5000])
    """
    name, over = "all_reduce of pmean", _axis("pmean", axis)
    if axis is None and (carried := _carried_by_step()) is not None:
        return _sum_of_logical(_as_tensor(x), over, carried, name=name) / carried.size
    return reduce_many([_as_tensor(x)], over, ordered=_in_order(), name=name)[0] / over.size


@overload
def all_to_all(
    x: Tensor,
    *,
    split_dim: int = ...,
    concat_dim: int = ...,
    axis: AxisLike | None = ...,
    sizes: None = ...,
) -> Tensor: ...


@overload
def all_to_all(
    x: Tensor,
    *,
    split_dim: int = ...,
    concat_dim: int = ...,
    axis: AxisLike | None = ...,
    sizes: Sequence[int],
) -> tuple[Tensor, list[int]]: ...


@overload
def all_to_all(
    x: Tensor,
    *,
    split_dim: int = ...,
    concat_dim: int = ...,
    axis: AxisLike | None = ...,
    sizes: Tensor,
) -> tuple[Tensor, Tensor]: ...


@outside_of_graphs
def all_to_all(
    x: Tensor,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    axis: AxisLike | None = None,
    sizes: Sizes | None = None,
) -> Tensor | tuple[Tensor, list[int] | Tensor]:
    """y_r = concat_s(chunk r of x_s): [.., W n, .., m, ..] -> [.., n, .., W m, ..].

    Rank r gets chunk r along `split_dim` of every rank, in rank order along `concat_dim`. Ulysses
    attention takes it from [seq / W, heads] to [seq, heads / W]: split_dim=1, concat_dim=0.

    transpose   all_to_all with the two dims swapped.
    valid when  every rank calls it with the same shape and dims, and W divides `split_dim`.

    With `sizes` each rank sends another number of rows to each: sizes[r] to rank r, in order; the
    experts of a mixture are asked like that. The result is (y, received): the rows of all ranks, in
    rank order, and how many came from each: a list, or of a tensor an int64 tensor on the CPU. They
    are what takes y back: `all_to_all(y, sizes=received)` is the transpose. Sizes are told to the
    other ranks first, which the host waits for. No rank, or one alone, may get rows.

    Args:
        x: any tensor with a dim.
        split_dim: the dim that is cut, one chunk for each rank.
        concat_dim: the dim along which what comes is put together; with sizes the same one.
        axis: as for `all_gather`.
        sizes: W whole numbers, of which the sum is the size of `split_dim`: a list, or a tensor,
            which the host reads.

    Raises:
        LayoutError: if W does not divide `split_dim`; for sizes that do not go with x.
        MismatchError: on every rank, if their shapes differ.
        PhaseError: for sizes that vmap maps over, or that a trace of a real rank has no values of.

    Example:
        >>> import torch, fzero
        >>> x = torch.arange(8).view(2, 2, 2)
        >>> fzero.simulate(fzero.all_to_all, world_size=2)(x)
        tensor([[[0, 1],
                 [4, 5]],
        <BLANKLINE>
                [[2, 3],
                 [6, 7]]])
        >>> def to_the_last(x):  # both rows of each rank go to rank 1
        ...     y, received = fzero.all_to_all(x, sizes=[0, len(x)])
        ...     return torch.tensor(received)
        >>> fzero.simulate(to_the_last, world_size=2)(x)
        tensor([[0, 0],
                [2, 2]])
    """
    over = _axis("all_to_all", axis)
    _at_least_1d("all_to_all", x)
    split, concat = split_dim % x.ndim, concat_dim % x.ndim
    if sizes is not None:
        return _by_sizes(x, split, concat, over, sizes)
    if x.shape[split] % over.size:
        raise LayoutError(
            f"all_to_all: dim {split_dim} of shape {tuple(x.shape)} does not divide by the "
            f"{over.size} ranks of {over}.",
            cause="a number of heads or rows that is no multiple of the ranks.",
            fix="pad the dim; or, where ranks send other numbers of rows, say them: sizes=.",
        )
    if over.runtime is Runtime.LOCAL:
        return x
    chunks = torch.unflatten(x, split, (over.size, x.shape[split] // over.size))
    chunks = chunks.movedim(split, 0)
    name = f"all_to_all of dim {split} along dim {concat}"
    (got,) = apply_map(LinearMap("exchange", over, name=name), [chunks])
    return got.movedim(0, concat).flatten(concat, concat + 1)


@outside_of_graphs
def ppermute(x: Tensor, perm: Iterable[tuple[int, int]], *, axis: AxisLike | None = None) -> Tensor:
    """y_d = x_s for each (s, d) of `perm`; zeros on a rank that is no destination.

    All ranks send and receive at once, so no order of a ring can deadlock. One step around it is
    `perm=[(r, (r + 1) % W) for r in range(W)]` with W = `fzero.axis_size(axis)`.

    transpose   ppermute by the inverse pairs (d, s).
    valid when  every rank calls it with the same shape and the same pairs.

    Args:
        x: any tensor.
        perm: pairs (source, destination) of ranks of the axis. A rank is source at most once, and
            destination at most once.
        axis: as for `all_gather`.

    Raises:
        AxisError: for pairs that are none, or a rank that is not on the axis, or comes twice.
        MismatchError: on every rank, if shapes or pairs differ.

    Example:
        >>> import torch, fzero
        >>> shift = lambda x: fzero.ppermute(x, [(0, 1), (1, 2)])
        >>> fzero.simulate(shift, world_size=3)(torch.tensor([1.0, 2.0, 3.0]))
        tensor([0., 1., 2.])
    """
    over = _axis("ppermute", axis)
    pairs = _pairs(perm, over)
    if over.runtime is Runtime.LOCAL:
        return x if pairs else torch.zeros_like(x)
    between = tuple(s for s, _ in pairs), tuple(d for _, d in pairs)
    plan = LinearMap("permute", over, name=f"ppermute by {pairs}", between=between)
    return apply_map(plan, [x])[0]


@outside_of_graphs
def pmax(x: Tensor | float, axis: AxisLike | None = None) -> Tensor:
    """y = max_r(x_r), element by element, on every rank; a NaN of any rank is the result.

    It is not differentiated, as in JAX: `PhaseError` for an x that a derivative is wanted of. Give
    it `x.detach()`, as for the maximum that a softmax subtracts. `axis`: as for `all_gather`.

    Example:
        >>> import torch, fzero
        >>> fzero.simulate(fzero.pmax, world_size=3)(torch.tensor([1.0, 3.0, 2.0]))
        tensor([3., 3., 3.])
    """
    return _extremum("pmax", x, axis)


@outside_of_graphs
def pmin(x: Tensor | float, axis: AxisLike | None = None) -> Tensor:
    """y = min_r(x_r), element by element, on every rank. See `pmax`.

    Example:
        >>> import torch, fzero
        >>> fzero.simulate(fzero.pmin, world_size=3)(torch.tensor([1.0, 3.0, 2.0]))
        tensor([1., 1., 1.])
    """
    return _extremum("pmin", x, axis)


psum = all_reduce
psum_scatter = reduce_scatter


def _extremum(name: str, x: Tensor | float, axis: AxisLike | None) -> Tensor:
    over, x = _axis(name, axis), _as_tensor(x)
    if x.is_complex():
        raise LayoutError(
            f"{name} got a tensor of {x.dtype}.",
            cause="complex numbers have no order.",
            fix=f"give it x.abs(), or the real and the imaginary part: {name}(x.real).",
        )
    return extremum(name, x, over)


def _pairs(perm: Iterable[tuple[int, int]], axis: Axis) -> list[tuple[int, int]]:
    """Return the pairs of a permutation, sorted: their order says nothing."""
    try:
        pairs = sorted((operator.index(s), operator.index(d)) for s, d in perm)
    except (TypeError, ValueError) as error:
        raise AxisError(
            f"ppermute: perm={perm!r} is no list of pairs (source, destination) of ranks.",
            cause="a list with one rank for each rank, as torch.roll or an index has it.",
            fix="[(r, (r + 1) % W) for r in range(W)] is one step around the ring of W ranks.",
        ) from error
    sides = {"source": [s for s, _ in pairs], "destination": [d for _, d in pairs]}
    for side, ranks in sides.items():
        twice = [r for r in ranks if ranks.count(r) > 1]
        away = [r for r in ranks if not 0 <= r < axis.size]
        if away or twice:
            what = f"is not on {axis}" if away else f"is a {side} twice"
            raise AxisError(
                f"ppermute: rank {(away or twice)[0]} of perm={pairs} {what}.",
                cause="ranks that are counted from 1, or without the modulo at the end of the "
                "ring; ranks of the world on one axis of a mesh; or a sum of what several send.",
                fix=f"give ranks of the axis, 0 to {axis.size - 1}, each at most once on each "
                "side; for a sum psum or psum_scatter.",
            )
    return pairs


def _by_sizes(
    x: Tensor, split: int, concat: int, axis: Axis, sizes: Sizes
) -> tuple[Tensor, list[int] | Tensor]:
    if split != concat:
        raise LayoutError(
            f"all_to_all: sizes, with split_dim={split} and concat_dim={concat}.",
            cause="pieces of other sizes cannot be put together along another dim.",
            fix="give both the same dim, and move dims of the result.",
        )
    carried = carried_here()
    if carried is not None and carried.runs is Runs.TOGETHER:
        raise PhaseError(
            "all_to_all: sizes, in a loss where ranks carry several logical ranks.",
            cause="rows of other numbers for each logical rank, of which some are on one rank.",
            fix=f"pad to equal sizes and leave sizes= out, or run it on {carried.size} ranks.",
        )
    sent = _sent(x.shape[split], axis, sizes)
    received = sent
    if axis.runtime is not Runtime.LOCAL and not is_abstract():
        every = rows_of_ranks("the sizes of all_to_all", sent, axis)
        received = [row[axis.rank] for row in every]
    y = x
    if axis.runtime is not Runtime.LOCAL:
        between = tuple(sent), tuple(received)
        name = f"all_to_all with sizes, along dim {split}"
        plan = LinearMap("ragged", axis, name=name, between=between)
        y = apply_map(plan, [x.movedim(split, 0)])[0].movedim(0, split)
    if not isinstance(sizes, Tensor):
        return y, list(received)
    # On an abstract rank they have no values, as what was given.
    return y, sizes.new_empty(axis.size) if is_abstract() else torch.tensor(received, device="cpu")


def _sent(rows: int, axis: Axis, sizes: Sizes) -> list[int]:
    """Return how many rows this rank sends to each rank.

    An abstract rank gets as many from each. Of sizes without values it sends all rows away, for a
    bound of the bytes, the same number to each other rank.
    """
    if isinstance(sizes, Tensor):
        sizes = without_transforms("all_to_all: sizes", sizes)
        if sizes.is_floating_point() or sizes.is_complex() or sizes.ndim != 1:
            raise _no_sizes(f"a tensor of {sizes.dtype}, shape {tuple(sizes.shape)}", rows, axis)
        if has_no_values(sizes) or is_recorded([sizes]):
            return _away(rows, axis)
        with _TORCH._C._DisableFuncTorch():
            values: Any = sizes  # tolist() has no types
            sent: list[int] = values.tolist()
    else:
        sent = list(sizes)
    if not all(type(n) is int and n >= 0 for n in sent):
        raise _no_sizes(sent, rows, axis)
    if (len(sent), sum(sent)) != (axis.size, rows):
        raise _no_sizes(sent, rows, axis)
    return sent


def _away(rows: int, axis: Axis) -> list[int]:
    if not is_abstract():
        raise PhaseError(
            "all_to_all: sizes that are a tensor of a trace, which has no values.",
            cause="make_fx, or fake tensors, around a step in which data decide how many rows go "
            "to each rank.",
            fix="give sizes as a list that is the same in each call, or leave this step untraced; "
            "fzero.plan and fzero.trace take it as one in which all ranks get the same.",
        )
    others = max(axis.size - 1, 1)
    part, more = divmod(rows, others)
    sent = [part + (r < more) for r in range(others)]
    return sent if axis.size == 1 else [*sent[: axis.rank], 0, *sent[axis.rank :]]


def _no_sizes(seen: Any, rows: int, axis: Axis) -> LayoutError:
    return LayoutError(
        f"all_to_all: sizes={seen} of {rows} rows over the {axis.size} ranks of {axis}.",
        cause="counts of experts in the place of ranks, or rows that go to no rank.",
        fix="give one whole number for each rank, in rank order, of which the sum is the number of "
        "rows: counts.view(W, -1).sum(1) of the counts of experts.",
    )


def _axis(name: str, axis: AxisLike | None) -> Axis:
    """Return the axis that a caller means; by name, a part of the ambient one.

    Raises `PhaseError` in the loss of a logical rank that does not have a rank of its own.
    """
    over, carried = axis_named(axis, who=name), carried_here()
    if carried is None or carried.rank is None:
        return over
    if ambient().size < carried.size:
        error = PhaseError(
            f"{name} in a loss of logical rank {carried.rank}, and {ambient().size} ranks carry "
            f"{carried.size} logical ranks.",
            cause="a collective between logical ranks that run one after another: in a loop of an "
            "engine, in a plan or a trace, or in a backward alone.",
            fix=f"call it in the forward of a loss of fzero.grad_and_reduce; or run it on "
            f"{carried.size} ranks, or reduce outside of the loss.",
        )
        together = carried.runs is Runs.FIRST_IN_TURN and not is_abstract()
        raise MetInLoss(error) if together else error
    if carried.runs is Runs.TOGETHER and over != ambient():
        raise PhaseError(
            f"{name} over {over} in a loss, where ranks carry {carried.size} logical ranks.",
            cause="an axis of the ranks that carry them, of which there may be any number.",
            fix="leave axis= out: in a loss it is the axis of all logical ranks.",
        )
    return over


def _in_order() -> bool:
    """Whether sums are made in rank order, for they are of logical ranks."""
    return carried_here() is not None


def _carried_by_step() -> Carried | None:
    """Return the logical ranks of the step that runs, outside of a loss."""
    carried = carried_here()
    return None if carried is None or carried.rank is not None else carried


def _sum_of_logical(x: Tensor, axis: Axis, carried: Carried, *, name: str) -> Tensor:
    """Return the sum over logical ranks of a value of each rank, by the tree."""
    rows = gather_many([x.unsqueeze(0)], axis, ordered=True, name=name)[0]
    counts = [len(logical.carried(rank, axis.size, carried.size)) for rank in range(axis.size)]
    return fold_rows(
        torch.cat([row.expand(n, *x.shape) for row, n in zip(rows, counts, strict=True)])
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
