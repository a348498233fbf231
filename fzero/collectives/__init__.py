"""Collectives that are each other's exact adjoint, and their lowering by backend.

In: tensors and an `Axis`. Out: tensors, or an `InFlight` that is waited for. `Channel` carries
rounds of messages between ranks, `Performer` does the effects of the protocol one after another,
and `CollectiveLog` counts calls and bytes.
This room alone calls torch.distributed.
"""

from fzero.collectives._agree import assert_same_everywhere as assert_same_everywhere
from fzero.collectives._agree import broadcast as broadcast
from fzero.collectives._agree import disagreement as disagreement
from fzero.collectives._agree import told_everywhere as told_everywhere
from fzero.collectives._api import all_gather as all_gather
from fzero.collectives._api import all_reduce as all_reduce
from fzero.collectives._api import all_to_all as all_to_all
from fzero.collectives._api import pmax as pmax
from fzero.collectives._api import pmean as pmean
from fzero.collectives._api import pmin as pmin
from fzero.collectives._api import ppermute as ppermute
from fzero.collectives._api import psum as psum
from fzero.collectives._api import psum_scatter as psum_scatter
from fzero.collectives._api import reduce_scatter as reduce_scatter
from fzero.collectives._backend import native as native
from fzero.collectives._channel import Channel as Channel
from fzero.collectives._channel import mismatch as mismatch
from fzero.collectives._connected import Scope as Scope
from fzero.collectives._connected import anchors as anchors
from fzero.collectives._connected import close_scope as close_scope
from fzero.collectives._connected import come_to as come_to
from fzero.collectives._connected import connected as connected
from fzero.collectives._connected import connecting as connecting
from fzero.collectives._connected import of_an_edge as of_an_edge
from fzero.collectives._connected import open_scope as open_scope
from fzero.collectives._connected import shared as shared
from fzero.collectives._connected import tied_to as tied_to
from fzero.collectives._functions import connecting_calls as connecting_calls
from fzero.collectives._functions import gather_many as gather_many
from fzero.collectives._functions import reduce_many as reduce_many
from fzero.collectives._functions import scatter_many as scatter_many
from fzero.collectives._kept import Block as Block
from fzero.collectives._kept import run_of as run_of
from fzero.collectives._kept import without_hooks as without_hooks
from fzero.collectives._log import CollectiveEvent as CollectiveEvent
from fzero.collectives._log import CollectiveLog as CollectiveLog
from fzero.collectives._log import about as about
from fzero.collectives._log import count_collectives as count_collectives
from fzero.collectives._log import note_call as note_call
from fzero.collectives._performer import EVALUATION as EVALUATION
from fzero.collectives._performer import FUNCTIONAL as FUNCTIONAL
from fzero.collectives._performer import Performer as Performer
from fzero.collectives._performers import end_of_run as end_of_run
from fzero.collectives._performers import gather_objects as gather_objects
from fzero.collectives._performers import gather_objects_beside as gather_objects_beside
from fzero.collectives._performers import performer_of as performer_of
from fzero.collectives._rehearsed import Rehearsal as Rehearsal
from fzero.collectives._start import InFlight as InFlight
from fzero.collectives._start import start_all_to_all as start_all_to_all
from fzero.collectives._start import start_extremum as start_extremum
from fzero.collectives._start import start_gather as start_gather
from fzero.collectives._start import start_gather_in_place as start_gather_in_place
from fzero.collectives._start import start_permute as start_permute
from fzero.collectives._start import start_reduce as start_reduce
from fzero.collectives._start import start_scatter as start_scatter
from fzero.collectives._together import run_together as run_together
from fzero.collectives._tree import Over as Over
from fzero.collectives._tree import fold_rows as fold_rows
from fzero.collectives._tree import gather_rows as gather_rows
from fzero.collectives._tree import start_tree_sum as start_tree_sum
from fzero.collectives._uneven import exchange_beside as exchange_beside
from fzero.collectives._uneven import start_uneven_all_to_all as start_uneven_all_to_all
