"""The random numbers of a logical rank: a function of the seed and of the place in the run."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from fzero.context.generators import seeded
from fzero.state.fold_in import fold_in


def generators_of(
    seed: int, update: int, call: int, logical_rank: int, device: torch.device
) -> AbstractContextManager[None]:
    """Return a block in which torch's generators are those of a logical rank.

    They are set by fold_in(seed, update, call, logical_rank): that of the CPU, and that of `device`
    if it is a CUDA device. When the block ends, also by an exception, they are as they were before
    it. What is recomputed in a backward (`remat`, torch.utils.checkpoint) draws the same numbers
    again, in the block or after it: a recomputation sets the state that its forward began with.

    Args:
        seed: of the run.
        update: how many updates were made before.
        call: which gradient call of this update it is, from 0.
        logical_rank: which logical rank runs, from 0.
        device: of the state.

    Raises:
        LayoutError: for a number that `fold_in` does not take.

    Example:
        >>> import torch
        >>> with generators_of(0, update=7, call=0, logical_rank=3, device=torch.device("cpu")):
        ...     first = torch.rand(1)
        >>> with generators_of(0, update=7, call=0, logical_rank=3, device=torch.device("cpu")):
        ...     print(torch.equal(torch.rand(1), first))
        True
    """
    return seeded(fold_in(seed, update, call, logical_rank), device)
