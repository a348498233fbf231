"""ZeRO as function transforms over explicit, immutable state."""

# Without this import, raw functional collectives in a user's loss would have zero gradients,
# without an error.
import torch.distributed._functional_collectives  # noqa: F401

from fzero import adapter, checkpoint, optim, plot, state
from fzero.certify import certify
from fzero.collectives import (
    CollectiveLog,
    all_gather,
    all_reduce,
    count_collectives,
    pmean,
    psum,
    psum_scatter,
    reduce_scatter,
)
from fzero.compile import compile, export
from fzero.diff import Difference, Run, diff
from fzero.errors import (
    AxisError,
    CallError,
    DonatedError,
    FzeroError,
    LayoutError,
    MismatchError,
    NonFiniteError,
    PeerFailedError,
    PhaseError,
)
from fzero.functional import functionalize
from fzero.mesh import Axis, axis_index, axis_size, world
from fzero.plan import plan
from fzero.state import DynamicScale, TrainState, state_bytes
from fzero.state.offload import Offload
from fzero.state.precision import Autocast
from fzero.trace import check_spmd, trace
from fzero.transforms import (
    accumulate,
    add_gradients,
    apply_gradients,
    autocast,
    check_finite,
    clip,
    coalesce,
    evaluate,
    full_gradients,
    full_params,
    global_norm,
    grad_and_reduce,
    gradients,
    init,
    offload,
    remat,
    scale_loss,
    shard,
    simulate,
)

__version__ = "0.1.0"  # the build reads it here, too

__all__ = [
    "Autocast",
    "Axis",
    "AxisError",
    "CallError",
    "CollectiveLog",
    "Difference",
    "DonatedError",
    "DynamicScale",
    "FzeroError",
    "LayoutError",
    "MismatchError",
    "NonFiniteError",
    "Offload",
    "PeerFailedError",
    "PhaseError",
    "Run",
    "TrainState",
    "accumulate",
    "adapter",
    "add_gradients",
    "all_gather",
    "all_reduce",
    "apply_gradients",
    "autocast",
    "axis_index",
    "axis_size",
    "certify",
    "check_finite",
    "check_spmd",
    "checkpoint",
    "clip",
    "coalesce",
    "compile",
    "count_collectives",
    "diff",
    "evaluate",
    "export",
    "full_gradients",
    "full_params",
    "functionalize",
    "global_norm",
    "grad_and_reduce",
    "gradients",
    "init",
    "offload",
    "optim",
    "plan",
    "plot",
    "pmean",
    "psum",
    "psum_scatter",
    "reduce_scatter",
    "remat",
    "scale_loss",
    "shard",
    "simulate",
    "state",
    "state_bytes",
    "trace",
    "world",
]


def __dir__() -> list[str]:
    """List the public names: `dir(fzero)` and completion leave out the modules behind them."""
    return sorted([*__all__, "__version__"])
