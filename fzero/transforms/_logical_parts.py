"""The arguments and the weight of a call for each logical rank that a rank carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
from torch import Tensor

from fzero.context.current_rank import has_no_values
from fzero.errors import LayoutError
from fzero.errors.check import is_count
from fzero.state import NAMESPACE, Setup
from fzero.state.train_state import GivenCall, Weight
from fzero.transforms._micro_batches import InAxes, check_axes, parts_of

EachWeight = Weight | Sequence[Weight] | Callable[..., Weight]
"""The weight of a call; of several logical ranks one for each, or what gives it for a part."""

ALIGNED = 64
"""Bytes that torch aligns the memory of tensors to."""


def call_given(
    name: str, setup: Setup, weight: Any, in_axes: InAxes, sizes: Sequence[int] | None
) -> GivenCall:
    """Return what a user says of a call; of one of logical ranks whether they have weights.

    Raises `LayoutError` for what cannot be a weight, axes or sizes of a call on this rank.
    """
    if setup.logical is None:
        if sizes is not None or in_axes != 0:
            given = f"in_axes={in_axes!r}" if sizes is None else f"sizes={sizes!r}"
            raise LayoutError(
                f"{name}: {given}, and the state has no logical ranks.",
                cause="an option of logical ranks, whose parts of the arguments are cut; another "
                "rank's part is its own.",
                fix="make the state with logical_ranks=, or leave it out; fzero.accumulate cuts a "
                "batch into micro-batches.",
            )
        return GivenCall(name, weight)
    count = len(setup.carried(setup.axis.rank))
    check_axes(in_axes, name)
    if sizes is not None and not _are_counts(sizes, count):
        raise LayoutError(
            f"{name}: sizes={sizes!r}.",
            cause="sizes of all logical ranks, or of another rank.",
            fix=f"give the number of rows of each logical rank that is here, {count} ints.",
        )
    for one in _weights(name, weight, count) if not callable(weight) else ():
        GivenCall(name, one)
    return GivenCall(name, None if weight is None else 1.0)


def _are_counts(sizes: Any, count: int) -> bool:
    good = isinstance(sizes, list | tuple) and len(sizes) == count
    return good and all(is_count(size, 0) for size in sizes)


def _weights(name: str, weight: Any, count: int) -> Sequence[Any]:
    if weight is None:
        return ()
    if isinstance(weight, list | tuple) or (isinstance(weight, Tensor) and weight.ndim == 1):
        given = [*weight]
    elif count == 1:
        given = [weight]
    else:
        given = []
    if len(given) != count:
        seen = f"{len(given)} weights" if given else f"weight={weight!r}"
        raise LayoutError(
            f"{name}: {seen} for the {count} logical ranks of this rank.",
            cause="the weight of the whole batch of this rank, whose parts have weights of their "
            "own.",
            fix="give one for each, weight=[w_0, w_1, ...], or a function of its part of the "
            "arguments: weight=lambda batch: batch['mask'].sum().",
        )
    return given


def each_call(
    name: str,
    fn: Callable[..., Any],
    setup: Setup,
    arguments: tuple[Any, Any],
    weight: EachWeight | None,
    in_axes: InAxes,
    sizes: Sequence[int] | None,
) -> list[tuple[Any, Any, Weight | None]]:
    """Return (args, kwargs, weight) of the call of each logical rank that is here."""
    count = len(setup.carried(setup.axis.rank))
    args, kwargs = arguments
    parts = parts_of(fn, args, kwargs, count, in_axes, name=name, sizes=sizes)
    parts = [_each_as_alone(part) for part in parts]
    if weight is None:
        return [(*part, None) for part in parts]
    if not callable(weight):
        given = _weights(name, weight, count)
        return [(*part, one) for part, one in zip(parts, given, strict=True)]
    found = []
    for args, kwargs in parts:
        one = weight(*args, **kwargs)
        GivenCall(name, one)
        found.append((args, kwargs, one))
    return found


def _each_as_alone(part: Any) -> Any:
    return optree.tree_map(_as_alone, part, namespace=NAMESPACE)


def _as_alone(x: Any) -> Any:
    """Return a tensor where it would be if its rank had it alone: at the start of its memory.

    What a kernel adds up first may depend on where a tensor starts.
    """
    if type(x) is not Tensor or not x.is_floating_point() or has_no_values(x) or not x.numel():
        return x
    starts_there = x.device.type != "cpu" or x.data_ptr() % ALIGNED == 0
    return x if starts_there else x.clone()
