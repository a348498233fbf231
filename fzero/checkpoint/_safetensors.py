"""The safetensors format: 8 bytes with the header's length, a JSON header, the values.

    header   {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}}, in bytes from
             the end of the header; the ranges follow each other without gap or overlap

Source: Hugging Face, safetensors, section "Format" of its README.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint._storage import bytes_of
from fzero.checkpoint.collective import CheckpointError, damaged
from fzero.checkpoint.folders import is_there, regular
from fzero.errors import LayoutError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NAME = re.compile(r"[^/\\\0]*[^/\\\0.][^/\\\0]*\.safetensors")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorForm(NamedTuple):
    """A tensor before its values are there."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the values of a tensor are."""

    file: Path
    name: str
    begin: int
    form: TensorForm
    mark: tuple[int, int] | None = None  # of the file that was looked at; None: it is being made


def _mark(stream: BinaryIO) -> tuple[int, int]:
    """Return what another file of this name would not have."""
    found = os.fstat(stream.fileno())
    return found.st_mtime_ns, found.st_size


def split_files(forms: Mapping[str, TensorForm], max_bytes: int) -> list[list[str]]:
    """Return which names share a file: in their order, a file full before the next one begins.

    Example:
        >>> forms = {name: TensorForm((4,), torch.float32) for name in "abc"}
        >>> split_files(forms, 32)
        [['a', 'b'], ['c']]
    """
    shards: list[list[str]] = [[]]
    held = 0
    for name, form in forms.items():
        if shards[-1] and held + form.nbytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += form.nbytes
    return shards


def begin_file(
    file: Path, forms: Mapping[str, TensorForm], tied: Mapping[str, str] | None = None
) -> dict[str, Place]:
    """Write the header of a file, and make room for the values; return where each one goes.

    tied: other names of what is in it, which are written as safetensors.torch.save_model does.

    Raises `LayoutError` for a dtype that the format has not.
    """
    # The widest dtype first: so each tensor begins at a multiple of the size of its elements.
    names = sorted(forms, key=lambda name: -forms[name].dtype.itemsize)
    more = {other: name for other, name in (tied or {}).items() if name in forms}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **more}}
    ends = 0
    for name in names:
        form = forms[name]
        begin, ends = ends, ends + form.nbytes
        header[name] = {
            "dtype": _name_of(name, form.dtype),
            "shape": list(form.shape),
            "data_offsets": [begin, ends],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb", opener=regular) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + ends)
    first = 8 + len(text)
    return {
        name: Place(
            file=file, name=name, begin=first + header[name]["data_offsets"][0], form=forms[name]
        )
        for name in names
    }


def write_values(place: Place, values: Tensor) -> None:
    """Write the values of one tensor to where they go."""
    flat = values.detach().to("cpu").contiguous().reshape(-1)
    with open(place.file, "r+b", opener=regular) as stream:
        stream.seek(place.begin)
        if flat.numel():
            stream.write(bytes_of(flat))


def read_values(place: Place) -> Tensor:
    """Read the values of one tensor; no other bytes of its file."""
    form = place.form
    data = bytearray(form.nbytes)
    with open(place.file, "rb", opener=regular) as stream:
        if place.mark not in (None, _mark(stream)):
            raise damaged(place.file, "was replaced since its header was read")
        stream.seek(place.begin)
        if stream.readinto(data) != len(data):
            raise damaged(place.file, "is shorter than it was")
    if not data:
        return torch.empty(form.shape, dtype=form.dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(form.dtype).reshape(form.shape)


def read_index(folder: Path) -> dict[str, str]:
    """Return which file of a folder has each tensor, by its index; {} where there is one file.

    Raises `CheckpointError`, naming the file, for what is not as the format has it.
    """
    index = folder / INDEX
    if not is_there(index):
        if not is_there(folder / SINGLE):
            raise CheckpointError(
                f"there are no weights at {folder}: no {INDEX} and no {SINGLE} in it.",
                cause="a mistyped path, or an export that was cut off.",
                fix="pass the folder of export_safetensors, or of save_pretrained.",
            )
        return {}
    with open(index, "rb", opener=regular) as stream:
        file_of = _json(index, stream.read()).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise damaged(index, "has no weight_map")
    for name, file in file_of.items():
        if not isinstance(file, str) or not _NAME.fullmatch(file):
            raise damaged(index, f"has {name} in {file!r:.200}, which is no file of the folder")
    return file_of


def places_in(folder: Path, file_of: Mapping[str, str] | None = None) -> dict[str, Place]:
    """Return where each tensor of a folder is: by its index, or in its one file.

    file_of: what `read_index` has returned; by default it is read. Raises as that does.
    """
    file_of = read_index(folder) if file_of is None else file_of
    if not file_of:
        return read_file(folder / SINGLE)
    files: dict[str, dict[str, Place]] = {}
    for name, file in file_of.items():
        if file not in files:
            if not is_there(folder / file):
                raise damaged(folder / file, "is missing")
            files[file] = read_file(folder / file)
        if name not in files[file]:
            raise damaged(folder / file, f"has no {name}, which its index says")
    every = {name: place for places in files.values() for name, place in places.items()}
    tied = {name: place for name, place in every.items() if place.name != name}
    return {**tied, **{name: files[file][name] for name, file in file_of.items()}}


def read_file(file: Path) -> dict[str, Place]:
    """Return where each tensor of a file is, a tied one at each name that the header says.

    Raises `CheckpointError` for a damaged one.
    """
    if not is_there(file):
        raise damaged(file, "is missing")
    with open(file, "rb", opener=regular) as stream:
        mark = _mark(stream)
        size = mark[1]
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= size - 8:
            raise damaged(file, f"of {size:,} bytes has no header of {length:,} bytes")
        header = _json(file, stream.read(length))
    more = header.pop("__metadata__", None)
    made = {name: _place(file, name, entry, 8 + length, mark) for name, entry in header.items()}
    tied = more.items() if isinstance(more, dict) else ()
    found = {other: made[x] for other, x in tied if isinstance(x, str) and x in made}
    return {**found, **made}


def _place(file: Path, name: str, entry: Any, first: int, mark: tuple[int, int]) -> Place:
    """Return where a tensor is. Raises `CheckpointError` unless that is in the file."""
    try:
        begin, end = entry["data_offsets"]
        form = TensorForm(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
        good = all(type(n) is int and n >= 0 for n in (begin, end, *form.shape))
        good = good and end - begin == form.nbytes and first + end <= mark[1]
    except (KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise damaged(file, f"has no tensor {name} where its header says: {entry!r:.200}")
    return Place(file=file, name=name, begin=first + begin, form=form, mark=mark)


def _json(file: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"is no JSON: {type(error).__name__}: {error}") from None
    if not isinstance(found, dict):
        raise damaged(file, "holds no dict")
    return found


def _name_of(name: str, dtype: torch.dtype) -> str:
    if dtype in _NAMES:
        return _NAMES[dtype]
    raise LayoutError(
        f"export_safetensors: {name} is {dtype}, for which the format has no name.",
        cause="a parameter or buffer that is quantized, or complex of 128 bits.",
        fix="save it with fzero.checkpoint.save, or convert it before.",
    )
