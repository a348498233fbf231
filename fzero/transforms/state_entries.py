"""All that a state keeps, from everything that keeps something; and a state made of it again.

    entries     what has elements, with the form of each: see `fzero/state/entry.py`
    numbers     what a manifest has room for: the step, counters, a loss scale
    facts       what a manifest says of replicas that train apart

Who saves, moves or copies states goes over these, and names nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fzero.collectives import performer_of
from fzero.errors import MismatchError, PhaseError
from fzero.errors.json_form import DictForm, natural, text
from fzero.machine.compress import BACK, RESIDUAL, START, memory_slots
from fzero.machine.named_shards import leaf_paths
from fzero.machine.offload import to_device
from fzero.machine.owners import every_leaf_owned
from fzero.machine.packing import digest, unpack
from fzero.optim.counters import (
    COUNT,
    COUNTERS,
    STEP,
    UNSTEPPED,
    counters_of,
    unstepped_of,
    with_counters,
)
from fzero.optim.entries import RULE, rule_entries, with_rule_entries
from fzero.ranks.mesh import MeshLike
from fzero.state import (
    Buffers,
    Form,
    Local,
    Placement,
    Progress,
    Setup,
    Slot,
    TrainState,
    outer,
    scale,
)
from fzero.state.entry import Entry, entry_of, with_slots
from fzero.state.progress import CLOSED
from fzero.state.scale import ScalePolicy, as_numbers, from_numbers, with_slot
from fzero.state.setup import MASTERS
from fzero.transforms import local_state
from fzero.transforms.backward_pass import agree
from fzero.transforms.donation import check_alive
from fzero.transforms.init import blank_state, setup_at
from fzero.transforms.local import anchored, mesh_for
from fzero.transforms.loss_scale import (
    SCALE_ENTRY,
    SCALE_NUMBERS,
    scale_entries,
    with_policy,
    with_scale_entries,
)
from fzero.transforms.models import flatten_states
from fzero.transforms.points import begun_slots

PARAMS, GRADIENTS = "params", "gradients"
APART = "local"
"""Under which name a manifest has the facts of replicas that train apart."""


class Keeper(NamedTuple):
    """Something that keeps values in a state."""

    entries: Callable[[TrainState, int], Iterable[Entry]]
    put: Callable[[TrainState, Sequence[Entry]], TrainState]


def _params(state: TrainState, rank: int) -> list[Entry]:
    values = dict(enumerate(state.params.flats))
    form = Form(leaves="all", placement=state.setup.params)
    return [Entry(name=PARAMS, form=form, values=values)]


def _with_params(state: TrainState, entries: Sequence[Entry]) -> TrainState:
    values = {i: x for one in entries for i, x in one.values.items()}
    flats = tuple(values.get(i, x) for i, x in enumerate(state.params.flats))
    return state.replace(params=replace(state.params, flats=flats))


def _gradients(state: TrainState, rank: int) -> list[Entry]:
    if not state.gradients.held:
        return []
    values = dict(zip(state.setup.layout.trainable, state.gradients.flats, strict=True))
    form = Form(placement=state.setup.gradients, lifetime="update")
    return [Entry(name=GRADIENTS, form=form, values=values)]


def _with_gradients(state: TrainState, entries: Sequence[Entry]) -> TrainState:
    flats = tuple(x for one in entries for _, x in sorted(one.values.items()))
    return state.replace(gradients=Buffers(flats=flats, placement=state.setup.gradients))


def _slots(state: TrainState, rank: int) -> list[Entry]:
    """Return the slots, but for those of which a manifest has numbers, or all replicas have one."""
    slots = state.slots.items()
    apart = {scale.SLOT, *outer.FORMS}
    return [entry_of(state.setup, name, slot) for name, slot in slots if name not in apart]


def _with_slots(state: TrainState, entries: Sequence[Entry]) -> TrainState:
    """Return the state with these slots; one that it has not is made of its form."""
    empty = {
        one.name: Slot(value=Buffers(placement=one.placement), form=one.form)
        for one in entries
        if one.name not in state.slots
    }
    return state.replace(slots=with_slots(state.setup, {**state.slots, **empty}, entries))


_SLOTS = Keeper(_slots, _with_slots)
_SOURCES: dict[str, Keeper] = {
    PARAMS: Keeper(_params, _with_params),
    RULE: Keeper(rule_entries, lambda s, x: s.replace(optimizer=with_rule_entries(s, x))),
    GRADIENTS: Keeper(_gradients, _with_gradients),
    SCALE_ENTRY: Keeper(lambda s, _: scale_entries(s), with_scale_entries),
}
"""{name of an entry: what keeps it}; of a rule, how the names begin. All others are slots."""


def entries_of(state: TrainState, rank: int, *, live: bool = False) -> list[Entry]:
    """Return all that a state keeps; of replicas that train apart, what this one has of its own.

    rank: whose state it is, among those of `setup.axis`. live: also what does not live for the run.
    """
    sources = dict.fromkeys([*_SOURCES.values(), _SLOTS])
    found = [one for source in sources for one in source.entries(state, rank)]
    return [one for one in found if live or one.form.lifetime == "run"]


VALUES = (PARAMS, RULE + MASTERS)
"""The entries that have the values of parameters."""


def has_values(entry: Entry) -> bool:
    """Whether it has the values of parameters."""
    return entry.name in VALUES


def is_slot(entry: Entry) -> bool:
    """Whether it is neither parameters nor what a rule keeps."""
    return entry.name != PARAMS and not entry.name.startswith(RULE)


def with_entries(state: TrainState, entries: Iterable[Entry]) -> TrainState:
    """Return the state in which these entries have their values; the others stay.

    It gets those that it has not: gradients, and slots of any form.
    """
    given: dict[Keeper, list[Entry]] = {}
    for one in entries:
        name = RULE if one.name.startswith(RULE) else one.name
        given.setdefault(_SOURCES.get(name, _SLOTS), []).append(one)
    for source, some in given.items():
        state = source.put(state, some)
    return state


def begun(state: TrainState, like: TrainState, names: Collection[str]) -> TrainState:
    """Return the state with some of what it keeps as a new state of its parameters has it.

    like: has what nobody makes anew: slots that were made by hand. A collective, where a transform
    makes them by one.
    """
    own = {name: slot for name, slot in like.slots.items() if name in names}
    fresh = {k: x for k, x in memory_slots(state.setup, state.device).items() if k in names}
    return begun_slots(state.replace(slots={**state.slots, **own, **fresh}), [*names])


def follows_setup(name: str) -> bool:
    """Whether options alone decide that a state has a slot: it may have none elsewhere."""
    return name in (RESIDUAL, BACK, START, scale.SLOT, *outer.FORMS)


def owning_ranks(setup: Setup) -> int:
    """Return how many ranks own whole tensors: those that share the optimizer's state."""
    return every_leaf_owned(setup).axis.size


