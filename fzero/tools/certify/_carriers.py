"""Logical ranks on fewer ranks: the bits that they must have on as many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.state.logical import carried
from fzero.tools.certify._drivers import Seen


def fewer_than(logical: int) -> list[int]:
    """Return 1, and the largest number below that does not divide so many logical ranks.

    Example:
        >>> [fewer_than(logical) for logical in (2, 3, 4, 6)]
        [[1], [1, 2], [1, 3], [1, 5]]
    """
    odd = [ranks for ranks in range(1, logical) if logical % ranks]
    return [1, *odd[-1:]]


def bits_apart(
    alone: Sequence[Sequence[Seen]], fewer: Sequence[Sequence[Seen]], logical: int
) -> str:
    """Return the first number with other bits, its update and its ranks; "" if there is none.

    alone: [rank][update], each rank carries one logical rank; fewer: the same on fewer ranks.
    """
    for update in range(len(alone[0])):
        odd: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(fewer):
            its = carried(rank, len(fewer), logical)
            for name, x, y in _pairs([alone[i][update] for i in its], of_rank[update]):
                if not _same(x, y):
                    odd.setdefault(name, []).append(rank)
        if odd:
            name, ranks = next(iter(odd.items()))
            which = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            return f"update {update + 1}, {which}: {name} has other bits"
    return ""


def _pairs(alone: Sequence[Seen], here: Seen) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, of the logical ranks by themselves, of the rank that carries them)."""
    first, count = alone[0], len(alone)
    for path, x in first.params.items():
        yield f"parameter {path}", x, here.params.get(path)
    for path, x in first.slots.items():
        yield f"the optimizer's {path}", x, here.slots.get(path)
    yield "the norm", first.norm, here.norm
    for number, one in enumerate(alone):
        yield "the loss", one.losses, here.losses[number::count]


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        return torch.equal(_bits(x), _bits(y))
    return type(x) is type(y) and x == y


def _bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
