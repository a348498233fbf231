"""A gradient call under torch.func: all is gathered first, and the result is differentiable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fzero.collectives import gather_many
from fzero.errors import PhaseError
from fzero.machine.offload import to_device
from fzero.machine.packing import input_shape, pack, unpack_groups
from fzero.machine.partition import assemble
from fzero.state import TrainState
from fzero.transforms._differentiate import (
    WROTE,
    GradientCall,
    Result,
    Source,
    by_func,
    versions_of,
)
from fzero.transforms._finite import found_at_once, require_values, with_found
from fzero.transforms.agree import agree
from fzero.transforms.points import Locals, loss_learned
from fzero.transforms.receive import mean_of, not_differentiable, receive
from fzero.transforms.scaled import scales_of
from fzero.transforms.weights import Weight, counted, counted_loss, times_weight


def grad_by_func(
    call: GradientCall, states: Sequence[TrainState]
) -> tuple[list[TrainState], Result]:
    """Return the states with the gradient of a call added, and its result.

    Raises `PhaseError` if the loss wrote to a parameter.
    """
    require_values(states)
    # Ranks on which nothing requires grad announce a pass instead: then all of them raise.
    crosses = [one for one in states if one.setup.stage == 3 or not one.window.is_open]
    agree("grad_and_reduce of arguments that require grad", crosses)
    held = [with_full(state) for state in states]
    scale, rest = scales_of(states)
    fulls = [flat for _, some in held for flat in some]
    versions = versions_of(fulls)
    acting = [one for one in states if one.setup.layout.trainable]

    def learned(loss: Tensor) -> Tensor:
        loss = loss_learned(acting, loss)
        return loss if scale is None else loss * scale

    try:
        sources = [_source(*one) for one in held]
        result = by_func(call.loss_of, sources, has_aux=call.has_aux, learned=learned)
    except RuntimeError as error:
        if versions_of(fulls) != versions:
            raise PhaseError(WROTE) from error
        raise
    if versions_of(fulls) != versions:
        raise PhaseError(WROTE)
    locally = [
        _after_locals(state, some) for (state, _), some in zip(held, result.grads, strict=True)
    ]
    held = [(state, some) for (state, _), (_, some) in zip(locally, held, strict=True)]
    grads = [_times_weight(state, some, call.weight) for state, some in locally]
    seen = Result(
        grads=tuple(map(tuple, grads)), value=counted_loss(result.value, call.weight), aux=None
    )
    made = zip(held, found_at_once(states, seen), grads, rest, strict=True)
    new = [_received(with_found(one, bad), some, by) for (one, _), bad, some, by in made]
    return [counted(state, call.weight) for state in new], result


def _after_locals(
    state: TrainState, grads: Sequence[Tensor]
) -> tuple[TrainState, Sequence[Tensor]]:
    """Return the gradient of each group after the transforms at `local`, and the state's slots."""
    locals_ = Locals(state)
    if not locals_:
        return state, grads
    layout = state.setup.layout
    flats = [g.reshape(-1) for g in grads]
    leaves = unpack_groups(layout, dict(zip(layout.trainable, flats, strict=True)))
    made = {leaf: locals_(leaf, g) for leaf, g in leaves.items()}
    packed = [
        pack(layout, i, [made[leaf] for leaf in layout.groups[i].leaves]) for i in layout.trainable
    ]
    return locals_.put(state), packed


def _times_weight(
    state: TrainState, grads: Sequence[Tensor], weight: Weight | None
) -> Sequence[Tensor]:
    """Return w g of each group, in the dtype in which gradients add up."""
    if weight is None:
        return grads
    dtypes = map(state.setup.accumulate_dtype, state.setup.layout.trainable)
    return [times_weight(g, weight, dtype) for g, dtype in zip(grads, dtypes, strict=True)]


def with_full(state: TrainState) -> tuple[TrainState, Sequence[Tensor]]:
    """Gather the full flats of every group; return the state, which may keep them, and them."""
    setup, layout = state.setup, state.setup.layout
    if setup.stage < 3:
        return state, state.params.flats
    for group in layout.groups:
        if group.codec is not None:
            raise not_differentiable("parameters", group.codec)
    fulls = state.window.gathered
    if not fulls or any(flat.numel() < layout.full_numel(i) for i, flat in enumerate(fulls)):
        pairs = zip(layout.groups, state.params.flats, strict=True)
        device = state.device
        sent = [to_device(flat, device, group.communication_dtype) for group, flat in pairs]
        fulls = tuple(gather_many(sent, setup.axis.shards))
        if setup.gathering.reshard_after_forward == "window" and state.window.is_open:
            state = state.replace(window=dataclasses.replace(state.window, gathered=fulls))
    pairs = zip(layout.groups, fulls, strict=True)
    return state, [flat.to(group.dtype) for group, flat in pairs]


def _source(state: TrainState, fulls: Sequence[Tensor]) -> Source:
    layout = state.setup.layout

    def build(inputs: Sequence[Tensor]) -> Any:
        flats = dict(enumerate(fulls)) | dict(zip(layout.trainable, inputs, strict=True))
        return assemble(layout, unpack_groups(layout, flats))

    inputs = tuple(fulls[i].view(input_shape(layout, i)) for i in layout.trainable)
    return Source(inputs=inputs, build=build)


def _received(
    state: TrainState, grads: Sequence[Tensor], factor: Tensor | None = None
) -> TrainState:
    """Add this rank's own gradients: leave them in the open window, or reduce them now."""
    setup = state.setup
    local = [
        g.reshape(-1).to(setup.accumulate_dtype(i))
        for i, g in zip(setup.layout.trainable, grads, strict=True)
    ]
    if factor is not None:
        local = [g * factor.to(g.dtype) for g in local]
    return receive(state, local if state.window.is_open else mean_of(setup, local))
