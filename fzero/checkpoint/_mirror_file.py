"""One copy: what a process holds at one update, as one file in shared memory.

    prefix    32 bytes: a mark, then the sizes and the checksums of header and body
    body      from byte 64: the values of each piece, each from a multiple of 16 bytes
    header    JSON: whose copy it is, the random generators, and the manifest of a checkpoint, which
              says where in this file each piece is

The file is mapped, and kept for a later update: memory that was used once costs no page faults.
While it is written it has a name that nobody reads; a rename ends that.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint._private import new_file, own_file
from fzero.checkpoint._storage import chunks_of
from fzero.checkpoint.collective import damaged
from fzero.checkpoint.manifest import MANIFEST_FORM, Manifest
from fzero.errors.json_form import DictForm, problems

_PREFIX = struct.Struct("<8sQQII")  # mark, bytes of body and header, crc32 of body and header
_MARK = b"fzmirr01"  # another format has another mark
_BODY = 64
_ALIGNED = 16
_ROUND = 2**16  # files grow by so much, that a longer header fits into the same one


class Label(NamedTuple):
    """Whose copy it is."""

    attempt: str  # of the processes that wrote it: another one after each restart
    update: int
    rank: int
    ranks: int

    @property
    def name(self) -> str:
        """Of the file."""
        return f"{self.attempt}-update-{self.update:06d}-rank-{self.rank:05d}-of-{self.ranks:05d}"


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


_HEADER = DictForm(
    must={
        "label": (lambda x: isinstance(x, str) and x.isalnum(), _natural, _natural, _natural),
        "complete": _natural,
        "rng": lambda x: isinstance(x, str),
        "manifest": MANIFEST_FORM,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a copy says of itself."""

    label: Label
    complete: int  # the update before, of which all copies were there; 0: none
    rng: str
    manifest: Manifest  # its chunks are in this file
    end: int = 0  # of the body in the file


class CopyFile(NamedTuple):
    """The memory of one file."""

    file: Path
    memory: Tensor  # [bytes] uint8, mapped

    def named(self, file: Path) -> CopyFile:
        """Rename the file."""
        os.replace(self.file, file)
        return self._replace(file=file)


