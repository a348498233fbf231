"""`map_params`: a function of the parameters, and of what is parallel to them, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from fzero.collectives import gather_objects, reduce_many, told_everywhere
from fzero.context.current_rank import is_abstract
from fzero.context.modes import in_transform, is_recorded
from fzero.errors import LayoutError, PhaseError
from fzero.machine import elementwise
from fzero.machine.elementwise import Values, sampled
from fzero.machine.named_shards import (
    Pieces,
    as_flats,
    by_path,
    leaf_numbers,
    leaf_paths,
    ranges_of,
)
from fzero.machine.offload import to_device
from fzero.machine.packing import cut, gather_parts, pack, unpack_groups
from fzero.machine.partition import matched
from fzero.machine.tree_sum import one_thread
from fzero.optim.entries import RULE, rule_entries
from fzero.ranks.mesh import Axis
from fzero.state import Buffers, Layout, Part, Placement, Slot, TrainState
from fzero.state.train_state import require_state
from fzero.transforms.backward_pass import agree, tell_at_next_round
from fzero.transforms.donation import check_alive, returned
from fzero.transforms.models import ParamsT
from fzero.transforms.points import stepped_as_held, with_params, with_stepped
from fzero.transforms.recipe import factor_of

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

    `torch.utils._pytree.tree_map` over parameters that are sharded. fn is called for each leaf of
    floating numbers, frozen or not, with this rank's elements of it, 1-D; so it is elementwise.
    Where parameters have fp32 masters it is called with those, and the parameters are what they
    round to. All else of the state stays: gradients, slots, the optimizer's state, `step`; so do
    leaves that are stored encoded, and frozen ones of which one of `others` has no values, as
    gradients and slots.

    It is pure, and differentiable by the parameters, by others, and by what fn closes over. No
    collective where all are placed alike; at stages 1 and 2, where parameters are whole and
    gradients, slots and masters are shards, it is computed on shards, and one all-gather for each
    bucket makes the parameters whole. Another state of the same leaves may have another rule,
    stage or buckets: where its shards are others it is gathered, a few buckets at a time.

    Args:
        fn: (p, *others) -> p', in the shape of p; it is cast to the dtype of p.
        state: a train state.
        others: what is parallel to the parameters: another state of the same leaves on the same
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
    setup, layout = state.setup, state.setup.layout
    own, made = stepped_as_held(state), state
    frozen = [i for i, one in enumerate(layout.groups) if not (one.trainable or one.encoded)]
    frozen = [i for i in frozen if layout.groups[i].dtype.is_floating_point]
    flats = tuple(state.params.flats[i] for i in frozen)
    passes = ((layout.trainable, own), (frozen, replace(state.params, flats=flats)))
    finest = [
        max([held.placement, *(one.placement for one in operands)], key=_FINER.index)
        for _, held in passes
    ]
    crosses = finest[0] is not setup.params or any(one.elsewhere for one in operands)
    tell_at_next_round(state, f"map_params({_named(fn)})")
    if setup.axis.size > 1 and crosses:
        agree("map_params", [state])
    for (groups, held), at in zip(passes, finest, strict=True):
        if not groups:
            continue
        parts = [cut(setup, to_device(x, state.device), held.placement, at) for x in held.flats]
        new = _mapped(state, fn, tuple(groups), at, parts, operands)
        if held is own:
            made = with_stepped(made, dict(enumerate(new)), at)
        else:
            made = with_params(made, dict(zip(groups, new, strict=True)), at)
    returned([made])
    return made


def _mapped(
    state: TrainState,
    fn: Callable[..., Tensor],
    groups: tuple[int, ...],
    at: Placement,
    parts: Sequence[Tensor],
    operands: Sequence[_Operand],
) -> list[Tensor]:
    """Return this rank's parts of some groups after fn, leaf by leaf."""
    setup = state.setup
    ranges = ranges_of(setup.layout, setup.part(at, setup.axis.rank), groups)
    every = by_path(ranges, parts)
    lacks = {path for one in operands for path in one.lacks}
    pieces = {path: x for path, x in every.items() if path not in lacks}
    rest = [by_path(ranges, [*one.parts(state, groups, at)]) for one in operands] if pieces else []
    key = _key(state, fn)
    first = key not in _TESTED and not (in_transform() or is_recorded(parts) or is_abstract())
    first = first and bool(pieces)
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
    flats = as_flats(ranges, parts, every, every | new)
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


