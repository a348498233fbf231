"""Reading and writing gradients, parameters and optimizer state by path, whole or this rank's.

Paths are those of module.named_parameters(). What says `full` is a collective, which every rank
calls; the other calls are not. Gradients are those that an update would use: divided by the number
of ranks, the loss scale and the micro-batches, before clipping. With a loss scale those of 16 bits
are given in fp32, which holds them without it.

An `Engine` has these functions as methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.adapter.driver import Driver
from fzero.adapter.gradients import as_held, used
from fzero.adapter.writes import own_part, take_values
from fzero.collectives import broadcast, gather_objects
from fzero.errors import LayoutError, PhaseError
from fzero.machine.offload import change, to_device, write_back
from fzero.machine.owners import Owners, owners_of
from fzero.machine.packing import LeafRange, gather_parts, leaf_ranges, unpack
from fzero.machine.partition import identity
from fzero.machine.placeholder import LazyParam
from fzero.optim.entries import codec_in
from fzero.state import Placement, TrainState
from fzero.state.layout import Leaf, as_complex, as_real
from fzero.state.setup import MASTERS
from fzero.transforms.accumulate_grad import filled
from fzero.transforms.backward_pass import raises_together
from fzero.transforms.clip import norm_of_state
from fzero.transforms.local import NO_WRITES
from fzero.transforms.recipe import mean_of

# Gradients.


def full_gradients(driver: Driver) -> dict[str, Tensor]:
    """{path: mean_r(g_r)} of every parameter that learns, in the accumulation dtype.

    Reduces what waits first; zeros for a parameter that got none. Raises `PhaseError` when
    there are no gradients at all, and inside a window (which they would break up).
    """
    state = driver.with_gradients("full_gradients()")
    layout, found = state.setup.layout, {}
    for number, index in enumerate(layout.trainable):
        leaves = leaves_of(state, index, used(state, state.gradients.flats[number]))
        found.update(zip(layout.groups[index].leaves, leaves, strict=True))
    every, read = enumerate(layout.leaves), driver.stand_ins.read
    return {leaf.path: read(found[i]) for i, leaf in every if leaf.trainable}


def full_gradient(driver: Driver, path: str) -> Tensor:
    """`full_gradients()[path]`, gathering only its group."""
    place = find_learning(driver, path)
    driver.with_gradients("full_gradient()", path)
    return whole_gradient(driver, place)


def set_full_gradient(driver: Driver, path: str, value: Tensor) -> None:
    """Make `value` (the same on every rank) the gradient that the update will use.

    Where no backward has brought any, it is the only one: an update steps what was set.
    """
    place = find_learning(driver, path)
    state = driver.with_gradients("set_full_gradient()", path, begins=True)
    place.write(state, place.flat_of(state, state.gradients.flats), _given(state, value))
    driver.wrote_gradient(place.leaf.path, place.number)


def local_gradient(driver: Driver, path: str) -> Tensor:
    """This rank's piece of the gradient: 1-D, empty if the rank has none of it.

    At stage 0 that is all of it. No collective, so only what has been reduced already.
    """
    driver.wait()
    place, state = find_learning(driver, path), driver.state
    flats = state.gradients.flats or filled(state, {}, state.setup.gradients)
    return driver.stand_ins.read(used(state, place.piece(state, place.flat_of(state, flats))))


def set_local_gradient(driver: Driver, path: str, value: Tensor) -> None:
    """Make `value` this rank's piece of the gradient that the update will use.

    No collective; at stage 0 every rank has to set the same. Raises `PhaseError` if nothing
    has been reduced yet.
    """
    driver.wait()
    place, state = find_learning(driver, path), driver.state
    if not state.gradients.held:
        raise PhaseError(
            f"set_local_gradient() {path}: there are no reduced gradients.",
            cause="no backward ran since the last update, or it ran in a window.",
            fix="call it between the backward and step(), outside of a window.",
        )
    place.write_piece(state, place.flat_of(state, state.gradients.flats), _given(state, value))
    driver.wrote_gradient(place.leaf.path, place.number)


def global_grad_norm(driver: Driver) -> Tensor | None:
    """|g|, before clipping, of what an update would use now. A collective.

    Without gradients, that of the last update if `max_norm` was given, else None.
    """
    if not driver.reduced("global_grad_norm"):
        return driver.guard.norm
    state = driver.state
    return driver.stand_ins.read(mean_of(state).of(norm_of_state(state, state.gradients)))


# Parameters.


def full_parameters(driver: Driver) -> dict[str, Tensor]:
    """{path: values} of all parameters, frozen ones too: copies, masters where there are."""
    driver.call("full_parameters()")
    state = driver.state
    layout, found = state.setup.layout, {}
    for index, group in enumerate(layout.groups):
        leaves = leaves_of(state, index, stepped(state, index))
        found.update(zip(group.leaves, [x.clone() for x in leaves], strict=True))
    return {leaf.path: found[i] for i, leaf in enumerate(layout.leaves)}


def full_state_dict(driver: Driver) -> dict[str, Any]:
    """module.state_dict() with whole values, buffers too: copies, to save or to load.

    At stage 3 `with fzero.adapter.gathered(module, modify=True)` is for loading it.
    """
    return _state_dict_of(driver, "full_state_dict()", live=False)


def state_dict(driver: Driver) -> dict[str, Any]:
    """module.state_dict(): below stage 3 live, as the module's; at stage 3 a copy. A collective.

    Below stage 3 what is written into a value, the same on every rank, is written to the parameter,
    and masters follow. At stage 3 the values are whole, those of `full_state_dict()`, and writes
    into them are lost: `load_state_dict()` or `set_full_parameter(path, value)` write. The same is
    true of an encoded parameter at every stage.
    """
    if driver.state.stage == 3:
        return full_state_dict(driver)
    return _state_dict_of(driver, "state_dict()", live=True)


def full_parameter(driver: Driver, path: str) -> Tensor:
    """`full_parameters()[path]`, gathering only its group."""
    place = find(driver, path)
    driver.call(f"full_parameter() {path}")
    return place.whole(driver.state, stepped(driver.state, place.group)).clone()


@torch.no_grad()
def set_full_parameter(driver: Driver, path: str, value: Tensor) -> None:
    """Make `value` (the same on every rank) the parameter, and that of its master copy."""
    require_no_anchors(driver, "set_full_parameter()")
    place = find(driver, path)
    driver.call(f"set_full_parameter() {path}")
    for part in values_of(driver.state, place.group):
        place.write(driver.state, part, value)
    driver.running.changed()


def local_parameter(driver: Driver, path: str) -> Tensor:
    """This rank's piece of the parameter, as the optimizer steps it: 1-D. No collective."""
    place, state = find(driver, path), driver.state
    return place.piece(state, stepped(state, place.group)).clone()


