"""Checkpoints that do not know how they were sharded: save on W ranks, load on any other number.

    path/checkpoint.json          what is saved: leaves, optimizer slots, step, `extra`, where each
                                  tensor is; written last and in one move, it names the data folder
                                  that counts
    path/data-<id>/               a checkpoint of torch.distributed.checkpoint: 1-D tensors
        params/<leaf>             each parameter, without padding
        optimizer/<slot>/<leaf>   what the optimizer keeps for each element of it
        buffers/<rank>/<name>     of an engine's module: those of rank 0, and others that differ
    path/data-<id>/rng-<rank>.json    the random generators of each rank
    path/data-<id>/sums.json          the checksum of each chunk of the files with tensors
    path/data-<id>/groups.json        of an engine: the names in each param group of its optimizer
    path/.lock                    held by who writes or reads there

The position in the data, and all else that JSON can hold, goes into `extra`.
"""

from fzero.checkpoint._load import load as load
from fzero.checkpoint._load import load_with_extra as load_with_extra
from fzero.checkpoint._load import read_extra as read_extra
from fzero.checkpoint._safetensors import export_safetensors as export_safetensors
from fzero.checkpoint._safetensors import import_safetensors as import_safetensors
from fzero.checkpoint._safetensors import safetensors_initializer as safetensors_initializer
from fzero.checkpoint._safetensors import state_dict as state_dict
from fzero.checkpoint._save import AsyncSave as AsyncSave
from fzero.checkpoint._save import save as save
from fzero.checkpoint._save import save_async as save_async
from fzero.checkpoint._universal import load_universal as load_universal
from fzero.checkpoint._universal import save_universal as save_universal
from fzero.checkpoint.collective import CheckpointError as CheckpointError
from fzero.checkpoint.mesh_transition import reshard as reshard
from fzero.checkpoint.mirror import Mirror as Mirror
