"""`map_params`: a function of the parameters, and of what is parallel to them, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import unwrap
from typing import Any, overload

import torch
from torch import Tensor

from fzero.collectives import told_everywhere
from fzero.context.here import is_abstract
from fzero.context.modes import in_transform, is_recorded
from fzero.errors import LayoutError, PhaseError
from fzero.machine import elementwise
from fzero.machine.by_path import Pieces, as_flats, by_path, leaf_paths, ranges_in
from fzero.machine.elementwise import Values, sampled
from fzero.machine.offload import to_device
from fzero.machine.packing import pack
from fzero.machine.partition import matched
from fzero.machine.parts import cut
from fzero.machine.threads import one_thread
from fzero.ranks.mesh import Axis
from fzero.state import Buffers, Layout, Placement, Slot, TrainState
from fzero.state.view import require_state
from fzero.transforms.agree import agree, tell_at_next_round
from fzero.transforms.builtins import factor_of
from fzero.transforms.donation import check_alive
from fzero.transforms.points import stepped_as_held, with_stepped
from fzero.transforms.states import ParamsT
from fzero.transforms.written import returned

_FINER = (Placement.REPLICATED, Placement.SHARDED, Placement.OVER_ALL)


@overload
def map_params(
    fn: Callable[[Tensor], Tensor], state: TrainState[ParamsT]
) -> TrainState[ParamsT]: ...
@overload
def map_params(
    fn: Callable[[Tensor, Tensor], Tensor], state: TrainState[ParamsT], other: Any, /
) -> TrainState[ParamsT]: ...
@overload
def map_params(
    fn: Callable[..., Tensor], state: TrainState[ParamsT], *others: Any
) -> TrainState[ParamsT]: ...
def map_params(
    fn: Callable[..., Tensor], state: TrainState[ParamsT], *others: Any
) -> TrainState[ParamsT]:
    """Return the state with p' = fn(p, *others of the same leaf) in the place of each p.

    `torch.utils._pytree.tree_map` over parameters that are sharded. fn is called for each leaf that
    learns, with this rank's elements of it, 1-D; so it is elementwise. Where parameters have fp32
    masters it is called with those, and the parameters are what they round to. All else of the
    state stays: gradients, slots, the optimizer's state, `step`.

    It is pure, and differentiable by the parameters, by others, and by what fn closes over. No
    collective where all are placed alike; at stages 1 and 2, where parameters are whole and
    gradients, slots and masters are shards, it is computed on shards, and one all-gather for each
    bucket makes the parameters whole.

    Args:
        fn: (p, *others) -> p', in the shape of p; it is cast to the dtype of p.
        state: a train state.
        others: what is parallel to the parameters: another state of the same layout on the same
            ranks, for its parameters; `other.gradients`, reduced; a slot,
            `state.slots["ema/mean"]`; or a pytree of full tensors like the parameters. Gradients
            and slots do not say on which ranks they are: take them from states on the same ones.

    Returns:
        The new state.

    Raises:
        LayoutError: for what is not parallel to the parameters, for a state on other ranks or on
            another part of a mesh, for another shape returned, for an fn that looks at more than
            single elements (tested once for each code), and for bare gradients of a state with a
            loss scale, which are times it: give
            `fzero.gradients(other)`.
        PhaseError: for gradients that are not there, or not reduced.
        DonatedError: for a state that was used up.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([1.0, 2.0])}, fzero.optim.sgd(0.1), stage=2)
        >>> ahead, _ = fzero.grad_and_reduce(lambda p: (p["w"] ** 2).sum() / 2, state)()
        >>> moved = fzero.map_params(lambda p, g: p + 0.5 * g, state, ahead.gradients)
        >>> fzero.full_params(moved)
        {'w': tensor([1.5000, 3.0000])}
    """
    require_state("map_params", state)
    check_alive(state)
    operands = [_operand(state, other) for other in others]
    setup = state.setup
    own = stepped_as_held(state)
    at = max([own.placement, *(one.placement for one in operands)], key=_FINER.index)
    tell_at_next_round(state, f"map_params({_named(fn)})")
    if setup.axis.size > 1 and at is not setup.params:
        agree("map_params", [state])
    parts = [cut(setup, to_device(x, state.device), own.placement, at) for x in own.flats]
    made = with_stepped(state, dict(enumerate(_mapped(state, fn, at, parts, operands))), at)
    returned(made)
    return made


def _mapped(
    state: TrainState,
    fn: Callable[..., Tensor],
    at: Placement,
    parts: Sequence[Tensor],
    operands: Sequence[Buffers],
) -> list[Tensor]:
    """Return this rank's parts after fn, leaf by leaf."""
    setup = state.setup
    ranges = ranges_in(setup, Buffers(placement=at))
    pieces = by_path(ranges, parts)
    rest = [
        by_path(
            ranges,
            [cut(setup, to_device(x, state.device), one.placement, at) for x in one.flats],
        )
        for one in operands
    ]
    key = _key(state, fn)
    first = key not in _TESTED and not (in_transform() or is_recorded(parts) or is_abstract())
    # Where all ranks have all of it, they find the same, and one may be called without the others.
    alike, what = at is Placement.REPLICATED or not first, "map_params: fn"
    with nullcontext() if alike else told_everywhere(setup.axis, what=what):
        with one_thread(setup.layout.options.block > 1):  # pieces are cut where ranks are
            made = {path: fn(p, *(x[path] for x in rest)) for path, p in pieces.items()}
        new = {path: _checked(path, p, made[path]) for path, p in pieces.items()}
        error = _accused(fn, [pieces, *rest], new) if first else ""
    if first:
        elementwise.require_unaccused([error], Axis(size=1) if alike else setup.axis, what=what)
        _TESTED.add(key)
    flats = as_flats(ranges, parts, pieces, new)
    return [x.clone() if x is old else x for x, old in zip(flats, parts, strict=True)]


