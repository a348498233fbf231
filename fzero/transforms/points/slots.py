"""The slots of transforms in a state: made by `init`, given to functions, and put back.

state.slots["ema/mean"]: Slot  - given ->  {"mean": {path: this rank's elements}}
<-  put  -
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fzero.context.modes import in_transform
from fzero.errors import LayoutError
from fzero.machine.named_shards import (
    FlatRanges,
    Pieces,
    as_flats,
    by_path,
    leaf_paths,
    ranges_in,
)
from fzero.machine.offload import offloaded, to_device
from fzero.machine.owners import Owners, every_leaf_owned, owners_of
from fzero.machine.packing import gather_parts, part_of
from fzero.optim.entries import with_tensors
from fzero.optim.precision import masters_of, work_tensors
from fzero.state import Buffers, Form, Placement, Setup, Slot, TrainState
from fzero.state.layout import as_complex, as_real
from fzero.state.points import Points
from fzero.transforms.leaf_slices import pieces_of
from fzero.transforms.points.context import Context, parts_of, whole_parts
from fzero.transforms.points.first_call import (
    accused,
    is_first,
    require_equal,
    told,
    watched_call,
)

# Whole leaves on the ranks that own them, for transforms that need matrices.
#
# parts of each rank  - one exchange for a batch ->  {path: the leaf}, on its owner
# parts of each rank  <- one exchange for a batch -  what a function made of it

Wholes = dict[str, Tensor]
"""{path: the whole leaf in its shape}: of the leaves of a batch that this rank owns."""


def path_of(setup: Setup, owners: Owners, number: int) -> str:
    """Return the path of a leaf by its number among those with owners."""
    return leaf_paths(setup.layout)[owners.leaves[number].index]


def owned_paths(setup: Setup) -> dict[str, bool]:
    """Return {path: whether this rank owns the leaf} of all leaves that learn."""
    owners = every_leaf_owned(setup)
    rank = owners.axis.rank
    return {path_of(setup, owners, k): one.owner == rank for k, one in enumerate(owners.leaves)}


def on_owners(
    setup: Setup,
    inputs: Sequence[Sequence[Tensor]],
    compute: Callable[[list[Wholes]], Mapping[str, Tensor]],
    outs: Sequence[Tensor],
) -> None:
    """Write compute(wholes of each input) into `outs`, leaf by leaf on its owner. A collective.

    inputs: lists of this rank's parts of the flats that learn. outs: parts that are written to.
    compute: called once for each batch, on every rank, also for one of which it owns nothing.
    """
    owners = every_leaf_owned(setup)

    def of_batch(numbers: list[int], wholes: Mapping[int, list[Tensor]]) -> dict[int, Tensor]:
        paths = {k: path_of(setup, owners, k) for k in numbers}
        given = [
            {path: _shaped(owners, k, wholes[k][j]) for k, path in paths.items()}
            for j in range(len(inputs))
        ]
        made = compute(given)
        return {k: as_real(made[path]).reshape(-1) for k, path in paths.items()}

    owners.run(inputs, of_batch, outs)


def owned_wholes(setup: Setup, flats: Sequence[Tensor]) -> Wholes:
    """Return {path: the whole leaf in its shape} of the leaves that this rank owns. A collective.

    flats: this rank's parts.
    """
    found: Wholes = {}

    def keep(given: list[Wholes]) -> Wholes:
        found.update({path: x.clone() for path, x in given[0].items()})
        return given[0]

    on_owners(setup, [list(flats)], keep, [x.clone() for x in flats])
    return found


def _shaped(owners: Owners, number: int, flat: Tensor) -> Tensor:
    leaf = owners.leaves[number].leaf
    return (as_complex(flat) if leaf.dtype.is_complex else flat).view(leaf.shape)


def rule_state(setup: Setup, shards: Sequence[Tensor]) -> Any:
    """Return what the optimizer keeps before its first step, of this rank's shards."""
    home, owners = setup.offload.optimizer, owners_of(setup)
    given: dict[str, Any] = {} if owners is None else {"owners": owners}
    if home is not None:
        given["place"] = lambda x: offloaded(home, x, setup.offload)
    return setup.optimizer.init(shards, pieces_of(setup), **given)


