"""`from_torch`: torch.optim for a state."""

from __future__ import annotations

from typing import Any

import torch

from fzero.optim._precision import precision_of
from fzero.optim._torch import TorchOptimizer
from fzero.optim._usable import require_usable


def from_torch(
    optimizer: Any,
    *,
    master_weights: bool = True,
    state_dtype: torch.dtype | None = None,
    stochastic_rounding: bool = False,
) -> TorchOptimizer:
    """torch.optim on shards: p', s' = optimizer.step() on this rank's [l] of each flat [W l].

    The numbers are those of the optimizer on whole parameters, if its rule is elementwise: this
    is tried on a few elements when a state is made. Options are read from the optimizer at each
    update, so a scheduler made for an instance goes on working.

    Args:
        optimizer: a `torch.optim` class; a factory, parameters -> optimizer, such as
            `functools.partial(torch.optim.AdamW, lr=3e-4)`; or an instance made from the
            parameters that the state is made of (a module's own, if they were functionalized;
            by `named_parameters()` on the meta device), in any param groups. A parameter that no
            group has is not stepped. A class or factory is given a list of `nn.Parameter`s, which
            also has `named_parameters()`, as a module. What an instance has from a run (it made
            steps, or `load_state_dict`) is taken over when a state is made: training goes on.
        master_weights: keep fp32 copies of 16-bit parameters and step those (4 bytes an element).
        state_dtype: as in `fzero.optim.adamw`.
        stochastic_rounding: as in `fzero.optim.adamw`.

    Returns:
        An optimizer for `fzero.init`, `shard(...).init` and `Engine`. An update by it cannot be
        differentiated; those of `fzero.optim.adamw` and its like can.

    Raises:
        LayoutError: for what is no such thing, and for LBFGS and SparseAdam.

    Example:
        >>> import functools, torch
        >>> from fzero.optim import Piece
        >>> from fzero.state import Leaf
        >>> opt = from_torch(functools.partial(torch.optim.SGD, lr=0.5)).bind({"w": torch.ones(2)})
        >>> leaf = Leaf(path="w", shape=(2,), dtype=torch.float32, trainable=True)
        >>> flats, pieces = [torch.tensor([1.0, 1.0])], [Piece(0, leaf, 0, 2)]
        >>> opt.advance(flats, [torch.tensor([2.0, 4.0])], opt.init(flats, pieces), pieces)[0]
        [tensor([ 0., -1.])]
    """
    require_usable(optimizer)
    precision = precision_of("from_torch", master_weights, state_dtype, stochastic_rounding)
    return TorchOptimizer(source=optimizer, precision=precision)
