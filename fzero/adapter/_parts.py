"""`engine.parts`: a loop over the parts of a batch, one for each logical rank of this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fzero.adapter._torch_hooks import in_backward
from fzero.adapter.driver import Driver
from fzero.errors import PhaseError
from fzero.transforms.logical_ranks import parts_of_batch, told_of_errors


def parts(  # noqa: D417
    driver: Driver, batch: Any, *, in_axes: Any = 0, sizes: Sequence[int] | None = None
) -> Iterator[Any]:
    """Yield the part of a batch of each logical rank that this rank carries, in order.

    In a turn of the loop `fzero.axis_index()`, `axis_size()`, torch's generators and the buffers of
    the module are those of the logical rank. Each turn has its own forwards and backwards, as many
    as the others; the update that follows is that of all logical ranks. Where each rank carries one
    its gradients are reduced beside the backward; else when the loop ends, which is a collective.
    Between two updates a logical rank goes on with its own buffers; at the update floating ones
    become the mean of all, others those of logical rank 0.

    The loop must come to its end: after a break or an exception `step()` raises until
    `zero_grad()`. It may stand in a window. Without logical ranks the batch is the one part.

    Args:
        batch: of this rank: a pytree of tensors, with the rows of its logical ranks in order.
        in_axes: which dim of them is cut, as in `torch.func.vmap`: an int, or a tree with the first
            levels of the batch; None for what each part gets whole.
        sizes: how many rows each of this rank's logical ranks has; default equal parts.

    Raises:
        LayoutError: for a batch that does not divide, and axes or sizes that do not fit.
        PhaseError: inside of another such loop, of a forward or a backward.

    Example:
        >>> import torch
        >>> from fzero.adapter import Engine
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> engine = Engine(model, optimizer, stage=2, logical_ranks=2)
        >>> for part in engine.parts(torch.tensor([[1.0, 0.0], [0.0, 1.0]])):
        ...     engine.backward(engine(part).sum())
        >>> engine.step(), model.weight.data
        (True, tensor([[0.7500, 0.7500]]))
    """
    driver.require_not_closed()
    if in_backward() or driver.events.in_forward:
        raise PhaseError(
            "engine.parts() inside a forward or a backward.",
            cause="a hook that called it.",
            fix="begin the loop outside.",
        )
    driver.loops.require_none("engine.parts()")
    setup = driver.state.setup
    with told_of_errors(setup):  # the others wait at the end of their loops
        made = parts_of_batch(setup, batch, in_axes, sizes)
    return _each(driver, made)


def _each(driver: Driver, made: Sequence[Any]) -> Iterator[Any]:
    if driver.state.setup.logical is None:
        yield from made
        return
    driver.wait()
    driver.drop_if_user_did()
    loop, whole = driver.loops.begin(), False
    try:
        for place, part in enumerate(made):
            loop.begin(place)
            yield part
            driver.drop_unfinished()
            loop.end()
        driver.loops.end()
        loop.close()
        whole = True
    finally:
        if not whole:
            driver.loops.leave(loop)
            driver.events.abandon()
    driver.show_gradients()
