"""Which bytes a rank trains on at a step: a pure function of seed, step and sample index.

Sample `i` of the `global_batch` samples of a step begins at the same byte whatever the number of
ranks, micro-batches or accumulated parts: those only decide who computes it, and when.
"""

import torch
from torch import Tensor

from fzero import LayoutError

_MIX = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))  # (shift, multiplier)
_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as int64


def sample_starts(numel: int, *, context: int, seed: int, step: int, samples: Tensor) -> Tensor:
    """Begin of each sample's window: `hash(seed, step, sample) mod (numel - context)`.

    Args:
        numel: bytes of the text.
        context: bytes a window predicts; it spans `context + 1` bytes.
        seed: any integer.
        step: number of the optimizer step, from 0.
        samples: `[b]` int64 indices in the global batch.

    Returns:
        `[b]` int64, each in `[0, numel - context)`.

    Raises:
        LayoutError: the text has fewer than `context + 1` bytes.

    Example:
        >>> sample_starts(1000, context=8, seed=0, step=0, samples=torch.arange(3))
        tensor([584, 433, 407])
    """
    _require_window(numel, context)
    key = _mix(_mix(torch.tensor(seed)) + step)
    # The shift drops the sign: a remainder of a negative int64 would have no uniform law.
    return (_mix(key + samples) >> 1 & (2**62 - 1)) % (numel - context)


def windows(text: Tensor, starts: Tensor, *, context: int) -> Tensor:
    """`out[b, t] = text[starts[b] + t]`: `[b, context + 1]`, inputs and their next bytes."""
    return text[starts[:, None] + torch.arange(context + 1)]


def rank_samples(global_batch: int, *, rank: int, world_size: int, passes: int) -> Tensor:
    """Indices of the samples that `rank` computes at every step: `[passes, b]` int64.

    The global batch is cut in rank order, a rank's part in the order of its backward passes, so
    every sample is computed exactly once whatever `world_size` and `passes`.

    Args:
        global_batch: samples of one optimizer step over all ranks.
        rank: this rank.
        world_size: number of ranks.
        passes: backward passes of a rank in one step.

    Raises:
        LayoutError: `global_batch` is not a multiple of `world_size * passes`.

    Example:
        >>> rank_samples(8, rank=1, world_size=2, passes=2)
        tensor([[4, 5],
                [6, 7]])
    """
    if global_batch % (world_size * passes):
        parts = world_size * passes
        below = global_batch // parts * parts
        near = f"{below} or {below + parts}" if below else f"{parts}"
        raise LayoutError(
            f"--global-batch {global_batch} cannot be split evenly: {world_size} rank(s) with "
            f"{passes} backward pass(es) each make {parts} parts.",
            cause="the number of ranks, --micro-batches or --accumulate was changed.",
            fix=f"--global-batch {near}, or fewer ranks or passes.",
        )
    mine = torch.arange(global_batch).view(world_size, passes, -1)
    return mine[rank]


def even_windows(text: Tensor, *, context: int, count: int) -> Tensor:
    """At most `count` disjoint windows spread evenly over `text`: `[b, context + 1]`, for scoring.

    Raises:
        LayoutError: the text has fewer than `context + 1` bytes.

    Example:
        >>> even_windows(torch.arange(12), context=2, count=2)
        tensor([[0, 1, 2],
                [6, 7, 8]])
    """
    _require_window(text.numel(), context)
    fit = text.numel() // (context + 1)
    count = min(count, fit)
    starts = torch.arange(count) * fit // count * (context + 1)
    return windows(text, starts, context=context)


def _require_window(numel: int, context: int) -> None:
    if numel <= context:
        raise LayoutError(
            f"text: {numel} bytes hold no window of {context} + 1 bytes.",
            cause="--text-mb or the folder of --text is tiny, or --context is large.",
            fix="more text, or a smaller --context.",
        )


def _mix(x: Tensor) -> Tensor:
    """One splitmix64 round on int64 (Steele, Lea, Flood, OOPSLA 2014); overflow wraps, as meant."""
    x = x + _GOLDEN
    for shift, multiplier in _MIX:
        x = (x ^ (x >> shift & ((1 << (64 - shift)) - 1))) * multiplier
    return x
