"""Donation: buffers of a used-up state are overwritten, and its own handles on them emptied."""

from __future__ import annotations

import dataclasses
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.context.modes import in_transform, is_recorded, wants_graph
from fzero.machine.offload import add_to
from fzero.state import NAMESPACE, Buffers, TrainState
from fzero.state.alive import require_not_donated
from fzero.state.offload import Home
from fzero.transforms.dropped import HERE, took
from fzero.transforms.written import given_back, require_unwritten


def donates(state: TrainState) -> bool:
    """Whether a state donates its buffers now: no graph or trace needs them."""
    if not state.setup.policy.donate or in_transform() or is_recorded(state.params.flats):
        return False
    return not wants_graph([*state.gradients.flats, *state.window.pending.flats])


def without_donation(state: TrainState) -> TrainState:
    """Return the same state to read from: reading must not use it up."""
    return state.replace_policy(donate=False)


def take_over(tree: Any) -> Any:
    """Return the same memory behind new tensors, and empty the old ones.

    Every state that shares the old tensor objects is used up by this: `check_alive` raises for
    it, and no read of it can see memory that changes under it. Copies (`torch.clone`) live on.
    """
    empties: dict[Any, Any] = {}

    def take(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return tensor
        kind = (type(tensor), tensor.dtype, tensor.device)  # a plan has some without values
        if kind not in empties:
            empties[kind] = tensor.new_empty(0)
        alias = tensor.detach()
        tensor.set_(empties[kind])
        return alias

    with torch.no_grad():
        return optree.tree_map(take, tree, namespace=NAMESPACE)


def undo_take_over(old: Any, taken: Any) -> None:
    """Undo `take_over`: the tensors of `old` have the memory of those of `taken` again."""
    before = optree.tree_leaves(old, namespace=NAMESPACE)
    after = optree.tree_leaves(taken, namespace=NAMESPACE)
    with torch.no_grad():
        for x, y in zip(before, after, strict=True):
            if x is not y:
                x.set_(y)
    given_back(before)


def add_donated(old: Buffers, new: Buffers, home: Home) -> Buffers:
    """old + new in the memory of `old`, which lives at `home` and is used up."""
    kept: Buffers = take_over(old)
    if home is not None:
        for mine, flat in zip(kept.flats, new.flats, strict=True):
            add_to(mine, flat)
    else:
        torch._foreach_add_(list(kept.flats), list(new.flats))
    return kept


def check_alive(state: TrainState, *, written: bool = False) -> None:
    """Raise `DonatedError` if `state`, or its gradients, was used up by a donating step.

    And `AxisError` if its ranks are not here: a stacked state outside of `simulate`, say;
    `PhaseError` if one of its buffers was written in place, unless a `written` state will do.
    """
    if HERE.made:
        took([state])
    state.setup.axis.rank  # noqa: B018 - raises
    require_not_donated(state)
    if not written:
        require_unwritten(state)


def own_gradients(state: TrainState) -> TrainState:
    """Copy the gradients that a state brings into a donating step.

    Inside, gradients add up in place; the caller's must survive a step that raises.
    """
    held: Any = (state.gradients, state.window.pending)
    gradients, pending = optree.tree_map(torch.clone, held, namespace=NAMESPACE)
    kept = dataclasses.replace(state.window, pending=pending)
    return state.replace(gradients=gradients, window=kept)


def empty(tensor: Tensor, nothing: Any) -> None:
    """Let go of what `tensor` holds: it is as empty as `nothing` from now on."""
    with torch.no_grad():
        tensor.set_(nothing)
