"""ZeRO as function transforms over explicit, immutable state.

`import fzero` loads what a step needs. The engine, checkpoints, integrations and tools are loaded
when a name of theirs is first used.
"""

import importlib
import sys
import types
import typing

# Without this import, raw functional collectives in a user's loss would have zero gradients,
# without an error.
import torch.distributed._functional_collectives  # noqa: F401

from fzero import optim as optim
from fzero import state as state
from fzero.collectives import CollectiveLog as CollectiveLog
from fzero.collectives import all_gather as all_gather
from fzero.collectives import all_reduce as all_reduce
from fzero.collectives import all_to_all as all_to_all
from fzero.collectives import count_collectives as count_collectives
from fzero.collectives import pmax as pmax
from fzero.collectives import pmean as pmean
from fzero.collectives import pmin as pmin
from fzero.collectives import ppermute as ppermute
from fzero.collectives import psum as psum
from fzero.collectives import psum_scatter as psum_scatter
from fzero.collectives import reduce_scatter as reduce_scatter
from fzero.context import lazy_import
from fzero.errors import AxisError as AxisError
from fzero.errors import CallError as CallError
from fzero.errors import DonatedError as DonatedError
from fzero.errors import FzeroError as FzeroError
from fzero.errors import LayoutError as LayoutError
from fzero.errors import LostRankError as LostRankError
from fzero.errors import MismatchError as MismatchError
from fzero.errors import NonFiniteError as NonFiniteError
from fzero.errors import PeerFailedError as PeerFailedError
from fzero.errors import PhaseError as PhaseError
from fzero.machine import codecs as codecs
from fzero.ranks.mesh import Axis as Axis
from fzero.ranks.mesh import Mesh as Mesh
from fzero.ranks.mesh import axis_index as axis_index
from fzero.ranks.mesh import axis_size as axis_size
from fzero.ranks.mesh import logical_ranks as logical_ranks
from fzero.ranks.mesh import world as world
from fzero.state import DynamicScale as DynamicScale
from fzero.state import Form as Form
from fzero.state import Local as Local
from fzero.state import Placement as Placement
from fzero.state import TrainState as TrainState
from fzero.state import state_bytes as state_bytes
from fzero.state.codec import Compress as Compress
from fzero.state.logical import fold_in as fold_in
from fzero.state.setup import Autocast as Autocast
from fzero.state.setup import Offload as Offload
from fzero.transforms import Context as Context
from fzero.transforms import accumulate as accumulate
from fzero.transforms import add_gradients as add_gradients
from fzero.transforms import apply_gradients as apply_gradients
from fzero.transforms import autocast as autocast
from fzero.transforms import check_finite as check_finite
from fzero.transforms import check_replicas as check_replicas
from fzero.transforms import clip as clip
from fzero.transforms import coalesce as coalesce
from fzero.transforms import compress as compress
from fzero.transforms import evaluate as evaluate
from fzero.transforms import full_gradients as full_gradients
from fzero.transforms import full_params as full_params
from fzero.transforms import global_norm as global_norm
from fzero.transforms import grad_and_reduce as grad_and_reduce
from fzero.transforms import gradients as gradients
from fzero.transforms import init as init
from fzero.transforms import iter_params as iter_params
from fzero.transforms import leave_out as leave_out
from fzero.transforms import local as local
from fzero.transforms import map_params as map_params
from fzero.transforms import offload as offload
from fzero.transforms import remat as remat
from fzero.transforms import scale_loss as scale_loss
from fzero.transforms import shard as shard
from fzero.transforms import simulate as simulate
from fzero.transforms import slots as slots
from fzero.transforms import transform as transform
from fzero.transforms import vjp as vjp
from fzero.transforms.functionalize import functionalize as functionalize
from fzero.transforms.logical_ranks import logical_mean as logical_mean

if typing.TYPE_CHECKING:  # what `__getattr__` imports
    from fzero import adapter as adapter
    from fzero import checkpoint as checkpoint
    from fzero import data as data
    from fzero import integrations as integrations
    from fzero import tools as tools
    from fzero.checkpoint import reshard as reshard
    from fzero.tools import plot as plot
    from fzero.tools.certify import certify as certify
    from fzero.tools.compile import compile as compile
    from fzero.tools.diff import diff as diff
    from fzero.tools.plan import plan as plan
    from fzero.tools.prove import prove as prove
    from fzero.tools.record import bisect as bisect
    from fzero.tools.record import load_recording as load_recording
    from fzero.tools.record import record as record
    from fzero.tools.record import replay as replay
    from fzero.tools.trace import check_spmd as check_spmd
    from fzero.tools.trace import trace as trace

__version__ = "0.1.0"  # the build reads it here, too


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
    _ROOMS = ["adapter", "checkpoint", "data", "integrations", "tools", "tools.plot"]
    _LATER = {
        "fzero.checkpoint": ["reshard"],
        "fzero.tools.certify": ["certify"],
        "fzero.tools.compile": ["compile"],
        "fzero.tools.diff": ["diff"],
        "fzero.tools.plan": ["plan"],
        "fzero.tools.prove": ["prove"],
        "fzero.tools.record": ["bisect", "load_recording", "record", "replay"],
        "fzero.tools.trace": ["check_spmd", "trace"],
    }
    _load = lazy_import.importer(__name__, [f"fzero.{room}" for room in _ROOMS], _LATER)
    __all__ = sorted(
        {x for x in globals() if x[0] != "_" and not isinstance(globals()[x], types.ModuleType)}
        | {"adapter", "checkpoint", "codecs", "data", "optim", "plot", "state"}
        | {x for names in _LATER.values() for x in names}
    )

    def __dir__() -> list[str]:
        """List the public names: completion leaves out the modules behind them."""
        return sorted([*__all__, "__version__"])

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
