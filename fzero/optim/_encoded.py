"""States of an elementwise rule that are kept encoded, and stepped a bounded piece at a time.

    row of a flat -> a piece of it, decoded -> the rule's own kernel -> encoded -> the row

Each block is encoded by itself, and in the layout of such a state leaves and shards consist of
whole blocks: so the bytes are those of any stage and any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import lcm
from typing import Any

import torch
from torch import Tensor

from fzero.errors import LayoutError, PhaseError
from fzero.machine.rows import Blocks
from fzero.optim._piece import Piece
from fzero.optim._stream import Flats
from fzero.state.layout import BLOCK, Leaf

_PIECE, _PIECE_OF_CPU = 2**22, 2**20
"""Elements that are decoded at once: on a GPU launches cost more, and on a CPU caches are small."""

CodecOf = Callable[[Leaf, str], Blocks | None]
"""(leaf, name of a slot) -> what encodes it."""


def begun(codec: Blocks | None, like: Tensor, fill: float, dtype: torch.dtype) -> Tensor:
    """Return a slot of a flat before the first step: the row of such numbers, or they."""
    if codec is None or not like.numel():
        return torch.full_like(like, fill, dtype=dtype, requires_grad=False)
    row = like.new_empty(codec.wire_bytes(like.numel()), dtype=torch.uint8, requires_grad=False)
    return codec.fill(row, fill)


def leaves_of_flats(params: Sequence[Tensor], pieces: Sequence[Piece]) -> dict[int, Leaf]:
    """Return a leaf of each flat; without pieces a flat is a leaf."""
    if pieces:
        return {piece.index: piece.leaf for piece in pieces}
    return {
        i: Leaf(path=str(i), shape=tuple(p.shape), dtype=p.dtype, trainable=True)
        for i, p in enumerate(params)
    }


def in_portions(
    flats: Flats, pieces: Sequence[Piece], codec_of: CodecOf, unused: Collection[str] = ()
) -> tuple[Flats, list[Piece]]:
    """Return parts of flats, views that are stepped one after the other, and what is in each.

    Of those with encoded slots, at most so many elements, and nothing of leaves that are `unused`:
    their bytes stay. Others are whole.
    """
    leaves, parts, placed = leaves_of_flats(flats.params, pieces), list[Flats](), list[Piece]()
    for i, p in enumerate(flats.params):
        if i not in leaves:
            continue  # of another rule
        own = [x for x in pieces if x.index == i] or [Piece(i, leaves[i], 0, p.numel())]
        codecs = {
            name: codec
            for name, some in flats.slots.items()
            if some[i].numel() and (codec := codec_of(leaves[i], name)) is not None
        }
        size = _PIECE_OF_CPU if p.device.type == "cpu" else _PIECE
        for span in _spans(own, codecs, unused, size) if codecs else [(0, p.numel())]:
            placed += _inside(own, span, len(parts))
            parts.append(_part(flats, i, codecs, span) if codecs else _part(flats, i, {}, None))

    def every(one: Callable[[Flats], Any]) -> list[Any]:
        return [one(part) for part in parts]

    made = Flats(
        params=every(lambda x: x.params[0]),
        grads=every(lambda x: x.grads[0]),
        masters=every(lambda x: x.masters[0]),
        slots={name: every(lambda x, name=name: x.slots[name][0]) for name in flats.slots},
        codecs=every(lambda x: x.codecs[0]),
    )
    return made, placed


def _part(
    flats: Flats, i: int, codecs: Mapping[str, Blocks], span: tuple[int, int] | None
) -> Flats:
    """Return some elements of a flat, as views; all of it for None."""

    def of(x: Tensor, codec: Blocks | None = None) -> Tensor:
        if span is None or not x.numel():
            return x
        start, stop = span if codec is None else map(codec.wire_bytes, span)
        return x.view(-1)[start:stop]

    return Flats(
        params=[of(flats.params[i])],
        grads=[of(flats.grads[i])],
        masters=[of(flats.masters[i])],
        slots={name: [of(some[i], codecs.get(name))] for name, some in flats.slots.items()},
        codecs=[codecs],
    )


def _inside(own: Sequence[Piece], span: tuple[int, int], number: int) -> Iterator[Piece]:
    """Yield what of the pieces of a flat is in a part of it, which has this number."""
    start, stop = span
    for one in own:
        low, high = max(one.start, start), min(one.stop, stop)
        if low < high or start == stop:
            yield Piece(number, one.leaf, low - start, high - start, one.first + low - one.start)


def _spans(
    own: Sequence[Piece], codecs: Mapping[str, Blocks], unused: Collection[str], size: int
) -> Iterator[tuple[int, int]]:
    """Yield what of a flat is stepped at once: whole blocks."""
    block = lcm(BLOCK, *(codec.block for codec in codecs.values()))
    step = max(size // block, 1) * block
    runs: list[list[int]] = []
    for piece in own:
        if piece.leaf.path in unused:
            continue
        if runs and runs[-1][1] == piece.start:
            runs[-1][1] = piece.stop
        else:
            runs.append([piece.start, piece.stop])
    for low, high in runs:
        yield from ((start, min(start + step, high)) for start in range(low, high, step))


def not_differentiable(optimizer: object) -> PhaseError:
    """Return the error for an update that is to be differentiated."""
    return PhaseError(
        f"an update by {optimizer!r} with encoded states was to be differentiated.",
        cause="torch.func, a trace, or parameters or gradients with a graph, around "
        "apply_gradients, as an encoding has no derivative; or a device without fused kernels.",
        fix="leave state_dtype=codec out there: state_dtype=None keeps states that have one.",
    )


def require_elements(optimizer: object, *, elementwise: bool) -> None:
    """Raise `LayoutError` for a rule that needs more than an element."""
    if not elementwise:
        raise LayoutError(
            f"{optimizer!r} with a codec as state_dtype.",
            cause="a rule that needs whole parameters: owners keep what it has, in any shape.",
            fix="use fzero.optim.partition: this rule without it for the matrices, and "
            "fzero.optim.adamw(lr, state_dtype=codec) for the rest.",
        )
