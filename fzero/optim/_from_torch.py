"""`from_torch`: torch.optim for a state."""

from __future__ import annotations

from typing import Any

from fzero.errors import CallError
from fzero.errors.check import called_as, require
from fzero.optim._encoding import StateDtype
from fzero.optim._precision import precision_of
from fzero.optim._torch import TorchOptimizer
from fzero.optim._usable import Needs, require_usable

WANTED = '"element", "matrix", or None (it is known, or tried)'


@called_as("from_torch(functools.partial(torch.optim.SGD, lr=0.1))")
def from_torch(
    optimizer: Any,
    *,
    needs: Needs = None,
    master_weights: bool = True,
    state_dtype: StateDtype = None,
    stochastic_rounding: bool = False,
    **options: Any,
) -> TorchOptimizer:
    """torch.optim on shards: p', s' = optimizer.step() on this rank's [l] of each flat [W l].

    The numbers are those of the optimizer on whole parameters. An elementwise rule steps shards.
    One that needs whole matrices (Muon, LAMB, Adafactor, Shampoo) steps each parameter on the rank
    that owns it, which has what the rule keeps of it, in any shape; all else stays cut evenly.
    Options are read from the optimizer at each update, so a scheduler made for an instance goes on
    working.

    Args:
        optimizer: a `torch.optim` class; a factory, parameters -> optimizer, such as
            `functools.partial(torch.optim.AdamW, lr=3e-4)`; or an instance made from the
            parameters that the state is made of (a module's own, if they were functionalized;
            by `named_parameters()` on the meta device), in any param groups. A parameter that no
            group has is not stepped. A class or factory is given a list of `nn.Parameter`s, which
            also has `named_parameters()`, as a module. What an instance has from a run (it made
            steps, or `load_state_dict`) is taken over when a state is made: training goes on.
        needs: what its rule looks at to update an element: "element", it alone, so that each rank
            steps a part of each parameter; "matrix", its whole parameter, which is stepped by the
            rank that owns it. None: it is known of torch.optim's classes; of any other an
            experiment on a few elements says so, for each param group. It sees the branches that
            it takes: declare a rule that looks at its matrix in some steps only. The experiment
            also tests what is said to need an element. One by chance (stochastic rounding of its
            own) passes with a warning: its bits are others at each stage.
        master_weights: keep fp32 copies of 16-bit parameters and step those (4 bytes an element).
        state_dtype: as in `fzero.optim.adamw`.
        stochastic_rounding: as in `fzero.optim.adamw`.
        options: none; those of the optimizer are given to it.

    Returns:
        An optimizer for `fzero.init`, `shard(...).init` and `Engine`. An update by it cannot be
        differentiated; those of `fzero.optim.adamw` and its like can.

    Raises:
        LayoutError: for what is no such thing, for LBFGS and SparseAdam, for another `needs`; when
            it is bound, for a rule that looks at more than it is said to need.
        CallError: for options of the optimizer.

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
    if options:
        name = getattr(optimizer, "__name__", "optimizer")
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise CallError(
            f"from_torch() got {given}.",
            cause="options of the optimizer: from_torch takes none of them, but the optimizer.",
            fix=f"from_torch(functools.partial(torch.optim.{name}, {given})).",
        )
    require_usable(optimizer)
    require("from_torch: needs", needs, (None, "element", "matrix").__contains__, WANTED)
    precision = precision_of("from_torch", master_weights, state_dtype, stochastic_rounding)
    return TorchOptimizer(source=optimizer, needs=needs, precision=precision)
