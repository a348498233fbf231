"""`apply_gradients`: reduced gradients -> the optimizer -> new parameters, placed as before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.collectives import gather_in_place, gather_many
from fzero.partition import shard_of
from fzero.state import Buffers, Placement, TrainState, buffers, progress
from fzero.transforms._donate import (
    check_alive,
    donates,
    give_back,
    take_over,
    without_donation,
)
from fzero.transforms._modes import in_transform, is_recorded, wants_graph
from fzero.transforms._norm import clip_factor, norm_of
from fzero.transforms._pieces import pieces_of
from fzero.transforms._receive import boundary, reduce_pending
from fzero.transforms._states import S, flatten_states


@torch._disable_dynamo
def apply_gradients(state: S) -> S:
    """Return the state after one update: p' = p + update(mean gradient), step' = step + 1.

    A pending window is reduced first (once) and stays open if it was; gradients are clipped as
    an enclosing `fzero.clip` asks; then they are cleared. Inside `fzero.accumulate` the update
    waits for the last micro-batch. `state` may be a pytree of states.

    Raises `PhaseError` if the state holds no gradients (also on a second call), `DonatedError`
    if it was used up. With donation the update is made in the state's own buffers, which uses
    the state up; before that moment an error leaves it whole.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([3.0])}, fzero.optim.sgd(0.5), stage=0)
        >>> state, _ = fzero.grad_and_reduce(lambda p: (p["w"] ** 2).sum(), state)()
        >>> fzero.full_params(fzero.apply_gradients(state))
        {'w': tensor([0.])}
    """
    states, treespec = flatten_states("apply_gradients", state)
    for one in states:
        check_alive(one)
    due = [one for one in states if not one.setup.policy.defer_update]
    for one in due:
        progress.saw_update(one.progress)
    boundary("apply_gradients", due, updates=True)
    new: Any = optree.tree_unflatten(treespec, [_apply(one) for one in states])
    return new


def global_norm(state: TrainState) -> Tensor:
    """sqrt(sum of g^2) over the mean gradients of every trainable element, on all ranks alike.

    Shards are summed over ranks, replicas counted once, padding is zero; tied leaves are one
    leaf, frozen ones have no gradient. A scalar, fp32 or wider. A collective.

    Raises `PhaseError` if the state holds no gradients.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([3.0, 4.0])}, fzero.optim.sgd(0.5), stage=0)
        >>> state, _ = fzero.grad_and_reduce(lambda p: (p["w"] ** 2).sum() / 2, state)()
        >>> fzero.global_norm(state)
        tensor(5.)
    """
    check_alive(state)
    progress.require_gradients(state.progress, "global_norm")
    boundary("global_norm", [state])
    return norm_of_state(state, reduce_pending(without_donation(state)).gradients)


def _apply(state: TrainState) -> TrainState:
    if state.setup.policy.defer_update:
        return state.replace(progress=progress.defer_update(state.progress))
    return update(reduce_pending(state))[0]


def update(state: TrainState) -> tuple[TrainState, Tensor | None]:
    """Return the state after one update from its reduced gradients, and their norm if clipped.

    Both drivers come here: no rank is asked, what waited is reduced. Raises `PhaseError` if there
    are no gradients. If the optimizer raises, the state is as it was.
    """
    after = progress.saw_update(state.progress)
    gradients, factor, norm = _prepared(state, buffers.require_reduced(state.gradients))
    try:
        params, optimizer = _advance(state, gradients.flats)
    except BaseException:
        if gradients is not state.gradients and donates(state):
            gradients = scaled(state, gradients, 1 / factor)
            give_back(state.gradients, gradients)
        raise
    new = state.replace(
        params=params,
        optimizer=optimizer,
        gradients=Buffers(),
        step=state.step + 1,
        progress=after,
    )
    return new, norm


def share(state: TrainState) -> float:
    """What an update multiplies gradients by: 1 / (loss scale x backwards, if it averages)."""
    policy = state.setup.policy
    return policy.unscale / (max(state.progress.backwards, 1) if policy.averages else 1)


def _advance(state: TrainState, gradients: Sequence[Tensor]) -> tuple[Buffers, Any]:
    """Run the optimizer on this rank's shards, and make the parameters whole again."""
    setup, layout = state.setup, state.setup.layout
    owned = donates(state)
    held, optimizer = state.params, state.optimizer
    if owned:  # from here on the old state is used up
        held, optimizer = take_over(held), take_over(optimizer)
    fulls = [held.flats[i] for i in layout.trainable]
    splits = setup.optimizer_state is Placement.SHARDED and setup.params is Placement.REPLICATED
    shards = [shard_of(f, setup.axis.size, setup.axis.rank) for f in fulls] if splits else fulls
    general = in_transform() or is_recorded(shards) or wants_graph([*shards, *gradients])
    try:
        new, optimizer = setup.optimizer.advance(
            shards, gradients, optimizer, pieces_of(setup), differentiable=general, owned=owned
        )
    except BaseException:
        give_back((state.params, state.optimizer), (held, optimizer))
        raise
    if splits and setup.axis.size > 1:
        if owned:  # the shards were written where they stand
            wanted = [full for full in fulls if full.numel()]
            gather_in_place(wanted, setup.axis)
            new = fulls
        else:
            new = gather_many(new, setup.axis)
    flats = list(held.flats)
    for i, flat in zip(layout.trainable, new, strict=True):
        flats[i] = flat
    return Buffers(flats=tuple(flats), placement=held.placement), optimizer


def _prepared(state: TrainState, gradients: Buffers) -> tuple[Buffers, Any, Tensor | None]:
    """g factor, factor = share min(1, max_norm / |g share|); and the norm if it clips.

    In place where the gradients are used up anyway.
    """
    max_norm, norm = state.setup.policy.max_norm, None
    factor: Any = share(state)
    if max_norm is not None:
        norm = norm_of_state(state, gradients) * factor
        factor = factor * clip_factor(norm, max_norm)
    elif factor == 1.0:
        return gradients, factor, None
    return scaled(state, gradients, factor), factor, norm


def scaled(state: TrainState, gradients: Buffers, factor: Tensor | float) -> Buffers:
    """g factor, in place if the state donates."""

    def of(flat: Tensor) -> Any:
        return factor.to(flat.dtype) if isinstance(factor, Tensor) else factor

    if donates(state):
        owned: Buffers = take_over(gradients)
        for flat in owned.flats:
            flat.mul_(of(flat))
        return owned
    flats = tuple(flat * of(flat) for flat in gradients.flats)
    return Buffers(flats=flats, placement=gradients.placement)


def norm_of_state(state: TrainState, gradients: Buffers) -> Tensor:
    """Return the norm of a state's reduced gradients, before any division. A collective."""
    setup = state.setup
    flats, placement = gradients.flats, gradients.placement
    return norm_of(flats, placement, setup.axis, ordered=setup.reduction.ordered)