_TESTED = set[Hashable]()  # the functions that were not accused, for each rank
_WAYS = (
    "take norms before, of the state: fzero.global_norm(state), fzero.full_params(state); what "
    'looks at whole leaves is a transform with needs="leaf". Nothing was changed.'
)


def _within(fn: Any) -> Any:
    while isinstance(fn := unwrap(fn), partial):
        fn = fn.func
    return fn


def _named(fn: Any) -> str:
    """Return what ranks compare of a function: its name, and the line of its code."""
    fn = _within(fn)
    name, code = getattr(fn, "__name__", type(fn).__name__), getattr(fn, "__code__", None)
    return name if code is None else f"{name}, line {code.co_firstlineno}"


def _key(state: TrainState, fn: Any) -> Hashable:
    """Return what a function is tested once for: its code, as a lambda is new at each step."""
    setup, fn = state.setup, _within(fn)
    code = getattr(fn, "__code__", fn if isinstance(fn, Hashable) else type(fn))
    return code, setup.axis.rank, setup.axis, setup.stage, setup.layout


@torch.no_grad()
def _accused(fn: Callable[..., Tensor], given: Sequence[Pieces], made: Pieces) -> str:
    """Return the error of a function that looks at more than single elements; "" if it does not."""

    def called(values: Values) -> Values:
        some = [{path: values[str(i), path] for path in made} for i in range(len(given))]
        return {("p", k): _checked(k, p, fn(*(x[k] for x in some))) for k, p in some[0].items()}

    values = {
        (str(i), path): sampled(x) for i, some in enumerate(given) for path, x in some.items()
    }
    found = elementwise.looks_beyond(
        called, values, {("p", path): sampled(x) for path, x in made.items()}
    )
    return "" if found is None else elementwise.accusation("map_params: fn", found, _WAYS)


def _checked(path: str, p: Tensor, new: Any) -> Tensor:
    if not isinstance(new, Tensor) or new.shape != p.shape:
        seen = f"{tuple(new.shape)}" if isinstance(new, Tensor) else f"a {type(new).__name__}"
        raise LayoutError(
            f"map_params: fn returned {seen} for {path}, of which this rank has {tuple(p.shape)}.",
            cause="a sum, a norm or a matrix product of a part of a leaf: shards cut it anywhere.",
            fix="compute elementwise; norms over everything come before: fzero.global_norm(state).",
        )
    if new.is_complex() and not p.is_complex():
        raise LayoutError(
            f"map_params: fn returned {new.dtype} for {path}, which is {p.dtype}.",
            cause="a complex number in fn.",
            fix="return a real tensor.",
        )
    return new.to(p.dtype)


