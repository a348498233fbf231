"""What all ranks must know of a live state before it moves, but for the elements of its tensors.

A manifest says it of leaves, slots and counters, as in a checkpoint. Rule, options and pytree are
records of this program: a rank without a state gets them from one that has it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint._held import Held
from fzero.checkpoint._local import facts_of_replicas
from fzero.checkpoint._outer import slots_of_owner
from fzero.checkpoint._owned import Slots
from fzero.checkpoint.manifest import Manifest, facts_of_state
from fzero.errors import LayoutError
from fzero.optim import TorchOptimizer
from fzero.state import Local, Setup
from fzero.state.scale import ScalePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What a state is, on whatever ranks."""

    setup: Setup
    local: Local | None
    policy: ScalePolicy | None  # of the loss scale
    manifest: Manifest
    device: torch.device

    @property
    def batch_bytes(self) -> int:
        """Bytes of the largest unit, which is the most that crosses ranks at once."""
        layout = self.setup.layout
        sizes: dict[str, int] = {}
        for leaf, unit in zip(layout.leaves, layout.options.units, strict=True):
            sizes[unit] = sizes.get(unit, 0) + prod(leaf.shape) * leaf.dtype.itemsize
        return max(sizes.values(), default=0)


def structure_of(held: Held) -> Structure:
    """Return what the held state is. With local updates, a collective of its ranks."""
    state = held.states[0]
    manifest = facts_of_state(state)
    outer, local, counters = state.window.outer, facts_of_replicas(held), manifest.counters
    if local:  # those of replica 0, as in a checkpoint
        counters = local["local"]["replicas"][0]["counters"]
    return Structure(
        setup=state.setup,
        local=None if outer is None else outer.local,
        policy=None if state.scale is None else state.scale.policy,
        manifest=replace(manifest, origin={**manifest.origin, **local}, counters=counters),
        device=state.device,
    )


def slots_of_owners(held: Held) -> Slots:
    """Return what the ranks of this process alone know of the slots that they own."""
    found: Slots = {}
    for state, rank in zip(held.states, held.ranks, strict=True):
        for slot, forms in slots_of_owner(state, rank).items():
            found.setdefault(slot, {}).update(forms)
    return found


def with_slots(structure: Structure, told: Sequence[Slots]) -> Structure:
    """Return the structure with what owners know of their slots."""
    slots = {name: dict(forms) for name, forms in structure.manifest.slots.items()}
    for some in told:
        for name, forms in some.items():
            slots.setdefault(name, {}).update(forms)
    return replace(structure, manifest=replace(structure.manifest, slots=slots))


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
    return replace(found, device=torch.device("cuda", torch.cuda.current_device()))


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
