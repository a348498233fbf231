"""`slots`: what a transform or the optimizer keeps in a state, whole and by path."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fzero.collectives import gather_objects, reduce_many
from fzero.errors import LayoutError
from fzero.machine.named_shards import by_path, leaf_paths, ranges_of
from fzero.machine.offload import to_device
from fzero.machine.packing import gather_parts
from fzero.optim.entries import RULE, rule_entries
from fzero.state import Buffers, Part, Placement, Slot, TrainState
from fzero.state.train_state import require_state
from fzero.transforms.agree import agree
from fzero.transforms.donation import check_alive


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
        found = _of_transform(state, name)
        agree(f"slots of {name}", [state])
        return {k: whole(state, x) for k, x in found.items() if x.form.leaves != "record"}
    kept = _of_optimizer(state)
    agree(f"slots of {name}", [state])
    return {
        slot: _shaped(state, {k: x for one in some for k, x in whole(state, one).items()})
        for slot, some in kept.items()
    }


def _of_transform(state: TrainState, name: str) -> dict[str, Slot]:
    prefix = f"{name}/"
    found = {k.removeprefix(prefix): x for k, x in state.slots.items() if k.startswith(prefix)}
    if not found:
        known = sorted({"optimizer", *(key.partition("/")[0] for key in state.slots)})
        raise LayoutError(
            f"slots: the state keeps nothing for {name!r}; it does for {', '.join(known)}.",
            cause="another name, or a state that was made without the transform.",
            fix="make it by the init of the step, or with transforms=[...].",
        )
    return found


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