@torch.no_grad()
def set_local_parameter(driver: Driver, path: str, value: Tensor) -> None:
    """Make `value` this rank's piece of the parameter, and that of its master copy. Stage 3.

    Every rank calls it, each with a piece of its own. Raises `LayoutError` below stage 3, where
    each rank has all of the parameter, and the ranks would differ.
    """
    require_no_anchors(driver, "set_local_parameter()")
    place = find(driver, path)
    driver.wait()
    if driver.state.stage != 3:
        raise LayoutError(
            f"set_local_parameter() {path} at stage {driver.state.stage}.",
            cause="a call for stage 3; below it each rank has the whole parameter.",
            fix="call set_full_parameter() on every rank.",
        )
    for part in values_of(driver.state, place.group):
        place.write_piece(driver.state, part, value)
    driver.running.changed()


# Optimizer state.


def local_optimizer_state(driver: Driver, path: str, name: str) -> Tensor:
    """This rank's piece of state `name`: 1-D, empty if it has none. No collective.

    A scalar ("step") as it is. Of a parameter that is updated whole, its owner has all.
    """
    place, kept = _kept_as(driver, path, name)
    if kept.kind == "elements":
        held = _numbers(driver.state, place.group, name, kept.held)
        return place.piece(driver.state, held).clone()
    return kept.copied(driver.state)


@torch.no_grad()
def set_local_optimizer_state(driver: Driver, path: str, name: str, value: Tensor | float) -> None:
    """Make `value` this rank's piece of state `name`. Every rank calls it; no collective.

    At stage 0, and of a scalar, every rank has to set the same.
    """
    _write_state(driver, path, name, value, whole=False)


def full_optimizer_state(driver: Driver, path: str, name: str) -> Tensor:
    """State `name` ("exp_avg", ...) of the parameter at `path`; a scalar ("step") as it is."""
    place, kept = _kept_as(driver, path, name)
    driver.call(f"full_optimizer_state() {path} {name}")
    state = driver.state
    if kept.kind == "owned":
        return _of_owner(state, place.leaf.path)[name]
    if kept.kind == "elements":
        return place.whole(state, _numbers(state, place.group, name, kept.held)).clone()
    return kept.copied(state)


