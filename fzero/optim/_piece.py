"""Which elements of which flat belong to which leaf."""

from __future__ import annotations

from collections.abc import Sequence

from fzero.state.stateful_update import Piece as Piece


def pieces_in(pieces: Sequence[Piece], indices: Sequence[int]) -> list[Piece]:
    """Return the pieces of some parameters, numbered as those are in `indices`.

    Example:
        >>> import torch
        >>> from fzero.state.layout import Leaf
        >>> leaf = Leaf(path="w", shape=(4,), dtype=torch.float32, trainable=True)
        >>> pieces_in([Piece(0, leaf, 0, 4), Piece(1, leaf, 0, 2)], [1])[0].index
        0
    """
    number = {index: k for k, index in enumerate(indices)}
    return [p._replace(index=number[p.index]) for p in pieces if p.index in number]