class _Operand(NamedTuple):
    """What a user gives beside a state: flats by the groups of that, or another state.

    lacks: the frozen leaves of which it has no values. elsewhere: a state whose shards are others.
    """

    flats: Mapping[int, Tensor]
    placement: Placement = Placement.REPLICATED
    lacks: Collection[str] = ()
    elsewhere: TrainState | None = None

    def parts(self, state: TrainState, groups: Sequence[int], at: Placement) -> Iterator[Tensor]:
        """Yield this rank's part of each group; zeros of what it lacks."""
        setup, held = state.setup, dict[int, Tensor]()
        for index in groups:
            if self.elsewhere is not None:
                held = _of_leaves(self.elsewhere, state.setup.layout, index, held)
                leaves = unpack_groups(self.elsewhere.setup.layout, held)
                numbers = leaf_numbers(self.elsewhere.setup.layout)
                paths = [setup.layout.names[i] for i in setup.layout.groups[index].leaves]
                flat = pack(setup.layout, index, [leaves[numbers[path]] for path in paths])
                flat = flat.to(state.device)
                own = cut(setup, flat, Placement.REPLICATED, at)
                yield own if own is flat else own.clone()
            elif index in self.flats:
                flat = to_device(self.flats[index], state.device)
                yield cut(setup, flat, self.placement, at)
            else:
                yield torch.zeros(setup.numel(index, at), device=state.device)