def full_optimizer_states(driver: Driver) -> dict[str, dict[str, Any]]:
    """{path: {name: value}} of every parameter that the optimizer steps."""
    driver.call("full_optimizer_states()")
    layout = driver.state.setup.layout
    found: dict[str, dict[str, Any]] = {}
    for index in layout.trainable:
        found.update(states_of_group(driver, index))
    return {leaf.path: found[leaf.path] for leaf in layout.leaves if leaf.path in found}


@torch.no_grad()
def set_full_optimizer_state(driver: Driver, path: str, name: str, value: Tensor | float) -> None:
    """Make `value` (the same on every rank) state `name` of the parameter at `path`.

    A scalar state ("step") is the parameter's own, as in torch.optim; but for one that a rule
    keeps in its param group, which is that of all parameters of the group.
    """
    _write_state(driver, path, name, value, whole=True)


def _write_state(
    driver: Driver, path: str, name: str, value: Tensor | float, *, whole: bool
) -> None:
    """Make `value` a state of a parameter: the `whole` of it, or this rank's piece."""
    place, kept = _kept_as(driver, path, name)
    if whole:
        driver.call(f"set_full_optimizer_state() {path} {name}")
    state, leaf = driver.state, place.leaf.path
    rule: Any = state.setup.optimizer
    paths = [one.path for one in state.setup.layout.leaves if one.trainable]
    if kept.kind == "owned":
        like = _of_owner(state, leaf)[name] if whole else kept.held
        state = _with_owned(state, leaf, name, value, like)
    elif kept.kind == "counter" and not rule.shares(leaf, name):
        counters = rule.counted(state.optimizer, paths)
        own = counters[name][leaf].clone()
        _fill(path, own, value)
        counters[name][leaf] = own
        fresh = rule.unstepped(state.optimizer)
        counted = rule.recounted(state.optimizer, paths, counters, unstepped=fresh)
        state = state.replace(optimizer=counted)
    elif kept.kind != "elements":
        _fill(path, kept.held, value)
    else:
        codec, given = codec_in(state.setup, place.group, name), torch.as_tensor(value)
        write = place.write if whole else place.write_piece

        def write_encoded(row: Tensor) -> None:
            assert codec is not None
            numbers = codec.numbers(row)
            write(state, numbers, given)
            codec.write(row, numbers)

        if codec is None:
            write(state, kept.held, given)
        else:
            change(kept.held, state.device, write_encoded)
    # It has a state now, which its first step does not make.
    driver.put(state.replace(optimizer=rule.begun(state.optimizer, paths, leaf)))


def _fill(path: str, held: Tensor, value: Tensor | float) -> None:
    """Write what is kept of a parameter beside its elements: a number, or another shape."""
    given = torch.as_tensor(value)
    if given.numel() != held.numel():
        raise LayoutError(
            f"what the optimizer keeps of {path} has the shape {tuple(held.shape)}, the new "
            f"value {tuple(given.shape)}.",
            cause="a value of another parameter, or a part of one.",
            fix="give the whole value, in the shape that the getter of the same name returns.",
        )
    write_back(held, given.detach().reshape(held.shape))


class ParamSlot(NamedTuple):
    """What is held of one state of one parameter."""

    kind: str  # elements: of its group, cut like it. whole: a flat of its own. counter. owned
    held: Tensor  # encoded, where it is kept so

    def copied(self, state: TrainState) -> Tensor:
        """Return a copy of it on the device; a counter stays where it is."""
        counts = self.kind == "counter"
        return (self.held if counts else to_device(self.held, state.device)).clone()


def _kept_as(driver: Driver, path: str, name: str) -> tuple[ParameterPlace, ParamSlot]:
    """Return state `name` of the parameter at `path`. Raises `LayoutError` if there is none."""
    place = find_learning(driver, path)
    every = _kept_of(driver.state, place)
    if name not in every:
        raise LayoutError(
            f"the optimizer has no state {name!r} for {path}; it has {sorted(every)}.",
            cause="a misspelt name, or the state of another optimizer.",
            fix="use one of those.",
        )
    return place, every[name]


