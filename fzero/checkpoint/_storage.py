"""Pieces -> a folder, by torch.distributed.checkpoint (DCP).

DCP plans and writes; a small planner tells it which ranges of which 1-D tensors this process has.
DCP is given an empty state dict: a state dict cannot hold ranges, and DCP logs each of its entries.

DCP's own index of the folder is a pickle, which can call any function, and its form changes with
the version of torch. It is there for other programs; what `_chunks` reads is JSON in the manifest,
made of what the writer says of each chunk that it has written:

    {tensor: {"dtype": dtype, "chunks": [[first element, elements, file, offset, bytes], ...]}}
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint.everywhere import could_not, said_by
from fzero.ranks.mesh import Axis, Runtime

Named = defaultdict[str, list[TensorPiece]]


def write_pieces(pieces: Sequence[TensorPiece], folder: Path, axis: Axis) -> dict[str, Any]:
    """Write the pieces of all ranks into a new folder; rank 0 gets the index. A collective.

    Returns:
        On rank 0 what the manifest says of the tensors; nothing on the others.

    Raises:
        CheckpointError: on every rank, naming the rank that failed.
    """
    writer, named, alone = _Writer(folder), Named(list), axis.runtime is not Runtime.PROCESSES
    for piece in pieces:
        named[piece.name].append(piece)
    try:
        with warnings.catch_warnings():
            # DCP warns whenever it runs in one process, even if that was asked for by `no_dist`.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.save(
                {},
                storage_writer=writer,
                planner=_Writing(named),
                no_dist=alone,
                process_group=None if alone else axis.group(),
            )
    except CheckpointException as failed:  # DCP raises it on all ranks; it is no Exception
        rank, (error, _) = min(failed.failures.items())
        if not isinstance(error, Exception):
            raise error from None  # Ctrl-C and its like: DCP catches those, too
        raise said_by(could_not(f"write {folder}", error), rank, axis) from None
    return writer.tensors


class _Writer(dcp.FileSystemWriter):
    """Notes where each chunk was written, on the rank that ends the checkpoint.

    Some versions of torch return this from `dcp.save`, others do not.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tensors: dict[str, Any] = {}

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {one.index: one.storage_data for some in results for one in some}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, dcp.TensorStorageMetadata)
            self.tensors[name] = {"dtype": str(tensor.properties.dtype), "chunks": []}
            for chunk in tensor.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                self.tensors[name]["chunks"].append(
                    [*chunk.offsets, *chunk.sizes, place.relative_path, place.offset, place.length]
                )


class _Writing(dcp.DefaultSavePlanner):
    """Writes pieces; the plan of all ranks together is checked by DCP: no overlap, no gap."""

    def __init__(self, named: Named) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._named = named

    def create_local_plan(self) -> dcp.SavePlan:
        items = [_write_item(piece) for pieces in self._named.values() for piece in pieces]
        self.plan = dcp.SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        start = index.offset[0]  # a process has few pieces of one tensor
        return _apart(next(p.values for p in self._named[index.fqn] if p.start == start))


def _write_item(piece: TensorPiece) -> dcp.WriteItem:
    start, numel = torch.Size([piece.start]), torch.Size([piece.values.numel()])
    chunk = dcp.ChunkStorageMetadata(offsets=start, sizes=numel)
    return dcp.WriteItem(
        index=MetadataIndex(piece.name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=piece.values.dtype),
            size=torch.Size([piece.numel]),
        ),
    )


def _apart(values: Tensor) -> Tensor:
    """Return the same memory as a storage that has nothing else in it.

    DCP copies what is a part of a larger storage, and keeps all copies until the file is written.
    """
    if values.device.type != "cpu":
        return values
    return torch.from_numpy(values.detach().view(torch.uint8).numpy()).view(values.dtype)
