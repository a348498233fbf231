"""Pieces -> a folder, which torch.distributed.checkpoint (DCP) reads, too.

Each process writes one file, or several at once if it has much, chunk by chunk (`_container`).
DCP's index of the folder is a pickle, which can call any function, and its form changes with the
version of torch: it is there for other programs. What `_chunks` reads is JSON in the manifest,

    {tensor: {"dtype": dtype, "chunks": [[first element, elements, file, offset, bytes], ...]}}

and, beside the files, the crc32 that each of them has from its begin to the end of each chunk:

    {file: [after the first chunk, after the second, ..., of the whole file]}

The form of one chunk: what torch.save writes of a 1-D tensor, with its values at a known place.

    64 bytes    the header of the first record, `archive/data/0`, which is filled up
    values      so a reader that knows where a chunk is needs no unpickling
    rest        the records `data.pkl`, `byteorder` and `version`, and the zip's table

So torch.load reads it, and torch.distributed.checkpoint (DCP) with it; and the one checksum of the
values, which a zip has anyway, is enough. The table holds 32-bit numbers: a chunk has at most 2 GB.

From a manifest to values: which chunks have the elements of a piece, and reading them.

A chunk is what one rank wrote of one tensor. A rank reads those that its own pieces touch, each
once, in two threads, but one at a time of those that need memory of their own; and what it reads it
has checked, for another rank may see another copy.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

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


def _index_of_dcp(written: Iterable[_Written]) -> Any:
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
    return index


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


class Packed(NamedTuple):
    """A chunk as it is written: its parts follow each other."""

    head: bytes
    values: memoryview
    rest: bytes
    crc: int  # of the values

    def crc_after(self, crc: int) -> int:
        """Return the crc32 of a file, which it had before this chunk, after it."""
        crc = joined_crc(zlib.crc32(self.head, crc), self.crc, len(self.values))
        return zlib.crc32(self.rest, crc)


def bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of contiguous values in host memory: the same memory."""
    data: Any = values.detach().view(torch.uint8).numpy()
    return memoryview(data)


def packed(values: Tensor) -> Packed:
    """Return what is written of 1-D values, wherever they are."""
    own = bytes_of(values.detach().to("cpu").contiguous())
    values = torch.frombuffer(own, dtype=torch.uint8).view(values.dtype)  # a storage of its own
    pickled = io.BytesIO()
    _Pickler(pickled, 2).dump(values)
    records = [
        (b"archive/data.pkl", pickled.getvalue()),
        (b"archive/byteorder", sys.byteorder.encode()),
        (b"archive/version", b"3\n"),
    ]
    crc = zlib.crc32(own)
    facts = _facts(_VALUES, own, crc)
    filled = HEADER - 30 - len(_VALUES)
    # The filling is an extra field, of the kind that torch.save fills up with.
    head = _header(facts, _VALUES, struct.pack(f"<2sH{filled - 4}x", b"FB", filled - 4))
    table = _entry(facts, _VALUES, 0)
    rest, end = b"", HEADER + len(own)
    for name, content in records:
        facts = _facts(name, content, zlib.crc32(content))
        table += _entry(facts, name, end + len(rest))
        rest += _header(facts, name) + content
    number = len(records) + 1
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, number, number, len(table), end + len(rest), 0)
    return Packed(head, own, rest + table + last, crc)


def _facts(name: bytes, content: bytes | memoryview, crc: int) -> bytes:
    """Return what both headers of a record have: it is stored as it is, with a checksum."""
    size = len(content)
    return struct.pack("<4H3LH", 0, 0, 0, _DATE, crc, size, size, len(name))


def _header(facts: bytes, name: bytes, extra: bytes = b"") -> bytes:
    return struct.pack("<4sH", b"PK\3\4", 20) + facts + struct.pack("<H", len(extra)) + name + extra