def _kept_of(state: TrainState, place: ParameterPlace) -> dict[str, ParamSlot]:
    """Return {name: what is held} of all that the optimizer keeps of a parameter."""
    rule: Any = state.setup.optimizer
    path = place.leaf.path
    if not _steps(state, path):
        raise PhaseError(
            f"no optimizer steps {path}.",
            cause="the parameter is frozen, or was not given to the optimizer.",
            fix="ask for a parameter that the optimizer steps.",
        )
    empty = not state.setup.numel(place.group, state.setup.optimizer_state)
    slots = {
        name: ParamSlot("whole" if name in rule.odd_slots else "elements", flat)
        for name, flat in slots_of_group(state, place.group).items()
        if name != MASTERS and (flat.numel() or empty)
    }
    counters = {
        name: ParamSlot("counter", x) for name, x in rule.counters(state.optimizer, path).items()
    }
    owned = {name: ParamSlot("owned", x) for name, x in _owned(state, path).items()}
    return {**counters, **slots, **owned}


def _steps(state: TrainState, path: str) -> bool:
    rule: Any = state.setup.optimizer
    return rule.group_of(path) != -1 and state.optimizer != ()


def _numbers(state: TrainState, group: int, name: str, flat: Tensor) -> Tensor:
    codec = codec_in(state.setup, group, name)
    return flat if codec is None else codec.numbers(to_device(flat, state.device))


def states_of_group(driver: Driver, index: int) -> dict[str, dict[str, Tensor]]:
    """Return {path: {name: whole value}} of a group; of one that is not stepped, nothing."""
    state, layout = driver.state, driver.state.setup.layout
    places = [find(driver, layout.leaves[i].path) for i in layout.groups[index].leaves]
    if index not in layout.trainable or not _steps(state, places[0].leaf.path):
        return {}
    every = [_kept_of(state, place) for place in places]
    found = {
        place.leaf.path: {
            name: one.copied(state) for name, one in kept.items() if one.kind != "elements"
        }
        | _of_owner(state, place.leaf.path)
        for place, kept in zip(places, every, strict=True)
    }
    for name, one in every[0].items():
        if one.kind == "elements":
            leaves = leaves_of(state, index, _numbers(state, index, name, one.held))
            for place, leaf in zip(places, leaves, strict=True):
                found[place.leaf.path][name] = leaf.clone()
    return found


# What the owner of a parameter keeps of it: on the owner alone, or on every rank.


def _owner_of(state: TrainState, path: str) -> tuple[Owners, int] | None:
    """Return the owners, and the number among their parameters of the leaf at `path`, if it is."""
    owners = owners_of(state.setup)
    every = () if owners is None else enumerate(owners.leaves)
    number = next((k for k, one in every if one.leaf.path == path), None)
    return None if owners is None or number is None else (owners, number)


def _owned(state: TrainState, path: str) -> dict[str, Tensor]:
    """Return {name: what this rank keeps}: in the parameter's shape, or its own; else empty."""
    if (found := _owner_of(state, path)) is None:
        return {}
    owners, number = found
    leaf, rule = owners.leaves[number].leaf, state.setup.optimizer
    every = rule.owned(state.optimizer)
    return {name: every[name][number] for name in (*rule.kept_of(leaf), *rule.made_by_steps(leaf))}


def _of_owner(state: TrainState, path: str) -> dict[str, Tensor]:
    """Return {name: what the owner keeps} on every rank. A collective."""
    if (found := _owner_of(state, path)) is None:
        return {}
    owners, number = found
    one, axis, own = owners.leaves[number], state.setup.axis, _owned(state, path)
    in_shape: Any = state.setup.optimizer.kept_of(one.leaf)
    forms = gather_objects({name: (tuple(x.shape), x.dtype) for name, x in own.items()}, axis)
    made = {}
    for name, (shape, dtype) in forms[one.owner].items():
        mine = owners.rank_of(axis.rank) == one.owner
        sent = own[name] if mine else torch.empty(shape, dtype=dtype, device=state.device)
        whole = broadcast([sent.detach().to(state.device)], axis, one.owner)[0]
        made[name] = whole.view(one.leaf.shape) if name in in_shape else whole
    return made


