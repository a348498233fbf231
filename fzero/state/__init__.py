"""Frozen records and their pure transitions, one concept a file."""

from fzero.state import accumulation as accumulation
from fzero.state import buckets as buckets
from fzero.state import coordinator as coordinator
from fzero.state import effects as effects
from fzero.state import hooks as hooks
from fzero.state._record import NAMESPACE as NAMESPACE
from fzero.state._record import record as record
from fzero.state._record import static as static
from fzero.state.buffers import Buffers as Buffers
from fzero.state.buffers import Placement as Placement
from fzero.state.coordinator import CoordinatorState as CoordinatorState
from fzero.state.effects import DropBackward as DropBackward
from fzero.state.effects import QueueCallback as QueueCallback
from fzero.state.effects import RunEpilogue as RunEpilogue
from fzero.state.hooks import HookState as HookState
from fzero.state.layout import Group as Group
from fzero.state.layout import Layout as Layout
from fzero.state.layout import Leaf as Leaf
from fzero.state.progress import Phase as Phase
from fzero.state.progress import Progress as Progress
from fzero.state.setup import Keep as Keep
from fzero.state.setup import Policy as Policy
from fzero.state.setup import Setup as Setup
from fzero.state.train import TrainState as TrainState
from fzero.state.view import state_bytes as state_bytes
from fzero.state.window import Window as Window
