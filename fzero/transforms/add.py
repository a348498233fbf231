"""`add_gradients`: put a ready gradient into a state, as if a backward had brought it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optree
from torch import Tensor

from fzero.context.modes import in_transform
from fzero.errors import LayoutError, PhaseError
from fzero.machine.named_shards import leaf_numbers
from fzero.machine.packing import cut, pack
from fzero.machine.partition import matched
from fzero.state import NAMESPACE, Placement, TrainState
from fzero.state.layout import Layout, Leaf
from fzero.state.train_state import GivenCall
from fzero.transforms.accumulate_grad import mean_of, receive
from fzero.transforms.backward_pass import agree, tell_at_next_round
from fzero.transforms.donation import check_alive, returned
from fzero.transforms.grad import require_learner
from fzero.transforms.logical_rank import require_reduced_beside
from fzero.transforms.observe import tell_added
from fzero.transforms.recipe import begun, called, facts, times_factor
from fzero.transforms.state_entries import entries_of, with_entries


def add_gradients(state: TrainState, grads: Any, *, reduced: bool = False) -> TrainState:
    """Return state', gradients' = gradients + mean_r(grads_r), or + grads if they are `reduced`.

    For gradients that are made elsewhere: clipped and noised per-sample gradients (DP-SGD), sums
    over cached representations, gradients by hand. They are treated as those of a backward: they
    stay local in a coalescing window, add up, and are divided by the micro-batches of `accumulate`.
    Give them without the loss scale: they are multiplied by it here.

    Args:
        state: a train state.
        grads: a pytree like the parameters, of full tensors of the same shapes. In the place of a
            frozen leaf stands anything, such as None; a leaf that learns has a gradient, zeros if
            nothing has used it. Other dtypes are converted to that of the sum. Or another state of
            the same layout, whose gradients are given to this one, which has none: as they are,
            reduced or waiting, with their weights and their loss scale. No collective then.
        reduced: they are the same on every rank, and the mean already.

    Returns:
        The new state. A collective, unless a window is open.

    Raises:
        LayoutError: for another structure or shape, for None as the gradient of a leaf that
            learns, for a state of which none does, for a reduced gradient in a window, where it
            would be reduced again, and for a state of another layout, stage or mesh, or with other
            options of reductions.
        PhaseError: for the gradients of another state, if this one has gradients, or that one none.
        DonatedError: for a state that was used up.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.zeros(2)}, fzero.optim.sgd(1.0), stage=2)
        >>> state = fzero.add_gradients(state, {"w": torch.tensor([1.0, 2.0])})
        >>> fzero.full_params(fzero.apply_gradients(state))
        {'w': tensor([-1., -2.])}
    """
    check_alive(state)
    require_learner([state], "add_gradients")
    if isinstance(grads, TrainState):
        return _given_by(state, grads)
    setup, waits = state.setup, state.window.is_open
    if not reduced:
        require_reduced_beside(setup)
    if reduced and waits:
        raise LayoutError(
            "add_gradients: a reduced gradient inside a coalescing window.",
            cause="the window reduces all that is in it when it closes.",
            fix="add this rank's own gradient (reduced=False), or add it outside of it.",
        )
    if waits:
        tell_at_next_round(state, "add_gradients in a window")
    state = begun(called(state, GivenCall("add_gradients")))
    given = _flats(state, grads)
    tell_added(state, given, reduced=reduced)
    times = times_factor(state, given)
    share = 1.0 if reduced else setup.share_of_mesh
    wide = times if share == 1.0 else [x * share for x in times]
    own: Any = [x.to(flat.dtype) for x, flat in zip(wide, given, strict=True)]
    if not waits:
        agree(f"add_gradients(reduced={reduced})", [state])
    if not waits and not reduced:
        own = mean_of(setup, own)
    elif not waits:
        own = [cut(setup, flat, Placement.REPLICATED, setup.gradients) for flat in own]
    new = receive(state, own)
    returned([new], gradients=True, name="add_gradients", given=[state])
    return new


def _given_by(state: TrainState, other: TrainState) -> TrainState:
    """Return the state with the gradients of another one, and what is counted of them."""
    check_alive(other)
    mine, theirs = state.setup, other.setup
    if (mine.stage, mine.axis, mine.layout) != (theirs.stage, theirs.axis, theirs.layout):
        raise LayoutError(
            "add_gradients: the gradients of a state of another layout, stage or mesh.",
            cause="another model, or a state that was resharded.",
            fix="give fzero.gradients(other), whole ones, with reduced=True.",
        )
    if state.progress.backwards or not other.progress.backwards:
        which = "the state holds" if state.progress.backwards else "the other state holds no"
        raise PhaseError(
            f"add_gradients: {which} gradients.",
            cause="a second call between two updates, or a state from before grad_and_reduce.",
            fix="add to the gradients of a state by fzero.gradients(other), reduced=True.",
        )
    known = facts(state, "call"), state.window.is_open, mine.reduction
    if known != (facts(other, "call"), other.window.is_open, theirs.idle.reduction):
        raise LayoutError(
            "add_gradients: the gradients of a state with another loss scale or window, or that "
            "are reduced in another way.",
            cause="a state that did not come from this one.",
            fix="give fzero.gradients(other), whole ones, with reduced=True.",
        )
    tell_at_next_round(state, "add_gradients(state, another state)")
    new = state.replace(
        gradients=other.gradients,
        window=other.window,
        progress=other.progress,
        setup=replace(mine, reduction=theirs.reduction),
    )
    entries = entries_of(other, theirs.axis.rank, live=True)
    new = with_entries(new, [one for one in entries if one.form.lifetime == "update"])
    returned([new], gradients=True, name="add_gradients", given=[state])
    return new


def _flats(state: TrainState, grads: Any) -> list[Any]:
    """The gradients as one flat [W l] for each group that learns, in the dtype of the sum."""
    setup, layout = state.setup, state.setup.layout
    given = _by_leaf(layout, grads)
    found = []
    for index in layout.trainable:
        group, dtype = layout.groups[index], setup.accumulate_dtype(index)
        device = state.device
        parts = []
        for leaf in group.leaves:
            one, like = given[leaf], layout.leaves[leaf]
            _require_gradient(one, like)
            own = dtype.to_complex() if like.dtype.is_complex else dtype
            parts.append(one.to(device=device, dtype=own))
        flat = pack(layout, index, parts)
        found.append(flat if in_transform() else flat.detach().clone())
    return found


def _require_gradient(one: Any, like: Leaf) -> None:
    """Raise `LayoutError` for what is no gradient of a leaf that learns."""
    if not isinstance(one, Tensor):
        seen = "None" if one is None else f"a {type(one).__name__}"
        raise LayoutError(
            f"add_gradients: the gradient of {like.title} is {seen}, and the leaf learns.",
            cause="gradients of a state in which it is frozen, p.grad of a parameter that nothing "
            "has used, or torch.autograd.grad(..., allow_unused=True).",
            fix="give torch.zeros_like(p) if it has none (materialize_grads=True makes them), or "
            "freeze the leaf: trainable=, requires_grad_(False).",
        )
    if tuple(one.shape) != like.shape:
        raise LayoutError(
            f"add_gradients: the gradient of {like.title} has shape "
            f"{tuple(one.shape)}, the parameter {like.shape}.",
            cause="per-sample gradients that were not summed, or another model's.",
            fix="give one gradient for each parameter, e.g. g.mean(0).",
        )


def _by_leaf(layout: Layout, grads: Any) -> list[Any]:
    pairs, paths = matched(layout, grads), leaf_numbers(layout)
    tree: Any = grads
    learning = {path for path, leaf in paths.items() if layout.leaves[leaf].trainable}
    if pairs is None and isinstance(grads, dict) and learning <= set(grads) <= set(paths):
        pairs = [(leaf, grads.get(path)) for path, leaf in paths.items()]
    if pairs is None:
        seen = optree.tree_structure(tree, none_is_leaf=True, namespace=NAMESPACE)
        raise LayoutError(
            f"add_gradients: the gradients have the structure {seen}, the parameters "
            f"{layout.treespec}.",
            cause="gradients of another model, or only of a part of it.",
            fix="give a pytree like the parameters, with zeros where nothing has used a leaf.",
        )
    found: list[Any] = [None] * len(layout.leaves)
    for leaf, gradient in pairs:
        if gradient is not None:  # of a tied leaf, the gradients of its places add up
            found[leaf] = gradient if found[leaf] is None else found[leaf] + gradient
    return found
