"""Checkpoints that do not know how they were sharded: save on W ranks, load on any other number.

    path/checkpoint.json          what is saved: leaves, optimizer slots, step, `extra`; written
                                  last and in one move, it names the data folder that counts
    path/data-<id>/               a checkpoint of torch.distributed.checkpoint: 1-D tensors
        params/<leaf>             each parameter, without padding
        optimizer/<slot>/<leaf>   what the optimizer keeps for each element of it

Random state and the position in the data are not in it; `extra` is the place for those.
"""

from fzero.checkpoint._api import load as load
from fzero.checkpoint._api import read_extra as read_extra
from fzero.checkpoint._api import save as save
from fzero.checkpoint._everywhere import CheckpointError as CheckpointError