def stepped_parts(state: TrainState) -> list[Tensor]:
    """Return this rank's part of what the rule steps: of each flat its master, or itself."""
    setup, rank = state.setup, state.setup.axis.rank
    held, wanted = setup.part(setup.params, rank), setup.part(setup.optimizer_state, rank)
    parts = [part_of(state.params.flats[i], held, wanted) for i in setup.layout.trainable]
    masters = masters_of(state)
    return work_tensors(parts, masters) if masters else parts


def stepped_as_held(state: TrainState) -> Buffers:
    """Return what the rule steps, placed as this rank has it: masters, or parameters as they are.

    Where some flats have masters, the others are cut as those are.
    """
    setup = state.setup
    if any(x.numel() for x in masters_of(state)):
        return Buffers(flats=tuple(stepped_parts(state)), placement=setup.optimizer_state)
    flats = tuple(state.params.flats[i] for i in setup.layout.trainable)
    return Buffers(flats=flats, placement=setup.params)


def with_stepped(state: TrainState, values: Mapping[int, Tensor], at: Placement) -> TrainState:
    """Return the state in which what the rule steps has these values, and parameters follow.

    values: {number of a group among those that learn: this rank's part}, placed `at`: new tensors,
    which the state takes. A collective where that is not how masters or parameters are placed.
    """
    setup, learning, parts = state.setup, state.setup.layout.trainable, [*values.values()]
    held = [(n, masters_of(state)[k]) for n, k in enumerate(values) if masters_of(state)]
    if held := [(n, master) for n, master in held if master.numel()]:
        parts = gather_parts(setup, parts, at, setup.optimizer_state)
        at = setup.optimizer_state
        new = {id(x): to_device(parts[n], x.device, x.dtype) for n, x in held}
        state = with_tensors(state, new)
    return with_params(state, dict(zip((learning[k] for k in values), parts, strict=True)), at)


def with_params(state: TrainState, values: Mapping[int, Tensor], at: Placement) -> TrainState:
    """Return the state in which the parameters of some groups have these values, placed `at`."""
    setup, flats = state.setup, list(state.params.flats)
    cast = [x.to(flats[index].dtype) for index, x in values.items()]
    home = setup.offload.params
    for index, flat in zip(values, gather_parts(setup, cast, at, setup.params), strict=True):
        flats[index] = flat if home is None else offloaded(home, flat, setup.offload)
    return state.replace(params=dataclasses.replace(state.params, flats=tuple(flats)))


def stepped_by_path(state: TrainState) -> tuple[tuple[FlatRanges, ...], Pieces]:
    """Return where leaves lie in what the rule steps, and that by their paths."""
    placed = Buffers(placement=state.setup.optimizer_state)
    ranges = ranges_in(state.setup, placed)
    flats = [to_device(x, state.device) for x in stepped_parts(state)]
    return ranges, by_path(ranges, flats)


# Made.


def begun_slots(state: TrainState, only: Sequence[str] | None = None) -> TrainState:
    """Return the state with the slots of its transforms as `init` makes them.

    only: the names of slots, "<transform>/<slot>", that are made; None: all that it has not.
    """
    made = dict(state.slots)
    for one in state.setup.transforms:
        known = [*(f"{one.name}/{name}" for name, _ in one.slots or ()), *state.slots]
        wanted = [x for x in known if x.startswith(f"{one.name}/") and (only is None or x in only)]
        if one.init is None or (only is not None and not wanted):
            continue
        for name, slot in _begun(state, one).items():
            if name not in made or (only is not None and name in only):
                made[name] = slot
    return state.replace(slots=made)


def _begun(state: TrainState, one: Points) -> dict[str, Slot]:
    """Return the slots of one transform as its `init` makes them, checked."""
    setup, (ranges, params) = state.setup, stepped_by_path(state)
    parts, whole = parts_of(ranges), one.whole
    if whole:
        params, parts = owned_wholes(setup, stepped_parts(state)), whole_parts(parts)
    ctx = Context(state, parts, params=lambda: params, whole=whole)
    if not is_first(state, one, "init"):
        function: Any = one.init
        return _as_slots(state, one, function(params, ctx), whole=whole)
    with told(state, one, "init", first=True):
        values, asked = watched_call(one, "init", ctx, params)
        found = _as_slots(state, one, values, whole=whole)
        error = "" if whole else accused(one, "init", asked, {}, params, values, {})
    require_equal(state.replace(slots=found), one, "init", None, accusation=error)
    return found


