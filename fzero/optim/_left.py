"""Unused leaves under a foreign pair: it steps all leaves, then their old values are restored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.optim._piece import Piece
from fzero.optim._whole import flats_in, with_flats


class Left:
    """The values of unused leaves in parameters and state before an update, to be restored after.

    pieces: of all leaves. unused: the paths of those that the update leaves out.
    """

    def __init__(
        self, state: Any, params: Sequence[Tensor], pieces: Sequence[Piece], unused: Collection[str]
    ) -> None:
        self._params = params
        self._pieces = [piece for piece in pieces if piece.leaf.path in unused]
        held = flats_in(state, params) if self._pieces else []
        self._kept = [[_of(flats, piece).clone() for piece in self._pieces] for flats in held]

    def updates(self, updates: list[Tensor]) -> list[Tensor]:
        """Return the updates, -0.0 for unused leaves: p + -0.0 is p, also where p is -0.0."""
        return self._put([torch.tensor(-0.0)] * len(self._pieces), updates)

    def state(self, state: Any) -> Any:
        """Return the state after the update, with the old slots of the unused leaves."""
        if not self._pieces:
            return state
        held = flats_in(state, self._params)
        if len(held) != len(self._kept):
            raise LayoutError(
                f"the foreign optimizer keeps {len(held)} lists of tensors after an update, and "
                f"{len(self._kept)} before it, which leaves parameters out that no rank used.",
                cause="a rule that makes its state in its first update.",
                fix="let it make its state in init; or use every parameter in the first step.",
            )
        pairs = zip(self._kept, held, strict=True)
        return with_flats(state, self._params, [self._put(kept, flats) for kept, flats in pairs])

    def _put(self, kept: Sequence[Tensor], flats: Sequence[Tensor]) -> list[Tensor]:
        touched = {piece.index for piece in self._pieces}
        made = [x.clone() if i in touched else x for i, x in enumerate(flats)]
        for piece, values in zip(self._pieces, kept, strict=True):
            _of(made, piece).copy_(values)
        return made


def _of(flats: Sequence[Tensor], piece: Piece) -> Tensor:
    return flats[piece.index].view(-1)[piece.start : piece.stop]
