"""Add the gradients of a backward to a state: to its open window, or to its reduced gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fzero.collectives import performer_of
from fzero.context.modes import in_transform, is_recorded, needs_func
from fzero.errors import PhaseError
from fzero.machine import Reducer
from fzero.machine.compress import Lent, with_memories
from fzero.machine.offload import offloaded, to_device
from fzero.machine.packing import sum_parts
from fzero.machine.reduce import Nodes, ReductionPlan
from fzero.ranks.mesh import Runtime
from fzero.state import Buffers, Placement, Setup, TrainState, buffers, progress
from fzero.state.codec import Codec
from fzero.state.points import Excludes
from fzero.transforms.donation import add_donated, donates, take_over


def receive(
    state: TrainState,
    flats: Sequence[Tensor],
    *,
    used: int = progress.ALL,
    reduced: bool = False,
) -> TrainState:
    """Count one backward, and add the gradient of each group that learns.

    `flats` are means over ranks, [l] (at stage 0 [W l]); in a window this rank's own, [W l].
    `used`: the leaves that this rank has one of, bit by bit. `reduced`: by a
    `Reducer`.
    """
    waits = state.window.is_open
    state = _counted(state, waits, used)
    if state.setup.gradient_share != 1.0:
        flats = part_of_update(state, flats, reduced=reduced)
    return accumulated(state, flats, waits=waits)


def receive_local(
    state: TrainState, reducer: Reducer, number: int, *, used: int = progress.ALL
) -> TrainState:
    """Count one backward, and add this rank's own gradients of state `number` of a reducer.

    A state that donates has them added in the memory of those before, with no copy between.
    """
    waits, donated = state.window.is_open, donates(state)
    old = state.window.pending if waits else state.gradients
    if not old.held or not donated or state.setup.offload.gradients is not None:
        found = reducer.states[number].pop_local(to_write=donated and not old.held)
        placement = Placement.PARTIAL if waits else state.setup.gradients
        return receive(state, filled(state, found, placement), used=used)
    total: Buffers = take_over(old)
    totals = dict(zip(state.setup.layout.trainable, total.flats, strict=True))
    reducer.states[number].pop_local_into(totals, state.setup.gradient_share)
    state = _counted(state, waits, used)
    if waits:
        return state.replace(window=dataclasses.replace(state.window, pending=total))
    return state.replace(gradients=total)


def _counted(state: TrainState, waits: bool, used: int) -> TrainState:
    """Return the state with one backward more, whose gradient waits or is reduced."""
    counted = progress.count_backward(state.progress, reduced=not waits, used=used)
    window = state.window
    if window.length:
        window = progress.add_backward(window, counted.backwards)
    return state.replace(progress=counted, window=window)


def part_of_update(
    state: TrainState, flats: Sequence[Tensor], *, reduced: bool = False
) -> Sequence[Tensor]:
    """Return gradients of one micro-batch times its share of an averaged update.

    `reduced`: an encoder, if there is one, has multiplied them by it: see `machine/compress.Lent`.
    """
    scale = 1.0 if reduced and state.setup.encodes_gradients else state.setup.gradient_share
    if scale == 1.0:
        return flats
    # On the device: the host has not waited for the copies to their home.
    return [to_device(flat, state.device) * scale for flat in flats]


def waiting(state: TrainState) -> dict[int, Tensor]:
    """Return gradients that wait in a window as a backward brings them: {group: [W l]}.

    All of it is multiplied by the share: by an encoder, or by `receive`.
    """
    share, flats = state.setup.gradient_share, state.window.pending.flats
    flats = flats if share == 1.0 else [x / share for x in flats]
    return dict(zip(state.setup.layout.trainable, flats, strict=True))


def accumulated(state: TrainState, flats: Sequence[Tensor], *, waits: bool = False) -> TrainState:
    """Return the state with means over ranks, [l] or [W l], added to its reduced gradients.

    waits: these are this rank's own, [W l], and are added to those that wait in the window.

    They are added where gradients of this state live; in the memory of the old ones if the state
    donates. Under a transform they stay where they are.
    """
    setup, offload = state.setup, state.setup.offload
    old = state.window.pending if waits else state.gradients
    placement = Placement.PARTIAL if waits else setup.gradients
    stays = offload.gradients is None or in_transform() or is_recorded(tuple(flats))
    if old.held and not stays:
        flats = [to_device(flat, state.device) for flat in flats]
    new, donated = Buffers(flats=tuple(flats), placement=placement), old.held and donates(state)
    if stays:
        total = add_donated(old, new, None) if donated else buffers.add(old, new)
    elif donated:
        total = add_donated(old, new, offload.gradients)
    else:
        here = tuple(to_device(flat, state.device) for flat in old.flats)
        added = buffers.add(Buffers(flats=here, placement=old.placement), new)
        moved = tuple(offloaded(offload.gradients, flat, offload) for flat in added.flats)
        total = Buffers(flats=moved, placement=added.placement)
    if waits:
        return state.replace(window=dataclasses.replace(state.window, pending=total))
    return state.replace(gradients=total)


def reduce_window(state: TrainState) -> TrainState:
    """Reduce the gradients that wait in a state's window, or zeros. A collective."""
    owned = donates(state)  # asked while the gradients are in it: they may carry a graph
    emptied, pending = progress.pop(state.window)
    state = state.replace(window=emptied)
    flats = take_over(pending).flats if owned else pending.flats
    if state.setup.logical is not None:
        means = _mean_of_waiting(state, flats)
    elif needs_func(flats) or any(flat.requires_grad for flat in flats):
        means = mean_of(state.setup, [to_device(flat, state.device) for flat in flats])
    else:
        local = dict(zip(state.setup.layout.trainable, flats, strict=False))
        del flats, pending  # a bucket is freed when it is reduced
        state, means = means_over_ranks(state, local, owned=owned)
    state = accumulated(state, means)
    return state.replace(progress=progress.saw_reduction(state.progress))


