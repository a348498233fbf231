"""The parts of a batch: which dim of each argument is cut, and the arguments of each part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
import torch

from fzero.errors import LayoutError
from fzero.state import NAMESPACE
from fzero.state.batch import Parts, is_array, opened, with_children
from fzero.transforms.states import is_state

InAxes = int | None | Sequence[Any] | Mapping[str, Any]
"""An int or None for all arguments; a sequence of prefixes, one for each positional argument after
the state; or a dict of prefixes by the names of arguments, those that it leaves out having 0."""


class _Cut(NamedTuple):
    """A leaf of the arguments: its path for errors, its value, and the dim that is cut, if any."""

    path: str
    leaf: Any
    dim: int | None


def check_axes(in_axes: InAxes, name: str = "accumulate") -> None:
    """Raise `LayoutError` for axes that are no ints and not None."""
    tree: Any = in_axes
    for leaf in optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE):
        if leaf is not None and (isinstance(leaf, bool) or not isinstance(leaf, int)):
            raise LayoutError(
                f"{name}: in_axes={in_axes!r} has {leaf!r}, which is no int and not None.",
                cause="a flag or a name in the place of a dim.",
                fix="give the dim of the batch in each argument after the state, and None for "
                'what every part gets whole: in_axes=(0, None), or in_axes={"table": None}.',
            )


def parts_of(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    count: int,
    in_axes: InAxes,
    *,
    name: str = "accumulate",
    sizes: Sequence[int] | None = None,
    groups: int = 1,
) -> list[tuple[Any, Any]]:
    """Return the (args, kwargs) of `fn(state, *args, **kwargs)` for each of `count` parts.

    name: of the call, for errors. sizes: of the parts; default equal ones. groups: equal runs of
    the examples, of which each part gets an equal part, in their order.

    Raises `LayoutError`, naming the argument, for tensors whose sizes differ or do not divide, and
    for axes that do not fit the arguments.
    """
    if count == 1:
        return [(args, kwargs)]
    names = _names(fn, len(args))
    axes = _axes(name, fn, names, args, kwargs, in_axes)
    places = [f"arguments[0][{i}]" for i in range(len(args))]
    places += [f"arguments[1][{key!r}]" for key in kwargs]
    values = [*args, *kwargs.values()]
    cuts = [
        [*_cuts(name, where, value, axis)]
        for where, value, axis in zip(places, values, axes, strict=True)
    ]
    flat = [leaf for some in cuts for one in some for leaf in _leaves(name, one)]
    for one in flat:
        if isinstance(one.leaf, Parts):
            _require_parts(name, one, count, groups)
    cut = [one for one in flat if one.dim is not None and not isinstance(one.leaf, Parts)]
    whole = count * groups if sizes is None else sum(sizes)
    _require_one_size(name, cut, whole, even=sizes is None)
    columns = [[_pieces(one, count, sizes, groups) for one in some] for some in cuts]
    specs = [_structure(value) for value in values]
    found = []
    for i in range(count):
        pairs = zip(specs, columns, strict=True)
        part = [optree.tree_unflatten(spec, [x[i] for x in some]) for spec, some in pairs]
        keywords = dict(zip(kwargs, part[len(args) :], strict=True))
        found.append((tuple(part[: len(args)]), keywords))
    return found


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of the positional arguments after the state, as `fn` calls them."""
    try:
        known = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin
        known = ()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in known if one.kind in plain][1 : 1 + count]
    rest = next((x.name for x in known if x.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    return names + [f"{rest}[{i}]" for i in range(count - len(names))]


def _axes(
    name: str,
    fn: Callable[..., Any],
    names: Sequence[str],
    args: Any,
    kwargs: Any,
    in_axes: InAxes,
) -> list[Any]:
    """The prefix of each argument, positional ones first."""
    if in_axes is None or isinstance(in_axes, int):
        return [in_axes] * (len(args) + len(kwargs))
    if isinstance(in_axes, Mapping):
        given = [x.partition("[")[0] for x in names] + [*kwargs]
        unknown = set(in_axes) - set(given) - set(_parameters(fn))
        if unknown:
            raise _misfit(name, in_axes, f"there is no argument {min(unknown)!r}, but {given}")
        return [in_axes.get(x, 0) for x in given]
    if len(in_axes) != len(args):
        raise _misfit(name, in_axes, f"there are {len(args)} positional arguments after the state")
    return [*in_axes, *(0 for _ in kwargs)]


def _parameters(fn: Callable[..., Any]) -> list[str]:
    try:
        return [*inspect.signature(fn).parameters]
    except (TypeError, ValueError):
        return []


def _misfit(name: str, in_axes: InAxes, seen: str) -> LayoutError:
    return LayoutError(
        f"{name}: in_axes={in_axes!r} does not fit the call: {seen}.",
        cause="an axis for the state, which has none, or one too few.",
        fix="give one for each positional argument after the state, in_axes=(0, None), or by name, "
        'in_axes={"table": None}; each may be a tree with the first levels of its argument.',
    )


def _structure(value: Any) -> optree.PyTreeSpec:
    return optree.tree_structure(value, is_leaf=is_state, none_is_leaf=True, namespace=NAMESPACE)


def _cuts(name: str, where: str, value: Any, axis: Any) -> Iterator[_Cut]:
    """Yield the leaves of an argument."""
    options: Any = {"is_leaf": is_state, "none_is_leaf": True, "namespace": NAMESPACE}
    accessors, leaves, spec = optree.tree_flatten_with_accessor(value, **options)
    try:
        axes: Any = optree.tree_broadcast_prefix(axis, value, **options)
        dims: Any = spec.flatten_up_to(axes)
    except ValueError as error:
        raise _misfit(name, axis, f"of {where}, {error!s:.200}") from None
    for accessor, leaf, dim in zip(accessors, leaves, dims, strict=True):
        path = accessor.codify(where)
        if is_state(leaf) and dim is not None:
            raise _is_a_state(name, path)
        yield _Cut(path, leaf, dim)


def _leaves(name: str, one: _Cut) -> Iterator[_Cut]:
    """Yield the arrays and the `Parts` of a leaf: its own, or those of a container."""
    path, leaf, dim = one
    for key, x in (_inner(leaf) or {}).items():
        yield from _leaves(name, _Cut(f"{path}[{key!r}]", x, dim))
    if isinstance(leaf, Parts):
        yield one
    elif is_array(leaf) and leaf.ndim and dim is not None:
        if not -leaf.ndim <= dim < leaf.ndim:
            raise _misfit(name, dim, f"{path} has {leaf.ndim} dims, shape {tuple(leaf.shape)}")
        yield _Cut(path, leaf, dim % leaf.ndim)


def _inner(leaf: Any) -> dict[Any, Any] | None:
    """Return what a leaf has that is a container with arrays; a state is none."""
    return None if is_state(leaf) else opened(leaf)


def _require_one_size(name: str, cut: Sequence[_Cut], count: int, *, even: bool) -> None:
    """Raise `LayoutError` unless all that is cut has one size: `count`, or a multiple of it."""
    for one in cut:
        size: Any = one.leaf.shape[one.dim]
        if even and size % count:
            raise LayoutError(
                f"{name}: argument {one.path} of shape {tuple(one.leaf.shape)} does not divide "
                f"into {count} parts along dim {one.dim}.",
                cause="a last, shorter batch, or a tensor that is no batch.",
                fix=f"use batches of a multiple of {count}; for what every part gets whole, such "
                "as a table, give in_axes= with None for it, or close over it.",
            )
        if not even and size != count:
            raise LayoutError(
                f"{name}: argument {one.path} of shape {tuple(one.leaf.shape)} has {size} rows "
                f"along dim {one.dim}, and the sizes are {count} together.",
                cause="sizes of another batch, or of the logical ranks of another rank.",
                fix="give the number of rows of each logical rank that is here; for what each gets "
                "whole give in_axes= with None.",
            )
    for one in cut:
        first = cut[0]
        size, wanted = one.leaf.shape[one.dim], first.leaf.shape[first.dim]
        if size != wanted:
            raise LayoutError(
                f"{name}: argument {first.path} has {wanted} examples along dim {first.dim}, "
                f"and {one.path}, of shape {tuple(one.leaf.shape)}, {size} along dim {one.dim}.",
                cause="a tensor that is no batch (a table, a mask of positions), or one that has "
                "its batch in another dim.",
                fix="say which dim is the batch by in_axes=, as in torch.func.vmap: None for what "
                'every part gets whole, in_axes={"table": None}.',
            )


def _require_parts(name: str, one: _Cut, count: int, groups: int) -> None:
    """Raise `LayoutError` for `Parts` of other logical ranks, or that do not divide."""
    wanted, parts = (count if groups == 1 else groups), one.leaf.parts
    if len(parts) != wanted:
        raise LayoutError(
            f"{name}: argument {one.path} has the values of {len(parts)} logical ranks, and is cut "
            f"for {wanted}.",
            cause="a batch of another order than the step's, or a step without logical_ranks=.",
            fix="give fzero.data.Order and fzero.shard the same logical_ranks=.",
        )
    for x in parts if groups > 1 else ():
        cut = [*_leaves(name, _Cut(one.path, x, one.dim))]
        _require_one_size(name, cut, count, even=True)


def _pieces(one: _Cut, count: int, sizes: Sequence[int] | None, groups: int) -> Sequence[Any]:
    path, leaf, dim = one
    if isinstance(leaf, Parts):
        if groups == 1:
            return leaf.parts
        columns = [_pieces(_Cut(path, x, dim), count, None, 1) for x in leaf.parts]
        return [Parts(column) for column in zip(*columns, strict=True)]
    if (inner := _inner(leaf)) is not None:
        each = {k: _pieces(_Cut(path, x, dim), count, sizes, groups) for k, x in inner.items()}
        return [with_children(leaf, {k: x[i] for k, x in each.items()}) for i in range(count)]
    if dim is None or not is_array(leaf) or not leaf.ndim or not leaf.shape[dim]:
        return [leaf] * count
    if isinstance(leaf, np.ndarray):
        rows = _pieces(_Cut(path, torch.arange(leaf.shape[dim]), 0), count, sizes, groups)
        return [leaf.take(some.numpy(), axis=dim) for some in rows]
    if groups > 1:
        parts = leaf.unflatten(dim, (groups, count, -1)).unbind(dim % leaf.ndim + 1)
        return [part.flatten(dim % leaf.ndim, dim % leaf.ndim + 1) for part in parts]
    return leaf.chunk(count, dim) if sizes is None else leaf.split([*sizes], dim)


def _is_a_state(name: str, path: str) -> LayoutError:
    return LayoutError(
        f"{name}: argument {path} is a TrainState, which is no batch to be split.",
        cause="the state is the first argument of a step, and stood further back, or a second "
        "state was passed beside it.",
        fix="write step(state, *batch), with a dict or tuple of states as the first argument if "
        "there are several; one that is only read is closed over, or has None in in_axes=.",
    )
