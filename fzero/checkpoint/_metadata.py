"""The index of torch.distributed.checkpoint (DCP), read without running what is in it.

DCP pickles its index, and a pickle can call any function. Here it is taken apart by an unpickler
that knows the names in an index of DCP and gives each a stand-in which only keeps its arguments;
another name is refused. What the stand-ins kept is then checked, number by number, against what is
wanted and against the files of the manifest, and only that becomes an index that DCP reads by.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fzero.checkpoint._everywhere import damaged
from fzero.checkpoint._parse import INDEX
from fzero.checkpoint._pickles import Kept
from fzero.checkpoint._pieces import Wanted

_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
}
_DROPPED = {
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


def read_index(folder: Path, files: Mapping[str, list[int]], wanted: Mapping[str, Wanted]) -> Any:
    """Return DCP's `Metadata` of the tensors that are `wanted`, all of them whole in `files`.

    Raises `CheckpointError`, naming the tensor or the class, for any other index.
    """
    where = folder / INDEX
    try:
        index = _Reader(where.read_bytes()).load()
    except pickle.UnpicklingError as error:
        raise damaged(where, str(error)) from None
    except Exception as error:  # a pickle that was made up can fail in any way
        raise damaged(where, f"is no index: {type(error).__name__}") from None
    try:
        tensors, places = _taken_apart(index)
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(where, f"is no index of tensors: {type(error).__name__}: {error}") from None
    found = Metadata(state_dict_metadata={}, storage_data={})
    for name, one in wanted.items():
        problem = _add(found, name, one, tensors.get(name), places, files)
        if problem:
            raise damaged(where, f"does not fit {name}: {problem}")
    return found


class _Reader(pickle.Unpickler):
    """Finds the names of an index, each as something new that only this reader has."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._names: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the stand-in of a name. Raises `UnpicklingError` for one that is not known."""
        place = (module, name)
        if place not in self._names:
            self._names[place] = _stand_in(module, name)
        return self._names[place]


def _stand_in(module: str, name: str) -> Any:
    if (module, name) in _RECORDS:
        return type(name, (Kept,), {})
    if (module, name) in _DROPPED:
        return lambda *args: None
    if (module, name) == ("torch", "Size"):
        return lambda sizes=(): tuple(sizes)
    dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
    if isinstance(dtype, torch.dtype):
        return dtype
    raise pickle.UnpicklingError(f"names {module}.{name}, which no index of tensors has")


Places = dict[tuple[str, int], Any]


def _taken_apart(index: Any) -> tuple[dict[str, Any], Places]:
    """Return the tensors by name, and where each chunk is by name and offset."""
    tensors = index.state["state_dict_metadata"]
    places: Places = {}
    for key, place in index.state["storage_data"].items():
        name, offset = key.state["fqn"], key.state["offset"]
        if isinstance(offset, tuple) and len(offset) == 1:
            places[name, offset[0]] = place.state
    return dict(tensors.items()), places


def _add(
    found: Metadata,
    name: str,
    wanted: Wanted,
    entry: Any,
    places: Places,
    files: Mapping[str, list[int]],
) -> str:
    """Add a tensor to `found`; or return what is wrong with it."""
    if entry is None:
        return "the index does not have it"
    chunks = []
    try:
        dtype, size = entry.state["properties"].state[0], entry.state["size"]
        if dtype is not wanted.dtype or size != (wanted.numel,):
            return f"it is {size!r:.80} of {dtype!r:.80} in the index, {wanted} is wanted"
        for begin, numel in _in_order(entry.state["chunks"], wanted.numel):
            place = _storage(places[name, begin], files)
            assert found.storage_data is not None
            found.storage_data[MetadataIndex(name, [begin])] = place
            chunks.append(
                ChunkStorageMetadata(offsets=torch.Size([begin]), sizes=torch.Size([numel]))
            )
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    found.state_dict_metadata[name] = TensorStorageMetadata(
        properties=TensorProperties(dtype=wanted.dtype),
        size=torch.Size([wanted.numel]),
        chunks=chunks,
    )
    return ""


def _in_order(chunks: Any, numel: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, length) of each chunk. Raises `ValueError` unless they are 0..numel once."""
    ranges = sorted((_natural(one, "offsets"), _natural(one, "sizes")) for one in chunks)
    end = 0
    for begin, length in ranges:
        if begin != end or not length:
            raise ValueError(f"elements {end} to {begin} are in no chunk, or in two")
        yield begin, length
        end = begin + length
    if end != numel:
        raise ValueError(f"{end} of {numel} elements are there")


def _natural(chunk: Any, name: str) -> int:
    (value,) = chunk.state[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} {value!r:.80}")
    return value


def _storage(place: Any, files: Mapping[str, list[int]]) -> _StorageInfo:
    """Return where a chunk is: inside of a file that was checked."""
    file, begin, length = place["relative_path"], place["offset"], place["length"]
    if not isinstance(file, str) or file not in files:
        raise ValueError(f"it is in {file!r:.200}, which is not in the manifest")
    good = type(begin) is int and type(length) is int and begin >= 0 and length > 0
    if not good or begin + length > files[file][0]:
        raise ValueError(f"it is at {begin!r:.40} + {length!r:.40} of {file}")
    if place.get("transform_descriptors"):
        raise ValueError("it was transformed when it was written")
    return _StorageInfo(relative_path=file, offset=begin, length=length)
