"""Function transforms over train states, one public transform a file.

In: a function of a state, and options. Out: a function of a state that reduces, coalesces, scales,
clips, offloads or simulates; or a new state. `backward_pass` turns what a function does into events
of the protocol; `agree` is what all ranks say before an update.
"""

from fzero.transforms.accumulate import accumulate as accumulate
from fzero.transforms.accumulate import coalesce as coalesce
from fzero.transforms.add import add_gradients as add_gradients
from fzero.transforms.autocast import autocast as autocast
from fzero.transforms.clip import check_finite as check_finite
from fzero.transforms.clip import clip as clip
from fzero.transforms.clip import global_norm as global_norm
from fzero.transforms.compress import compress as compress
from fzero.transforms.evaluate import evaluate as evaluate
from fzero.transforms.full_params import full_gradients as full_gradients
from fzero.transforms.full_params import full_params as full_params
from fzero.transforms.full_params import gradients as gradients
from fzero.transforms.full_params import iter_params as iter_params
from fzero.transforms.grad import grad_and_reduce as grad_and_reduce
from fzero.transforms.init import init as init
from fzero.transforms.local import leave_out as leave_out
from fzero.transforms.local import local as local
from fzero.transforms.loss_scale import scale_loss as scale_loss
from fzero.transforms.map_params import map_params as map_params
from fzero.transforms.map_params import slots as slots
from fzero.transforms.offload import offload as offload
from fzero.transforms.points import Context as Context
from fzero.transforms.points import transform as transform
from fzero.transforms.remat import remat as remat
from fzero.transforms.shard import shard as shard
from fzero.transforms.simulate import simulate as simulate
from fzero.transforms.state_entries import check_replicas as check_replicas
from fzero.transforms.update import apply_gradients as apply_gradients
from fzero.transforms.vjp import Pull as Pull
from fzero.transforms.vjp import vjp as vjp
