"""The norm of gradients over all ranks, and the factor that clips to one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fzero.collectives import reduce_many
from fzero.machine.offload import to_device
from fzero.machine.packing import over_places
from fzero.machine.tree_sum import square_sum
from fzero.state import Buffers, Placement, TrainState
from fzero.state.train_state import require_state
from fzero.transforms._reading import require_learner
from fzero.transforms.agree import agree, reduce_agreed, require_held
from fzero.transforms.donation import check_alive, without_donation
from fzero.transforms.scaled import without_scale
from fzero.transforms.weights import divided, total_weight


def global_norm(state: TrainState) -> Tensor:
    """sqrt(sum of g^2) over the mean gradients of every trainable element, on all ranks alike.

    Shards are summed over ranks, replicas counted once, padding is zero; tied leaves are one
    leaf, frozen ones have no gradient. Of a state on a part of a mesh it is over the elements at
    all places: over all experts. A scalar, fp32 or wider. A collective.

    Raises `PhaseError` if the state holds no gradients, and `LayoutError` for what is no state, or
    one of which no leaf learns.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([3.0, 4.0])}, fzero.optim.sgd(0.5), stage=0)
        >>> state, _ = fzero.grad_and_reduce(lambda p: (p["w"] ** 2).sum() / 2, state)()
        >>> fzero.global_norm(state)
        tensor(5.)
    """
    require_state("global_norm", state)
    check_alive(state)
    require_learner([state], "global_norm")
    said = agree("global_norm", [state])
    require_held(said, "global_norm")
    reduced = reduce_agreed(without_donation(state), said[0])
    return divided(norm_of_state(reduced, reduced.gradients), total_weight(reduced))


def norm_of_state(state: TrainState, gradients: Buffers) -> Tensor:
    """Return the norm of a state's reduced gradients, without its loss scale. A collective.

    Before any other division.
    """
    flats = (without_scale(state, flat) for flat in gradients.flats)  # one at a time
    return norm_of(state, flats, gradients.placement)


def norm_of(state: TrainState, flats: Iterable[Tensor], placement: Placement) -> Tensor:
    """Return the norm of what ranks hold of gradients placed so. A collective.

    In a layout of blocks it is a sum in one order: the same bits at any stage, on any ranks.
    """
    setup, device = state.setup, state.device
    if setup.layout.options.block > 1 and setup.layout.trainable:
        return square_sum(setup, (to_device(flat, device) for flat in flats), placement).sqrt()
    squares = [_square_sum(to_device(flat, device)) for flat in flats if flat.numel()]
    nothing = torch.zeros((), dtype=torch.float32, device=device)
    total = torch.stack(squares).sum() if squares else nothing
    axis = setup.over(placement)  # replicas have the same elements, which count once
    total = reduce_many([total], axis, ordered=setup.reduction.ordered)[0]
    return over_places(setup, total).sqrt()


def _square_sum(flat: Tensor) -> Tensor:
    wide = torch.promote_types(flat.dtype, torch.float32)
    return torch.linalg.vector_norm(flat, dtype=wide).square()
