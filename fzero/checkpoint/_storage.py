"""Pieces -> files of a folder, which torch.distributed.checkpoint (DCP) reads, too; and back.

Each process writes one file, or two at once if it has much, chunk by chunk: a chunk is what one
rank wrote of one tensor, as torch.save writes it, with its values at a known place:

    64 bytes    the header of the first record, `archive/data/0`, which is filled up
    values      so a reader that knows where a chunk is needs no unpickling
    rest        the records `data.pkl`, `byteorder` and `version`, and the zip's table

The table holds 32-bit numbers: a chunk has at most 2 GB. DCP's index of the folder is a pickle,
which can call any function, and its form changes with the version of torch: it is there for other
programs. What is read here is JSON in the manifest,

    {tensor: {"dtype": dtype, "chunks": [[first element, elements, file, offset, bytes], ...]}}

and, beside the files, the crc32 that each of them has from its begin to the end of each chunk:

    {file: [after the first chunk, after the second, ..., of the whole file]}

A rank reads the chunks that its own pieces touch, each once, in two threads, but one at a time of
those that need memory of their own; and what it reads it has checked, for another rank may see
another copy.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint.collective import Ranks, damaged, from_first, results_of_ranks
from fzero.checkpoint.folders import read_text, regular, require_digest, together
from fzero.checkpoint.manifest import SUMS, Manifest
from fzero.errors.json_form import DictForm, natural, problems

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

    def write_file(file: Path, some: Sequence[TensorPiece]) -> list[_Written]:
        found: list[_Written] = []
        offset = crc = 0
        with open(file, "xb") as stream:
            for piece in some:
                parts, crc = packed(piece.values, crc)
                length = sum(map(stream.write, parts))
                chunk = Chunk(piece.start, piece.values.numel(), file.name, offset, length)
                found.append(_Written(piece.name, piece.values.dtype, piece.numel, chunk, crc))
                offset += length
            stream.flush()
            os.fsync(stream.fileno())
        return found

    def write() -> list[_Written]:
        ends = [*accumulate(piece.values.nbytes for piece in pieces)] or [0]
        number = max(1, min(_FILES, ends[-1] // _LEAST))
        cuts = [*(bisect_left(ends, ends[-1] * k // number) for k in range(number)), len(pieces)]
        calls = [
            partial(write_file, folder / f"__{ranks.axis.rank}_{k}.distcp", pieces[first:last])
            for k, (first, last) in enumerate(pairwise(cuts))
        ]
        return [one for some in together(calls) for one in some] if pieces else []

    of_ranks = results_of_ranks(ranks, write, what=f"write {folder}")
    written = [one for some in of_ranks for one in some]
    tensors, files, sums = dict[str, Any](), dict[str, list[int]](), dict[str, list[int]]()
    for name, dtype, _, chunk, crc in written:
        tensors.setdefault(name, {"dtype": str(dtype), "chunks": []})["chunks"].append([*chunk])
        sums.setdefault(chunk.file, []).append(crc)
        files[chunk.file] = [chunk.offset + chunk.length, crc]

    def write_index() -> None:
        # It is slow to import: who never saves need not wait for it.
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

        index = dcp.Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
        for name, dtype, numel, chunk, _ in written:
            form = dcp.TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size([numel]), [])
            tensor: Any = index.state_dict_metadata.setdefault(name, form)
            start = torch.Size([chunk.start])
            tensor.chunks.append(dcp.ChunkStorageMetadata(start, torch.Size([chunk.numel])))
            info = _StorageInfo(chunk.file, chunk.offset, chunk.length)
            index.storage_data[MetadataIndex(name, start)] = info
        with open(folder / ".metadata", "wb") as stream:
            pickle.dump(index, stream)
        (folder / SUMS).write_text(json.dumps(sums))

    from_first(ranks, write_index, what=f"write {folder}")
    return tensors, files


HEADER = 64  # bytes before the values
_VALUES = b"archive/data/0"
_DATE = 33  # 1980-01-01, the first one that a zip can have


class _Pickler(pickle.Pickler):
    """Pickles a tensor as torch.save does: its storage has a name, and is written elsewhere."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage):
            return "storage", torch.UntypedStorage, "0", "cpu", obj.nbytes()
        if isinstance(obj, torch.storage.TypedStorage):
            kind = getattr(torch, obj._pickle_storage_type())
            return "storage", kind, "0", "cpu", obj._size()
        return None


def bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of contiguous values in host memory: the same memory."""
    data: Any = values.detach().view(torch.uint8).numpy()
    return memoryview(data)


def packed(values: Tensor, crc: int) -> tuple[tuple[bytes, memoryview, bytes], int]:
    """Return what is written of 1-D values, wherever they are; and the crc32 of the file after it.

    crc: of the file before it. The values are gone over once: a zip has their checksum anyway.
    """
    own = bytes_of(values.detach().to("cpu").contiguous())
    values = torch.frombuffer(own, dtype=torch.uint8).view(values.dtype)  # a storage of its own
    pickled = io.BytesIO()
    _Pickler(pickled, 2).dump(values)
    crc_of_values = zlib.crc32(own)
    table, rest, head = b"", b"", b""
    for name, content, crc_of in (
        (_VALUES, own, crc_of_values),
        (b"archive/data.pkl", pickled.getvalue(), None),
        (b"archive/byteorder", sys.byteorder.encode(), None),
        (b"archive/version", b"3\n", None),
    ):
        crc_of = zlib.crc32(content) if crc_of is None else crc_of
        size, extra = len(content), b""
        at = HEADER + len(own) + len(rest) if head else 0
        if not head:  # filled up by an extra field, of the kind that torch.save fills up with
            filled = HEADER - 30 - len(name) - 4
            extra = struct.pack(f"<2sH{filled}x", b"FB", filled)
        # Both headers of a record have this: it is stored as it is, with a checksum.
        facts = struct.pack("<4H3LH", 0, 0, 0, _DATE, crc_of, size, size, len(name))
        table += struct.pack("<4s2H", b"PK\1\2", 20, 20) + facts
        table += struct.pack("<4H2L", 0, 0, 0, 0, 0, at) + name
        header = struct.pack("<4sH", b"PK\3\4", 20) + facts + struct.pack("<H", len(extra))
        if head:
            rest += header + name + extra + bytes(content)
        else:
            head = header + name + extra
    end = HEADER + len(own) + len(rest)
    rest += table + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 4, 4, len(table), end, 0)
    crc = joined_crc(zlib.crc32(head, crc), crc_of_values, len(own))
    return (head, own, rest), zlib.crc32(rest, crc)


def joined_crc(first: int, second: int, size: int) -> int:
    """Return the crc32 of two texts, of theirs and of the bytes of the second one.

    Source: zlib, crc32_combine.

    Example:
        >>> joined_crc(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
        True
    """
    return _times(_power(size), first) ^ second


@lru_cache(maxsize=256)
def _power(size: int) -> int:
    """Return x to the number of bits of so many bytes, modulo the polynomial of crc32."""
    found, square = 1 << 31, 1 << 23  # x to 0, and to 8
    while size:
        found = _times(square, found) if size & 1 else found
        square, size = _times(square, square), size >> 1
    return found


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        product ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


_THREADS, _BLOCK = 2, 2**20

Targets = list[tuple[Tensor, int]]
"""What is filled of a chunk, and with which of its elements first."""


class Chunk(NamedTuple):
    """A range of a tensor, and where its bytes are: as a manifest has it."""

    start: int
    numel: int
    file: str
    offset: int
    length: int


def chunks_of(saved: Manifest, piece: TensorPiece) -> Iterator[tuple[Chunk, Tensor, int]]:
    """Yield (chunk, the part of the piece that it has, where that begins in it), in elements."""
    first, last = piece.start, piece.start + piece.values.numel()
    for chunk in map(Chunk._make, saved.tensors[piece.name]["chunks"]):
        low, high = max(first, chunk.start), min(last, chunk.start + chunk.numel)
        if low < high:
            yield chunk, piece.values[low - first : high - first], low - chunk.start


def tensor_files(saved: Manifest) -> dict[str, list[Chunk]]:
    """Return the files that have tensors, each with its chunks in their order; by their writers."""
    found: dict[str, list[Chunk]] = defaultdict(list)
    for tensor in saved.tensors.values():
        for chunk in map(Chunk._make, tensor["chunks"]):
            found[chunk.file].append(chunk)
    for chunks in found.values():
        chunks.sort(key=lambda chunk: chunk.offset)
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def read_pieces(
    pieces: Sequence[TensorPiece],
    folder: Path,
    saved: Manifest,
    share: tuple[int, int] | None = None,
    named: Manifest | None = None,
) -> None:
    """Fill the values of pieces from the files of a folder, and check all that is read.

    share: which part of how many this rank checks of all that is there, whether it is read or not;
    None: no more than is read. named: a manifest with the names that the pieces have, if they are
    others than the saved ones.

    Raises `CheckpointError` for a file that is not what was written.
    """
    wanted: dict[Chunk, Targets] = defaultdict(list)
    for piece in pieces:
        for chunk, target, at in chunks_of(named or saved, piece):
            wanted[chunk].append((target, at))
    sums: dict[str, list[int]] = {}
    for listed in (name for name in saved.files if name.rpartition("/")[2] == SUMS):
        require_digest(folder / listed, saved.files[listed])
        found = json.loads(read_text(folder / listed))
        for wrong in problems(found, DictForm(others=[natural]), "the file"):
            raise damaged(folder / listed, f"is not what was written: {wrong}")
        sums |= {f"{listed.removesuffix(SUMS)}{name}": ends for name, ends in found.items()}
    calls, alone = list[Callable[[], None]](), Lock()
    for number, (name, chunks) in enumerate(tensor_files(saved).items()):
        file, checks = folder / name, share is not None and number % share[1] == share[0]
        if not checks and wanted.keys().isdisjoint(chunks):
            continue
        if name not in sums:  # saved by a version that kept the checksum of whole files only
            require_digest(file, saved.files[name])
        elif len(sums[name]) != len(chunks):
            raise damaged(file, f"has {len(chunks)} chunks, and checksums of {len(sums[name])}")
        ends = sums.get(name, [-1] * len(chunks))
        for chunk, before, after in zip(chunks, [0, *ends[:-1]], ends, strict=True):
            if checks or chunk in wanted:
                targets = wanted.get(chunk, [])
                calls.append(partial(_read, file, chunk, targets, before, after, alone))
    each = iter(calls)

    def next_ones() -> None:
        for call in each:  # a list's iterator: each thread gets others
            call()

    together([next_ones] * max(1, min(_THREADS, len(calls))))


def _read(file: Path, chunk: Chunk, targets: Targets, before: int, after: int, alone: Lock) -> None:
    """Fill the targets of a chunk.

    before, after: the crc32 of the file up to it, and to its end; -1: it is not known. alone: held
    where that takes memory of its own, by one thread at a time.
    """
    values = torch.empty(0, device="cpu")
    if len(targets) == 1 and targets[0][1] == 0 and after >= 0:
        values = targets[0][0]
    in_place = values.numel() == chunk.numel and values.is_contiguous() and values.is_cpu
    with nullcontext() if in_place else alone, open(file, "rb", opener=regular) as stream:
        stream.seek(chunk.offset)
        if not targets or after < 0:
            data = stream.read(chunk.length)
            crc = zlib.crc32(data, before) if after >= 0 else after
            if targets:
                values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        else:
            if not in_place:
                values = torch.empty(chunk.numel, dtype=targets[0][0].dtype, device="cpu")
            data, crc = bytes_of(values), zlib.crc32(stream.read(HEADER), before)
            for begin in range(0, len(data), _BLOCK):  # what was read is near when it is summed
                block = data[begin : begin + _BLOCK]
                if stream.readinto(block) != len(block):
                    raise damaged(file, "is not what was written: its checksum is wrong")
                crc = zlib.crc32(block, crc)
            crc = zlib.crc32(stream.read(max(chunk.length - HEADER - len(data), 0)), crc)
        for target, at in [] if in_place else targets:
            target.copy_(values.narrow(0, at, target.numel()))
    if crc != after:
        raise damaged(file, "is not what was written: its checksum is wrong")