def is_owner(setup: Setup, key: str, rank: int) -> bool:
    """Whether a rank owns a named tensor: that of a leaf that learns; of others the first rank."""
    owners, paths = every_leaf_owned(setup), leaf_paths(setup.layout)
    found = (one.owner for one in owners.leaves if paths[one.index] == key)
    return next(found, 0) == owners.rank_of(rank)


def require_movable(state: TrainState) -> None:
    """Raise `PhaseError` for gradients of which a codec keeps what it has lost."""
    if any(slot.before is not None for slot in state.slots.values()):
        raise PhaseError(
            "reshard: a state with gradients, and with a codec that has a memory.",
            cause="a call between the gradient and the update of a compressed step.",
            fix="call it after the update.",
        )


# Numbers.


def numbers_of(state: TrainState) -> dict[str, Any]:
    """Return the numbers of a state as a manifest has them."""
    unstepped = unstepped_of(state)
    return {
        "step": int(state.step),
        "optimizer": counters_of(state),
        "scale": as_numbers(state.scale),
        **({UNSTEPPED: unstepped} if unstepped else {}),
    }


def numbered(state: TrainState, numbers: Mapping[str, Any]) -> TrainState:
    """Return a state with the saved numbers, without gradients, and with what `state` keeps."""
    counters = dict(numbers["optimizer"])
    counters.setdefault(STEP, counters.get(COUNT, 0))  # of an optimizer that has but the count
    unstepped = numbers.get(UNSTEPPED, ())
    state = state.without_gradients()
    return state.replace(
        optimizer=with_counters(state, lambda slot: slot.flat, counters, unstepped),
        gradients=Buffers(),
        window=CLOSED,
        step=torch.tensor(numbers["step"], dtype=torch.int64, device="cpu"),
        progress=Progress(),
        slots=with_slot(state.slots, from_numbers(state.scale, numbers["scale"])),
    )


