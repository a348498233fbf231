"""Pieces -> a folder, which torch.distributed.checkpoint (DCP) reads, too.

Each process writes one file, or several at once if it has much, chunk by chunk (`_container`).
DCP's index of the folder is a pickle, which can call any function, and its form changes with the
version of torch: it is there for other programs. What `_chunks` reads is JSON in the manifest,

    {tensor: {"dtype": dtype, "chunks": [[first element, elements, file, offset, bytes], ...]}}

and, beside the files, the crc32 that each of them has from its begin to the end of each chunk:

    {file: [after the first chunk, after the second, ..., of the whole file]}
"""

from __future__ import annotations

import json
import os
import pickle
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from fzero.checkpoint._chunks import Chunk
from fzero.checkpoint._container import packed
from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint.disk import together
from fzero.checkpoint.everywhere import Ranks, from_first, results_of_ranks
from fzero.checkpoint.manifest import SUMS

_FILES, _LEAST = 2, 2**25  # files at once, where each has so many bytes


class _Written(NamedTuple):
    """A chunk that was written."""

    name: str  # of the tensor
    dtype: torch.dtype
    numel: int  # of the tensor
    chunk: Chunk
    crc: int  # of its file, up to its end


def write_pieces(
    pieces: Sequence[TensorPiece], folder: Path, ranks: Ranks
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Write the pieces of all ranks into a new folder. A collective.

    Returns:
        What the manifest says of the tensors; and {file: [bytes, crc32]} of what was written.

    Raises:
        CheckpointError: on every rank, naming the rank that failed.
    """

    def write() -> list[_Written]:
        calls = [
            partial(_write, some, folder / f"__{ranks.axis.rank}_{number}.distcp")
            for number, some in enumerate(_shares(pieces))
        ]
        return [one for some in together(calls) for one in some] if pieces else []

    told = results_of_ranks(ranks, write, what=f"write {folder}")
    tensors, files, sums = dict[str, Any](), dict[str, list[int]](), dict[str, list[int]]()
    for name, dtype, _, chunk, crc in (one for some in told for one in some):
        tensors.setdefault(name, {"dtype": str(dtype), "chunks": []})["chunks"].append([*chunk])
        sums.setdefault(chunk.file, []).append(crc)
        files[chunk.file] = [chunk.offset + chunk.length, crc]

    def write_index() -> None:
        with open(folder / ".metadata", "wb") as stream:
            pickle.dump(_index_of_dcp(one for some in told for one in some), stream)
        (folder / SUMS).write_text(json.dumps(sums))

    from_first(ranks, write_index, what=f"write {folder}")
    return tensors, files


def _shares(pieces: Sequence[TensorPiece]) -> list[Sequence[TensorPiece]]:
    """Cut pieces into runs of about as many bytes: one for each file that is written at once."""
    ends = [*accumulate(piece.values.nbytes for piece in pieces)]
    number = max(1, min(_FILES, ends[-1] // _LEAST)) if ends else 1
    cuts = [bisect_left(ends, ends[-1] * k // number) for k in range(number)] if ends else [0]
    return [pieces[first:last] for first, last in zip(cuts, [*cuts[1:], len(pieces)], strict=True)]


def _write(pieces: Sequence[TensorPiece], file: Path) -> list[_Written]:
    """Write the file of one process."""
    found: list[_Written] = []
    offset = crc = 0
    with open(file, "xb") as stream:
        for piece in pieces:
            parts = packed(piece.values)
            length = sum(map(stream.write, parts[:3]))
            crc = parts.crc_after(crc)
            chunk = Chunk(piece.start, piece.values.numel(), file.name, offset, length)
            found.append(_Written(piece.name, piece.values.dtype, piece.numel, chunk, crc))
            offset += length
        stream.flush()
        os.fsync(stream.fileno())
    return found


def _index_of_dcp(written: Iterable[_Written]) -> dcp.Metadata:
    index = dcp.Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
    for name, dtype, numel, chunk, _ in written:
        form = dcp.TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size([numel]), [])
        tensor: Any = index.state_dict_metadata.setdefault(name, form)
        start = torch.Size([chunk.start])
        tensor.chunks.append(dcp.ChunkStorageMetadata(start, torch.Size([chunk.numel])))
        info = _StorageInfo(chunk.file, chunk.offset, chunk.length)
        index.storage_data[MetadataIndex(name, start)] = info
    return index
