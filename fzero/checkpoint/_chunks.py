"""From a manifest to values: which chunks have the elements of a piece, and reading them.

A chunk is what one rank wrote of one tensor. A rank reads those that its own pieces touch, each
once, in two threads, but one at a time of those that need memory of their own; and what it reads it
has checked, for another rank may see another copy.
"""

from __future__ import annotations

import io
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint._container import HEADER, bytes_of
from fzero.checkpoint._folders import require_digest
from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint.disk import read_text, regular, together
from fzero.checkpoint.everywhere import damaged
from fzero.checkpoint.manifest import SUMS, Manifest
from fzero.errors.json_form import DictForm, natural, problems

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
    sums = dict[str, list[int]]()
    for file in (name for name in saved.files if name.rpartition("/")[2] == SUMS):
        require_digest(folder / file, saved.files[file])
        found = json.loads(read_text(folder / file))
        for wrong in problems(found, DictForm(others=[natural]), "the file"):
            raise damaged(folder / file, f"is not what was written: {wrong}")
        sums |= {f"{file.removesuffix(SUMS)}{name}": ends for name, ends in found.items()}
    return sums


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
