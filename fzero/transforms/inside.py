"""What tools use of the transforms: wrapped steps, the states in a tree, observers of a step."""

from fzero.transforms._observe import observe as observe
from fzero.transforms._pieces import pieces_of as pieces_of
from fzero.transforms._pipeline import Step as Step
from fzero.transforms._states import flatten_states as flatten_states
from fzero.transforms._states import is_state as is_state
