"""Pieces <-> a folder, by torch.distributed.checkpoint (DCP).

DCP plans, writes, reads and reshards; two small planners tell it which ranges of which 1-D
tensors this process has. So a rank reads only the saved chunks that its own ranges touch. DCP is
given an empty state dict: a state dict cannot hold ranges, and DCP logs each of its entries.

DCP's own index of the folder is a pickle, which can call any function, and its form changes with
the version of torch. It is there for other programs; what is read here is JSON in the manifest,
made of what the writer says of each chunk that it has written:

    {tensor: {"dtype": dtype, "chunks": [[first element, elements, file, offset, bytes], ...]}}
"""

from __future__ import annotations

import io
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint.everywhere import could_not, damaged, said_by
from fzero.checkpoint.manifest import MANIFEST, Manifest, misfits
from fzero.ranks.mesh import Axis, Runtime

Named = dict[str, list[TensorPiece]]


class _Place(NamedTuple):
    """Where the bytes of one chunk are: what `torch.save` wrote of it."""

    file: str
    offset_bytes: int
    length_bytes: int


def write_pieces(pieces: Sequence[TensorPiece], folder: Path, axis: Axis) -> dict[str, Any]:
    """Write the pieces of all ranks into a new folder; rank 0 gets the index. A collective.

    Returns:
        On rank 0 what the manifest says of the tensors; nothing on the others.

    Raises:
        CheckpointError: on every rank, naming the rank that failed.
    """
    writer = _Writer(folder)

    def run(named: Named, **where: Any) -> None:
        dcp.save({}, storage_writer=writer, planner=_Writing(named), **where)

    _with_dcp(run, pieces, axis, doing=f"write {folder}")
    return writer.tensors


def read_pieces(
    pieces: Sequence[TensorPiece], folder: Path, index: dcp.Metadata, axis: Axis
) -> None:
    """Fill the values of this rank's pieces from a folder, whoever wrote it. A collective.

    index: what `index_of` has checked.

    Raises `CheckpointError` on every rank, naming the rank that failed.
    """

    def run(named: Named, **where: Any) -> None:
        dcp.load({}, storage_reader=_Reader(folder, index), planner=_Reading(named), **where)

    _with_dcp(run, pieces, axis, doing=f"read {folder}")


def index_of(saved: Manifest, pieces: Sequence[TensorPiece], path: Path) -> dcp.Metadata:
    """Return DCP's index of the tensors that the pieces are of.

    Raises `CheckpointError`, naming the tensor, unless they are whole in the files of the manifest.
    """
    found = dcp.Metadata(state_dict_metadata={}, storage_data={})
    for piece in pieces:
        if piece.name in found.state_dict_metadata:
            continue
        for wrong in misfits(saved, piece):
            raise damaged(path / MANIFEST, f"does not fit {piece.name}: {wrong}")
        chunks = []
        for begin, numel, *place in saved.tensors[piece.name]["chunks"]:
            chunks.append(_chunk(begin, numel))
            assert found.storage_data is not None
            found.storage_data[MetadataIndex(piece.name, [begin])] = _Place(*place)
        found.state_dict_metadata[piece.name] = dcp.TensorStorageMetadata(
            properties=TensorProperties(dtype=piece.values.dtype),
            size=torch.Size([piece.numel]),
            chunks=chunks,
        )
    return found


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


class _Reader(dcp.StorageReader):
    """Reads by an index that was checked: chunks of 1-D tensors, each at a `_Place`."""

    def __init__(self, folder: Path, index: dcp.Metadata) -> None:
        self._folder, self._index = folder, index

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[_Place, dcp.ReadItem]]] = defaultdict(list)
        assert self._index.storage_data is not None
        for item in plan.items:
            place = self._index.storage_data[item.storage_index]
            by_file[place.file].append((place, item))
        for file, items in by_file.items():
            with open(self._folder / file, "rb") as stream:
                for place, item in items:
                    stream.seek(place.offset_bytes)
                    chunk = io.BytesIO(stream.read(place.length_bytes))
                    values = torch.load(chunk, map_location="cpu", weights_only=True)
                    target = planner.resolve_tensor(item)
                    target.copy_(values.narrow(0, item.storage_offsets[0], item.lengths[0]))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self._index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """There is nothing to forget: a reader reads one folder."""

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool) -> None:
        """There is nothing to set up: the index is there."""

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.path.isdir(checkpoint_id)


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
        return _apart(_values(self._named, index))


class _Reading(dcp.DefaultLoadPlanner):
    """Reads into the values of pieces."""

    def __init__(self, named: Named) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._named = named

    def create_local_plan(self) -> dcp.LoadPlan:
        assert self.metadata is not None
        items = []
        for name, pieces in self._named.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, dcp.TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, [_part(p) for p in pieces])
        return dcp.LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        # Virtual ranks of several replicas read the same elements: by their numbers here.
        assert index.index is not None
        return self._named[index.fqn][index.index].values


def _write_item(piece: TensorPiece) -> dcp.WriteItem:
    chunk = _part(piece)
    return dcp.WriteItem(
        index=MetadataIndex(piece.name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=piece.values.dtype),
            size=torch.Size([piece.numel]),
        ),
    )


def _part(piece: TensorPiece) -> dcp.ChunkStorageMetadata:
    return _chunk(piece.start, piece.values.numel())


def _chunk(start: int, numel: int) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(offsets=torch.Size([start]), sizes=torch.Size([numel]))


def _values(named: Named, index: MetadataIndex) -> Tensor:
    """Return the values that a plan's item means: a process has few pieces of one tensor."""
    assert index.offset is not None
    return next(p.values for p in named[index.fqn] if p.start == index.offset[0])


def _apart(values: Tensor) -> Tensor:
    """Return the same memory as a storage that has nothing else in it.

    DCP copies what is a part of a larger storage, and keeps all copies until the file is written.
    """
    if values.device.type != "cpu":
        return values
    return torch.from_numpy(values.detach().view(torch.uint8).numpy()).view(values.dtype)


def _with_dcp(
    run: Callable[..., Any], pieces: Sequence[TensorPiece], axis: Axis, *, doing: str
) -> Any:
    named: Named = defaultdict(list)
    for piece in pieces:
        named[piece.name].append(piece)
    alone = axis.runtime is not Runtime.PROCESSES
    try:
        with warnings.catch_warnings():
            # DCP warns whenever it runs in one process, even if that was asked for by `no_dist`.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            return run(dict(named), no_dist=alone, process_group=None if alone else axis.group())
    except CheckpointException as failed:  # DCP raises it on all ranks; it is no Exception
        rank, (error, _) = min(failed.failures.items())
        if not isinstance(error, Exception):
            raise error from None  # Ctrl-C and its like: DCP catches those, too
        raise said_by(could_not(doing, error), rank, axis) from None
