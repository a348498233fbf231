"""The form of one chunk: what torch.save writes of a 1-D tensor, with its values at a known place.

    64 bytes    the header of the first record, `archive/data/0`, which is filled up
    values      so a reader that knows where a chunk is needs no unpickling
    rest        the records `data.pkl`, `byteorder` and `version`, and the zip's table

So torch.load reads it, and torch.distributed.checkpoint (DCP) with it; and the one checksum of the
values, which a zip has anyway, is enough. The table holds 32-bit numbers: a chunk has at most 2 GB.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
