"""Reading and writing gradients, parameters and optimizer state by path, whole or this rank's.

Paths are those of module.named_parameters(). What says `full` is a collective, which every rank
calls; the other calls are not. Gradients are those that an update would use: divided by the number
of ranks, the loss scale and the micro-batches, before clipping. With a loss scale those of 16 bits
are given in fp32, which holds them without it.

An `Engine` has these functions as methods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.adapter import parts
from fzero.adapter._owned import whole_values, with_value
from fzero.adapter.driver import Driver
from fzero.errors import LayoutError, PhaseError
from fzero.machine.partition import identity
from fzero.machine.placeholder import LazyParam
from fzero.state import TrainState
from fzero.transforms.accumulate_grad import filled
from fzero.transforms.backward_pass import raises_together
from fzero.transforms.clip import norm_of_state
from fzero.transforms.loss_scale import without_scale
from fzero.transforms.recipe import times_factor
from fzero.transforms.weights import averaged, unaveraged

# Gradients.


def full_gradients(driver: Driver) -> dict[str, Tensor]:
    """{path: mean_r(g_r)} of every parameter that learns, in the accumulation dtype.

    Reduces what waits first; zeros for a parameter that got none. Raises `PhaseError` when
    there are no gradients at all, and inside a window (which they would break up).
    """
    state = driver.with_gradients("full_gradients()")
    layout, found = state.setup.layout, {}
    for number, index in enumerate(layout.trainable):
        leaves = parts.leaves_of(state, index, used(state, state.gradients.flats[number]))
        found.update(zip(layout.groups[index].leaves, leaves, strict=True))
    return {leaf.path: found[i].clone() for i, leaf in enumerate(layout.leaves) if leaf.trainable}


def full_gradient(driver: Driver, path: str) -> Tensor:
    """`full_gradients()[path]`, gathering only its group."""
    place = parts.find_learning(driver, path)
    return whole_gradient(driver.with_gradients("full_gradient()", path), place)


def set_full_gradient(driver: Driver, path: str, value: Tensor) -> None:
    """Make `value` (the same on every rank) the gradient that the update will use.

    Where no backward has brought any, it is the only one: an update steps what was set.
    """
    place = parts.find_learning(driver, path)
    state = driver.with_gradients("set_full_gradient()", path, begins=True)
    place.write(state, place.flat_of(state, state.gradients.flats), _held(state, value))
    driver.wrote_gradient(place.leaf.path, place.number)


def local_gradient(driver: Driver, path: str) -> Tensor:
    """This rank's piece of the gradient: 1-D, empty if the rank has none of it.

    At stage 0 that is all of it. No collective, so only what has been reduced already.
    """
    driver.wait()
    place, state = parts.find_learning(driver, path), driver.state
    flats = state.gradients.flats or filled(state, {}, state.setup.gradients)
    return used(state, place.piece(state, place.flat_of(state, flats)))


def set_local_gradient(driver: Driver, path: str, value: Tensor) -> None:
    """Make `value` this rank's piece of the gradient that the update will use.

    No collective; at stage 0 every rank has to set the same. Raises `PhaseError` if nothing
    has been reduced yet.
    """
    driver.wait()
    place, state = parts.find_learning(driver, path), driver.state
    if not state.gradients.held:
        raise PhaseError(
            f"set_local_gradient() {path}: there are no reduced gradients.",
            cause="no backward ran since the last update, or it ran in a window.",
            fix="call it between the backward and step(), outside of a window.",
        )
    place.write_piece(state, place.flat_of(state, state.gradients.flats), _held(state, value))
    driver.wrote_gradient(place.leaf.path, place.number)


def global_grad_norm(driver: Driver) -> Tensor | None:
    """|g|, before clipping, of what an update would use now. A collective.

    Without gradients, that of the last update if `max_norm` was given, else None.
    """
    if not driver.reduced("global_grad_norm"):
        return driver.guard.norm
    state = driver.state
    return averaged(state, norm_of_state(state, state.gradients))


# Parameters.


def full_parameters(driver: Driver) -> dict[str, Tensor]:
    """{path: values} of all parameters, frozen ones too: copies, masters where there are."""
    driver.call("full_parameters()")
    state = driver.state
    layout, found = state.setup.layout, {}
    for index, group in enumerate(layout.groups):
        leaves = parts.leaves_of(state, index, parts.stepped(state, index))
        found.update(zip(group.leaves, [x.clone() for x in leaves], strict=True))
    return {leaf.path: found[i] for i, leaf in enumerate(layout.leaves)}


def full_state_dict(driver: Driver) -> dict[str, Any]:
    """module.state_dict() with whole values, buffers too: copies, to save or to load.

    At stage 3 `with fzero.adapter.gathered(module, modify=True)` is for loading it.
    """
    held = _state_dict_of(driver, "full_state_dict()")
    made: dict[Any, Any] = {}
    for value in held.values():  # what is tied stays tied, and is saved once
        if (key := _memory_of(value)) not in made:
            made[key] = _whole_copy(value)
    return {name: made[_memory_of(value)] for name, value in held.items()}


def state_dict(driver: Driver) -> dict[str, Any]:
    """module.state_dict(): below stage 3 live, as the module's; at stage 3 a copy. A collective.

    Below stage 3 what is written into a value, the same on every rank, is written to the parameter,
    and masters follow. At stage 3 the values are whole, those of `full_state_dict()`, and writes
    into them are lost: `load_state_dict()` or `set_full_parameter(path, value)` write. The same is
    true of an encoded parameter at every stage.
    """
    if driver.state.stage == 3:
        return full_state_dict(driver)
    held, made = _state_dict_of(driver, "state_dict()"), dict[Any, Any]()
    for name, value in held.items():  # what is tied is one object
        key = _memory_of(value)
        held[name] = made[key] if key in made else made.setdefault(key, _live(value))
    return held


def full_parameter(driver: Driver, path: str) -> Tensor:
    """`full_parameters()[path]`, gathering only its group."""
    place = parts.find(driver, path)
    driver.call(f"full_parameter() {path}")
    return place.whole(driver.state, parts.stepped(driver.state, place.group)).clone()


@torch.no_grad()
def set_full_parameter(driver: Driver, path: str, value: Tensor) -> None:
    """Make `value` (the same on every rank) the parameter, and that of its master copy."""
    parts.require_no_anchors(driver, "set_full_parameter()")
    place = parts.find(driver, path)
    driver.call(f"set_full_parameter() {path}")
    for part in parts.values_of(driver.state, place.group):
        place.write(driver.state, part, value)
    driver.running.changed()


def local_parameter(driver: Driver, path: str) -> Tensor:
    """This rank's piece of the parameter, as the optimizer steps it: 1-D. No collective."""
    place, state = parts.find(driver, path), driver.state
    return place.piece(state, parts.stepped(state, place.group)).clone()


