"""What crosses ranks in the place of values: the record of a codec, and where codecs are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

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
