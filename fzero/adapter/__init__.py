"""ZeRO for an nn.Module, a torch.optim optimizer and loss.backward().

In: a module, an optimizer and options; then forwards, backwards and steps as torch has them.
Out: an `Engine`, whose hooks become the events that a functional step sends, too.
What it holds between calls is a `TrainState`: `engine.state`.
"""

from fzero.adapter.deferred_init import sharded_init as sharded_init
from fzero.adapter.engine import Engine as Engine
from fzero.adapter.engine import MemoryReport as MemoryReport
from fzero.adapter.full_params import gathered as gathered
from fzero.integrations import deepspeed as deepspeed
from fzero.integrations.deepspeed import initialize as initialize
from fzero.state import DynamicScale as DynamicScale
from fzero.state.layout import LeafSpec as LeafSpec
from fzero.state.setup import Autocast as Autocast