@torch.no_grad()
def set_local_parameter(driver: Driver, path: str, value: Tensor) -> None:
    """Make `value` this rank's piece of the parameter, and that of its master copy. Stage 3.

    Every rank calls it, each with a piece of its own. Raises `LayoutError` below stage 3, where
    each rank has all of the parameter, and the ranks would differ.
    """
    parts.require_no_anchors(driver, "set_local_parameter()")
    place = parts.find(driver, path)
    driver.wait()
    if driver.state.stage != 3:
        raise LayoutError(
            f"set_local_parameter() {path} at stage {driver.state.stage}.",
            cause="a call for stage 3; below it each rank has the whole parameter.",
            fix="call set_full_parameter() on every rank.",
        )
    for part in parts.values_of(driver.state, place.group):
        place.write_piece(driver.state, part, value)
    driver.running.changed()


# Optimizer state.


def local_optimizer_state(driver: Driver, path: str, name: str) -> Tensor:
    """This rank's piece of state `name`: 1-D, empty if it has none. No collective.

    A scalar ("step") as it is. Of a parameter that is updated whole, its owner has all.
    """
    place, held, alone, *_ = parts.named_state(driver, path, name)
    piece = held if alone else place.piece(driver.state, held)
    return piece.clone()


@torch.no_grad()
def set_local_optimizer_state(driver: Driver, path: str, name: str, value: Tensor | float) -> None:
    """Make `value` this rank's piece of state `name`. Every rank calls it; no collective.

    At stage 0, and of a scalar, every rank has to set the same.
    """
    named = parts.named_state(driver, path, name)
    place, held, alone, counts, owned, _ = named
    if counts:
        parts.count(driver, path, name, value)
    elif owned:
        driver.put(with_value(driver.state, owned, name, value, held))
    elif alone:
        parts.write_whole(path, held, value)
    else:
        place.write_piece(driver.state, held, torch.as_tensor(value))
        named.wrote()
    parts.begin(driver, path)


