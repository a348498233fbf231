"""Which elements of which flat belong to which leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fzero.state.layout import Leaf


class Piece(NamedTuple):
    """Elements `start` to `stop` of parameter `index`: a part with one set of options."""

    index: int
    leaf: Leaf
    start: int
    stop: int
    first: int = 0  # the element of the leaf that is at `start`


def pieces_in(pieces: Sequence[Piece], indices: Sequence[int]) -> list[Piece]:
    """Return the pieces of some parameters, numbered as those are in `indices`.

    Example:
        >>> import torch
        >>> leaf = Leaf(path="w", shape=(4,), dtype=torch.float32, trainable=True)
        >>> pieces_in([Piece(0, leaf, 0, 4), Piece(1, leaf, 0, 2)], [1])[0].index
        0
    """
    number = {index: k for k, index in enumerate(indices)}
    return [p._replace(index=number[p.index]) for p in pieces if p.index in number]
