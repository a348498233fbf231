"""Tell an optimizer which elements of this rank's flats belong to which leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.context.modes import in_transform, is_recorded, wants_graph
from fzero.machine.offload import change, offloaded, to_device
from fzero.optim import Piece
from fzero.state import Buffers, Layout, Setup, TrainState
from fzero.state.layout import Part
from fzero.transforms.donation import donates, take_over, undo_take_over


def pieces_of(setup: Setup) -> tuple[Piece, ...]:
    """Which elements of this rank's parts are of which leaf; padding goes with its neighbour."""
    return _pieces_of(setup.layout, setup.part(setup.optimizer_state, setup.axis.rank))


@lru_cache(maxsize=64)  # every step asks for the same ones
def _pieces_of(layout: Layout, part: Part) -> tuple[Piece, ...]:
    found: list[Piece] = []
    for number, index in enumerate(layout.trainable):
        # A flat of padding alone has an empty piece, which says whose it is.
        nothing = Piece(number, layout.leaves[layout.groups[index].leaves[0]], 0, 0)
        found.extend([*_in_group(layout, index, number, part)] or [nothing])
    return tuple(found)


def _in_group(layout: Layout, index: int, number: int, part: Part) -> Iterator[Piece]:
    group, numel = layout.groups[index], layout.full_numel(index) // part.count
    start = part.index * numel
    begins, ends = (0, *group.offsets[1:]), (*group.offsets[1:], layout.full_numel(index))
    for leaf, begin, end in zip(group.leaves, begins, ends, strict=True):
        low, high = max(begin - start, 0), min(end - start, numel)
        if low < high:
            yield Piece(number, layout.leaves[leaf], low, high, max(start - begin, 0))


# Gradients on their way from a state to its rule: multiplied in place where they are used up.


class Prepared(NamedTuple):
    """Gradients to step from.

    Attributes:
        gradients: as they are so far.
        rest: what they are multiplied by yet, together: see `with_rest`.
        norm: before clipping, if they are clipped.
        grad_scale: what the rule has still to divide by.
        own: those of the state, if they were written to.
        factor: what `own` was multiplied by.
        is_shared: others may have these tensors, too: they are not written to.
    """

    gradients: Buffers
    rest: Any = 1.0
    norm: Tensor | None = None
    grad_scale: Tensor | None = None
    own: Buffers | None = None
    factor: Any = 1.0
    is_shared: bool = False


def fulls_of(state: TrainState) -> list[Tensor]:
    """Return what a rank holds of the parameters that learn."""
    return [state.params.flats[i] for i in state.setup.layout.trainable]


def is_general(state: TrainState, gradients: Sequence[Tensor]) -> bool:
    """Whether the update is to be differentiated, mapped or traced."""
    fulls = fulls_of(state)
    return in_transform() or is_recorded(fulls) or wants_graph([*fulls, *gradients])


def multiplied(state: TrainState, ready: Prepared, factor: Tensor | float) -> Prepared:
    """g factor, in place if the state donates."""
    times = torch.Tensor.mul, torch.Tensor.mul_
    return _changed(state, ready, times, partial(_like, factor), ready.factor * factor)


def divided_by(
    state: TrainState, ready: Prepared, total: Tensor, divisor: Callable[[Tensor], Tensor]
) -> Prepared:
    """g / divisor(g), in place if the state donates. total: what that is, but where it is 0."""
    division = torch.Tensor.div, torch.Tensor.div_
    return _changed(state, ready, division, divisor, ready.factor / total)


def with_rest(state: TrainState, ready: Prepared) -> Prepared:
    """Multiply by what waits in `rest`: once for all of it."""
    rest = ready.rest
    if isinstance(rest, Tensor) or rest != 1.0:
        ready = multiplied(state, ready, rest)._replace(rest=1.0)
    return ready


def left_to_rule(state: TrainState, ready: Prepared, scale: Tensor) -> Prepared:
    """Let the rule divide by `scale`, in the memory of the state if that donates."""
    if donates(state):  # nobody else is to see that
        owned: Buffers = take_over(ready.gradients)
        ready = ready._replace(gradients=owned, own=owned)
    return ready._replace(grad_scale=scale)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / |g|): the factor that torch.nn.utils.clip_grad_norm_ uses."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def given_back(state: TrainState, ready: Prepared) -> None:
    """Undo what was done to the gradients of a state that goes on: the rule raised."""
    if ready.own is None:
        return
    factor: Any = 1 / ready.factor
    for flat in ready.own.flats:
        change(flat, state.device, partial(Tensor.mul_, other=_like(factor, flat)))
    undo_take_over(state.gradients, ready.own)


def scaled(state: TrainState, gradients: Buffers, factor: Tensor | float) -> Buffers:
    """g factor of the gradients of a state, in place if it donates."""
    return multiplied(state, Prepared(gradients), factor).gradients


def _like(factor: Tensor | float, flat: Tensor) -> Any:
    return factor.to(flat.dtype) if isinstance(factor, Tensor) else factor


def _changed(
    state: TrainState,
    ready: Prepared,
    operations: tuple[Callable[..., Tensor], Callable[..., Tensor]],
    operand: Callable[[Tensor], Any],
    factor: Any,
) -> Prepared:
    """op(g, operand(g)), by the second of two operations, in place, if the state donates.

    factor: what the state's own are multiplied by then.
    """
    device, offload, gradients = state.device, state.setup.offload, ready.gradients
    apart, in_place = operations
    if donates(state) and not ready.is_shared:
        owned: Buffers = take_over(gradients)
        for flat in owned.flats:
            change(flat, device, partial(in_place, other=operand(flat)))
        if gradients is (state.gradients if ready.own is None else ready.own):
            return ready._replace(gradients=owned, own=owned, factor=factor)
        return ready._replace(gradients=owned)
    general = is_general(state, gradients.flats)
    home = None if general else offload.gradients
    flats = (apart(to_device(flat, device), operand(flat)) for flat in gradients.flats)
    made = tuple(offloaded(home, flat, offload) for flat in flats)
    return ready._replace(
        gradients=Buffers(flats=made, placement=gradients.placement), is_shared=False
    )
