"""The values of all virtual ranks as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stack_ranks(column: Sequence[Tensor]) -> Tensor:
    """Return [W, *t] of what each rank has of one place of a state.

    What one rank keeps for all of them, and the others have empty, is shown on each rank: a view,
    which takes no more memory than its owner does. (Of several replicas, each has its own.)

    Example:
        >>> stack_ranks([torch.empty(0), torch.ones(2)])
        tensor([[1., 1.],
                [1., 1.]])
    """
    if len({x.shape for x in column}) == 1:
        return torch.stack(list(column))
    kept = [x for x in column if x.numel()]
    if any(x.shape != kept[0].shape for x in kept):
        raise ValueError(f"ranks have {sorted({tuple(x.shape) for x in column})}")
    if len(kept) == 1:
        return kept[0].expand(len(column), *kept[0].shape)
    # Each replica writes to what its own owner has.
    return torch.stack([x if x.numel() else kept[0] for x in column])