def _as_slots(state: TrainState, one: Points, values: Any, *, whole: bool) -> dict[str, Slot]:
    """Return what `init` has made as slots, checked."""
    if not isinstance(values, Mapping):
        raise _bad_init(one, f"returned a {type(values).__name__}")
    forms = dict(one.slots or ())
    if not set(forms) <= set(values):
        raise _bad_init(one, f"made {sorted(values)}, and slots= has {sorted(forms)}")
    found, setup, learning = {}, state.setup, state.setup.layout.trainable
    for name, value in values.items():
        place, by_path = f"{one.name}/{name}", isinstance(value, Mapping)
        usual = Form(leaves="named", placement=Placement.OWNER) if whole else Form()
        form = forms.get(name, usual if by_path else Form(leaves="number"))
        made = value
        if form.leaves == "number":
            if isinstance(made, bool | int | float):
                wide = torch.float32  # as wide as the widest parameter that learns
                for index in learning:
                    wide = torch.promote_types(wide, setup.layout.groups[index].dtype)
                kind = {bool: torch.bool, int: torch.int64}.get(type(made), wide)
                made = torch.tensor(made, dtype=kind)
            if not isinstance(made, Tensor):
                raise _bad_init(one, f"made a {type(made).__name__} for the number {place}")
            made = _own(_apart(made).to(state.device, form.dtype or made.dtype))
        elif form.leaves == "named":
            if not by_path:
                raise _bad_init(one, f"made a {type(value).__name__} for {place}, which has names")
            for key, x in value.items():
                if not isinstance(x, Tensor):
                    raise _bad_init(one, f"made a {type(x).__name__} for {place}[{key!r}]")
            made = {key: _stored(state, _own(_apart(x))) for key, x in value.items()}
            if whole:  # every rank knows every name
                for path in owned_paths(setup):
                    made.setdefault(path, torch.zeros(0, device=state.device))
            made = dict(sorted(made.items()))
        else:
            made = _in_flats(state, one, place, form, value)
        found[place] = Slot(value=made, form=form)
    return found


def _in_flats(state: TrainState, one: Points, place: str, form: Form, value: Any) -> Buffers:
    """Return a slot that `init` has made by path, or by one number for all elements, as flats."""
    placement = form.placed(state.setup.optimizer_state)
    ranges = ranges_in(state.setup, Buffers(placement=placement), every=form.leaves == "all")
    if isinstance(value, int | float) or (isinstance(value, Tensor) and not value.ndim):
        number, value = value, dict[str, Tensor]()
        for leaf in (leaf for some in ranges for leaf in some.ranges):
            dtype = leaf.leaf.dtype  # a Python number has that of the leaf
            floats = dtype.is_floating_point or dtype.is_complex
            kind = dtype if floats and not isinstance(number, Tensor) else None
            x = torch.as_tensor(number, device=state.device, dtype=kind)
            value[leaf.path] = x.expand(leaf.count)
    if not isinstance(value, Mapping):
        raise _bad_init(one, f"made a {type(value).__name__} for {place}, which is by path")
    flats, learning = list[Tensor](), set[str]()
    for some in ranges:
        pieces, dtype = dict[str, Tensor](), form.dtype and _real(form.dtype)
        for leaf in some.ranges:
            learning.add(leaf.path)
            x = value.get(leaf.path)
            if not isinstance(x, Tensor) or x.numel() != leaf.count:
                seen = f"{x.numel()} elements" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise _bad_init(
                    one,
                    f"made {seen} for {place}[{leaf.path!r}], of which this rank has {leaf.count} "
                    "elements",
                )
            pieces[leaf.path] = x
        if dtype is None:
            found = [_real(x.dtype) for x in pieces.values()]
            dtype = reduce(torch.promote_types, found) if found else torch.float32
            dtype = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        for leaf in some.ranges:
            x, wide, where = pieces[leaf.path], dtype, f"{place}[{leaf.path!r}]"
            if leaf.leaf.dtype.is_complex:
                if dtype not in (torch.float32, torch.float64):
                    raise _bad_init(one, f"made {dtype} for {where}, which is complex")
                wide = dtype.to_complex()
            elif x.is_complex():
                raise _bad_init(one, f"made complex numbers for {where}, which is real")
            pieces[leaf.path] = _apart(x).to(wide, copy=True)
        flat = torch.zeros(some.numel, dtype=dtype, device=state.device)
        given: dict[str, Any] = dict.fromkeys(pieces)
        flats.append(_stored(state, as_flats([some], [flat], given, pieces)[0]))
    if extra := set(value) - learning:
        raise _bad_init(one, f"made {place}[{min(extra)!r}], and no such leaf learns")
    return Buffers(flats=tuple(flats), placement=placement)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _apart(x: Tensor) -> Tensor:
    """Return a value without its graph; inside of a torch.func transform it depends on params."""
    return x if in_transform() or x.requires_grad else x.detach()


