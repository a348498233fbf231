"""What all ranks must know of a live state before it moves, but for the elements of its tensors.

A manifest says it of leaves, slots and counters, as in a checkpoint. Rule, options and pytree are
records of this program: a rank without a state gets them from one that has it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint._held import Held
from fzero.checkpoint._kept import Texts, form_in, place_of
from fzero.checkpoint._replicas import facts_of_replicas, texts_here
from fzero.checkpoint.manifest import Manifest, facts_of_state, kept_facts, note_texts
from fzero.errors import LayoutError
from fzero.machine.by_path import leaf_paths
from fzero.machine.offload import offloaded
from fzero.optim import TorchOptimizer
from fzero.state import Buffers, Form, Placement, Setup, Slot, TrainState
from fzero.state.entry import Entry, slot_with
from fzero.transforms.kept import APART, entries_of, follows_setup, is_owner
from fzero.transforms.pattern import Pattern, pattern_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What a state is, on whatever ranks."""

    pattern: Pattern
    manifest: Manifest
    slots: dict[str, Form] = field(default_factory=dict)
    more: dict[str, Form] = field(default_factory=dict)  # no slot, and does not live for the run

    @property
    def setup(self) -> Setup:
        """Of the state."""
        return self.pattern.setup

    @property
    def device(self) -> torch.device:
        """Where the state computes."""
        return self.pattern.device

    @property
    def batch_bytes(self) -> int:
        """Bytes of the largest unit, which is the most that crosses ranks at once."""
        layout = self.setup.layout
        sizes: dict[str, int] = {}
        for leaf, unit in zip(layout.leaves, layout.options.units, strict=True):
            sizes[unit] = sizes.get(unit, 0) + prod(leaf.shape) * leaf.dtype.itemsize
        return max(sizes.values(), default=0)


class KeptHere(NamedTuple):
    """What a rank tells of what it keeps, which others may not have."""

    texts: list[Texts]
    kept: dict[str, Any]  # as a manifest has it
    slots: dict[str, Form]
    more: dict[str, Form]  # of what is no slot, and does not live for the run


def structure_of(held: Held) -> Structure:
    """Return what the held state is. With replicas that train apart, a collective of its ranks."""
    state = held.states[0]
    manifest = facts_of_state(state)
    facts, counters = facts_of_replicas(held), manifest.counters
    if facts:  # those of replica 0, as in a checkpoint
        counters = facts[APART]["replicas"][0]["counters"]
    origin = {**manifest.origin, **facts}
    manifest = replace(manifest, origin=origin, counters=counters)
    return Structure(pattern=pattern_of(state), manifest=manifest)


def told_of(held: Held) -> KeptHere:
    """Return what the ranks of this process tell."""
    found = KeptHere(texts_here(held), {}, {}, {})
    for state, rank in zip(held.states, held.ranks, strict=True):
        own = place_of(state, rank)[1]
        found.kept.update(kept_facts(state, own, live=True))
        slots = {k: slot for k, slot in state.slots.items() if not follows_setup(k)}
        found.slots.update({name: slot.form for name, slot in slots.items()})
        every = entries_of(state, own, live=True)
        found.more.update({x.name: x.form for x in every if x.form.lifetime != "run"})
    return found


def with_told(structure: Structure, told: Sequence[KeptHere]) -> Structure:
    """Return the structure with what all ranks have told."""
    manifest: Manifest = deepcopy(structure.manifest)
    slots, more = dict[str, Form](), dict[str, Form]()
    for one in told:
        manifest.kept.update(
            {k: deepcopy(x) for k, x in one.kept.items() if k not in manifest.kept}
        )
        slots |= one.slots
        more |= one.more
    note_texts(manifest, (texts for one in told for texts in one.texts))
    more = {name: form for name, form in more.items() if name not in slots}
    return replace(structure, manifest=manifest, slots=slots, more=more)


def with_slots(structure: Structure, blank: TrainState, rank: int) -> TrainState:
    """Return a state that was made anew with the slots that nobody makes anew, of zeros."""
    made: dict[str, Slot] = {}
    for name, form in structure.slots.items():
        if name not in blank.slots:
            entry = _blank(structure, blank, name, form, rank)
            empty = Slot(value=Buffers(placement=entry.placement), form=form)
            made[name] = slot_with(blank.setup, empty, entry.values)
    return blank.replace(slots={**blank.slots, **made})


def more_of(structure: Structure, blank: TrainState, rank: int) -> list[Entry]:
    """Return what is no slot, and does not live for the run, of zeros."""
    return [_blank(structure, blank, *one, rank) for one in structure.more.items()]