# What is parallel to the parameters.


def _operand(state: TrainState, other: Any) -> Buffers:
    """Return what a user gives beside a state as flats of the groups that learn."""
    layout = state.setup.layout
    if isinstance(other, TrainState):
        check_alive(other)
        _require_layout(state, other.setup.layout, "the parameters of a state")
        if not state.setup.axis.has_places_of(other.setup.axis):
            raise LayoutError(
                f"map_params: a state on {other.mesh} beside one on {state.mesh}.",
                cause="states on two parts of a mesh, or on two meshes: shards that are equally "
                "long have other elements.",
                fix="give its whole values: fzero.map_params(fn, state, fzero.full_params(other)).",
            )
        flats = tuple(other.params.flats[i] for i in layout.trainable)
        return replace(other.params, flats=flats)
    if isinstance(other, Slot):
        return _learning(state, other.value, "a slot")
    if isinstance(other, Buffers):
        if factor_of(state) is not None:
            raise LayoutError(
                "map_params: bare gradients of a state with a loss scale.",
                cause="`other.gradients` is times the loss scale.",
                fix="give fzero.gradients(other), which divides by it.",
            )
        return _learning(state, other, "gradients")
    return _of_pytree(state, other)


def _learning(state: TrainState, held: Any, what: str) -> Buffers:
    """Return buffers of the groups that learn; raise for others."""
    layout = state.setup.layout
    if not isinstance(held, Buffers):
        raise _not_parallel(f"{what} that is not parallel to the parameters")
    if held.placement in (Placement.PARTIAL, Placement.OWNER) or not held.held:
        raise PhaseError(
            f"map_params: {what}, {held.placement.value}, {len(held.flats)} flats: "
            "they are not there, or not reduced.",
            cause="the gradients of a state before grad_and_reduce, or of one in an open window.",
            fix="reduce them first: fzero.gradients(other) does, and gives whole ones.",
        )
    flats = held.flats
    if len(flats) == len(layout.groups) != len(layout.trainable):
        flats = tuple(flats[i] for i in layout.trainable)
    numels = [state.setup.numel(i, held.placement) for i in layout.trainable]
    if [x.numel() for x in flats] != numels:
        raise _not_parallel(f"{what} of {[x.numel() for x in flats]} elements, {numels} wanted")
    return replace(held, flats=flats)


def _require_layout(state: TrainState, other: Layout, what: str) -> None:
    if state.setup.layout != other:
        raise _not_parallel(f"{what} of another layout")


def _of_pytree(state: TrainState, tree: Any) -> Buffers:
    """Return the flats [W l] of full tensors: in a pytree like the parameters, or by path."""
    layout = state.setup.layout
    paths, pairs = leaf_paths(layout), matched(layout, tree)
    if pairs is not None:
        by_leaf: dict[int, Any] = dict(pairs)  # a tied leaf has one value, that of its last place
    elif isinstance(tree, dict) and set(tree) <= set(paths):
        by_leaf = {leaf: tree.get(path) for leaf, path in enumerate(paths)}
    else:
        raise _not_parallel(f"a {type(tree).__name__}")
    flats = []
    for index in layout.trainable:
        some = [by_leaf[i] for i in layout.groups[index].leaves]
        for x, i in zip(some, layout.groups[index].leaves, strict=True):
            leaf = layout.leaves[i]
            if not isinstance(x, Tensor) or tuple(x.shape) != leaf.shape:
                shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise _not_parallel(f"{shape} for {leaf.title}, which is {leaf.shape}")
        dtype = torch.promote_types(some[0].dtype, some[-1].dtype)
        flats.append(pack(layout, index, [x.to(state.device, dtype) for x in some]))
    return Buffers(flats=tuple(flats), placement=Placement.REPLICATED)


def _not_parallel(seen: str) -> LayoutError:
    return LayoutError(
        f"map_params: {seen}.",
        cause="values that are not parallel to the parameters of the state.",
        fix="give another state, its `gradients`, a slot (state.slots[...]) or a pytree of full "
        "tensors like the parameters.",
    )