def _own(x: Tensor) -> Tensor:
    """Return a value in memory of its own, contiguous: it is saved, and moved, as bytes."""
    return x.clone(memory_format=torch.contiguous_format)


def _stored(state: TrainState, flat: Tensor) -> Tensor:
    """Return a flat where the optimizer's state is stored."""
    return offloaded(state.setup.offload.optimizer, flat, state.setup.offload)


def _bad_init(one: Points, seen: str) -> LayoutError:
    return LayoutError(
        f"{one.name}: init {seen}.",
        cause="an init that does not return {slot: {path: this rank's elements, 1-D} or a number}.",
        fix="make each slot of `params`, e.g. {'mean': {path: p.clone() for path, p in "
        "params.items()}}, and declare forms that differ from that in slots=.",
    )


# Given, and put back.


def given(state: TrainState, one: Points) -> dict[str, Any]:
    """Return what a function of a transform is given of its slots."""
    found, prefix = {}, f"{one.name}/"
    for name, slot in state.slots.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = value_given(state, slot)
    return found


def value_given(state: TrainState, slot: Slot) -> Any:
    """Return a slot's value as functions have it: by path, on the device that computes."""
    if isinstance(slot.value, Buffers):
        flats = [to_device(x, state.device) for x in slot.value.flats]
        return by_path(_ranges(state.setup, slot), flats)
    if isinstance(slot.value, dict):
        return {key: to_device(x, state.device) for key, x in slot.value.items()}
    return slot.value


def _ranges(setup: Setup, slot: Slot) -> tuple[FlatRanges, ...]:
    return ranges_in(setup, slot.value, every=slot.form.leaves == "all")


def put(
    state: TrainState, one: Points, before: Mapping[str, Any], after: Mapping[str, Any]
) -> TrainState:
    """Return the state with other values of the slots of a transform, where any is another one."""
    changed = {}
    for name, value in after.items():
        if value is before[name]:
            continue
        slot, held = state.slots[f"{one.name}/{name}"], value
        if isinstance(slot.value, Buffers):
            flats = [to_device(x, state.device) for x in slot.value.flats]
            made = as_flats(_ranges(state.setup, slot), flats, before[name], value)
            kept = tuple(
                old if x is here else _stored(state, x)
                for old, here, x in zip(slot.value.flats, flats, made, strict=True)
            )
            held = dataclasses.replace(slot.value, flats=kept)
        elif isinstance(value, dict):
            held = {key: _stored(state, _own(x)) for key, x in value.items()}
        else:
            held = _own(value)
        changed[f"{one.name}/{name}"] = dataclasses.replace(slot, value=held)
    return state.replace(slots={**state.slots, **changed}) if changed else state


def without_gradients(state: TrainState) -> TrainState:
    """Return the state without gradients, and without what belongs to them."""
    return renewed(state.without_gradients(), "update")


def renewed(state: TrainState, lifetime: str) -> TrainState:
    """Return the state whose slots of this lifetime are as `init` makes them, or gone."""
    names = [name for name, slot in state.slots.items() if slot.form.lifetime == lifetime]
    if not names:
        return state
    others = {name: slot for name, slot in state.slots.items() if name not in names}
    return begun_slots(state.replace(slots=others), names)
