"""The form in which encoded values cross ranks: rows of one buffer, and their way back.

    x [r, n]   ->  codec.encode: parts [r, m_k]  ->  one buffer [r, m]  ->  parts  ->  [r, n]

One part crosses in its own dtype (8-bit floats as bytes, for backends refuse them); several parts
lie end to end as bytes, in int8 if the last of them is. Rows without elements are never encoded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.state.codec import Codec


class WireForm(NamedTuple):
    """How encoded rows lie in a buffer: the dtype and the size of each part of a row; n."""

    parts: tuple[tuple[torch.dtype, int], ...]
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the buffer."""
        if not self.parts:
            return torch.uint8
        single = len(self.parts) == 1 and not _is_float8(self.parts[0][0])
        return self.parts[0][0] if single else _bytes_of(self)

    @property
    def nbytes(self) -> int:
        """The bytes of a row."""
        return sum(size * kind.itemsize for kind, size in self.parts)

    def rows_of(self, received: Tensor) -> Tensor:
        """Return the rows of what was received, [r m] -> [r, m]; one where n is 0."""
        width = self.nbytes // self.dtype.itemsize
        return received.view(received.numel() // width, width) if width else received.view(1, 0)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are encoded and summed: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def encoded(codec: Codec, x: Tensor) -> tuple[Tensor, WireForm]:
    """Floating [r, n] -> (a buffer [r, m], what it looks like).

    Example:
        >>> from fzero.machine.codecs import int8
        >>> buffer, form = encoded(int8(), torch.tensor([[1.0, -0.5, 0.0]]))
        >>> buffer.dtype, decoded(int8(), buffer, form, torch.float32)
        (torch.int8, tensor([[ 1.0000, -0.4963,  0.0000]]))
    """
    rows, numel = x.shape
    if not x.numel():
        return x.new_empty((rows, 0), dtype=torch.uint8), WireForm((), numel)
    parts = codec.encode(x.to(wide(x.dtype)))
    form = WireForm(tuple((part.dtype, part.shape[-1]) for part in parts), numel)
    if len(parts) == 1 and not _is_float8(parts[0].dtype):
        return parts[0], form
    as_bytes = [_viewed(part, torch.uint8) for part in parts]
    return torch.cat(as_bytes, -1).view(_bytes_of(form)), form


def decoded(codec: Codec, buffer: Tensor, form: WireForm, dtype: torch.dtype) -> Tensor:
    """A buffer [r, m] of encoded rows -> [r, n] in `dtype`."""
    if not form.parts:
        return buffer.new_empty((buffer.shape[0], form.numel), dtype=dtype)
    if len(form.parts) == 1 and not _is_float8(form.parts[0][0]):
        parts = [buffer]
    else:
        widths = [size * kind.itemsize for kind, size in form.parts]
        pieces = torch.split(buffer.view(torch.uint8), widths, -1)
        parts = [_viewed(x, kind) for x, (kind, _) in zip(pieces, form.parts, strict=True)]
    return codec.decode(tuple(parts), form.numel, wide(dtype)).to(dtype)


def decoded_row(codec: Codec, row: Tensor, numel: int) -> Tensor:
    """One encoded row [m], of n elements -> [n] in fp32.

    Example:
        >>> from fzero.machine.codecs import int8
        >>> row = encoded(int8(), torch.tensor([[1.0, -0.5, 0.0]]))[0].reshape(-1)
        >>> decoded_row(int8(), row, 3)
        tensor([ 1.0000, -0.4963,  0.0000])
    """
    return decoded(codec, row.view(1, -1), form_of(codec, numel), torch.float32).reshape(-1)


def form_of(codec: Codec, numel: int) -> WireForm:
    """Return what a row of n elements looks like, encoded.

    Example:
        >>> from fzero.machine.codecs import int8
        >>> form_of(int8(), 300).nbytes, int8().wire_bytes(300)
        (308, 308)
    """
    try:
        return encoded(codec, torch.empty((1, numel), device="meta"))[1]
    except Exception:  # a codec that reads a value, or has a table of its own on the CPU
        return encoded(codec, torch.zeros((1, numel)))[1]


def as_bytes(codec: Codec, x: Tensor) -> Tensor:
    """Floating x of n elements -> the bytes [m] of one encoded row."""
    return encoded(codec, x.reshape(1, -1))[0].contiguous().view(torch.uint8).reshape(-1)


def from_bytes(codec: Codec, row: Tensor, form: WireForm, dtype: torch.dtype) -> Tensor:
    """The bytes [m] of one encoded row -> [n] in `dtype`.

    Example:
        >>> from fzero.machine.codecs import bf16
        >>> row = as_bytes(bf16(), torch.tensor([1.0, 2.0]))
        >>> row.numel(), from_bytes(bf16(), row, form_of(bf16(), 2), torch.float32)
        (4, tensor([1., 2.]))
    """
    return decoded(codec, row.view(1, -1).view(form.dtype), form, dtype).reshape(-1)


def is_by_rows(codec: Codec, x: Tensor) -> bool:
    """Whether each row of x [r, n] is encoded by itself, and all of it the same the next time.

    Example:
        >>> from fzero.machine.codecs import int8
        >>> is_by_rows(int8(), torch.tensor([[1.0, -0.5, 0.0], [3.0, 1.0, 2.0]]))
        True
    """
    together, form = encoded(codec, x)
    alone = torch.cat([encoded(codec, row.unsqueeze(0))[0] for row in x])
    once, twice = (decoded(codec, together, form, x.dtype) for _ in range(2))
    same = torch.equal(together.view(torch.uint8), alone.view(torch.uint8))
    return same and torch.equal(once, twice)


def sum_of(codec: Codec, buffer: Tensor, form: WireForm, dtype: torch.dtype) -> Tensor:
    """A buffer [r, m] -> [n]: what the ranks have sent, decoded and added up in their order."""
    rows = [buffer[r : r + 1] for r in range(buffer.shape[0])]
    total = decoded(codec, rows[0], form, dtype)[0]
    for row in rows[1:]:
        total = total + decoded(codec, row, form, dtype)[0]
    return total


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _bytes_of(form: WireForm) -> torch.dtype:
    return torch.int8 if form.parts[-1][0] is torch.int8 else torch.uint8


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x with the bytes of its last dim read as another dtype; in memory of its own."""
    return x.clone(memory_format=torch.contiguous_format).view(dtype)
