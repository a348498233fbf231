"""Tensors in whatever a module returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, nn.Module)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in `value`, each once: containers, dataclasses and other objects.

    What cannot be looked into is passed over: a backward that comes from there is still seen,
    when the first parameter gets its gradient.

    Example:
        >>> import torch
        >>> x = torch.ones(1)
        >>> len(tensors_in({"a": (x, [x]), "b": iter([x])}))
        1
    """
    return list(_walk(value, {}))


def _walk(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen[id(value)] = value  # kept, for the id of what is gone may be taken again
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _walk_all(value.values(), seen)
    elif isinstance(value, tuple | list | set | frozenset):
        yield from _walk_all(value, seen)
    elif is_dataclass(value):
        yield from _walk_all([getattr(value, f.name, None) for f in fields(value)], seen)
    else:
        yield from _walk_all(list(getattr(value, "__dict__", {}).values()), seen)


def _walk_all(values: Iterable[Any], seen: dict[int, Any]) -> Iterator[Tensor]:
    for value in values:
        yield from _walk(value, seen)
