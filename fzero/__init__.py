"""ZeRO as function transforms over explicit, immutable state.

`import fzero` loads what a step needs. The engine, checkpoints, integrations and tools are loaded
when a name of theirs is first used.
"""

import importlib
import sys
import typing

# Without this import, raw functional collectives in a user's loss would have zero gradients,
# without an error.
import torch.distributed._functional_collectives  # noqa: F401

from fzero import optim, state
from fzero.collectives import (
    CollectiveLog,
    all_gather,
    all_reduce,
    all_to_all,
    count_collectives,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    reduce_scatter,
)
from fzero.context import lazy_import
from fzero.errors import (
    AxisError,
    CallError,
    DonatedError,
    FzeroError,
    LayoutError,
    LostRankError,
    MismatchError,
    NonFiniteError,
    PeerFailedError,
    PhaseError,
)
from fzero.machine import codecs
from fzero.ranks.mesh import Axis, Mesh, axis_index, axis_size, logical_ranks, world
from fzero.state import DynamicScale, Form, Local, Placement, TrainState, state_bytes
from fzero.state.codec import Compress
from fzero.state.logical import fold_in
from fzero.state.setup import Autocast, Offload
from fzero.transforms import (
    Context,
    accumulate,
    add_gradients,
    apply_gradients,
    autocast,
    check_finite,
    check_replicas,
    clip,
    coalesce,
    compress,
    evaluate,
    full_gradients,
    full_params,
    global_norm,
    grad_and_reduce,
    gradients,
    init,
    iter_params,
    leave_out,
    local,
    map_params,
    offload,
    remat,
    scale_loss,
    shard,
    simulate,
    slots,
    transform,
)
from fzero.transforms.functionalize import functionalize
from fzero.transforms.logical_ranks import logical_mean

if typing.TYPE_CHECKING:  # what `__getattr__` imports
    from fzero import adapter, checkpoint, data
    from fzero import integrations as integrations
    from fzero import tools as tools
    from fzero.checkpoint import reshard
    from fzero.tools import plot
    from fzero.tools.certify import certify
    from fzero.tools.compile import compile
    from fzero.tools.diff import diff
    from fzero.tools.plan import plan
    from fzero.tools.prove import prove
    from fzero.tools.record import bisect, load_recording, record, replay
    from fzero.tools.trace import check_spmd, trace

__version__ = "0.1.0"  # the build reads it here, too

__all__ = [
    "Autocast",
    "Axis",
    "AxisError",
    "CallError",
    "CollectiveLog",
    "Compress",
    "Context",
    "DonatedError",
    "DynamicScale",
    "Form",
    "FzeroError",
    "LayoutError",
    "Local",
    "LostRankError",
    "Mesh",
    "MismatchError",
    "NonFiniteError",
    "Offload",
    "PeerFailedError",
    "PhaseError",
    "Placement",
    "TrainState",
    "accumulate",
    "adapter",
    "add_gradients",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "apply_gradients",
    "autocast",
    "axis_index",
    "axis_size",
    "bisect",
    "certify",
    "check_finite",
    "check_replicas",
    "check_spmd",
    "checkpoint",
    "clip",
    "coalesce",
    "codecs",
    "compile",
    "compress",
    "count_collectives",
    "data",
    "diff",
    "evaluate",
    "fold_in",
    "full_gradients",
    "full_params",
    "functionalize",
    "global_norm",
    "grad_and_reduce",
    "gradients",
    "init",
    "iter_params",
    "leave_out",
    "load_recording",
    "local",
    "logical_mean",
    "logical_ranks",
    "map_params",
    "offload",
    "optim",
    "plan",
    "plot",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "prove",
    "psum",
    "psum_scatter",
    "record",
    "reduce_scatter",
    "remat",
    "replay",
    "reshard",
    "scale_loss",
    "shard",
    "simulate",
    "slots",
    "state",
    "state_bytes",
    "trace",
    "transform",
    "world",
]


def __dir__() -> list[str]:
    """List the public names: `dir(fzero)` and completion leave out the modules behind them."""
    return sorted([*__all__, "__version__"])


