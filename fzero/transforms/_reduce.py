"""A gradient's way across ranks: this rank's own sum -> the mean, placed as the stage says."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fzero.collectives import gather_many, reduce_many, reduce_owned, scatter_many
from fzero.lazy import meet
from fzero.partition import shard_rows
from fzero.state import Buffers, Placement, Setup, TrainState, buffers, progress, window
from fzero.transforms._donate import add_donated, donates, take_over
from fzero.transforms._modes import in_transform, is_recorded


def reduce_gradients(
    setup: Setup, local: Sequence[Tensor], to: Placement, *, owned: bool
) -> Buffers:
    """mean_r(local_r), REPLICATED by an all-reduce or SHARDED by a reduce-scatter.

    `local` are [W l] flats of the trainable groups; if they are `owned` they may be written to.
    """
    if to is Placement.SHARDED:
        across = scatter_many
    else:
        across = reduce_owned if owned and not in_transform() else reduce_many
    summed = across(local, setup.axis, ordered=setup.ordered)
    return Buffers(flats=mean_over_ranks(setup, summed), placement=to)


def mean_over_ranks(setup: Setup, summed: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """summed / W: the visible division after every sum."""
    ranks = setup.axis.size
    if ranks == 1:
        return tuple(summed)
    if in_transform() or is_recorded(summed) or any(s.requires_grad for s in summed):
        return tuple(s / ranks for s in summed)
    return tuple(s.div_(ranks) for s in summed)  # fresh from the collective: nobody else's


def accumulate(state: TrainState, new: Buffers) -> TrainState:
    """Return `state` with `new` added to its reduced gradients."""
    old = state.gradients
    if old.held and donates(state):
        return state.replace(gradients=add_donated(old, new))
    return state.replace(gradients=buffers.add(old, new))


def settle(state: TrainState, to: Placement | None = None) -> TrainState:
    """Reduce what is pending in the state's window and add it to its gradients.

    `to` asks for a placement: before an update the optimizer's own, so that a window costs one
    reduce-scatter and not an all-reduce.
    """
    setup = state.setup
    to = to or setup.gradients
    emptied, pending = window.take(state.window)
    gradients = state.gradients
    if gradients.held and gradients.placement is not to:
        gradients = place(setup, gradients, to)
    state = state.replace(window=emptied, gradients=gradients)
    if not pending.held:
        return state
    eager = not (in_transform() or is_recorded(pending.flats))
    if setup.gathers_by_unit and not setup.lockstep and eager:
        meet(setup.axis)
    owned = donates(state)
    local = take_over(pending).flats if owned else pending.flats
    state = accumulate(state, reduce_gradients(setup, local, to, owned=owned))
    return state.replace(progress=progress.saw_reduction(state.progress))


def place(setup: Setup, held: Buffers, to: Placement) -> Buffers:
    """Return the same values REPLICATED or SHARDED."""
    buffers.require_reduced(held)
    if held.placement is to:
        return held
    if to is Placement.REPLICATED:
        return Buffers(flats=tuple(gather_many(held.flats, setup.axis)), placement=to)
    rank = setup.axis.rank
    rows = tuple(shard_rows(flat, setup.axis.size, rank) for flat in held.flats)
    return Buffers(flats=rows, placement=to)
