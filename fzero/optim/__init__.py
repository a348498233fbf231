"""Optimizers on shards: pure (init, update) pairs over torch's own fused kernels.

In: a rule (`adamw`, `sgd`, ...), or a class of torch.optim or from PyPI (`from_torch`).
Out: an `Optimizer`, which says what it keeps for each element or leaf, and makes new flats of old
flats and gradients. `require_elementwise` tries whether a rule may be cut between ranks.
"""

import sys
import typing

import torch.optim

from fzero.context import later
from fzero.optim import schedules as schedules
from fzero.optim._complex import require_ordered as require_ordered
from fzero.optim._complex import require_real_views as require_real_views
from fzero.optim._encoding import Encoding as Encoding
from fzero.optim._from_torch import from_torch as from_torch
from fzero.optim._make import adam as adam
from fzero.optim._make import adamw as adamw
from fzero.optim._make import lion as lion
from fzero.optim._make import sgd as sgd
from fzero.optim._make_factored import adafactor as adafactor
from fzero.optim._make_factored import shampoo as shampoo
from fzero.optim._make_factored import soap as soap
from fzero.optim._muon import Muon as Muon
from fzero.optim._muon import muon as muon
from fzero.optim._optimizer import Optimizer as Optimizer
from fzero.optim._optimizer import OptimizerState as OptimizerState
from fzero.optim._pair import ShardOptimizer as ShardOptimizer
from fzero.optim._pair import as_optimizer as as_optimizer
from fzero.optim._partition import Partition as Partition
from fzero.optim._partition import PartitionState as PartitionState
from fzero.optim._partition import partition as partition
from fzero.optim._piece import Piece as Piece
from fzero.optim._precision import Precision as Precision
from fzero.optim._precision import require_precision as require_precision
from fzero.optim._torch import TorchOptimizer as TorchOptimizer
from fzero.optim._torch_state import TorchState as TorchState
from fzero.optim._usable import require_elementwise as require_elementwise
from fzero.optim._usable import require_leafwise as require_leafwise
from fzero.optim.masters import unscaled as unscaled
from fzero.optim.none import NoOptimizer as NoOptimizer
from fzero.optim.none import no_optimizer as no_optimizer

if not typing.TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> typing.Any:
        """Say what there is for a name of torch's."""
        own = {x.lower() for x in dir(sys.modules[__name__]) if x[0] != "_"}
        rules = [x for x, kind in vars(torch.optim).items() if isinstance(kind, type)]
        fixes = {f"fzero.optim.from_torch(torch.optim.{x})": x for x in rules}
        instead = {} if name.lower() in own else fixes
        raise later.unknown_name(sys.modules[__name__], name, instead)
