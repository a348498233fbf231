"""Reduced gradients as an optimizer steps them: without the scale, divided, bounded and clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.context.modes import in_transform, is_recorded, wants_graph
from fzero.machine.offload import change, offloaded, to_device
from fzero.optim import require_ordered
from fzero.state import Buffers, TrainState
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.scale import multiplier
from fzero.transforms.donation import donates, take_over
from fzero.transforms.norm import clip_factor, norm_of
from fzero.transforms.scaled import without_scale
from fzero.transforms.weights import divisor_of, share


class Prepared(NamedTuple):
    """Gradients to step from."""

    gradients: Buffers
    factor: Any  # what those of the state were multiplied by, if it was `in_place`
    in_place: bool
    norm: Tensor | None  # before clipping, if they are clipped
    grad_scale: Tensor | None = None  # what the optimizer has still to divide by


def fulls_of(state: TrainState) -> list[Tensor]:
    """Return what a rank holds of the parameters that learn."""
    return [state.params.flats[i] for i in state.setup.layout.trainable]


def is_general(state: TrainState, gradients: Sequence[Tensor]) -> bool:
    """Whether the update is to be differentiated, mapped or traced."""
    fulls = fulls_of(state)
    return in_transform() or is_recorded(fulls) or wants_graph([*fulls, *gradients])


def prepared(state: TrainState, held: Buffers, total: Tensor | None, *, divides: bool) -> Prepared:
    """g factor, factor = share / scale min(1, max_norm / |g share / scale|); the norm if it clips.

    After weighted calls 1 / total takes the place of the share.

    In place where the gradients are used up anyway, and no element is bounded. If the optimizer
    `divides` and nothing is clipped, the scale is left to it.
    """
    max_norm, max_value = state.setup.policy.max_norm, state.setup.policy.max_value
    norm = None
    gradients, in_place, grad_scale = held, True, None
    factor: Any = 1.0
    by = multiplier(state.scale)
    if by is not None and divides and max_norm is None and max_value is None:
        grad_scale = by.scale
        if donates(state):  # the kernel divides in their memory: nobody else is to see that
            gradients = take_over(held)
    elif by is not None:
        factor = by.scale.double().reciprocal()
        in_place = max_value is None and all(x.dtype not in SIXTEEN_BIT for x in held.flats)
        if in_place:
            gradients = scaled(state, held, factor)
        else:  # 16 bits may not hold them without the scale
            flats = tuple(without_scale(state, flat) for flat in held.flats)
            gradients = Buffers(flats=flats, placement=held.placement)
    if total is not None:
        division = torch.Tensor.div, torch.Tensor.div_
        gradients = _combined(state, gradients, division, partial(divisor_of, total))
        factor = factor / total
    rest: Any = 1.0 if total is not None else share(state)
    if max_value is not None:
        require_ordered("clip: max_value", state.setup.layout.leaves)
        gradients, in_place = _bounded(state, gradients, max_value / rest), False
    if max_norm is not None:
        norm = norm_of(state, gradients.flats, gradients.placement) * rest
        rest = rest * clip_factor(norm, max_norm)
    if isinstance(rest, Tensor) or rest != 1.0:
        gradients, factor = scaled(state, gradients, rest), factor * rest
    in_place = in_place and gradients is not held
    return Prepared(gradients, factor, in_place, norm, grad_scale)


def _bounded(state: TrainState, gradients: Buffers, bound: float) -> Buffers:
    """max(-bound, min(g, bound)), in new memory."""
    flats = tuple(to_device(flat, state.device).clamp(-bound, bound) for flat in gradients.flats)
    return Buffers(flats=flats, placement=gradients.placement)


def scaled(state: TrainState, gradients: Buffers, factor: Tensor | float) -> Buffers:
    """g factor, in place if the state donates."""

    def of(flat: Tensor) -> Any:
        return factor.to(flat.dtype) if isinstance(factor, Tensor) else factor

    return _combined(state, gradients, (torch.Tensor.mul, torch.Tensor.mul_), of)


def _combined(
    state: TrainState,
    gradients: Buffers,
    operations: tuple[Callable[..., Tensor], Callable[..., Tensor]],
    operand: Callable[[Tensor], Any],
) -> Buffers:
    """op(g, operand(g)), by the second of two operations, in place, if the state donates."""
    device, offload = state.device, state.setup.offload
    apart, in_place = operations
    if donates(state):
        owned: Buffers = take_over(gradients)
        for flat in owned.flats:
            change(flat, device, partial(in_place, other=operand(flat)))
        return owned
    general = is_general(state, gradients.flats)
    home = None if general else offload.gradients
    flats = (apart(to_device(flat, device), operand(flat)) for flat in gradients.flats)
    return Buffers(
        flats=tuple(offloaded(home, flat, offload) for flat in flats), placement=gradients.placement
    )
