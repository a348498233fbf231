"""Values in blocks that share a scale, and flats of which each block is encoded by itself.

    x [n]    in blocks of b elements, the last one filled up with zeros
    row      [ceil(n / b) m] uint8: what a codec makes of each block, end to end

Where a flat is cut at blocks, so are its bytes: those of a leaf, or of a shard, that begins with a
block are a function of its values alone, and cross to other ranks as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fzero.state.codec import Codec, WireForm, decoded, encoded, form_of
from fzero.state.layout import Layout


def blocks_in(numel: int, block: int) -> int:
    """Return how many blocks so many elements are."""
    return -(-numel // block)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """[.., n] -> [.., ceil(n / block), block], filled up with zeros; a view of `x` if it fits."""
    blocks = blocks_in(x.shape[-1], block)
    missing = blocks * block - x.shape[-1]
    filled = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return filled.reshape(*x.shape[:-1], blocks, block)


def with_largest(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return x in blocks, and max |x| of each in fp32; NaN where it is no finite number."""
    blocks = in_blocks(x, block)
    largest = torch.maximum(blocks.amax(-1), -blocks.amin(-1)).to(torch.float32)
    return blocks, torch.where(largest.isfinite(), largest, torch.nan)


def largest_of_block(x: Tensor, block: int) -> Tensor:
    """Return max |x| of the block of each element."""
    largest = in_blocks(x.abs(), block).amax(-1, keepdim=True)
    return largest.expand(*largest.shape[:-1], block).flatten(-2)[..., : x.shape[-1]]


@dataclass(frozen=True)
class Blocks(Codec):
    """A codec on blocks, each a row of its own.

    Example:
        >>> from fzero.machine.codecs import int8
        >>> codec = Blocks(int8(block=4))
        >>> row = codec.row_of(torch.arange(8.0))
        >>> row.shape, torch.equal(row[8:], codec.row_of(torch.arange(4.0, 8.0)))
        (torch.Size([16]), True)
    """

    codec: Codec

    @property
    def block(self) -> int:
        """The elements of a block."""
        return self.codec.block  # type: ignore[attr-defined]

    @property
    def block_bytes(self) -> int:
        """The bytes of a block."""
        return _form_of(self.codec).nbytes

    def encode(self, x: Tensor) -> tuple[Tensor]:
        """Return the bytes, uint8."""
        return (self.row_of(in_blocks(x, self.block).reshape(-1)).view(*x.shape[:-1], -1),)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Return the elements."""
        form, (row,) = _form_of(self.codec), parts
        made = decoded(self.codec, row.reshape(-1, form.nbytes).view(form.dtype), form, dtype)
        return made.reshape(*row.shape[:-1], -1)[..., :numel]

    def wire_bytes(self, numel: int) -> int:
        """Return the bytes of n elements."""
        return blocks_in(numel, self.block) * self.block_bytes

    def bound(self, x: Tensor) -> Tensor:
        """That of the codec in each block."""
        blocks = in_blocks(x, self.block)
        return self.codec.bound(blocks).expand_as(blocks).flatten(-2)[..., : x.shape[-1]]

    def row_of(self, x: Tensor, update: int | Tensor = 0) -> Tensor:
        """x [n] -> its bytes, rounded as in this update where that is by chance."""
        made = encoded(self.codec.at(update), in_blocks(x, self.block))[0]
        return made.contiguous().view(torch.uint8).view(-1)

    def numbers(self, row: Tensor) -> Tensor:
        """The bytes of whole blocks -> their elements, in fp32; where it is encoded at all."""
        if row.is_floating_point():
            return row
        numel = row.shape[-1] // self.block_bytes * self.block
        return self.decode((row,), numel, torch.float32)

    def fill(self, row: Tensor, value: float = 0.0) -> Tensor:
        """Make a row that of elements which are all `value`; return it."""
        one = self.row_of(torch.full((self.block,), value)).to(row.device)
        row.view(-1, self.block_bytes).copy_(one)
        return row

    def write(self, row: Tensor, numbers: Tensor) -> None:
        """Encode into a row what has changed of its elements: other blocks keep their bytes."""
        changed = (numbers != self.numbers(row)).view(-1, self.block).any(-1)
        new = self.row_of(numbers).view(-1, self.block_bytes)
        row.view(-1, self.block_bytes)[changed] = new[changed]

    def layout(self, layout: Layout) -> Layout:
        """Return where leaves and shards lie in the bytes of flats: a layout of bytes."""
        return _in_bytes(layout, self.block, self.block_bytes)


@lru_cache
def _form_of(codec: Codec) -> WireForm:
    """Return how an encoded block lies in a buffer."""
    return form_of(codec, codec.block)  # type: ignore[attr-defined]


@lru_cache
def _in_bytes(layout: Layout, block: int, size: int) -> Layout:
    def of(numel: int) -> int:
        return blocks_in(numel, block) * size

    leaves = [
        replace(leaf, shape=(of(leaf.numel),), dtype=torch.uint8, codec=None)
        for leaf in layout.leaves
    ]
    groups = [
        replace(
            group,
            dtype=torch.uint8,
            offsets=tuple(map(of, group.offsets)),
            shard_numel=of(group.shard_numel),
        )
        for group in layout.groups
    ]
    return replace(layout, leaves=tuple(leaves), groups=tuple(groups))
