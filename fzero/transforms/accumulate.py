"""`accumulate`: one large batch as several micro-batches and one update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, overload

import numpy as np
import optree
import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.errors.check import called_as, is_count, require
from fzero.options import OPTIONS, takes
from fzero.state import NAMESPACE, TrainState, progress
from fzero.state.batch import Parts, is_array, opened, with_children
from fzero.transforms.backward_pass import agree, reduce_agreed, serving_pulls
from fzero.transforms.donation import check_alive
from fzero.transforms.models import S, call_of_states, flatten_states, is_state, map_states
from fzero.transforms.pipeline import P, R, Step, Transform, returned_pair, transform
from fzero.transforms.points import renewed

# The parts of a batch: which dim of each argument is cut, and the arguments of each part.

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
    known = _parameters(fn)
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
        unknown = set(in_axes) - set(given) - {x.name for x in _parameters(fn)}
        if unknown:
            raise _misfit(name, in_axes, f"there is no argument {min(unknown)!r}, but {given}")
        return [in_axes.get(x, 0) for x in given]
    if len(in_axes) != len(args):
        raise _misfit(name, in_axes, f"there are {len(args)} positional arguments after the state")
    return [*in_axes, *(0 for _ in kwargs)]


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):  # a builtin
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
            raise LayoutError(
                f"{name}: argument {path} is a TrainState, which is no batch to be split.",
                cause="the state is the first argument of a step, and stood further back, or a "
                "second state was passed beside it.",
                fix="write step(state, *batch), with a dict or tuple of states as the first "
                "argument if there are several; one that is only read is closed over, or has None "
                "in in_axes=.",
            )
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


@overload
def accumulate(fn: Callable[P, R], /, *, micro_batches: int, in_axes: InAxes = 0) -> Step[P, R]: ...
@overload
def accumulate(*, micro_batches: int, in_axes: InAxes = 0) -> Transform: ...
@overload  # the older spelling
def accumulate(fn: Callable[P, R], /, *, steps: int, in_axes: InAxes = 0) -> Step[P, R]: ...
@overload
def accumulate(*, steps: int, in_axes: InAxes = 0) -> Transform: ...
@takes("accumulate", "accumulate(step, micro_batches=4)", older={"steps": "micro_batches"})
def accumulate(
    fn: Callable[..., Any] | None = None, /, *, micro_batches: int, in_axes: InAxes = 0
) -> Step[..., Any] | Transform:
    """Run `fn(state, *batch) -> (state, aux)` on each of `micro_batches` equal parts of the batch.

    g = (1/k) sum_i g(part_i): for a loss that is a mean over examples, the gradient of the whole
    batch. An `apply_gradients` inside `fn` waits for the last part, so the result is that of one
    call with the whole batch; activations are those of one part. With
    `micro_batches=1` it is the identity.

    Tensors in the arguments are split along dim 0, or as `in_axes` says, and must have as many
    examples as each other; scalars and everything else go to each part. In aux, floating scalars
    are averaged, other scalars summed, tensors concatenated along dim 0; what is neither must be
    the same for every part.

    With `logical_ranks=` each part has an equal part of the examples of every logical rank that
    this rank carries, in their order.

    Without `coalesce` each part is reduced as it comes; `coalesce(accumulate(fn))` reduces once.

    Accumulations may be nested: the update then waits for the last part of the outermost one.

    Args:
        fn: the step. Its state may be a pytree of states.
        micro_batches: k, the number of parts, at least 1 (older code says `steps`). A batch
            [n, *t] is given in parts [n / k, *t].
        in_axes: the dim of the examples, as in `torch.func.vmap`: an int, or None for what every
            part gets whole (a table that all examples share). For all arguments after the state
            alike; or a tuple, one for each positional argument (keywords have 0); or a dict by the
            names of arguments, {"table": None}, the others having 0. One of an argument that is a
            tree may be a tree, too, with its first levels: ({"x": 1, "table": None},).

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        LayoutError: for `micro_batches` that is no count, and axes that are none; in a call, naming
            the argument, when a batch does not divide by it or has another number of examples than
            another one, when axes do not fit, or when a state is among the arguments that are cut.
        PhaseError: in a call, when `fn` updates twice, or goes on to another gradient after its
            update, also where that update ends an `accumulate` inside `fn`: those would be lost in
            one sum.

    Source: Huang et al., "GPipe", arXiv 1811.06965, section 2: micro-batches and one update.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p * x).mean(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> state = fzero.init(torch.ones(()), fzero.optim.sgd(1.0), stage=0)
        >>> xs = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> state, loss = fzero.accumulate(step_fn, micro_batches=2)(state, xs)
        >>> loss, fzero.full_params(state)
        (tensor(2.5000), tensor(-1.5000))
        >>> def weighted(state, x, table):  # the table is whole in each part
        ...     state, loss = fzero.grad_and_reduce(lambda p: (p * x * table.sum()).mean(), state)()
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.accumulate(weighted, micro_batches=2, in_axes={"table": None})
        >>> step(state, xs, torch.ones(3))[1]
        tensor(-11.2500)
    """
    OPTIONS["micro_batches"].require(micro_batches, "accumulate: ")
    check_axes(in_axes)

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        states = flatten_states("accumulate", state)[0]
        # The examples of as many logical ranks are in the batch of this one; else of itself.
        groups = len(states[0].setup.carried(states[0].setup.axis.rank))
        parts = parts_of(inner, args, kwargs, micro_batches, in_axes, groups=groups)
        before = [(one.setup.policy, one.progress.deferred) for one in states]

        def each(tree: Any, begins: bool, last: bool) -> Any:
            rest = iter(before)

            def entered(one: TrainState) -> TrainState:
                policy, deferred = next(rest)
                if begins:
                    share, defers = policy.grad_scale / micro_batches, policy.defer_update
                    policy = replace(policy, grad_scale=share, defer_update=defers or not last)
                    # An update that waited before this accumulation waits for one further out.
                    one = one.replace(progress=replace(one.progress, deferred=deferred))
                return one.replace(setup=one.setup.changed(policy=policy))

            return map_states("accumulate", entered, tree)

        auxes = []
        for i, (part_args, part_kwargs) in enumerate(parts):
            state = each(state, begins=True, last=i == micro_batches - 1)
            returned = inner(state, *part_args, **part_kwargs)
            state, aux = returned_pair("accumulate", inner, returned)
            auxes.append(aux)
        # Whether an update waits stays as the last part left it: what comes next, inside an
        # accumulation further out, must not add to its gradients.
        return each(state, begins=False, last=True), _join(auxes)

    return transform(
        "accumulate",
        fn,
        around,
        never_around=("simulate",),
        right="fzero.simulate(fzero.accumulate(step, micro_batches=...), world_size=...)",
        options={"micro_batches": micro_batches, **({} if in_axes == 0 else {"in_axes": in_axes})},
    )


def _join(auxes: list[Any]) -> Any:
    if len(auxes) == 1:
        return auxes[0]
    first = optree.tree_structure(auxes[0], namespace=NAMESPACE)
    for aux in auxes[1:]:
        if optree.tree_structure(aux, namespace=NAMESPACE) != first:
            raise LayoutError(
                "accumulate: the step returned aux of another structure for another part.",
                cause="aux that depends on the data.",
                fix="return the same structure each time.",
            )
    return optree.tree_map(_join_leaves, *auxes, namespace=NAMESPACE)


def _join_leaves(*leaves: Any) -> Any:
    head = leaves[0]
    if isinstance(head, Tensor):
        if head.ndim:
            return torch.cat(leaves)
        total = torch.stack(leaves).sum()
        return total / len(leaves) if head.is_floating_point() else total
    if isinstance(head, float):
        return sum(leaves) / len(leaves)
    if isinstance(head, int) and not isinstance(head, bool):
        return sum(leaves)
    if all(leaf == head for leaf in leaves):
        return head
    raise LayoutError(
        f"accumulate: aux differs between parts: {head!r} and others.",
        cause="aux that can be neither averaged nor concatenated.",
        fix="return tensors or numbers.",
    )


# `coalesce`: however many backward passes a step makes, its gradients cross the ranks once.


@overload
def coalesce(fn: Callable[P, R], /, *, backwards: int | None = None) -> Step[P, R]: ...
@overload
def coalesce(*, backwards: int | None = None) -> Transform: ...
@called_as("coalesce(step)")
def coalesce(
    fn: Callable[..., Any] | None = None, /, *, backwards: int | None = None
) -> Step[..., Any] | Transform:
    """Run `fn(state, *args) -> (state, aux)` in a window: N gradients, one reduction.

    sum_i reduce(g_i) = reduce(sum_i g_i): the values are the same up to the rounding of one
    re-ordered sum. Inside, `grad_and_reduce` adds to this rank's own full-sized sum (P elements
    at every stage, the price of it); `apply_gradients`, or else the end of `fn`, reduces it.

    If `fn` raises, nothing is reduced and the caller's state is as it was. Several windows
    before one update add up; a window without gradients is the identity.

    Args:
        fn: the step. Its state may be a pytree of states, which have a window each.
        backwards: N, if it is known and the same on all ranks: every N-th gradient call of a state
            since its update reduces the sum, bucket by bucket, beside its own backward pass, as
            DDP does after `no_sync`. None: they are reduced after the last one.

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        LayoutError: for coalesce around coalesce, and a `backwards` that cannot be; in a call, when
            `fn` does not return a pair.
        PhaseError: in a call, for a state whose window is open already (one coalesced step called
            inside another).
        MismatchError: in a call, on every rank, when the ranks have other gradients to reduce, or
            with `backwards` make other numbers of calls.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
    arXiv 2101.06983, needs it: N backward passes for one batch.

    Example:
        >>> import torch, fzero
        >>> @fzero.coalesce
        ... def step_fn(state, xs):
        ...     for x in xs:
        ...         state, _ = fzero.grad_and_reduce(lambda p, x: (p * x).sum(), state)(x)
        ...     return state, None
        >>> state = fzero.init(torch.ones(2), fzero.optim.sgd(1.0), stage=2)
        >>> state, _ = step_fn(state, [1.0, 2.0])
        >>> fzero.gradients(state), state.progress.reductions
        (tensor([3., 3.]), 1)
    """
    if backwards is not None:
        wanted = "an int of 1 or more: the gradient calls before each update, the same on all ranks"
        require("backwards", backwards, is_count, wanted)

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        state = map_states("coalesce", partial(_open, length=backwards or 0), state)
        state, aux = returned_pair("coalesce", inner, inner(state, *args, **kwargs))
        return _close(state), aux

    return transform(
        "coalesce",
        fn,
        around,
        never_around=("coalesce", "simulate"),
        right="fzero.simulate(fzero.shard(fzero.coalesce(step), stage=...)), with one coalesce",
        options={} if backwards is None else {"backwards": backwards},
    )


def _open(state: TrainState, length: int) -> TrainState:
    check_alive(state)
    opened = progress.open_window(state.window, length)
    state = renewed(state, "window")
    return state.replace(window=progress.add_backward(opened, state.progress.backwards))


def _close(tree: S) -> S:
    """Return the states with closed windows; gradients pending on any rank are reduced.

    Right after an update nothing is pending on any rank, so no message is sent. If only some
    ranks have gradients since then, the calls of the ranks differ, and all of them raise.
    """
    states, treespec = flatten_states("coalesce", tree)
    if not all(one.window.is_settled and not one.window.pending.held for one in states):
        with serving_pulls(states):
            said = agree(call_of_states("the end of coalesce", treespec), states)
        states = [
            reduce_agreed(one, all_say) if all_say.waits else one
            for one, all_say in zip(states, said, strict=True)
        ]
    closed = [one.replace(window=progress.close(one.window)) for one in states]
    settled: Any = optree.tree_unflatten(treespec, closed)
    return settled