def full_optimizer_state(driver: Driver, path: str, name: str) -> Tensor:
    """State `name` ("exp_avg", ...) of the parameter at `path`; a scalar ("step") as it is."""
    place, held, alone, _, owned, _ = parts.named_state(driver, path, name)
    driver.call(f"full_optimizer_state() {path} {name}")
    if owned:
        return whole_values(driver.state, owned)[name]
    return (held if alone else place.whole(driver.state, held)).clone()


def full_optimizer_states(driver: Driver) -> dict[str, dict[str, Any]]:
    """{path: {name: value}} of every parameter that the optimizer steps."""
    driver.call("full_optimizer_states()")
    layout = driver.state.setup.layout
    found: dict[str, dict[str, Any]] = {}
    for index in layout.trainable:
        found.update(parts.states_of_group(driver, index))
    return {leaf.path: found[leaf.path] for leaf in layout.leaves if leaf.path in found}


@torch.no_grad()
def set_full_optimizer_state(driver: Driver, path: str, name: str, value: Tensor | float) -> None:
    """Make `value` (the same on every rank) state `name` of the parameter at `path`.

    A scalar state ("step") is the parameter's own, as in torch.optim; but for one that a rule
    keeps in its param group, which is that of all parameters of the group.
    """
    named = parts.named_state(driver, path, name)
    place, held, alone, counts, owned, _ = named
    driver.call(f"set_full_optimizer_state() {path} {name}")
    if counts:
        parts.count(driver, path, name, value)
    elif owned:
        whole = whole_values(driver.state, owned)[name]
        driver.put(with_value(driver.state, owned, name, value, whole))
    elif alone:
        parts.write_whole(path, held, value)
    else:
        place.write(driver.state, held, torch.as_tensor(value))
        named.wrote()
    parts.begin(driver, path)


def whole_gradient(state: TrainState, place: parts.ParameterPlace) -> Tensor:
    """The gradient of one parameter. A collective."""
    flat = used(state, place.flat_of(state, state.gradients.flats))
    return place.whole(state, flat).clone()


def used(state: TrainState, gradient: Tensor) -> Tensor:
    """A gradient that a state holds as an update uses it."""
    return averaged(state, without_scale(state, gradient))


def _held(state: TrainState, gradient: Any) -> Any:
    """The other way round; what is no tensor is refused where it is written."""
    if not isinstance(gradient, Tensor):
        return gradient
    return times_factor(state, [unaveraged(state, gradient)])[0]


def _state_dict_of(driver: Driver, name: str) -> dict[str, Any]:
    """Return that of the module, on every rank; raise on every rank for what the engine lacks."""
    with raises_together(driver.axis):
        driver.params.require_none_added()
    driver.call(name)
    return driver.module.state_dict()


def _memory_of(value: Any) -> Any:
    """What is equal for values of one memory."""
    if isinstance(value, LazyParam) and not value.views:
        return id(value.reader), value.where
    return identity(value) if isinstance(value, Tensor) else id(value)


def _live(value: Any) -> Any:
    return _whole_copy(value) if isinstance(value, LazyParam) else value


def _whole_copy(value: Any) -> Any:
    if isinstance(value, LazyParam):
        value = value.full()
    return value.detach().clone() if isinstance(value, Tensor) else value
