"""Codecs of 256 levels that are not evenly spaced: what is small keeps most of its precision.

    x [n]     in blocks, a: of each the x of the largest |x|, with its sign
    sent      a in fp32, and the number of the level that is nearest to x / a
    received  level times a

So the largest of a block is received as it was, and what was received is encoded to the same bytes
again. Where a block has an infinity or a NaN, all of it is received as NaN.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, sections
2.1 and 2.2, and appendix F.2 (dynamic tree quantization, of which the unsigned form has no sign).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fzero.context.here import is_abstract
from fzero.context.modes import is_recorded
from fzero.errors.check import check_flags, is_count, require
from fzero.machine.blocks import blocks_in, in_blocks
from fzero.state.codec import Codec, mixed

_SCALE_BYTES = 4
_DECADES = 7  # levels reach from 1 down to 5.5e-7
_SAME = 2.0**-18  # by how much of itself a number may miss the level that it was decoded from


@dataclass(frozen=True)
class dynamic8(Codec):
    """Blocks of 8 bits with levels in each power of ten, and a scale in fp32 each; no memory.

    Made for the states of optimizers (`fzero.optim.adamw(..., state_dtype=dynamic8())`), whose
    squares of gradients differ by many powers of ten. Without `signed`, where all numbers are 0 or
    more, there are twice as many levels, and a positive number is never received as 0: an update
    may divide by its root.

    Args:
        block: elements that share a scale, which costs 4 bytes.
        signed: whether numbers may be negative; without it those are received as 0.
        stochastic: round up with the probability of what is cut off, so that the error has mean
            zero. The chance is a hash of the bits and places in a block, and of the number of the
            update: it does not depend on ranks.
        seed: of that chance; an update gives its number, by `at`.

    Source: see above. The levels are those of `bitsandbytes.functional.create_dynamic_map`.

    Example:
        >>> codec = dynamic8(block=4)
        >>> codec.decode(codec.encode(torch.tensor([1.0, -0.5, 1e-4, 0.0])), 4, torch.float32)
        tensor([ 1.0000e+00, -5.0078e-01,  8.8750e-05,  0.0000e+00])
    """

    block: int = 256
    signed: bool = True
    stochastic: bool = False
    seed: int | Tensor = 0

    def __post_init__(self) -> None:
        """Refuse what is no block, and a memory."""
        require("dynamic8: memory", self.memory, lambda x: x is False, "False")
        require("dynamic8: block", self.block, is_count, "an int of 1 or more")
        check_flags(**{"dynamic8: signed": self.signed, "dynamic8: stochastic": self.stochastic})

    def of_squares(self) -> Self:
        """Return the same without a sign."""
        return replace(self, signed=False)

    def at(self, update: int | Tensor) -> Self:
        """Return the codec that rounds by another chance in each update."""
        return replace(self, seed=update) if self.stochastic else self

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and the numbers of the levels."""
        scales, ratios = self._scaled(x)
        codes = self._rounded(ratios) if self.stochastic else _level(ratios, self.signed, "nearest")
        return scales, codes.flatten(-2)[..., : x.shape[-1]]

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Levels times scales."""
        scales, codes = parts
        blocks = in_blocks(codes, self.block)
        levels = _levels(self.signed, codes.device)
        found = levels.index_select(0, blocks.reshape(-1).to(torch.int32)).to(dtype)
        return (
            found.view(blocks.shape).mul_(scales.to(dtype).unsqueeze(-1)).flatten(-2)[..., :numel]
        )

    def wire_bytes(self, numel: int) -> int:
        """A byte for each, and the scales."""
        return numel + _SCALE_BYTES * blocks_in(numel, self.block)

    def bound(self, x: Tensor) -> Tensor:
        """How far the levels on either side of x are apart; all of x where it may not be < 0."""
        scales, ratios = self._scaled(x)
        low, high = self._around(ratios)[1:]
        apart = ((high - low) * scales.abs().unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]
        return apart + (0.0 if self.signed else x.clamp(max=0.0).abs()) + 2.0**-126

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a of each block, and x / a, [.., blocks, block], 0 beside a NaN."""
        x = x if self.signed else x.clamp(min=0.0)
        blocks = in_blocks(x, self.block)
        top, low = blocks.amax(-1), blocks.amin(-1)
        scales = torch.where(top >= -low, top, low).to(torch.float32)
        scales = torch.where(top.isfinite() & low.isfinite(), scales, torch.nan)
        ratios = (blocks.to(torch.float32) / scales.unsqueeze(-1)).nan_to_num_(0.0)  # of zeros, too
        return scales, ratios

    def _around(self, ratios: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the number of the level that is not above each ratio, that level, the next one."""
        levels = _levels(self.signed, ratios.device)
        below = _level(ratios, self.signed, "below").to(torch.int32)
        near = levels, torch.cat([levels[1:], levels[-1:]])
        low, high = (some.index_select(0, below.view(-1)).view_as(ratios) for some in near)
        return below, low, high

    def _rounded(self, ratios: Tensor) -> Tensor:
        """Return a level on either side of each ratio, by chance: the ratio in the mean."""
        below, low, high = self._around(ratios)
        near = torch.where(ratios - low < high - ratios, low, high)
        share = (ratios - low) / (high - low)
        exact = (ratios - near).abs() <= _SAME * near.abs()
        up = torch.where(exact, near > low, self._noise(ratios) < share)
        if not self.signed:
            up |= (ratios > 0) & (below == 0)
        return torch.where(up, below + 1, below).to(torch.uint8)

    def _noise(self, ratios: Tensor) -> Tensor:
        """Return numbers in [0, 1) that are a function of the blocks and the seed."""
        bits = ratios.view(torch.int32)
        place = torch.arange(self.block, dtype=torch.int32, device=ratios.device)
        hashed = bits ^ (place * 0x2545F491)
        row = hashed.sum(-1, keepdim=True, dtype=torch.int64).to(torch.int32)
        seed = (self.seed * 0x5851F42D + 0x14057B7E) % 2**31
        return (mixed(hashed ^ mixed(row ^ seed)) & 0xFFFFFF).float() * 2.0**-24


def dynamic_levels(*, signed: bool) -> Tensor:
    """Return the 256 levels in ascending order: in each of seven powers of ten twice as many.

    Example:
        >>> dynamic_levels(signed=False)[[0, 1, -1]]
        tensor([0.0000e+00, 3.2500e-07, 1.0000e+00])
    """
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1)
        middles = (10.0 ** (decade + 1 - _DECADES) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        found += [*middles, *(-x for x in middles if signed)]
    return torch.tensor(sorted(found))


def _levels(signed: bool, device: torch.device) -> Tensor:
    return _table(signed, "levels", device)[0]


def _table(signed: bool, which: str, device: torch.device) -> tuple[Tensor, ...]:
    """Return a table, which is kept unless it has no values: that of a record ends with it."""
    if (found := _TABLES.get((signed, which, device))) is not None:
        return found
    levels = dynamic_levels(signed=signed)
    made = (levels,) if which == "levels" else _bounds(levels, signed, which)
    made = tuple(x.to(device) for x in made)
    if not (is_abstract() or is_recorded(made)):
        _TABLES[signed, which, device] = made
    return made


_TABLES: dict[tuple[bool, str, torch.device], tuple[Tensor, ...]] = {}


def _level(ratios: Tensor, signed: bool, which: str) -> Tensor:
    """Return the number of the level that is nearest to each ratio, or that is not above it.

    The first 16 bits of a ratio leave two levels at most, of which it is said where the second one
    begins: so two look-ups do what a search would take long for.
    """
    first, begins = _table(signed, which, ratios.device)
    key = ((ratios.view(torch.int32) >> 16) & 0xFFFF).reshape(-1)
    above = ratios.reshape(-1) >= begins.index_select(0, key)
    return (first.index_select(0, key) + above.view(torch.uint8)).view_as(ratios)


def _bounds(levels: Tensor, signed: bool, which: str) -> tuple[Tensor, Tensor]:
    """Return by the first 16 bits of a ratio its lower level, and from which ratio on the next."""
    edges = levels[1:] if which == "below" else ((levels[1:].double() + levels[:-1]) / 2).float()
    if not signed and which == "nearest":
        edges[0] = 2.0**-149  # a positive number is never 0
    keys = torch.arange(65536, dtype=torch.int32) << 16
    ends = torch.stack([keys, keys | 0xFFFF]).view(torch.float32).nan_to_num(nan=2.0)
    low, high = ends.amin(0), ends.amax(0)
    first = torch.searchsorted(edges, low, right=True)  # edges at or below the lowest of a key
    begins = torch.cat([edges, torch.tensor([torch.inf])])[first]
    begins = torch.where(begins <= high, begins, torch.inf)
    return first.to(torch.uint8), begins