def _with_owned(
    state: TrainState, path: str, name: str, value: Tensor | float, like: Tensor
) -> TrainState:
    """Return the state whose owner keeps `value`, as large as `like`; every rank calls it."""
    found = _owner_of(state, path)
    assert found is not None
    (owners, number), given = found, torch.as_tensor(value).detach()
    if like.numel() not in (0, given.numel()):
        raise LayoutError(
            f"{name} of {path} has the shape {tuple(like.shape)}, the new value "
            f"{tuple(given.shape)}.",
            cause="a part of a value: what is kept of this parameter is whole, on its owner.",
            fix="give the full value, in the shape that full_optimizer_state(path, name) returns.",
        )
    if owners.rank_of(state.setup.axis.rank) != owners.leaves[number].owner:
        return state
    rule: Any = state.setup.optimizer
    owned = {key: list(some) for key, some in rule.owned(state.optimizer).items()}
    old = owned[name][number]
    made = given.reshape(old.shape) if old.numel() else given
    owned[name][number] = made.to(old.device, old.dtype if old.numel() else made.dtype).clone()
    kept = {k: tuple(x) for k, x in owned.items()}
    return state.replace(optimizer=rule.with_owned(state.optimizer, kept))


# Gradients and parameters, in the flats of a state.


def whole_gradient(driver: Driver, place: ParameterPlace) -> Tensor:
    """The gradient of one parameter, of those that are reduced. A collective."""
    state = driver.state
    flat = used(state, place.flat_of(state, state.gradients.flats))
    return driver.stand_ins.read(place.whole(state, flat))


def _given(state: TrainState, gradient: Any) -> Any:
    """A gradient as a state holds it; what is no tensor is refused where it is written."""
    return as_held(state, gradient) if isinstance(gradient, Tensor) else gradient


def _state_dict_of(driver: Driver, name: str, *, live: bool) -> dict[str, Any]:
    """Return that of the module on every rank; what is tied is one object.

    live: what is whole here is no copy. Raises on every rank for a parameter that the engine lacks.
    """
    with raises_together(driver.axis):
        driver.params.require_none_added()
    driver.call(name)
    held, made = driver.module.state_dict(), dict[Any, Any]()
    for key, value in held.items():
        memory: Any = identity(value) if isinstance(value, Tensor) else id(value)
        is_lazy = isinstance(value, LazyParam)
        if is_lazy and not value.views:
            memory = id(value.reader), value.where
        if memory not in made:
            whole = value.full() if is_lazy else value
            copies = isinstance(whole, Tensor) and (is_lazy or not live)
            made[memory] = whole.detach().clone() if copies else whole
        held[key] = made[memory]
    return held


# One parameter in the flats of a state: where it is, and reading and writing it whole.


def require_no_anchors(driver: Driver, name: str) -> None:
    """Raise `PhaseError` for a write of parameters that the anchors of local updates miss."""
    if driver.state.outer is not None:
        raise PhaseError(f"{name}{NO_WRITES.seen(name)}", cause=NO_WRITES.cause, fix=NO_WRITES.fix)


