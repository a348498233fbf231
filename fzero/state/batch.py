"""Batches as trees, also of containers that optree does not know, and values of each logical rank.

Collate functions return a BatchEncoding, a UserDict, a dataclass: all of them have parts by key.
Pure.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

_TYPE: Any = type
"""The class of what may be anything."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """A value of each logical rank of this rank, where they have no common tensor.

    `fzero.data.batches` puts it into a batch in the place of a tensor whose logical ranks were
    padded to other lengths, or have their rows in another dim than the first. `grad_and_reduce` and
    `engine.parts` give each logical rank its own, so a loss sees a plain tensor.

    Args:
        parts: one for each logical rank of this rank, in order.

    Example:
        >>> import fzero, torch
        >>> x = fzero.data.Parts((torch.ones(1, 2), torch.ones(1, 3)))
        >>> [one.dtype for one in x.to(torch.float64).parts]
        [torch.float64, torch.float64]
    """

    parts: tuple[Any, ...]

    def map(self, fn: Callable[[Any], Any]) -> Parts:
        """Return fn of the value of each logical rank."""
        return Parts(tuple(map(fn, self.parts)))

    def to(self, *args: Any, **kwargs: Any) -> Parts:
        """Return `x.to(...)` of each tensor, others as they are."""
        return self.map(lambda x: x.to(*args, **kwargs) if isinstance(x, Tensor) else x)

    def pin_memory(self) -> Parts:
        """Return each tensor in pinned memory, as a DataLoader asks for it."""
        return self.map(lambda x: x.pin_memory() if isinstance(x, Tensor) else x)

    def __getattr__(self, name: str) -> Any:
        """Say that there are several values."""
        raise AttributeError(
            f"fzero.data.Parts has no attribute {name!r}: the logical ranks of this rank have "
            "values of other shapes. Give it to fzero.grad_and_reduce or engine.parts as it is, "
            "which give each its own; .parts has them, and .map(fn) changes them."
        )


def children(x: Any) -> dict[Any, Any] | None:
    """Return what a container has, by key; None for a leaf.

    Example:
        >>> children([3, 4]), children(3)
        ({0: 3, 1: 4}, None)
    """
    if _is(x, Mapping):
        return dict(x.items())
    if _TYPE(x) in (list, tuple) or _is_namedtuple(x):
        pairs: Any = enumerate(x)
        return dict(pairs)
    if dataclasses.is_dataclass(_TYPE(x)) and not _is(x, Parts):
        return {one.name: getattr(x, one.name) for one in dataclasses.fields(x)}
    return None


def with_children(x: Any, new: Mapping[Any, Any]) -> Any:
    """Return a container like x that has others in it."""
    kind = _TYPE(x)
    if _is(x, list, tuple):
        return (kind._make if _is_namedtuple(x) else kind)(new.values())
    if _is(x, Mapping) and not _is(x, MutableMapping):
        return kind(dict(new))
    made = copy.copy(x)
    for key, value in new.items():
        if _is(x, MutableMapping):
            made[key] = value
        else:
            object.__setattr__(made, key, value)  # also of a frozen dataclass: the copy is ours
    return made


def map_together(
    fn: Callable[[tuple[Any, ...], Sequence[Any]], Any],
    trees: Sequence[Any],
    leaves: Container[tuple[Any, ...]] = (),
    path: tuple[Any, ...] = (),
) -> Any:
    """Return fn(path, values) at each place of some trees, in the containers of the first.

    A place is a leaf also where they have other structures, as lists of other lengths, and where
    its path is one of `leaves`.

    Example:
        >>> map_together(lambda path, values: sum(values), [{"a": [1, 2]}, {"a": [3, 4]}])
        {'a': [4, 6]}
    """
    first, *others = inner = [children(x) for x in trees]
    differ = first is None or any(x is None or x.keys() != first.keys() for x in others)
    if first is None or differ or path in leaves:
        return fn(path, trees)
    made = {
        key: map_together(fn, [x[key] for x in inner if x is not None], leaves, (*path, key))
        for key in first
    }
    return with_children(trees[0], made)


def _is(x: Any, *kinds: type) -> bool:
    return isinstance(x, kinds)


def _is_namedtuple(x: Any) -> bool:
    return _is(x, tuple) and hasattr(x, "_fields")


def is_array(x: Any) -> bool:
    """Whether a leaf has dims."""
    return isinstance(x, Tensor | np.ndarray)


def opened(x: Any) -> dict[Any, Any] | None:
    """Return what a container has, by key, if an array or `Parts` is somewhere in it, else None."""
    inner = children(x)
    return inner if inner is not None and any(map(_has_rows, inner.values())) else None


def _has_rows(x: Any) -> bool:
    return is_array(x) or isinstance(x, Parts) or opened(x) is not None
