"""What crosses ranks in the place of values: the record of a codec, and where codecs are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.errors.check import require

Over = Literal["all", "replicas"]
"""For which ranks gradients are encoded: all, or other replicas (the slow dim of a mesh)."""

Memory = bool | torch.dtype
"""Whether what encoding loses is kept for the next time: True in the dtype of sums, or a dtype."""

KEPT_IN = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)
"""The dtypes in which a memory may be kept."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How values cross ranks: a frozen record of pure functions. Subclass it to write one.

    Values are encoded along their last dim, x [.., n] in fp32 (or wider): each row by itself. The
    size of what is sent is a function of n alone. `fzero.codecs` has those that fzero has.

    An attribute `block` says how many elements share a scale. A codec with `block = 1` says that it
    encodes single elements, each by itself; that is tested where it is given.

    Attributes:
        memory: whether what encoding a gradient has lost is added to the next one (error feedback):
            False, True (kept in the dtype in which gradients add up, fp32 or wider), or the dtype
            to keep it in, torch.int8 being blocks as of `fzero.codecs.int8()`. It is one element
            for each of the gradient, on every rank.
        linear: whether both functions are linear, encode(x) + encode(y) = encode(x + y): encoded
            forms are then reduced as they are. Otherwise ranks exchange them, decode, and add up in
            fp32 or wider.

    Example:
        >>> import torch, fzero
        >>> codec = fzero.codecs.int8(block=4)
        >>> parts = codec.encode(torch.tensor([1.0, -0.5, 0.0]))
        >>> [part.dtype for part in parts], codec.wire_bytes(3)
        ([torch.float32, torch.int8], 7)
        >>> codec.decode(parts, 3, torch.float32)
        tensor([ 1.0000, -0.4963,  0.0000])
    """

    linear: ClassVar[bool] = False
    memory: Memory = False

    def __post_init__(self) -> None:
        """Refuse a memory that is none."""
        wanted = "False, True, or one of " + ", ".join(map(str, KEPT_IN))
        good = isinstance(self.memory, bool) or self.memory in KEPT_IN
        require(f"{type(self).__name__}: memory", self.memory, lambda _: good, wanted)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [.., n] -> tensors [.., m], of any dtypes; of a linear codec one, of floats."""
        raise NotImplementedError

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """The encoded form of x [.., n], and n -> [.., n] in `dtype`, fp32 or wider."""
        raise NotImplementedError

    def wire_bytes(self, numel: int) -> int:
        """Return the bytes that n elements are sent as."""
        raise NotImplementedError

    def bound(self, x: Tensor) -> Tensor:
        """Return the largest |decode(encode(x)) - x| of each element of x, [.., n]."""
        raise NotImplementedError

    def of_squares(self) -> Codec:
        """Return what encodes numbers >= 0 by whose roots an update divides: itself."""
        return self

    def at(self, update: int | Tensor) -> Codec:
        """Return the codec as update number `update` encodes a state: itself, but for chance."""
        return self


@dataclass(frozen=True)
class cast(Codec):
    """Values in another dtype, in which the ranks' gradients add up on the wire.

    The sum is made in that dtype, by the backend; that of `bf16` is made in fp32.

    Args:
        dtype: torch.bfloat16, torch.float16, torch.float32 or torch.float64.

    Example:
        >>> import torch, fzero
        >>> fzero.codecs.cast(torch.bfloat16).encode(torch.tensor([1.001]))
        (tensor([1.], dtype=torch.bfloat16),)
    """

    dtype: torch.dtype
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse what is no floating dtype, and a memory."""
        require("cast: memory", self.memory, lambda x: x is False, "False: sums are rounded, too")
        known = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        require("cast: dtype", self.dtype, lambda x: x in known, " or ".join(map(str, known)))

    def encode(self, x: Tensor) -> tuple[Tensor]:
        """Round."""
        return (x.to(self.dtype),)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Widen."""
        return parts[0].to(dtype)

    def wire_bytes(self, numel: int) -> int:
        """Return the bytes of n numbers."""
        return numel * self.dtype.itemsize

    def bound(self, x: Tensor) -> Tensor:
        """Half a unit in the last place; infinity where x is beyond the dtype."""
        return rounding(x, self.dtype, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compress:
    """What crosses ranks encoded: the argument `compress` of `Engine` and `fzero.init`.

    Attributes:
        gradients: the codec of gradients on their way to their sum; None: as they are.
        parameters: the codec of what a forward or a backward gathers at stage 3; None: as they are.
        over: "all", or "replicas": on a mesh of two dims, gradients are encoded only where they
            cross from replica to replica.
    """

    gradients: Codec | None = None
    parameters: Codec | None = None
    over: Over = "all"

    def __post_init__(self) -> None:
        """Refuse what is no codec."""
        for name in ("gradients", "parameters"):
            wanted = "a codec of fzero.codecs, or a record of a subclass of fzero.codecs.Codec"
            value = getattr(self, name)
            require(f"compress: {name}", value, lambda x: x is None or _is_codec(x), wanted)
        require("compress: over", self.over, lambda x: x in ("all", "replicas"), "all or replicas")
        if self.over == "replicas" and self.gradients is None:
            raise LayoutError(
                'compress: over="replicas" without gradients.',
                cause="it says where gradients are encoded.",
                fix="give gradients=codec, or leave it out.",
            )


def _is_codec(x: object) -> bool:
    return isinstance(x, Codec)


def rounding(x: Tensor, dtype: torch.dtype, units: float) -> Tensor:
    """Return so many units in the last place of x in a dtype; infinity where x is beyond it."""
    info = torch.finfo(dtype)
    if info.eps <= torch.finfo(x.dtype).eps:
        return torch.zeros_like(x)
    found = units * (x.abs() * info.eps + info.smallest_normal * info.eps)
    return torch.where(x.abs() <= info.max, found, torch.inf)


def mixed(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which each bit of the result depends on all of x, nearly."""
    for factor in (0x7FEB352D, 0x2C1B3C6D):
        x = x ^ ((x >> 16) & 0xFFFF)
        x = x * factor  # of int32: modulo 2^32
    return x ^ ((x >> 16) & 0xFFFF)


# The form in which encoded values cross ranks: rows of one buffer, and their way back.
#
#     x [r, n]   ->  codec.encode: parts [r, m_k]  ->  one buffer [r, m]  ->  parts  ->  [r, n]
#
# One part crosses in its own dtype (8-bit floats as bytes, for backends refuse them); several parts
# lie end to end as bytes, in int8 if the last of them is. Rows without elements are never encoded.


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
