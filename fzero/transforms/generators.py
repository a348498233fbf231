"""The random numbers of a logical rank: a function of the seed and of the place in the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from fzero.context.current_rank import is_abstract
from fzero.context.rng import of_devices, seeded
from fzero.errors import PhaseError
from fzero.state import TrainState
from fzero.state.logical import fold_in


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


@contextmanager
def drawn_in_losses_alone(state: TrainState) -> Iterator[None]:
    """Raise `PhaseError` at the end of a step of logical ranks that has moved torch's generators.

    A loss puts them back. What else draws does it for the rows of all logical ranks of this rank
    together, so the numbers of a row depend on how many ranks there are.
    """
    if state.setup.logical is None or is_abstract():
        yield
        return
    generators = of_devices(state.device)
    before = [one.get_state() for one in generators]
    yield
    for one, then in zip(generators, before, strict=True):
        if not torch.equal(one.get_state(), then):
            raise PhaseError(
                f"a step with logical_ranks={state.setup.logical.ranks} drew from torch's "
                f"generator of {one.device} outside of its losses: on another number of ranks its "
                "rows would get other numbers.",
                cause="noise on the batch, or a model in train mode, before grad_and_reduce; noise "
                "on gradients after it.",
                fix="draw in the loss that grad_and_reduce is given, or in the data set or "
                "collate_fn of fzero.data.batches, where the numbers are those of the logical "
                "rank. What is the same for all ranks: generator=torch.Generator().manual_seed("
                "fzero.fold_in(seed, int(state.step))).",
            )