# Names of modules that are in rooms: `from fzero.plan import Plan`, `import fzero.codecs`.
for _room, _module in (
    ("machine", "codecs"),
    ("machine", "partition"),
    ("ranks", "mesh"),
    ("ranks", "virtual"),
):
    sys.modules[f"fzero.{_module}"] = importlib.import_module(f"fzero.{_room}.{_module}")
sys.modules["fzero.axis"] = sys.modules["fzero.mesh"]
for _module in ("certify", "compile", "diff", "doctor", "plan", "plot", "prove", "trace"):
    sys.modules[f"fzero.{_module}"] = lazy_import.SecondName(
        f"fzero.{_module}", f"fzero.tools.{_module}"
    )
sys.modules["fzero.adapter.deepspeed"] = lazy_import.SecondName(
    "fzero.adapter.deepspeed", "fzero.integrations.deepspeed"
)


if not typing.TYPE_CHECKING:  # a type checker would take any name for one of the package
    _load = lazy_import.importer(
        __name__,
        [
            "fzero.adapter",
            "fzero.checkpoint",
            "fzero.data",
            "fzero.integrations",
            "fzero.tools",
            "fzero.tools.plot",
        ],
        {
            "fzero.checkpoint": ["reshard"],
            "fzero.tools.certify": ["certify"],
            "fzero.tools.compile": ["compile"],
            "fzero.tools.diff": ["diff"],
            "fzero.tools.plan": ["plan"],
            "fzero.tools.prove": ["prove"],
            "fzero.tools.record": ["bisect", "load_recording", "record", "replay"],
            "fzero.tools.trace": ["check_spmd", "trace"],
        },
    )

    def __getattr__(name: str) -> typing.Any:
        """Import what is imported later, or say what to do in the place of a name that is gone."""
        if name == "export":
            from fzero.errors import explain

            raise AttributeError(  # nothing else: hasattr() asks, too
                explain(
                    "fzero.export is gone, and so is fzero.compile(step, exported=path).",
                    cause="a file of graphs is a program: who can write to it runs code in every "
                    "process that reads it.",
                    fix="fzero.compile(step) at the start of each run: its first call traces and "
                    "compiles, once for each rank.",
                ),
                name=name,
                obj=sys.modules[__name__],
            )
        if name in _MOVED:
            lazy_import.gone(__name__, {f"fzero.tools.{name}": [name]})(name)
        try:
            return _load(name)
        except AttributeError as error:
            raise lazy_import.unknown_name(sys.modules[__name__], name, _INSTEAD) from error

    # Records of tools, which were names of fzero itself: these words go with the next version.
    _MOVED = ["Claim", "Difference", "Parting", "Proof", "Recorder", "Recording", "Replayed", "Run"]
    _INSTEAD = {
        "from fzero.adapter import Engine, initialize": "Engine engine initialize",
        "fzero.adapter.Engine(module, optimizer, stage=3)": "FSDP fully_shard DDP "
        "DistributedDataParallel ZeroRedundancyOptimizer wrap",
        "fzero.optim.adamw(lr), sgd, lion, ...; fzero.optim.from_torch(torch.optim.AdamW)": "AdamW "
        "adamw Adam adam SGD sgd muon Muon lion Lion from_torch",
        "fzero.grad_and_reduce(loss_fn, state)(batch)": "grad value_and_grad backward",
        "fzero.apply_gradients(state), which clears the gradients": "step zero_grad apply_updates "
        "update",
        "fzero.coalesce(step) or fzero.accumulate(step, steps=n); engine.no_sync()": "no_sync",
        "fzero.simulate(step, world_size=n)": "pmap spmd",
        "fzero.full_params(state), and fzero.adapter.gathered(module) of an engine's": "state_dict "
        "summon_full_params full_state_dict consolidated_state_dict GatheredParameters",
        "fzero.checkpoint.save(path, state), fzero.checkpoint.load(path, like)": "save load "
        "save_checkpoint load_checkpoint save_async",
        "fzero.axis_index() and fzero.axis_size()": "rank get_rank process_index world_size "
        "get_world_size process_count",
        "leave it out: the first call starts the process group": "init_process_group "
        "init_distributed",
        "from fzero.integrations.transformers import sharded": "Trainer sharded",
    }
