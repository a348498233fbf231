"""A state taken apart into what does not depend on its ranks: leaves, slots, counters.

For tools that take states of other ranks apart as a checkpoint does.
"""

from fzero.checkpoint._counters import counters_of as counters_of
from fzero.checkpoint._counters import unstepped_of as unstepped_of
from fzero.checkpoint._counters import with_counters as with_counters
from fzero.checkpoint._held import stack_of as stack_of
from fzero.checkpoint._held import state_of_rank as state_of_rank
from fzero.checkpoint._pieces import leaf_names as leaf_names
from fzero.checkpoint._slots import Slot as Slot
from fzero.checkpoint._slots import slots_across as slots_across
from fzero.checkpoint._slots import slots_of as slots_of
