"""Pieces -> a folder, which torch.distributed.checkpoint (DCP) reads, too.

DCP plans, and writes its index; a small planner tells it which ranges of which 1-D tensors this
process has. DCP is given an empty state dict: a state dict cannot hold ranges, and DCP logs each of
its entries. Each process writes one file, chunk by chunk (`_container`).

DCP's own index of the folder is a pickle, which can call any function, and its form changes with
the version of torch. It is there for other programs; what `_chunks` reads is JSON in the manifest,
made of what the writer says of each chunk that it has written:

    {tensor: {"dtype": dtype, "chunks": [[first element, elements, file, offset, bytes], ...]}}

and, beside the files, the crc32 that each of them has from its begin to the end of each chunk:

    {file: [after the first chunk, after the second, ..., of the whole file]}
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fzero.checkpoint._container import packed
from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint.everywhere import could_not, said_by
from fzero.ranks.mesh import Axis, Runtime

Named = defaultdict[str, list[TensorPiece]]


class Written(NamedTuple):
    """What was written of all ranks, known on rank 0; on the others, of their own file alone."""

    tensors: dict[str, Any]  # what the manifest says of them
    sums: dict[str, list[int]]
    files: dict[str, list[int]]  # {name: [bytes, crc32]}


def write_pieces(pieces: Sequence[TensorPiece], folder: Path, axis: Axis) -> Written:
    """Write the pieces of all ranks into a new folder; rank 0 gets the index. A collective.

    Raises:
        CheckpointError: on every rank, naming the rank that failed.
    """
    alone = axis.runtime is not Runtime.PROCESSES
    writer, named = _Writer(folder, axis.rank), Named(list)
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
    return writer.written


@dataclass(frozen=True)
class _Result(WriteResult):
    """A chunk that was written."""

    crc: int = 0  # of its file up to its end


class _Writer(dcp.FileSystemWriter):
    """Writes the file of one process; on the rank that ends the checkpoint, notes what all wrote.

    Some versions of torch return this from `dcp.save`, others do not.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder)
        self.written = Written({}, {}, {})
        self._file = folder / f"__{rank}_0.distcp"

    def write_data(
        self, plan: dcp.SavePlan, planner: dcp.SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        results: list[WriteResult] = []
        offset = crc = 0
        if plan.items:
            with open(self._file, "xb") as stream:
                for item in plan.items:
                    chunk = packed(planner.resolve_data(item))  # type: ignore[arg-type]
                    length = sum(map(stream.write, chunk[:3]))
                    crc = chunk.crc_after(crc)
                    info = _StorageInfo(self._file.name, offset, length)
                    results.append(_Result(item.index, length, info, crc))
                    offset += length
                stream.flush()
                os.fsync(stream.fileno())
            self.written.files[self._file.name] = [offset, crc]
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        tensors, sums, files = self.written
        places = dict[MetadataIndex, _StorageInfo]()
        for one in (one for some in results for one in some):
            assert isinstance(one, _Result)
            place = places[one.index] = one.storage_data
            sums.setdefault(place.relative_path, []).append(one.crc)
            files[place.relative_path] = [place.offset + place.length, one.crc]
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, dcp.TensorStorageMetadata)
            tensors[name] = {"dtype": str(tensor.properties.dtype), "chunks": []}
            for chunk in tensor.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                tensors[name]["chunks"].append(
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
    """Return values in host memory, as a storage that has nothing else in it: it is pickled."""
    flat = values.detach().to("cpu").contiguous()
    return torch.from_numpy(flat.view(torch.uint8).numpy()).view(values.dtype)
