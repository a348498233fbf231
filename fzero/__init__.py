"""ZeRO as function transforms over explicit, immutable state."""

import torch.distributed._functional_collectives  # noqa: F401 - without it raw functional

# collectives in a user's loss would have zero gradients, without an error.
# from fzero import adapter as adapter
from fzero import checkpoint as checkpoint
from fzero import optim as optim
from fzero import state as state
from fzero.collectives import CollectiveLog as CollectiveLog
from fzero.collectives import all_gather as all_gather
from fzero.collectives import all_reduce as all_reduce
from fzero.collectives import count_collectives as count_collectives
from fzero.collectives import pmean as pmean
from fzero.collectives import psum as psum
from fzero.collectives import psum_scatter as psum_scatter
from fzero.collectives import reduce_scatter as reduce_scatter
from fzero.errors import AxisError as AxisError
from fzero.errors import DonatedError as DonatedError
from fzero.errors import FzeroError as FzeroError
from fzero.errors import LayoutError as LayoutError
from fzero.errors import PhaseError as PhaseError
from fzero.functional import functionalize as functionalize
from fzero.mesh import Axis as Axis
from fzero.mesh import axis_index as axis_index
from fzero.mesh import axis_size as axis_size
from fzero.mesh import world as world
from fzero.state import TrainState as TrainState
from fzero.state import state_bytes as state_bytes
from fzero.transforms import accumulate as accumulate
from fzero.transforms import apply_gradients as apply_gradients
from fzero.transforms import clip as clip
from fzero.transforms import coalesce as coalesce
from fzero.transforms import full_gradients as full_gradients
from fzero.transforms import full_params as full_params
from fzero.transforms import global_norm as global_norm
from fzero.transforms import grad_and_reduce as grad_and_reduce
from fzero.transforms import gradients as gradients
from fzero.transforms import init as init
from fzero.transforms import remat as remat
from fzero.transforms import shard as shard
from fzero.transforms import simulate as simulate
