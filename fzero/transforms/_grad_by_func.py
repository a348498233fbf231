"""A gradient call under torch.func: all is gathered first, and the result is differentiable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fzero.collectives import connecting_calls, gather_many
from fzero.errors import PhaseError
from fzero.machine.offload import to_device
from fzero.machine.packing import input_shape, pack, unpack_groups
from fzero.machine.partition import assemble
from fzero.state import TrainState
from fzero.state.train_state import weighed, with_weight
from fzero.transforms._differentiate import (
    WROTE,
    GradientCall,
    Result,
    Source,
    by_func,
    versions_of,
)
from fzero.transforms.agree import agree
from fzero.transforms.builtins import factors_of, in_backwards
from fzero.transforms.points import Calls, Changed, loss_learned
from fzero.transforms.receive import mean_of, not_differentiable, receive


def grad_by_func(
    call: GradientCall, states: Sequence[TrainState]
) -> tuple[list[TrainState], Result]:
    """Return the states with the gradient of a call added, and its result.

    Raises `PhaseError` if the loss wrote to a parameter.
    """
    calls = Calls(states, in_backwards, None)
    # Ranks on which nothing requires grad announce a pass instead: then all of them raise.
    crosses = [one for one in states if one.setup.stage == 3 or not one.window.is_open]
    agree(f"{call.name} with arguments that require grad", crosses)
    held = [with_full(state) for state in states]
    by, rest = factors_of(states)
    fulls = [flat for _, some in held for flat in some]
    versions = versions_of(fulls)
    acting = [one for one in states if one.setup.layout.trainable]
    before, connected = connecting_calls(), False

    def learned(loss: Tensor) -> Tensor:
        nonlocal connected
        connected = connecting_calls() > before
        times = with_weight(by, weighed(loss, call.weight, connected=connected))
        loss = loss_learned(acting, loss)
        return loss if times is None else loss * times

    try:
        sources = [_source(*one) for one in held]
        result = by_func(call.loss_of, sources, has_aux=call.has_aux, learned=learned)
    except RuntimeError as error:
        if versions_of(fulls) != versions:
            raise PhaseError(WROTE) from error
        raise
    if versions_of(fulls) != versions:
        raise PhaseError(WROTE)
    calls.loss(result.value, call.weight)
    how = weighed(result.value, call.weight, connected=connected)
    begun = [calls.begins(i, state, how) for i, (state, _) in enumerate(held)]
    grads = [
        _changed(state, some, calls.change(i))
        for i, (state, some) in enumerate(zip(begun, result.grads, strict=True))
    ]
    calls.settles()
    new = [calls.ends(i, state) for i, state in enumerate(begun)]
    pairs = zip(new, grads, rest, strict=True)
    return [_received(state, some, factor) for state, some, factor in pairs], result


def _changed(
    state: TrainState, grads: Sequence[Tensor], change: Changed | None
) -> Sequence[Tensor]:
    """Return what transforms make of the gradient of each group, the last leaf first.

    As it is in most backwards.
    """
    if change is None:
        return grads
    layout, setup = state.setup.layout, state.setup
    made: dict[int, Tensor] = {}
    for index, flat in reversed([*zip(layout.trainable, grads, strict=True)]):
        dtype = setup.accumulate_dtype(index)
        leaves = unpack_groups(layout, {index: flat.reshape(-1)})
        made |= {leaf: change(leaf, leaves[leaf], dtype) for leaf in reversed(leaves)}
    return [
        pack(layout, i, [made[leaf] for leaf in layout.groups[i].leaves]) for i in layout.trainable
    ]


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
    own = [
        g.reshape(-1).to(setup.accumulate_dtype(i))
        for i, g in zip(setup.layout.trainable, grads, strict=True)
    ]
    if factor is not None:
        own = [g * factor.to(g.dtype) for g in own]
    return receive(state, own if state.window.is_open else mean_of(setup, own))
