"""The machine: values and gradients that come and go, as the protocol of the rank decides.

What comes in: reads of placeholders, gradients of leaves, and effects of `state.protocol`. What
goes out: events (`ProtocolClient`), full values for kernels (`Gatherer`), means over
ranks (`Reducer`). Nothing here decides when a collective starts.
"""

from fzero.machine.reduce import Reducer as Reducer
from fzero.machine.unshard import FullUnit as FullUnit
from fzero.machine.unshard import Gatherer as Gatherer
from fzero.machine.unshard import GroupShard as GroupShard
from fzero.machine.unshard import ProtocolClient as ProtocolClient
from fzero.machine.unshard import UnitTable as UnitTable