class ParameterPlace(NamedTuple):
    """Where one parameter is in a state. A `part` is what this rank holds of its group."""

    leaf: Leaf
    number: int  # of the leaf
    group: int
    position: int  # in the group

    def flat_of(self, state: TrainState, flats: Sequence[Tensor]) -> Tensor:
        """Return that of its group, of flats of the groups that learn."""
        return flats[state.setup.layout.trainable.index(self.group)]

    def whole(self, state: TrainState, part: Tensor) -> Tensor:
        """Return its full values, of a part as the optimizer has it. A collective."""
        return leaves_of(state, self.group, part)[self.position]

    def piece(self, state: TrainState, part: Tensor) -> Tensor:
        """Return what a part has of it: 1-D."""
        self._require_elements()
        piece = to_device(self._range(state, part).of(part.detach()), state.device)
        return as_complex(piece) if self.leaf.dtype.is_complex else piece

    def write(self, state: TrainState, part: Tensor, value: Tensor) -> None:
        """Write its full `value` into a part."""
        if not isinstance(value, Tensor) or tuple(value.shape) != self.leaf.shape:
            seen = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise LayoutError(
                f"{self.leaf.path} has the shape {self.leaf.shape}, the new value {seen}.",
                cause="a flattened or transposed value.",
                fix="give the full value, in the shape of the parameter.",
            )
        here = self._range(state, part)
        with torch.no_grad():
            write_back(here.of(part), self._stored(value)[here.start : here.stop])

    def write_piece(self, state: TrainState, part: Tensor, value: Tensor) -> None:
        """Write what this rank has of it, 1-D, into a part."""
        self._require_elements()
        held = self._range(state, part).of(part)
        numel = held.numel() // (2 if self.leaf.dtype.is_complex else 1)
        if not isinstance(value, Tensor) or value.numel() != numel:
            seen = f"{value.numel()}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise LayoutError(
                f"this rank has {numel} elements of {self.leaf.path}, the new value {seen}.",
                cause="the full value, or the piece of another rank.",
                fix="give as many elements as the getter of the same name returns here.",
            )
        with torch.no_grad():
            write_back(held, self._stored(value))

    def _require_elements(self) -> None:
        """Raise `LayoutError` for a leaf of which a part has bytes, and no elements."""
        if self.leaf.codec is not None:
            raise LayoutError(
                f"{self.leaf.path} is stored encoded, by {self.leaf.codec}: a piece of it has no "
                "values by itself.",
                cause="local_parameter() or set_local_parameter() of a parameter that `frozen=` "
                "encodes.",
                fix="use full_parameter(path) and set_full_parameter(path, value) on every rank.",
            )

    def _stored(self, value: Tensor) -> Tensor:
        """What a flat has of a value."""
        value, dtype = value.detach(), self.leaf.dtype
        if self.leaf.codec is not None:
            return self.leaf.stored(value)
        if not dtype.is_complex:
            return value.reshape(-1)
        return as_real(value.to(torch.promote_types(value.dtype, dtype))).reshape(-1)

    def _range(self, state: TrainState, part: Tensor) -> LeafRange:
        """Return what a part has of it."""
        setup = state.setup
        placements = setup.params, setup.optimizer_state  # those of all that a state has
        numel = part.numel()
        held = next((x for x in placements if setup.numel(self.group, x) == numel), setup.params)
        found = leaf_ranges(setup.layout, self.group, setup.part(held, setup.axis.rank))
        nothing = LeafRange(self.position, self.number, 0, 0, 0)
        return next((one for one in found if one.position == self.position), nothing)


def find(driver: Driver, path: str) -> ParameterPlace:
    """Return where the parameter at `path` is."""
    layout = driver.state.setup.layout
    leaf = next((i for i, paths in driver.params.paths.items() if path in paths), None)
    if leaf is None:
        raise LayoutError(
            f"there is no parameter {path!r}.",
            cause="a misspelt path.",
            fix=f"use one of {[leaf.path for leaf in layout.leaves][:6]} ...",
        )
    index = next(i for i, group in enumerate(layout.groups) if leaf in group.leaves)
    return ParameterPlace(layout.leaves[leaf], leaf, index, layout.groups[index].leaves.index(leaf))


def find_learning(driver: Driver, path: str) -> ParameterPlace:
    """Return where a parameter is that learns."""
    place = find(driver, path)
    if not place.leaf.trainable:
        raise PhaseError(
            f"{path} has no gradient: it did not require grad when the engine was made.",
            cause="a frozen parameter.",
            fix="ask for a parameter that learns.",
        )
    return place


def leaves_of(state: TrainState, index: int, part: Tensor) -> list[Tensor]:
    """Return the full leaves of a group of which this rank has a part, as its optimizer has."""
    setup = state.setup
    held, whole = setup.optimizer_state, Placement.REPLICATED
    here = to_device(part.detach(), state.device)
    return unpack(setup.layout, index, gather_parts(setup, [here], held, whole)[0])


def stepped(state: TrainState, index: int) -> Tensor:
    """Return this rank's part of a group as its optimizer steps it: the master, if it has one."""
    part, master = own_part(state, state.params.flats[index]), master_of(state, index)
    if master is None:
        return part
    if not state.setup.gathers_by_unit:
        take_values(master, part)
    return master


def master_of(state: TrainState, index: int) -> Tensor | None:
    """Return the fp32 copy of this rank's part of a group, if there is one."""
    master = slots_of_group(state, index).get(MASTERS)
    return None if master is None or not master.numel() else master


def values_of(state: TrainState, index: int) -> list[Tensor]:
    """Return this rank's parts of a group that have its parameters: the master, too."""
    held, master = state.params.flats[index], master_of(state, index)
    return [held] if master is None else [held, master]


def slots_of_group(state: TrainState, index: int) -> dict[str, Tensor]:
    """Return what the optimizer keeps for the elements of a group, and its master."""
    trainable = state.setup.layout.trainable
    if index not in trainable:
        return {}
    number, every = trainable.index(index), state.setup.optimizer.slots(state.optimizer)
    return {name: flats[number] for name, flats in every.items()}
