"""`check_replicas`: do the ranks that hold the same part of a state have the same values?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero.collectives import performer_of
from fzero.errors import MismatchError
from fzero.machine.offload import to_device
from fzero.machine.packing import digest, unpack
from fzero.state import Buffers, Placement, TrainState
from fzero.transforms.agree import agree
from fzero.transforms.donation import check_alive
from fzero.transforms.states import flatten_states


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
