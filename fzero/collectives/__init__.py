"""Collectives that are each other's exact adjoint, and their lowering per backend."""

from fzero.collectives._agree import assert_same_everywhere as assert_same_everywhere
from fzero.collectives._agree import broadcast_from_first as broadcast_from_first
from fzero.collectives._agree import told_everywhere as told_everywhere
from fzero.collectives._api import all_gather as all_gather
from fzero.collectives._api import all_reduce as all_reduce
from fzero.collectives._api import pmean as pmean
from fzero.collectives._api import psum as psum
from fzero.collectives._api import psum_scatter as psum_scatter
from fzero.collectives._api import reduce_scatter as reduce_scatter
from fzero.collectives._functions import gather_many as gather_many
from fzero.collectives._functions import reduce_many as reduce_many
from fzero.collectives._functions import reduce_owned as reduce_owned
from fzero.collectives._functions import scatter_many as scatter_many
from fzero.collectives._log import CollectiveLog as CollectiveLog
from fzero.collectives._log import count_collectives as count_collectives
from fzero.collectives._lowering import exchange_ids as exchange_ids
from fzero.collectives._lowering import gather_in_place as gather_in_place
from fzero.collectives._start import InFlight as InFlight
from fzero.collectives._start import start_exchange as start_exchange
from fzero.collectives._start import start_gather as start_gather
from fzero.collectives._start import start_gather_in_place as start_gather_in_place
from fzero.collectives._start import start_reduce as start_reduce
from fzero.collectives._start import start_scatter as start_scatter