def slot_bytes(nbytes: int) -> int:
    """Return the bytes of a file for a copy of so many, which has room for a longer header."""
    return -(-nbytes // _ROUND) * _ROUND + _ROUND


def take_slot(file: Path, old: CopyFile | None, nbytes: int) -> CopyFile:
    """Return a mapped file of at least `nbytes`; `old`, which has another name then, if possible.

    file: a name that nobody can have guessed, of a file that is not there.

    Raises `OSError` where memory is short: a write into a mapping without memory ends the process.
    """
    if old is not None:
        old = old.named(file)
        if nbytes <= old.memory.numel():
            return old
    size = slot_bytes(nbytes)
    opened = new_file(file) if old is None else own_file(file, os.O_RDWR)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(opened, 0, size)
        else:  # macOS, which has no file system in memory either
            os.ftruncate(opened, size)
        return CopyFile(file, _tensor_of(mmap.mmap(opened, size)))
    except OSError:
        file.unlink(missing_ok=True)
        raise
    finally:
        os.close(opened)


def table_of(pieces: Sequence[TensorPiece], name: str) -> dict[str, Any]:
    """Return what a manifest says of pieces that are written into a copy of that name."""
    tensors: dict[str, Any] = {}
    for piece, begin in _places(pieces):
        values = piece.values
        entry = tensors.setdefault(piece.name, {"dtype": str(values.dtype), "chunks": []})
        entry["chunks"].append([piece.start, values.numel(), name, begin, values.nbytes])
    return tensors


def header_text(header: Header) -> bytes:
    """Return a header as it is written."""
    body = {
        "label": [*header.label],
        "complete": header.complete,
        "rng": header.rng,
        "manifest": {each.name: getattr(header.manifest, each.name) for each in fields(Manifest)},
    }
    return json.dumps(body).encode()


def copy_bytes(pieces: Sequence[TensorPiece], text: bytes = b"") -> int:
    """Return the bytes of a copy in all, with the text of its header."""
    return _BODY + sum(map(_padded_bytes, pieces)) + len(text)


@torch.no_grad()
def fill(slot: CopyFile, pieces: Sequence[TensorPiece]) -> None:
    """Copy values into the body."""
    for piece, begin in _places(pieces):
        target = slot.memory[begin : begin + piece.values.nbytes]
        target.view(piece.values.dtype).copy_(piece.values.detach())


def _places(pieces: Sequence[TensorPiece]) -> Iterator[tuple[TensorPiece, int]]:
    begin = _BODY
    for piece in pieces:
        yield piece, begin
        begin += _padded_bytes(piece)


def _padded_bytes(piece: TensorPiece) -> int:
    return -(-piece.values.nbytes // _ALIGNED) * _ALIGNED


def seal(slot: CopyFile, text: bytes, nbytes: int) -> None:
    """Write header and checksums, the mark last: from then on the copy is whole."""
    end = nbytes - len(text)
    slot.memory[end:nbytes].numpy()[:] = memoryview(text)
    body = slot.memory[_BODY:end]
    prefix = _PREFIX.pack(_MARK, end - _BODY, len(text), _crc32(body), zlib.crc32(text))
    slot.memory[: len(prefix)].numpy()[:] = memoryview(prefix)


def mapped(file: Path) -> Tensor:
    """Return the bytes of a file of this user's, mapped: what is written there changes no file."""
    opened = own_file(file, os.O_RDONLY)
    try:
        size = os.fstat(opened).st_size
        if not size:
            raise damaged(file, "is empty")
        return _tensor_of(mmap.mmap(opened, size, access=mmap.ACCESS_COPY))
    finally:
        os.close(opened)


def read_header(memory: Tensor, where: object) -> Header:
    """Return the header of a copy. Raises `CheckpointError` unless it is as `seal` writes it."""
    body, length, _, crc = _prefix(memory, where)
    text = memory[_BODY + body : _BODY + body + length].numpy().tobytes()
    if zlib.crc32(text) != crc:
        raise damaged(where, "is not what was written: the checksum of its header is wrong")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"has no header: {type(error).__name__}: {error}") from None
    for wrong in problems(found, _HEADER, "the header"):
        raise damaged(where, f"has no header: {wrong}")
    return Header(
        label=Label(*found["label"]),
        complete=found["complete"],
        rng=found["rng"],
        manifest=Manifest(**found["manifest"]),
        end=_BODY + body,
    )


def require_body(memory: Tensor, where: object) -> None:
    """Raise `CheckpointError` unless the checksum of the body is right."""
    body, _, crc, _ = _prefix(memory, where)
    if _crc32(memory[_BODY : _BODY + body]) != crc:
        raise damaged(where, "is not what was written: its checksum is wrong")


def extent(memory: Tensor, where: object) -> int:
    """Return the bytes of the copy in a file, which may be longer."""
    body, length, _, _ = _prefix(memory, where)
    return _BODY + body + length


def _prefix(memory: Tensor, where: object) -> tuple[int, int, int, int]:
    if memory.numel() < _BODY:
        raise damaged(where, f"has {memory.numel()} bytes")
    mark, *found = _PREFIX.unpack(memory[: _PREFIX.size].numpy().tobytes())
    if mark != _MARK or _BODY + found[0] + found[1] > memory.numel():
        raise damaged(where, "is no copy of this format, or is cut off")
    return tuple(found)


def joined(headers: Mapping[int, Header]) -> Manifest:
    """Return the manifest of all copies of an update, {rank: header}, as one of a checkpoint."""
    first = headers[0].manifest
    tensors: dict[str, Any] = {}
    buffers: dict[str, dict[str, str]] = {}
    files: dict[str, list[int]] = {}
    for rank, header in headers.items():
        files[header.label.name] = [header.end, 0]
        for name, entry in header.manifest.tensors.items():
            merged = tensors.setdefault(name, {"dtype": entry["dtype"], "chunks": []})
            merged["chunks"] += [
                [start, numel, header.label.name, *place]
                for start, numel, _, *place in entry["chunks"]
            ]
        for path, forms in header.manifest.module["buffers"].items():
            buffers.setdefault(path, {})[str(rank)] = forms["0"]
    module = {**first.module, "buffers": buffers}
    return replace(first, tensors=tensors, files=files, module=module)


def read_pieces(
    pieces: Sequence[TensorPiece], saved: Manifest, memories: Mapping[str, Tensor]
) -> None:
    """Fill the values of pieces from copies, {name in the manifest: bytes}."""
    for piece in pieces:
        for chunk, target, at in chunks_of(saved, piece):
            begin = chunk.offset + at * target.dtype.itemsize
            source = memories[chunk.file][begin : begin + target.nbytes]
            target.copy_(source.view(target.dtype))


def names_of(pieces: Sequence[TensorPiece], saved: Manifest) -> set[str]:
    """Return the copies that pieces are read from."""
    return {chunk.file for piece in pieces for chunk, *_ in chunks_of(saved, piece)}


def _tensor_of(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _crc32(memory: Tensor) -> int:
    values: Any = memory.numpy()
    return zlib.crc32(values)