def _mean_of_waiting(state: TrainState, flats: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean over logical ranks of what waits for each of them, zeros where nothing does.

    flats: [W l] for each group, with a first dim of this rank's logical ranks if they are several.
    """
    setup, nodes = state.setup, Nodes(state.setup, state.device)
    found = dict(zip(setup.layout.trainable, flats, strict=False))
    for place in range(len(setup.carried(setup.axis.rank)) if found else 0):
        row = {i: x[place] for i, x in found.items()} if setup.carries_several else found
        nodes.push(row)
    return mean_of_nodes(state, nodes)


def mean_of_nodes(state: TrainState, nodes: Nodes) -> list[Tensor]:
    """Return the mean over logical ranks of nodes, as gradients are placed. A collective."""
    performer, axis = performer_of(state.setup.axis), state.setup.axis
    means = nodes.mean(axis if performer is None else performer.over(axis))
    return filled(state, means, state.setup.gradients)


def means_over_ranks(
    state: TrainState, local: dict[int, Tensor], *, owned: bool
) -> tuple[TrainState, list[Tensor]]:
    """mean_r(local_r), bucket by bucket: {group: [W l]} -> the part of each group that learns.

    `local` is used up: the full gradient of a bucket is freed when it has been reduced; it is
    written to only if it is `owned`. The state that comes back knows what was lost, if gradients
    are encoded.
    """
    setup, performer = state.setup, performer_of(state.setup.axis)
    if performer is None:
        return state, filled(state, local, setup.gradients)
    plan = ReductionPlan([setup], [performer.over(setup.axis)])
    reducer = Reducer(plan, [state.device])
    if (encoder := reducer.encoder(0)) is not None:
        encoder.remembers_by(partial(Lent, state))
    reducer.add_waiting(0, local, owned=owned)
    local.clear()
    for unit in reversed(range(reducer.unit_count)):
        reducer.start(unit)
    reducer.wait()
    if encoder is not None:
        state = with_memories(state, encoder.changed())
    return state, reducer.states[0].pop_means()


NOT_DIFFERENTIABLE = Excludes(
    beside="a transform of torch.func, or a trace, around the step",
    when="graph",
    seen=lambda known: (
        f"compress({known[0]}={known[1]}), and the step is differentiated, mapped "
        "or traced as a whole, or its gradient does not come from a backward of its own."
    ),
    cause="a torch.func transform around grad_and_reduce, arguments that require grad, or "
    "fzero.add_gradients(reduced=False) outside of a coalescing window.",
    fix="leave the codec out there; transforms inside the loss are fine. In a window, "
    "add_gradients is too.",
)
"""Of codecs: an encoding has no derivative."""


def not_differentiable(option: str, codec: Codec) -> PhaseError:
    """Return the error for a step with encoded values under a transform of torch.func."""
    one = NOT_DIFFERENTIABLE
    return PhaseError(one.seen((option, codec)), cause=one.cause, fix=one.fix)


def mean_of(setup: Setup, local: Sequence[Tensor]) -> list[Tensor]:
    """mean_r(local_r) by collectives that torch.func differentiates: [W l] -> [l], or [W l]."""
    if setup.axis.runtime is Runtime.LOCAL:
        return list(local)
    if setup.codec is not None:
        raise not_differentiable("gradients", setup.codec)
    learning = setup.layout.trainable
    sent = [setup.sent(i, x) for i, x in zip(learning, local, strict=True)]
    summed = sum_parts(setup, sent)
    return [
        x.to(setup.accumulate_dtype(i)) / setup.divisor
        for i, x in zip(learning, summed, strict=True)
    ]


def filled(state: TrainState, found: Mapping[int, Tensor], placement: Placement) -> list[Tensor]:
    """Return a gradient for each trainable group: from `found`, or zeros."""
    setup, layout = state.setup, state.setup.layout
    flats = []
    for index in layout.trainable:
        flat = found.get(index)
        if flat is None:
            numel = setup.numel(index, placement)
            device = state.device
            flat = torch.zeros(numel, dtype=setup.accumulate_dtype(index), device=device)
        flats.append(flat)
    return flats
