"""Collectives that are each other's exact adjoint, and their lowering by backend.

In: tensors and an `Axis`. Out: tensors, or an `InFlight` that is waited for. `Performer`
carries rounds of messages between ranks, and does the effects of the protocol one after another;
`CollectiveLog` counts calls and bytes.
This room alone calls torch.distributed.
"""

from fzero.collectives.api import all_gather as all_gather
from fzero.collectives.api import all_reduce as all_reduce
from fzero.collectives.api import all_to_all as all_to_all
from fzero.collectives.api import pmax as pmax
from fzero.collectives.api import pmean as pmean
from fzero.collectives.api import pmin as pmin
from fzero.collectives.api import ppermute as ppermute
from fzero.collectives.api import psum as psum
from fzero.collectives.api import psum_scatter as psum_scatter
from fzero.collectives.api import reduce_scatter as reduce_scatter
from fzero.collectives.autograd import Rehearsal as Rehearsal
from fzero.collectives.autograd import connecting_calls as connecting_calls
from fzero.collectives.autograd import gather_many as gather_many
from fzero.collectives.autograd import reduce_many as reduce_many
from fzero.collectives.autograd import scatter_many as scatter_many
from fzero.collectives.log import CollectiveEvent as CollectiveEvent
from fzero.collectives.log import CollectiveLog as CollectiveLog
from fzero.collectives.log import about as about
from fzero.collectives.log import count_collectives as count_collectives
from fzero.collectives.log import note_call as note_call
from fzero.collectives.logical_groups import Over as Over
from fzero.collectives.logical_groups import fold_rows as fold_rows
from fzero.collectives.logical_groups import gather_rows as gather_rows
from fzero.collectives.logical_groups import run_together as run_together
from fzero.collectives.logical_groups import start_tree_sum as start_tree_sum
from fzero.collectives.lowering import InFlight as InFlight
from fzero.collectives.lowering import exchange_beside as exchange_beside
from fzero.collectives.lowering import native as native
from fzero.collectives.lowering import start_all_to_all as start_all_to_all
from fzero.collectives.lowering import start_extremum as start_extremum
from fzero.collectives.lowering import start_gather as start_gather
from fzero.collectives.lowering import start_gather_in_place as start_gather_in_place
from fzero.collectives.lowering import start_permute as start_permute
from fzero.collectives.lowering import start_reduce as start_reduce
from fzero.collectives.lowering import start_scatter as start_scatter
from fzero.collectives.lowering import start_uneven_all_to_all as start_uneven_all_to_all
from fzero.collectives.performer import EVALUATION as EVALUATION
from fzero.collectives.performer import FUNCTIONAL as FUNCTIONAL
from fzero.collectives.performer import PULLS as PULLS
from fzero.collectives.performer import Performer as Performer
from fzero.collectives.performer import assert_same_everywhere as assert_same_everywhere
from fzero.collectives.performer import broadcast as broadcast
from fzero.collectives.performer import disagreement as disagreement
from fzero.collectives.performer import end_of_run as end_of_run
from fzero.collectives.performer import gather_objects as gather_objects
from fzero.collectives.performer import gather_objects_beside as gather_objects_beside
from fzero.collectives.performer import mismatch as mismatch
from fzero.collectives.performer import performer_of as performer_of
from fzero.collectives.performer import told_everywhere as told_everywhere
from fzero.collectives.recompute import Block as Block
from fzero.collectives.recompute import run_of as run_of
from fzero.collectives.recompute import without_hooks as without_hooks
from fzero.collectives.ties import Scope as Scope
from fzero.collectives.ties import anchors as anchors
from fzero.collectives.ties import close_scope as close_scope
from fzero.collectives.ties import come_to as come_to
from fzero.collectives.ties import connected as connected
from fzero.collectives.ties import connecting as connecting
from fzero.collectives.ties import of_an_edge as of_an_edge
from fzero.collectives.ties import open_scope as open_scope
from fzero.collectives.ties import shared as shared
from fzero.collectives.ties import tied_to as tied_to
