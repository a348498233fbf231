"""Quantization for the wire: int8 blocks, their decoding, and error feedback.

    x [.., n]   in blocks of 256, a = max |x| of each
    sent        a in fp32, and round(127 x / a) in int8: n + 4 ceil(n / 256) bytes
    received    a q / 127, to within a / 254 of x

Where a block has an infinity or a NaN, all of it is received as NaN.

Source: Wang et al., "ZeRO++", arXiv 2306.10209, sections 3.1 and 3.3; error feedback: Karimireddy
et al., "Error Feedback Fixes SignSGD", arXiv 1901.09847, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fzero.state import Buffers, Placement, Setup, TrainState

BLOCK = 256
"""Elements that share a scale: an outlier costs its block, and a scale 1/64 of the bytes."""

_LEVELS = 127
_SCALE_BYTES = 4


def wire_numel(numel: int) -> int:
    """Return the bytes that `numel` elements are sent as.

    Example:
        >>> wire_numel(256), wire_numel(257), wire_numel(0)
        (260, 265, 0)
    """
    return numel + _SCALE_BYTES * _blocks(numel)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are quantized and summed: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def quantized(x: Tensor) -> Tensor:
    """Floating [.., n] -> int8 [.., wire_numel(n)]: first the scales, then the elements.

    Example:
        >>> dequantized(quantized(torch.tensor([1.0, -0.5, 0.0])), 3, torch.float32)
        tensor([ 1.0000, -0.5039,  0.0000])
    """
    *lead, numel = x.shape
    blocks = _in_blocks(x.to(wide(x.dtype)))
    largest = torch.maximum(blocks.amax(-1), -blocks.amin(-1)).to(torch.float32)
    levels = blocks / largest.unsqueeze(-1)  # NaN where all is zero, or anything not finite
    levels = levels.mul_(_LEVELS).round_().clamp_(-_LEVELS, _LEVELS).nan_to_num_(0.0)
    scales = _SCALE_BYTES * _blocks(numel)
    sent = torch.empty((*lead, wire_numel(numel)), dtype=torch.int8, device=x.device)
    sent[..., :scales] = largest.view(torch.int8)
    sent[..., scales:] = levels.view(*lead, -1)[..., :numel] if numel else 0
    return sent


def dequantized(sent: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """int8 [.., wire_numel(n)] -> [.., n] in `dtype`."""
    *lead, _ = sent.shape
    scales = _SCALE_BYTES * _blocks(numel)
    aligned = sent[..., :scales].clone(memory_format=torch.contiguous_format)
    largest = aligned.view(-1).view(torch.float32)  # one dim: no stride of rows that are empty
    blocks = _in_blocks(sent[..., scales:].to(wide(dtype), copy=True))
    values = blocks.div_(_LEVELS).mul_(largest.view(*blocks.shape[:-1], 1))
    return values.view(*lead, values.shape[-2] * BLOCK)[..., :numel].to(dtype)


def sum_of(sent: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """int8 [r, wire_numel(n)] -> [n]: what the ranks have sent, added up in their order."""
    total = dequantized(sent[0], numel, dtype)
    for row in sent[1:]:
        total = total + dequantized(row, numel, dtype)
    return total


class ErrorFeedback:
    """What quantized reductions of one state have lost, and send the next time.

    e' = (g + e) - received(sent(g + e)): so what all reductions have sent is the sum of all g, but
    for the last e, the residual. It does not grow: |e'| <= max |g + e| / 254 in a block.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._factor: Tensor | float = 1.0
        self._held: dict[int, Tensor] = {}
        self._changed: dict[int, Tensor] = {}

    def begin(self, residual: Mapping[int, Tensor], factor: Tensor | float) -> None:
        """Take the residual of each group that has one, [W l]; gradients are `factor` times it."""
        self._held, self._factor, self._changed = dict(residual), factor, {}

    def changed(self) -> dict[int, Tensor]:
        """Return, and forget, the new residual of each group that was reduced; nothing follows."""
        changed, self._changed, self._held = self._changed, {}, {}
        return changed

    def sent(self, index: int, gradient: Tensor | None) -> Tensor:
        """Return what is sent of a group's gradient, int8 [W wire_numel(l)]; None for zeros.

        Where that is not finite, the residual stays as it is.
        """
        residual, layout = self._held[index], self._setup.layout
        total = residual * self._factor
        if gradient is not None:
            total += gradient
        rows = total.view(layout.ranks, layout.groups[index].shard_numel)  # of which may be none
        sent = quantized(rows)
        rows -= dequantized(sent, rows.shape[-1], total.dtype)
        left = total.div_(self._factor)
        left = torch.where(left.isfinite(), left, residual)
        self._held[index] = self._changed[index] = left
        return sent.view(-1)

    def nothing(self, index: int, device: torch.device) -> Tensor:
        """Return zeros as they are sent; the residual stays."""
        layout = self._setup.layout
        numel = layout.ranks * wire_numel(layout.groups[index].shard_numel)
        return torch.zeros(numel, dtype=torch.int8, device=device)

    def summed(self, index: int, received: Tensor) -> Tensor:
        """Return this rank's shard of the sum, [l], of what the ranks have sent it."""
        layout = self._setup.layout
        numel, dtype = layout.groups[index].shard_numel, wide(self._setup.accumulate_dtype(index))
        return sum_of(received.view(layout.ranks, -1), numel, dtype)


def residual_of(state: TrainState) -> Buffers:
    """Return what quantized reductions have lost: zeros if there is nothing yet."""
    setup, layout = state.setup, state.setup.layout
    if state.window.residual.held or not setup.quantizes_gradients:
        return state.window.residual
    flats = tuple(
        torch.zeros(
            layout.full_numel(i),
            dtype=wide(setup.accumulate_dtype(i)),
            device=state.device,
        )
        for i in layout.trainable
    )
    return Buffers(flats=flats, placement=Placement.PARTIAL)


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _in_blocks(x: Tensor) -> Tensor:
    """[.., n] -> [.., ceil(n / 256), 256], filled up with zeros; a view of `x` if it fits."""
    blocks = _blocks(x.shape[-1])
    missing = blocks * BLOCK - x.shape[-1]
    filled = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return filled.reshape(*x.shape[:-1], blocks, BLOCK)