def _of_leaves(
    other: TrainState, layout: Layout, index: int, held: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Return {group: its whole flat} of those groups of another state that have these leaves."""
    setup, found = other.setup, dict[int, Tensor]()
    wanted = {leaf_numbers(setup.layout)[layout.names[i]] for i in layout.groups[index].leaves}
    for k, group in enumerate(setup.layout.groups):
        if k in held and wanted.intersection(group.leaves):
            found[k] = held[k]
        elif wanted.intersection(group.leaves):
            here = to_device(other.params.flats[k], other.device)
            found[k] = gather_parts(setup, [here], setup.params, Placement.REPLICATED)[0]
    return found


def _operand(state: TrainState, other: Any) -> _Operand:
    """Return what a user gives beside a state."""
    layout = state.setup.layout
    if isinstance(other, TrainState):
        check_alive(other)
        theirs = other.setup.layout
        _require_leaves(layout, theirs)
        if not state.setup.axis.has_places_of(other.setup.axis):
            raise LayoutError(
                f"map_params: a state on {other.mesh} beside one on {state.mesh}.",
                cause="states on two parts of a mesh, or on two meshes: shards that are equally "
                "long have other elements.",
                fix="give its whole values: fzero.map_params(fn, state, fzero.full_params(other)).",
            )
        if _pieces(layout) == _pieces(theirs):
            return _Operand(dict(enumerate(other.params.flats)), other.setup.params)
        return _Operand({}, elsewhere=other)
    frozen = [name for name, x in zip(layout.names, layout.leaves, strict=True) if not x.trainable]
    if isinstance(other, Slot):
        return _learning(state, other.value, "a slot", frozen)
    if isinstance(other, Buffers):
        if factor_of(state) is not None:
            raise LayoutError(
                "map_params: bare gradients of a state with a loss scale.",
                cause="`other.gradients` is times the loss scale.",
                fix="give fzero.gradients(other), which divides by it.",
            )
        return _learning(state, other, "gradients", frozen)
    return _of_pytree(state, other, frozen)


def _pieces(layout: Layout) -> Any:
    """What two layouts have in common if a rank's shards of both have the same elements."""
    names, groups = layout.names, layout.groups
    some = [([names[i] for i in x.leaves], x.offsets, x.shard_numel, x.encoded) for x in groups]
    return layout.ranks, some


def _learning(state: TrainState, held: Any, what: str, frozen: Sequence[str]) -> _Operand:
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
    return _Operand(dict(zip(layout.trainable, flats, strict=True)), held.placement, frozen)


def _require_leaves(mine: Layout, theirs: Layout) -> None:
    """Raise `LayoutError` unless two states have the same leaves, whatever their rules."""
    own, other = (
        {k: (x.shape, x.dtype.is_complex) for k, x in zip(o.names, o.leaves, strict=True)}
        for o in (mine, theirs)
    )
    if own != other:
        path = next(k for k in [*own, *other] if own.get(k) != other.get(k))
        seen = [f"{one[path][0]}" if path in one else "no such leaf" for one in (own, other)]
        raise _not_parallel(f"{path} is {seen[0]} in the state, {seen[1]} in the other one")


def _of_pytree(state: TrainState, tree: Any, frozen: Sequence[str]) -> _Operand:
    """Return the flats [W l] of full tensors: in a pytree like the parameters, or by path."""
    layout = state.setup.layout
    paths, pairs = leaf_paths(layout), matched(layout, tree)
    if pairs is not None:
        by_leaf: dict[int, Any] = dict(pairs)  # a tied leaf has one value, that of its last place
    elif isinstance(tree, dict) and set(tree) <= set(paths):
        by_leaf = {leaf: tree.get(path) for leaf, path in enumerate(paths)}
    else:
        raise _not_parallel(f"a {type(tree).__name__}")
    lacks = {path for path in frozen if by_leaf[leaf_numbers(layout)[path]] is None}
    flats = {}
    for index, group in enumerate(layout.groups):
        if group.encoded or not group.dtype.is_floating_point:
            continue
        some = []
        for i in group.leaves:
            x, leaf = by_leaf[i], layout.leaves[i]
            if paths[i] in lacks:
                x = torch.zeros(leaf.shape, dtype=leaf.dtype)
            if not isinstance(x, Tensor) or tuple(x.shape) != leaf.shape:
                shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise _not_parallel(f"{shape} for {leaf.title}, which is {leaf.shape}")
            some.append(x)
        dtype = torch.promote_types(some[0].dtype, some[-1].dtype)
        flats[index] = pack(layout, index, [x.to(state.device, dtype) for x in some])
    return _Operand(flats, lacks=lacks)


def _not_parallel(seen: str) -> LayoutError:
    return LayoutError(
        f"map_params: {seen}.",
        cause="values that are not parallel to the parameters of the state.",
        fix="give another state of the same leaves, its `gradients`, a slot (state.slots[...]) or "
        "a pytree of full tensors like the parameters.",
    )


# `slots`: what a transform or the optimizer keeps in a state, whole and by path.


def slots(state: TrainState, name: str) -> dict[str, Any]:
    """Return {slot: {path: its whole value}} of what the transform `name` keeps in a state.

    Of the optimizer, for name="optimizer", moments, masters, and what the owners of matrices keep,
    in any shape: all but its counters, under the names of a checkpoint. A number is a tensor in the
    place of the dict. What each rank has a summand of is the sum; what each rank has of its own
    ("own") is this rank's.

    Args:
        state: a train state; `engine.state` of an engine.
        name: of the transform.

    Returns:
        Copies, in the shapes of the leaves. A collective at stages 1 to 3: every rank must call it.

    Raises:
        LayoutError: for what is no state, and for a name that it has no slots of.
        DonatedError: for a state that was used up.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.ones(2, 2)}, fzero.optim.sgd(0.1, momentum=0.9), stage=2)
        >>> fzero.slots(state, "optimizer")
        {'momentum_buffer': {'w': tensor([[0., 0.],
                [0., 0.]])}}
    """
    require_state("slots", state)
    check_alive(state)
    if name != "optimizer":
        prefix, kept = f"{name}/", state.slots.items()
        found = {k.removeprefix(prefix): x for k, x in kept if k.startswith(prefix)}
        if not found:
            known = sorted({"optimizer", *(key.partition("/")[0] for key in state.slots)})
            raise LayoutError(
                f"slots: the state keeps nothing for {name!r}; it does for {', '.join(known)}.",
                cause="another name, or a state that was made without the transform.",
                fix="make it by the init of the step, or with transforms=[...].",
            )
        agree(f"slots of {name}", [state])
        return {k: whole(state, x) for k, x in found.items() if x.form.leaves != "record"}
    kept = _of_optimizer(state)
    agree(f"slots of {name}", [state])
    return {
        slot: _shaped(state, {k: x for one in some for k, x in whole(state, one).items()})
        for slot, some in kept.items()
    }


def _of_optimizer(state: TrainState) -> dict[str, list[Slot]]:
    """Return what the rule keeps, under its names in a checkpoint: in flats, and by owners."""
    learning, found = state.setup.layout.trainable, dict[str, list[Slot]]()
    for one in rule_entries(state, state.setup.axis.rank):
        value: Any = {
            i: one.codecs[i].numbers(x) if i in one.codecs else x for i, x in one.values.items()
        }
        if one.per_leaf:
            like = next(iter(value.values()))
            flats = tuple(value.get(i, like.new_empty(0)) for i in learning)
            value = Buffers(flats=flats, placement=one.placement)
        name = one.name.removeprefix(RULE)
        found.setdefault(name, []).append(Slot(value=value, form=one.form))
    return found


def _shaped(state: TrainState, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what owners keep: in the shape of its leaf what has an element for each of it."""
    layout = state.setup.layout
    leaves = dict(zip(leaf_paths(layout), layout.leaves, strict=True))
    return {
        path: leaves[path].of(x.reshape(-1)) if x.numel() == leaves[path].numel else x
        for path, x in values.items()
    }


def whole(state: TrainState, slot: Slot) -> Any:
    """Return the logical value of a slot: whole leaves by path, a number, or named tensors.

    A collective where ranks have parts.
    """
    if isinstance(slot.value, Buffers):
        return _whole_leaves(state, slot, slot.value)
    sums = slot.form.placement is Placement.PARTIAL and slot.form.elsewhere == "sum"
    if not isinstance(slot.value, dict):
        return _summed(state, [slot.value])[0] if sums else slot.value.clone()
    if slot.form.placement is not Placement.OWNER:
        return {key: to_device(x, state.device).clone() for key, x in slot.value.items()}
    everyone: Any = gather_objects({k: x.cpu() for k, x in slot.value.items()}, state.setup.axis)
    return {
        key: next((one[key] for one in everyone if one[key].numel()), x).to(state.device)
        for key, x in slot.value.items()
    }


def _summed(state: TrainState, values: list[Tensor]) -> list[Tensor]:
    return reduce_many(values, state.setup.axis, ordered=state.setup.reduction.ordered)


def _whole_leaves(state: TrainState, slot: Slot, held: Buffers) -> dict[str, Tensor]:
    setup, layout = state.setup, state.setup.layout
    every = slot.form.leaves == "all"
    groups = tuple(range(len(layout.groups))) if every else tuple(layout.trainable)
    kept = [(i, to_device(x, state.device)) for i, x in zip(groups, held.flats, strict=True)]
    kept = [(i, x) for i, x in kept if x.numel() or not layout.full_numel(i)]
    flats = [x for _, x in kept]
    if held.placement is not Placement.PARTIAL:
        flats = gather_parts(setup, flats, held.placement, Placement.REPLICATED)
    elif slot.form.elsewhere == "sum":
        flats = _summed(state, flats)
    ranges = ranges_of(layout, Part(1, 0), tuple(i for i, _ in kept))
    leaves = {one.path: one.leaf for some in ranges for one in some.ranges}
    pieces = by_path(ranges, flats)
    return {path: x.reshape(leaves[path].shape).clone() for path, x in pieces.items()}