NUMBERS = DictForm(
    must={"step": natural, "optimizer": COUNTERS, "scale": SCALE_NUMBERS},
    may={UNSTEPPED: [text]},
)
FACTS = {APART: local_state.facts_form(NUMBERS)}
"""What of it can be in a file."""


# Replicas that train apart.

shared_of, bases_of = local_state.shared_entries, local_state.base_entries
with_shared, with_facts = local_state.with_shared, local_state.with_facts
are_as_many, require_facts = local_state.are_as_many, local_state.require_facts
common_facts = local_state.common_facts


def trains_apart(state: TrainState) -> bool:
    """Whether replicas have parameters, and all else, of their own between two updates of all."""
    return state.outer is not None


def replica_facts(state: TrainState) -> dict[str, Any]:
    """Return what a replica says of itself in a manifest."""
    return local_state.replica_facts(state, numbers_of(state))


def without_shared(state: TrainState) -> TrainState:
    """Return the state of a replica without what it has in common with others."""
    return state.replace(slots=outer.with_outer(state.slots, None))


def begun_apart(state: TrainState, like: TrainState) -> TrainState:
    """Return a state with what its replicas have in common, where `like` has it: begun anew."""
    anew = None if trains_apart(state) else like.outer
    return state if anew is None else anchored(state, anew)


# What a state is but for its numbers: what a rank that comes must be told, to make room for it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What a state is but for its numbers, whatever ranks it is on: records of this program."""

    setup: Setup
    local: Local | None
    policy: ScalePolicy | None  # of the loss scale
    device: torch.device


def pattern_of(state: TrainState) -> Pattern:
    """Return what a state is."""
    outer = state.outer
    return Pattern(
        setup=state.setup,
        local=None if outer is None else outer.local,
        policy=None if state.scale is None else state.scale.policy,
        device=state.device,
    )


def blank_at(pattern: Pattern, *, stage: int, mesh: MeshLike) -> TrainState:
    """Return zeros in the place of a state, at a stage, on a mesh of this rank.

    Raises `LayoutError` for an option that does not go with the stage or with the ranks.
    """
    old, local, device = pattern.setup, pattern.local, pattern.device
    axis = mesh_for(mesh, local)
    setup = setup_at(old, stage=stage, axis=axis, device=device, local=local)
    return with_policy(blank_state(setup, device, local=local), pattern.policy)


# `check_replicas`: do the ranks that hold the same part of a state have the same values?


def check_replicas(state: Any) -> None:
    """Raise on every rank if ranks hold other values where they must hold the same.

    Compares digests of parameters and optimizer states: all of them at stage 0, parameters at
    stages 1 and 2, and shards over the replicas of a mesh of two dims. It finds writes that torch
    does not count, through `p.data` or NumPy, on the rank's own data or on some ranks only. Every
    element is read once; nothing else is done on the way of a step, so call it now and then, or
    when a run is in doubt.

    Args:
        state: a `TrainState`, or a pytree of them; `engine.state` of an engine.

    Raises:
        LayoutError: for what is no state.
        DonatedError: for a state that was used up.
        MismatchError: on every rank, naming the first value that differs; or when the ranks make
            other calls.

    Example:
        >>> import torch, fzero
        >>> def ranks_part(x):
        ...     state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(0.1), stage=0)
        ...     fzero.check_replicas(state)  # equal so far
        ...     state.params.flats[0].data.add_(x)
        ...     fzero.check_replicas(state)
        >>> fzero.simulate(ranks_part, world_size=2)(torch.arange(2))
        Traceback (most recent call last):
        ...
        fzero.errors.MismatchError: rank 1 has other values of parameter w than rank 0.
        Usual cause: ...
        Fix: ...
    """
    states, _ = flatten_states("check_replicas", state)
    for one in states:
        check_alive(one, written=True)  # it compares bits
    agree("check_replicas", states)
    for one in states:
        performer = performer_of(one.setup.axis)
        if performer is not None and (error := unequal(performer.tell(_digests(one)))) is not None:
            raise error