def _entry(facts: bytes, name: bytes, at: int) -> bytes:
    rest = struct.pack("<4H2L", 0, 0, 0, 0, 0, at)
    return struct.pack("<4s2H", b"PK\1\2", 20, 20) + facts + rest + name


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
    share: tuple[int, int] = (0, 2**62),
    named: Manifest | None = None,
) -> None:
    """Fill the values of pieces from the files of a folder, and check all that is read.

    share: which part of how many this rank checks of all that is there, whether it is read or not.
    named: a manifest with the names that the pieces have, if they are others than the saved ones.

    Raises `CheckpointError` for a file that is not what was written.
    """
    wanted: dict[Chunk, Targets] = defaultdict(list)
    for piece in pieces:
        for chunk, target, at in chunks_of(named or saved, piece):
            wanted[chunk].append((target, at))
    sums, calls, others = _sums(folder, saved), list[Callable[[], None]](), Lock()
    for number, (name, chunks) in enumerate(tensor_files(saved).items()):
        file, checks = folder / name, number % share[1] == share[0]
        if not checks and wanted.keys().isdisjoint(chunks):
            continue
        if name not in sums:  # saved by a version that kept the checksum of whole files only
            require_digest(file, saved.files[name])
        elif len(sums[name]) != len(chunks):
            raise damaged(file, f"has {len(chunks)} chunks, and checksums of {len(sums[name])}")
        ends = sums.get(name, [-1] * len(chunks))
        for chunk, before, after in zip(chunks, [0, *ends[:-1]], ends, strict=True):
            if checks or chunk in wanted:
                read = _Read(file, chunk, wanted.get(chunk, []), before, after)
                calls.append(partial(read.run, others))
    each = iter(calls)

    def next_ones() -> None:
        for call in each:  # a list's iterator: each thread gets others
            call()

    together([next_ones] * max(1, min(_THREADS, len(calls))))


class _Read(NamedTuple):
    """A chunk that is read."""

    file: Path
    chunk: Chunk
    targets: Targets  # that it fills
    before: int  # the crc32 of the file before it
    after: int  # and after it; -1: it is not known

    def run(self, others: Lock) -> None:
        """Fill the targets. others: held where that takes more memory, by one thread at a time."""
        whole = _in_place(self.chunk, self.targets)
        with (
            nullcontext() if whole is not None else others,
            open(self.file, "rb", opener=regular) as stream,
        ):
            stream.seek(self.chunk.offset)
            if self.after < 0:
                _unpickle(stream, self.chunk, self.targets)
            elif _read(stream, self.chunk, self.targets, self.before, whole) != self.after:
                raise damaged(self.file, "is not what was written: its checksum is wrong")


def _sums(folder: Path, saved: Manifest) -> dict[str, list[int]]:
    """Return the crc32 of each file from its begin to the end of each of its chunks."""
    if SUMS not in saved.files:
        return {}
    require_digest(folder / SUMS, saved.files[SUMS])
    found = json.loads(read_text(folder / SUMS))
    for wrong in problems(found, DictForm(others=[natural]), "the file"):
        raise damaged(folder / SUMS, f"is not what was written: {wrong}")
    return found


def _in_place(chunk: Chunk, targets: Targets) -> Tensor | None:
    """Return the tensor that a chunk can be read into; None where its values are copied."""
    if len(targets) != 1:
        return None
    (whole, at), *_ = targets
    alone = at == 0 and whole.numel() == chunk.numel
    return whole if alone and whole.device.type == "cpu" and whole.is_contiguous() else None


def _read(stream: BinaryIO, chunk: Chunk, targets: Targets, crc: int, whole: Tensor | None) -> int:
    """Fill the targets; return the crc32 of the file at the end of the chunk, from that before."""
    if not targets:
        return zlib.crc32(stream.read(chunk.length), crc)
    values = whole
    if values is None:
        values = torch.empty(chunk.numel, dtype=targets[0][0].dtype, device="cpu")
    data = bytes_of(values)
    crc = zlib.crc32(stream.read(HEADER), crc)
    for begin in range(0, len(data), _BLOCK):  # what was read is still near when it is summed
        block = data[begin : begin + _BLOCK]
        if stream.readinto(block) != len(block):  # type: ignore[attr-defined]
            return -1
        crc = zlib.crc32(block, crc)
    rest = stream.read(max(chunk.length - HEADER - len(data), 0))
    if whole is None:
        _fill(targets, values)
    return zlib.crc32(rest, crc)


def _unpickle(stream: BinaryIO, chunk: Chunk, targets: Targets) -> None:
    data = io.BytesIO(stream.read(chunk.length))
    if targets:
        _fill(targets, torch.load(data, map_location="cpu", weights_only=True))


def _fill(targets: Targets, values: Tensor) -> None:
    for target, at in targets:
        target.copy_(values.narrow(0, at, target.numel()))
