"""Batches of several logical ranks as one batch, and a batch without rows. Pure.

A collate function is called for each logical rank, so what it pads and draws depends on no other
one. By rows is what has a row for each example in its first dim, which is found by a batch of
twice the rows. That is joined where all have one shape; else each keeps its own, in `Parts`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.state.batch import Parts, is_array, map_together

Path = tuple[Any, ...]
_SIMPLE = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


def rows_of(one: Any, two: Any, rows: int) -> dict[Path, int | None]:
    """Return the dim of the rows of each place of a batch; None for what is not by rows.

    one, two: the same batch of so many rows, and with each row twice.

    Example:
        >>> one = {"ids": torch.ones(2, 5), "time": torch.ones(5, 2), "texts": ["a", "b"]}
        >>> two = {"ids": torch.ones(4, 5), "time": torch.ones(5, 4), "texts": ["a", "b"] * 2}
        >>> rows_of(one, two, 2)
        {('ids',): 0, ('time',): 1, ('texts',): None}
    """
    found: dict[Path, int | None] = {}

    def look(path: Path, values: Sequence[Any]) -> None:
        a, b = values
        found[path] = None
        if is_array(a) and is_array(b) and a.ndim == b.ndim:
            pairs = zip(a.shape, b.shape, strict=True)
            other = [(d, m, n) for d, (m, n) in enumerate(pairs) if m != n]
            if len(other) == 1 and other[0][1:] == (rows, 2 * rows):
                found[path] = other[0][0]

    map_together(look, [one, two])
    return found


def joined(batches: Sequence[Any], sizes: Sequence[int], dims: Mapping[Path, int | None]) -> Any:
    """Return the batches of some logical ranks as one.

    sizes: their numbers of rows. dims: of which place has rows in which dim.

    Example:
        >>> x, y = torch.ones(1, 2), torch.zeros(1, 2)
        >>> joined([x, y], [1, 1], {(): 0})
        tensor([[1., 1.],
                [0., 0.]])
        >>> joined([x, y], [1, 1], {(): 1})
        Parts(parts=(tensor([[1., 1.]]), tensor([[0., 0.]])))
    """

    def join(path: Path, values: Sequence[Any]) -> Any:
        if dims.get(path) == 0 and all(map(_has_rows, values, sizes)):
            there = [x for x, n in zip(values, sizes, strict=True) if n] or [values[0]]
            if len({(type(x), x.dtype, x.shape[1:]) for x in there}) == 1:
                return torch.cat(there) if isinstance(there[0], Tensor) else np.concatenate(there)
        same = all(_is_same(values[0], x) for x in values[1:])
        return values[0] if same and not _has_dims(values[0]) else Parts(tuple(values))

    return map_together(join, batches, dims)


def without_rows(one: Any, two: Any) -> Any:
    """Return a batch without rows, by that of one row, and one with this row twice.

    Raises `LayoutError` for what has no such value.

    Example:
        >>> without_rows((torch.ones(1, 2), ["a"], 3), (torch.ones(2, 2), ["a", "a"], 3))
        (tensor([], size=(0, 2)), [], 3)
    """
    dims = rows_of(one, two, 1)

    def emptied(path: Path, values: Sequence[Any]) -> Any:
        a, b = values
        dim = dims[path]
        if dim is not None:
            return a.narrow(dim, 0, 0) if isinstance(a, Tensor) else a.take(np.arange(0), axis=dim)
        if isinstance(a, list | tuple) and type(a) is type(b) and 2 * len(a) == len(b):
            return type(a)()
        if _is_same(a, b):
            return a
        seen = f"shape {[*values[0].shape]} of one row" if is_array(a) else f"{a!r:.60} of one row"
        where = "".join(f"[{key!r}]" for key in path)
        raise LayoutError(
            f"batches: the last batch of an epoch leaves a logical rank without rows, and batch"
            f"{where} has no value for that: {seen}.",
            cause="a count or an object in the batch, beside tensors with a dim of rows.",
            fix="give Order drop_last=True; or a batch of tensors with rows only, and count them "
            "by order.sizes(); or batches(..., empty=fn), which makes a batch without rows of one "
            "with a row.",
        )

    return map_together(emptied, [one, two])


def digest_of(rows: Any) -> int:
    """Return a number of 48 bits, not 0, of all values in some rows that have bytes or a text.

    Example:
        >>> x = torch.arange(3)
        >>> digest_of([x, "a"]) == digest_of([x, "a"]) != digest_of([x + 1, "a"])
        True
    """
    digest = hashlib.blake2b(digest_size=6)

    def add(path: Path, values: Sequence[Any]) -> None:
        (x,) = values
        if isinstance(x, Tensor):
            strided = x.layout == torch.strided and x.device.type != "meta"
            x = x.detach().cpu().reshape(-1).view(torch.uint8).numpy() if strided else x.shape
        has = getattr(x, "tobytes", None)  # of arrays, numpy's numbers, images
        data = has() if has is not None else repr(x).encode() if isinstance(x, _SIMPLE) else b""
        digest.update(repr((path, type(x).__name__, len(data))).encode() + data)

    map_together(add, [rows])
    return int.from_bytes(digest.digest()) or 1


def _has_dims(x: Any) -> bool:
    return is_array(x) and x.ndim > 0


def _has_rows(x: Any, rows: int) -> bool:
    return _has_dims(x) and len(x) == rows


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values that are not by rows say the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return a is b or (isinstance(a, _SIMPLE) and a == b)
