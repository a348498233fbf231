"""Which bytes are trained on, and by whom: rows of the text in an order of `fzero.data`.

Row i of the text is the window that begins at byte i. The order says which rows each logical rank
has in each batch, whatever number of ranks, micro-batches or accumulated parts there is: those only
decide who computes a row, and when.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero import LayoutError
from fzero.data import Order
from train.settings import Settings


def make_order(text: Tensor, settings: Settings) -> Order:
    """Return the order of the windows of `text`, at its first batch.

    Raises:
        LayoutError: the global batch cannot be split over logical ranks and passes, or the text
            holds no batch.

    Example:
        >>> order = make_order(torch.zeros(200, dtype=torch.uint8), Settings())
        >>> order.length, order.batch_size, order.logical_ranks
        (72, 1, 8)
    """
    kind, context = settings.kind, settings.kind.model.context
    _require_window(text.numel(), context)
    _require_even(settings)
    return Order(
        text.numel() - context,
        batch_size=settings.course.global_batch // kind.logical_ranks,
        logical_ranks=kind.logical_ranks,
        seed=kind.seed,
    )


def micro_batches(text: Tensor, order: Order, *, context: int, count: int) -> tuple[Tensor, ...]:
    """Return this rank's rows of the next batch, cut into `count`: `[l * b, context + 1]` each.

    Each has b rows of every one of the l logical ranks that this rank carries, in their order.

    Example:
        >>> order = Order(60, batch_size=2, logical_ranks=2, shuffle=False)
        >>> for part in micro_batches(torch.arange(62), order, context=1, count=2):
        ...     print(part.tolist())
        [[0, 1], [2, 3]]
        [[1, 2], [3, 4]]
    """
    ids, _ = order.next()
    rows = windows(text, torch.tensor(ids), context=context)
    parts = rows.unflatten(0, (-1, count, order.batch_size // count))  # [l, count, b, context + 1]
    return tuple(part.flatten(0, 1) for part in parts.unbind(1))


def windows(text: Tensor, starts: Tensor, *, context: int) -> Tensor:
    """`out[b, t] = text[starts[b] + t]`: `[b, context + 1]`, inputs and their next bytes."""
    return text[starts[:, None] + torch.arange(context + 1)]


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


def _require_even(settings: Settings) -> None:
    logical_ranks, passes = settings.kind.logical_ranks, settings.split.passes
    global_batch, parts = settings.course.global_batch, logical_ranks * passes
    if global_batch % parts:
        below = global_batch // parts * parts
        near = f"{below} or {below + parts}" if below else f"{parts}"
        raise LayoutError(
            f"--global-batch {global_batch} cannot be split evenly: {logical_ranks} "
            f"logical rank(s) with {passes} backward pass(es) each make {parts} parts.",
            cause="--logical-ranks, --micro-batches or --accumulate was changed.",
            fix=f"--global-batch {near}, or fewer logical ranks or passes.",
        )


def _require_window(numel: int, context: int) -> None:
    if numel <= context:
        raise LayoutError(
            f"text: {numel} bytes hold no window of {context} + 1 bytes.",
            cause="--text-mb or the folder of --text is tiny, or --context is large.",
            fix="more text, or a smaller --context.",
        )
