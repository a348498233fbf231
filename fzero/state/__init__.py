"""Frozen records and their pure transitions, one concept a file.

In: a record and an event. Out: the next record, and effects, which are data. `protocol` decides
when anything crosses ranks; `schedule` and `replay` plan a pass; `scale`, `window`, `progress` and
`hooks` are what an update, a window and a backward need. `TrainState` is what users hold.
Nothing here communicates, reads a clock or holds a handle.
"""

from fzero.state import effects as effects
from fzero.state import hooks as hooks
from fzero.state import protocol as protocol
from fzero.state import replay as replay
from fzero.state import residency as residency
from fzero.state import rounds as rounds
from fzero.state import scale as scale
from fzero.state import schedule as schedule
from fzero.state.buffers import NAMESPACE as NAMESPACE
from fzero.state.buffers import Buffers as Buffers
from fzero.state.buffers import Placement as Placement
from fzero.state.buffers import record as record
from fzero.state.buffers import static as static
from fzero.state.effects import DropBackward as DropBackward
from fzero.state.effects import QueueCallback as QueueCallback
from fzero.state.effects import RunEpilogue as RunEpilogue
from fzero.state.hooks import HookState as HookState
from fzero.state.layout import Group as Group
from fzero.state.layout import Layout as Layout
from fzero.state.layout import Leaf as Leaf
from fzero.state.layout import Part as Part
from fzero.state.outer import Local as Local
from fzero.state.outer import Outer as Outer
from fzero.state.progress import Phase as Phase
from fzero.state.progress import Progress as Progress
from fzero.state.progress import Window as Window
from fzero.state.scale import DynamicScale as DynamicScale
from fzero.state.scale import LossScale as LossScale
from fzero.state.schedule import Limits as Limits
from fzero.state.schedule import Program as Program
from fzero.state.schedule import Schedule as Schedule
from fzero.state.setup import Gathering as Gathering
from fzero.state.setup import OptimizerOver as OptimizerOver
from fzero.state.setup import Policy as Policy
from fzero.state.setup import ReduceOp as ReduceOp
from fzero.state.setup import Reduction as Reduction
from fzero.state.setup import Reshard as Reshard
from fzero.state.setup import Setup as Setup
from fzero.state.slots import Form as Form
from fzero.state.slots import Slot as Slot
from fzero.state.train_state import TrainState as TrainState
from fzero.state.train_state import state_bytes as state_bytes
