"""One parameter in the flats of a state: where it is, and reading and writing it whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.adapter._masters import own_part, take_values
from fzero.adapter._owned import owned_values, whole_values
from fzero.adapter.driver import Driver
from fzero.errors import LayoutError, PhaseError
from fzero.machine.codecs import Blocks
from fzero.machine.offload import to_device
from fzero.machine.packing import LeafRange, gather_parts, leaf_ranges, unpack
from fzero.optim.entries import codec_in
from fzero.state import Placement, TrainState
from fzero.state.layout import Leaf, as_complex, as_real
from fzero.state.setup import MASTERS
from fzero.transforms.local import NO_WRITES

Slots = dict[str, Tensor]
"""{name: flat}: what the optimizer keeps for the elements of one group."""


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
            here.of(part).copy_(self._stored(value)[here.start : here.stop])

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
            held.copy_(self._stored(value))

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


def write_whole(path: str, held: Tensor, value: Tensor | float) -> None:
    """Write what an optimizer keeps of a leaf beside its elements: a number, or another shape."""
    given = torch.as_tensor(value)
    if given.numel() != held.numel():
        raise LayoutError(
            f"what the optimizer keeps of {path} has the shape {tuple(held.shape)}, the new "
            f"value {tuple(given.shape)}.",
            cause="a value of another parameter, or a part of one.",
            fix="give the whole value, in the shape that the getter of the same name returns.",
        )
    with torch.no_grad():
        held.copy_(given.detach().reshape(held.shape))


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


def slots_of_group(state: TrainState, index: int) -> Slots:
    """Return what the optimizer keeps for the elements of a group, and its master."""
    trainable = state.setup.layout.trainable
    if index not in trainable:
        return {}
    number, every = trainable.index(index), state.setup.optimizer.slots(state.optimizer)
    return {name: flats[number] for name, flats in every.items()}


def steps(state: TrainState, path: str) -> bool:
    """Return whether the optimizer steps the parameter at `path`."""
    rule: Any = state.setup.optimizer
    return rule.group_of(path) != -1 and state.optimizer != ()


def optimizer_states(driver: Driver, path: str) -> tuple[Slots, Mapping[str, Tensor]]:
    """Return the optimizer's slots of its group, and its scalars, for the parameter at `path`.

    Among the scalars is what has another shape than the parameter, whole.
    """
    state = driver.state
    if not steps(state, path):
        raise PhaseError(
            f"no optimizer steps {path}.",
            cause="the parameter is frozen, or was not given to the optimizer.",
            fix="ask for a parameter that the optimizer steps.",
        )
    place = find_learning(driver, path)
    empty = not state.setup.numel(place.group, state.setup.optimizer_state)
    rule: Any = state.setup.optimizer
    odd = rule.odd_slots
    slots = {
        name: _numbers(state, place.group, name, flat)
        for name, flat in slots_of_group(state, place.group).items()
        if name != MASTERS and (flat.numel() or empty)
    }
    scalars = {name: slots.pop(name) for name in odd.intersection(slots)}
    owned = owned_values(state, place.leaf.path)
    slots = {name: flat for name, flat in slots.items() if name not in owned}
    return slots, {**rule.counters(state.optimizer, place.leaf.path), **scalars, **owned}


def _numbers(state: TrainState, group: int, name: str, flat: Tensor) -> Tensor:
    codec = codec_in(state.setup, group, name)
    return flat if codec is None else codec.numbers(flat)


def states_of_group(driver: Driver, index: int) -> dict[str, dict[str, Tensor]]:
    """Return {path: {name: whole value}} of a group; of one that is not stepped, nothing."""
    state, layout = driver.state, driver.state.setup.layout
    paths = [layout.leaves[i].path for i in layout.groups[index].leaves]
    if index not in layout.trainable or not steps(state, paths[0]):
        return {}
    slots = optimizer_states(driver, paths[0])[0]
    found = {
        path: {name: value.clone() for name, value in optimizer_states(driver, path)[1].items()}
        for path in paths
    }
    for path in paths:
        found[path] |= whole_values(state, path)
    for name, flat in slots.items():
        leaves = leaves_of(state, index, flat)
        for path, leaf in zip(paths, leaves, strict=True):
            found[path][name] = leaf.clone()
    return found


def count(driver: Driver, path: str, name: str, value: Tensor | float) -> None:
    """Make `value` counter `name` of one parameter; of its param group, if it is kept there."""
    state, leaf = driver.state, find(driver, path).leaf.path
    rule: Any = state.setup.optimizer
    if rule.shares(leaf, name):
        write_whole(path, rule.counters(state.optimizer, leaf)[name], value)
        return
    paths = _learning(state)
    counters = rule.counted(state.optimizer, paths)
    own = counters[name][leaf].clone()
    write_whole(path, own, value)
    counters[name][leaf] = own
    fresh = rule.unstepped(state.optimizer)
    made = rule.recounted(state.optimizer, paths, counters, unstepped=fresh)
    driver.put(state.replace(optimizer=made))


def begin(driver: Driver, path: str) -> None:
    """Note that the optimizer has a state of a parameter: its first step does not make it."""
    state = driver.state
    rule: Any = state.setup.optimizer
    made = rule.begun(state.optimizer, _learning(state), find(driver, path).leaf.path)
    driver.put(state.replace(optimizer=made))


def _learning(state: TrainState) -> list[str]:
    return [leaf.path for leaf in state.setup.layout.leaves if leaf.trainable]


class Named(NamedTuple):
    """What is held of one state of one parameter."""

    place: ParameterPlace
    held: Tensor  # of its whole group, or of it alone where it has another shape: "step"
    alone: bool
    counts: bool  # whether it is a counter
    owned: str = ""  # the path of a leaf whose owner alone has it
    row: tuple[Blocks, Tensor] | None = None  # where it is kept encoded: what is held is a copy

    def wrote(self) -> None:
        """Keep what was written into what is held."""
        if self.row is not None:
            codec, row = self.row
            codec.write(row, self.held)


def named_state(driver: Driver, path: str, name: str) -> Named:
    """Return state `name` of the parameter at `path`. Raises `LayoutError` if there is none."""
    place = find_learning(driver, path)
    slots, scalars = optimizer_states(driver, path)
    if name not in slots and name not in scalars:
        raise LayoutError(
            f"the optimizer has no state {name!r} for {path}; it has {sorted([*slots, *scalars])}.",
            cause="a misspelt name, or the state of another optimizer.",
            fix="use one of those.",
        )
    alone = name in scalars
    leaf = place.leaf.path
    owned = leaf if name in owned_values(driver.state, leaf) else ""
    counts = alone and not owned and name not in driver.state.setup.optimizer.odd_slots
    codec = None if alone else codec_in(driver.state.setup, place.group, name)
    row = None if codec is None else (codec, slots_of_group(driver.state, place.group)[name])
    return Named(place, scalars[name] if alone else slots[name], alone, counts, owned, row)
