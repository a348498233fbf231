"""Reading a state: full parameters and full gradients as pytrees, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

import optree
from torch import Tensor
from torch.nn import Parameter

from fzero.context.modes import in_transform
from fzero.machine.offload import to_device
from fzero.machine.packing import gather_parts, unpack, unpack_groups
from fzero.machine.partition import assemble
from fzero.state import Layout, Placement, TrainState, buffers
from fzero.transforms._reading import require_learner
from fzero.transforms.agree import Agreed, agree, reduce_agreed, require_held
from fzero.transforms.donation import check_alive, without_donation
from fzero.transforms.outer import anchor_of
from fzero.transforms.scaled import without_scale
from fzero.transforms.states import ParamsT, call_of_states, flatten_states
from fzero.transforms.weights import divided, total_weight


@overload
def full_params(state: TrainState[ParamsT], *, replica: bool = False) -> ParamsT: ...
@overload
def full_params(state: Any, *, replica: bool = False) -> Any: ...
def full_params(state: Any, *, replica: bool = False) -> Any:
    """Return copies of the parameters, whole on every rank: p = concat_r(p_r).

    They come as the pytree given to `init`. A write to them changes no state, and they stay as they
    are when the state goes on. Frozen floating leaves are parameters that require no grad, so that
    another `init` sees them as frozen too.

    Args:
        state: a `TrainState`, or a pytree of them.
        replica: of a state with local updates (`fzero.local`) the parameters of this rank's
            replica; else the anchors, which are equal on all replicas.

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
        check_alive(one, written=True)  # it shows what is there
    agree(
        call_of_states("full_params", treespec),
        [one for one in states if _is_gathered(one, replica)],
    )
    return optree.tree_unflatten(treespec, [_full_params(one, replica) for one in states])


@overload
def gradients(state: TrainState[ParamsT]) -> ParamsT: ...
@overload
def gradients(state: Any) -> Any: ...
def gradients(state: Any) -> Any:
    """Return copies of the mean gradients, whole on every rank: g = (1/W) sum_r g_r.

    They come in the structure of the parameters. A write to them (`clip_grad_norm_`, `mul_`)
    changes no state: `fzero.clip` clips, and `fzero.add_gradients(..., reduced=True)` takes changed
    ones. With `reduce_op="sum"` it is sum_r g_r; after weighted calls sum(w g) / sum(w) of those so
    far.

    What is pending in an open window is reduced for the answer (the state itself keeps it
    pending). Not clipped, and without the loss scale. `full_gradients` is another name of it.

    Args:
        state: a `TrainState`, or a pytree of them.

    Returns:
        The pytree of full tensors, in the shapes of the parameters, in `accumulate_dtype`: by
        default in fp32 for 16-bit ones, else in their dtype. Unused leaves are zero; in the place
        of a frozen one, which has no gradient, stands None. For a pytree of states one such pytree
        for each. A collective: every rank must call it.

    Raises:
        LayoutError: for what is no state, and where no leaf of any state learns.
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
    require_learner(states, "gradients")
    said = agree(call_of_states("gradients", treespec), states)
    require_held(said, "gradients")
    found = [_gradients(one, all_say) for one, all_say in zip(states, said, strict=True)]
    return optree.tree_unflatten(treespec, found)


full_gradients = gradients


def _is_gathered(state: TrainState, replica: bool) -> bool:
    held = state.outer
    at = state.params if replica or held is None else held.anchors
    cut = Placement.SHARDED in (state.params.placement, at.placement)
    return cut and state.setup.axis.size > 1


def _full_params(state: TrainState, replica: bool) -> Any:
    layout = state.setup.layout
    found = _leaves_apart(layout, whole_groups(state, range(len(layout.groups)), replica=replica))
    for i, leaf in enumerate(layout.leaves if not in_transform() else ()):
        differs = leaf.dtype.is_floating_point or leaf.dtype.is_complex
        if differs and not leaf.trainable:  # it comes back as it came
            found[i] = Parameter(found[i], requires_grad=False)
    return assemble(layout, found)


def whole_groups(
    state: TrainState, groups: Iterable[int], *, replica: bool = False
) -> dict[int, Tensor]:
    """Return {group: its full flat}, on the device. A collective where any of them is cut."""
    by_placement: dict[Placement, dict[int, Tensor]] = {}
    for index, flat, placement in held_of(state, groups, replica=replica):
        by_placement.setdefault(placement, {})[index] = to_device(flat, state.device)
    whole: dict[int, Tensor] = {}
    while by_placement:
        placement, held = by_placement.popitem()
        full = gather_parts(state.setup, [*held.values()], placement, Placement.REPLICATED)
        whole.update(zip(held, full, strict=True))
    return whole


def held_of(
    state: TrainState, groups: Iterable[int], *, replica: bool = False
) -> list[tuple[int, Tensor, Placement]]:
    """Return (group, what this rank has of its parameters, where ranks have the rest).

    replica: of a state with local updates what its replica has; else the anchors.
    """
    outer, learning = None if replica else state.outer, state.setup.layout.trainable
    return [
        (index, state.params.flats[index], state.params.placement)
        if outer is None or index not in learning
        else (index, anchor_of(state, index), outer.anchors.placement)
        for index in groups
    ]


def placement_of(state: TrainState, index: int) -> Placement:
    """Return the placement that `held_of` gives of a group."""
    outer, learning = state.outer, state.setup.layout.trainable
    held = state.params if outer is None or index not in learning else outer.anchors
    return held.placement


def _leaves_apart(layout: Layout, flats: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the leaves of full flats: copies, so that what is saved of one is that leaf alone."""
    if in_transform():
        return unpack_groups(layout, flats)
    found: dict[int, Tensor] = {}
    for index in list(flats):  # no flat lives longer than its copy is made
        leaves = unpack(layout, index, flats.pop(index))
        found.update(zip(layout.groups[index].leaves, [x.clone() for x in leaves], strict=True))
    return found


def _gradients(state: TrainState, agreed: Agreed) -> Any:
    setup, layout = state.setup, state.setup.layout
    state = reduce_agreed(without_donation(state), agreed)
    held, total = buffers.require_reduced(state.gradients), total_weight(state)
    here = [to_device(flat, state.device) for flat in held.flats]
    whole = gather_parts(setup, here, held.placement, Placement.REPLICATED)
    means = {
        i: divided(without_scale(state, x), total)
        for i, x in zip(layout.trainable, whole, strict=True)
    }
    del whole
    found = _leaves_apart(layout, means)
    return assemble(layout, found)
