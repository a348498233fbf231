"""Reading a state: full parameters and full gradients as pytrees, gathered from all ranks."""

from __future__ import annotations

from typing import Any

import optree
from torch.nn import Parameter

from fzero._modes import in_transform
from fzero.collectives import gather_parts
from fzero.homes import lent
from fzero.packing import unpack_groups
from fzero.partition import assemble
from fzero.state import Placement, TrainState, buffers, progress
from fzero.transforms._donate import check_alive, without_donation
from fzero.transforms._receive import boundary, reduce_pending
from fzero.transforms._scaled import without_scale
from fzero.transforms._states import flatten_states


def full_params(state: Any) -> Any:
    """p = concat_r(p_r): the parameters as the pytree given to `init`, whole, on every rank.

    The tensors are copies: they stay as they are when the state goes on; frozen floating leaves
    are parameters that require no grad, so that another `init` sees them as frozen too.

    Args:
        state: a `TrainState`, or a pytree of them.

    Returns:
        The pytree of full tensors, in the shapes and dtypes given to `init`; P bytes on each rank.
        For a pytree of states one such pytree for each. A collective at stage 3: every rank must
        call it.

    Raises:
        LayoutError: for what is no state.
        DonatedError: for a state that was used up.
        MismatchError: at stage 3, on every rank, when the ranks make other calls.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.3.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init([torch.ones(2)], fzero.optim.sgd(0.1), stage=3)
        >>> full_params(state)
        [tensor([1., 1.])]
    """
    states, treespec = flatten_states("full_params", state)
    for one in states:
        check_alive(one)
    boundary("full_params", [one for one in states if _is_gathered(one)])
    return optree.tree_unflatten(treespec, [_full_params(one) for one in states])


def gradients(state: Any) -> Any:
    """g = (1/W) sum_r g_r, whole, on every rank, in the structure of the parameters.

    With `reduce_op="sum"` it is sum_r g_r.

    What is pending in an open window is reduced for the answer (the state itself keeps it
    pending). Not clipped, and without the loss scale. `full_gradients` is another name of it.

    Args:
        state: a `TrainState`, or a pytree of them.

    Returns:
        The pytree of full tensors, in the shapes of the parameters, in `accumulate_dtype`: by
        default in fp32 for 16-bit ones, else in their dtype. Unused leaves are zero, frozen ones
        None. For a pytree of states one such pytree for each. A collective: every rank must call
        it.

    Raises:
        LayoutError: for what is no state.
        PhaseError: if a state holds no gradients.
        DonatedError: for a state that was used up.
        MismatchError: on every rank, when the ranks make other calls.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.2.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([3.0])}, fzero.optim.sgd(0.1), stage=2)
        >>> state, _ = fzero.grad_and_reduce(lambda p: (p["w"] ** 2).sum(), state)()
        >>> gradients(state)
        {'w': tensor([6.])}
    """
    states, treespec = flatten_states("gradients", state)
    for one in states:
        check_alive(one)
        progress.require_gradients(one.progress, "gradients")
    boundary("gradients", states)
    return optree.tree_unflatten(treespec, [_gradients(one) for one in states])


full_gradients = gradients


def _is_gathered(state: TrainState) -> bool:
    return state.params.placement is Placement.SHARDED and state.setup.axis.size > 1


def _full_params(state: TrainState) -> Any:
    held = state.params.flats
    flats = [lent(flat, state.device) for flat in held]
    if _is_gathered(state):
        flats = gather_parts(state.setup, flats, state.params.placement, Placement.REPLICATED)
    elif not in_transform():
        flats = [x.clone() if x is flat else x for x, flat in zip(flats, held, strict=True)]
    layout = state.setup.layout
    found = unpack_groups(layout, dict(enumerate(flats)))
    for i, leaf in enumerate(layout.leaves if not in_transform() else ()):
        differs = leaf.dtype.is_floating_point or leaf.dtype.is_complex
        if differs and not leaf.trainable:  # it comes back as it came
            found[i] = Parameter(found[i], requires_grad=False)
    return assemble(layout, found)


def _gradients(state: TrainState) -> Any:
    setup, layout = state.setup, state.setup.layout
    held = buffers.require_reduced(reduce_pending(without_donation(state)).gradients)
    here = [lent(flat, state.device) for flat in held.flats]
    whole = gather_parts(setup, here, held.placement, Placement.REPLICATED)
    unscaled = (without_scale(state, flat) for flat in whole)
    flats = [flat if in_transform() else flat.clone() for flat in unscaled]
    found = unpack_groups(layout, dict(zip(layout.trainable, flats, strict=True)))
    return assemble(layout, found)