def unequal(everyone: Sequence[Sequence[tuple[Any, int]]]) -> MismatchError | None:
    """Return an error for the first name whose digests differ between ranks; None if none does.

    everyone: the (name, digest) of what each rank holds. Ranks may hold other things.
    """
    first: dict[Any, tuple[int, int]] = {}
    for rank, told in enumerate(everyone):
        for name, value in told:
            other, known = first.setdefault(name, (rank, value))
            if known != value:
                what = name if isinstance(name, str) else name[0]
                return MismatchError(
                    f"rank {rank} has other values of {what} than rank {other}.",
                    cause="a write to parameters on some ranks only, or as each rank's own data "
                    "say: through `p.data` or NumPy in a forward (a codebook, weight clipping), "
                    "which torch does not count, or between steps.",
                    fix="write the same on every rank, between steps; `with "
                    "fzero.adapter.gathered(module, modify=True):` gives all ranks the values of "
                    "one, of an engine's module. Else start again from the last checkpoint.",
                )
    return None


def _digests(state: TrainState) -> list[tuple[Any, int]]:
    """((what, which part of it), digest) of all that this rank holds of a state."""
    setup, layout = state.setup, state.setup.layout
    rank, found = setup.axis.rank, []
    part = setup.part(setup.params, rank)
    for index, flat in enumerate(state.params.flats if part.count < setup.axis.size else ()):
        here = to_device(flat, state.device)
        paths = [layout.leaves[i].path for i in layout.groups[index].leaves]
        if setup.params is Placement.REPLICATED:
            for path, x in zip(paths, unpack(layout, index, here), strict=True):
                found.append(((f"parameter {path}", part), digest(x)))
        else:
            found.append(((f"a shard of {', '.join(paths)}", part), digest(here)))
    found += _of_slots(state)
    part = setup.part(setup.optimizer_state, rank)
    if part.count == setup.axis.size:  # no other rank has it
        return found
    for name, flats in setup.optimizer.slots(state.optimizer).items():
        for index, flat in zip(layout.trainable, flats, strict=False):
            paths = ", ".join(layout.leaves[i].path for i in layout.groups[index].leaves)
            what = f"the optimizer's {name} of {paths}"
            found.append(((what, part), digest(to_device(flat, state.device))))
    return found


def _of_slots(state: TrainState) -> list[tuple[Any, int]]:
    """((slot, which part of it), digest) of the slots of which other ranks have the same."""
    setup, rank, found = state.setup, state.setup.axis.rank, list[tuple[Any, int]]()
    for name, slot in state.slots.items():
        if slot.form.elsewhere == "own":
            continue
        if isinstance(slot.value, Buffers):
            part = setup.part(slot.value.placement, rank)
            if slot.value.placement is Placement.PARTIAL or part.count == setup.axis.size:
                continue
            for number, flat in enumerate(slot.value.flats):
                where = (f"the slot {name}", number, part)
                found.append((where, digest(to_device(flat, state.device))))
        elif slot.form.placed(setup.optimizer_state) is Placement.REPLICATED:
            values = slot.value if isinstance(slot.value, dict) else {"": slot.value}
            for key, x in values.items():
                found.append(((f"the slot {name} {key}".rstrip(), 0), digest(x.reshape(-1))))
    return found
