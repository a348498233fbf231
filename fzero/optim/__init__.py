"""Optimizers on shards: pure (init, update) pairs over torch's own fused kernels.

In: a rule (`adamw`, `sgd`, ...), or a class of torch.optim or from PyPI (`from_torch`).
Out: an `Optimizer`, which says what it keeps for each element or leaf, and makes new flats of old
flats and gradients. `require_elementwise` tries whether a rule may be cut between ranks.
"""

import sys
import typing

import torch.optim

from fzero.context import lazy_import
from fzero.optim import schedules as schedules
from fzero.optim._muon import Muon as Muon
from fzero.optim._muon import muon as muon
from fzero.optim._partition import Partition as Partition
from fzero.optim._partition import PartitionState as PartitionState
from fzero.optim._partition import partition as partition
from fzero.optim.matrix_rules import adafactor as adafactor
from fzero.optim.matrix_rules import shampoo as shampoo
from fzero.optim.matrix_rules import soap as soap
from fzero.optim.optax_pair import ShardOptimizer as ShardOptimizer
from fzero.optim.optax_pair import as_optimizer as as_optimizer
from fzero.optim.optimizer import NoOptimizer as NoOptimizer
from fzero.optim.optimizer import Optimizer as Optimizer
from fzero.optim.optimizer import OptimizerState as OptimizerState
from fzero.optim.optimizer import adam as adam
from fzero.optim.optimizer import adamw as adamw
from fzero.optim.optimizer import lion as lion
from fzero.optim.optimizer import no_optimizer as no_optimizer
from fzero.optim.optimizer import require_elementwise as require_elementwise
from fzero.optim.optimizer import require_leafwise as require_leafwise
from fzero.optim.optimizer import sgd as sgd
from fzero.optim.precision import Encoding as Encoding
from fzero.optim.precision import Precision as Precision
from fzero.optim.precision import require_ordered as require_ordered
from fzero.optim.precision import require_precision as require_precision
from fzero.optim.precision import unscaled as unscaled
from fzero.optim.torch_optim import TorchOptimizer as TorchOptimizer
from fzero.optim.torch_optim import TorchState as TorchState
from fzero.optim.torch_optim import from_torch as from_torch
from fzero.optim.torch_optim import require_real_views as require_real_views
from fzero.state.stateful_update import Piece as Piece

if not typing.TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> typing.Any:
        """Say what there is for a name of torch's."""
        own = {x.lower() for x in dir(sys.modules[__name__]) if x[0] != "_"}
        rules = [x for x, kind in vars(torch.optim).items() if isinstance(kind, type)]
        fixes = {f"fzero.optim.from_torch(torch.optim.{x})": x for x in rules}
        instead = {} if name.lower() in own else fixes
        raise lazy_import.unknown_name(sys.modules[__name__], name, instead)