def _blank(structure: Structure, state: TrainState, name: str, form: Form, rank: int) -> Entry:
    setup, device = state.setup, state.device
    texts, names = structure.manifest.kept[name]["values"], leaf_paths(setup.layout)
    if form.leaves in ("number", "named"):
        values: dict[Any, Tensor] = {}
        for key, text in texts.items():
            shape, dtype = form_in(f"{name}/{key}", text) or ((), torch.float32)
            values[key] = torch.zeros(shape, dtype=dtype, device=device)
        placement = form.placed(setup.optimizer_state)
        if placement is Placement.OWNER:
            values = {
                key: x if is_owner(setup, key, rank) else x.new_zeros((0,))
                for key, x in values.items()
            }
        return Entry(name=name, form=replace(form, placement=placement), values=values)
    layout = setup.layout
    placement = form.placement if form.lifetime == "run" else None
    home = setup.offload.optimizer if form.lifetime == "run" else setup.offload.gradients
    form = replace(form, placement=placement if placement else setup.optimizer_state)
    values = {}
    for i in layout.trainable if form.leaves == "learning" else range(len(layout.groups)):
        own = (texts[names[k]] for k in layout.groups[i].leaves if names[k] in texts)
        text = next(own, next(iter(texts.values()), "torch.float32"))  # a group may have no element
        dtype = getattr(torch, text.removeprefix("torch."))
        assert form.placement is not None
        flat = torch.zeros(setup.numel(i, form.placement), dtype=dtype, device=device)
        values[i] = offloaded(home, flat, setup.offload)
    return Entry(name=name, form=form, values=values)


def as_sent(structure: Structure) -> bytes:
    """Return a structure for ranks that have none. It has no elements of parameters.

    Raises `LayoutError` for one that only the process that made it can hold.
    """
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(structure)
    except LayoutError:
        raise
    except Exception as error:  # an object of the user's may raise anything
        raise _not_described(
            f"{type(error).__name__}: {error}",
            cause="an object among the options or in the optimizer that cannot be pickled.",
            fix="use objects of classes that can be, with functions that have a name in a module",
        ) from error
    return stream.getvalue()


def _not_described(seen: str, cause: str, fix: str) -> LayoutError:
    return LayoutError(
        f"reshard: the state cannot be described to a rank that has none: {seen}.",
        cause=cause,
        fix=f"{fix}; or go by fzero.checkpoint.save, and load it into a state that each rank has "
        "made. Nothing was changed.",
    )


def as_received(sent: bytes) -> Structure:
    """Return what another rank of this program has sent, for the device of this process.

    Raises `LayoutError` for functions or classes that this process has not.
    """
    try:
        found: Structure = pickle.loads(sent)
    except Exception as error:
        raise LayoutError(
            f"reshard: what the state is cannot be read on this rank: "
            f"{type(error).__name__}: {error}.",
            cause="a function or a class among the options that this process does not have: "
            "another script or version, or one that only some ranks define.",
            fix="run the same script on every rank, and define it before the call on all of them.",
        ) from error
    if found.device.type != "cuda":
        return found
    here = torch.device("cuda", torch.cuda.current_device())
    return replace(found, pattern=replace(found.pattern, device=here))


def _has_name(function: FunctionType) -> bool:
    """Whether its module has it under its name, as pickle looks it up."""
    module = sys.modules.get(function.__module__)
    return getattr(module, function.__qualname__, None) is function or (
        "<" not in function.__qualname__ and "." in function.__qualname__  # of a class
    )


class _Pickler(pickle.Pickler):
    """Refuses what has the parameters of a process, and functions that have no name for others."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TorchOptimizer) and obj.instance is obj.source:
            raise _not_described(
                f"{obj!r} is one object with its parameters",
                cause="an optimizer of torch that was made of this process's parameters.",
                fix="use a rule of fzero.optim, or fzero.optim.from_torch(class)",
            )
        if isinstance(obj, FunctionType) and not _has_name(obj):
            code = obj.__code__
            raise _not_described(
                f"it has the function {obj.__qualname__} ({code.co_filename}:"
                f"{code.co_firstlineno})",
                cause="a lambda, or a function that was defined inside of another one, as a "
                "learning rate, a mask, a label or another option.",
                fix="use a function with a name in its module (`def`, not inside of another "
                "function), or functools.partial of one",
            )
        if isinstance(obj, Tensor) and obj.device.type != "cpu":
            return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented
