"""A state taken apart into what does not depend on its ranks: leaves, slots, counters.

For tools that take states of other ranks apart as a checkpoint does.
"""

from fzero.checkpoint._load import fill_module as fill_module
from fzero.checkpoint._load import read_whole as read_whole
from fzero.checkpoint._process_states import LocalStates as LocalStates
from fzero.checkpoint._process_states import local_states as local_states
from fzero.checkpoint._process_states import stack_of as stack_of
from fzero.checkpoint._process_states import state_of_rank as state_of_rank
from fzero.checkpoint._process_states import states_of_ranks as states_of_ranks
from fzero.checkpoint._safetensors import TensorForm as TensorForm
from fzero.checkpoint._safetensors import begin_file as begin_file
from fzero.checkpoint._safetensors import read_file as read_file
from fzero.checkpoint._safetensors import read_values as read_values
from fzero.checkpoint._safetensors import values_by_path as values_by_path
from fzero.checkpoint._safetensors import whole_parameters as whole_parameters
from fzero.checkpoint._safetensors import write_values as write_values
from fzero.checkpoint._save import Draft as Draft
from fzero.checkpoint._save import draft_of as draft_of
from fzero.checkpoint._save import write_draft as write_draft
from fzero.optim.entries import slots_of as slots_of
