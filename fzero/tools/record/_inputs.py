"""Inputs of a step as JSON, with names for their tensors."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor

from fzero.errors import LayoutError


def encoded(x: Any, where: str, tensors: MutableMapping[str, Tensor], name: str = "") -> Any:
    """Return inputs as JSON, and note their tensors, under names that begin with `where`.

    name: of the part of them that this is, for an error.

    Raises `LayoutError` for an object that is no tensor, number, text, or a tuple, list or dict.

    Example:
        >>> encoded(((1, [2.0]), {}), "3/inputs", {})["tuple"][1]
        {'dict': {}}
    """
    name = name or where
    if isinstance(x, Tensor):
        tensor = f"{where}/{len(tensors)}"
        tensors[tensor] = x
        return {"tensor": tensor}
    if x is None or isinstance(x, bool | int | float | str):
        return {"value": x}
    if type(x) in (tuple, list):
        items = [encoded(one, where, tensors, f"{name}.{i}") for i, one in enumerate(x)]
        return {"tuple" if type(x) is tuple else "list": items}
    if type(x) is dict and all(isinstance(key, str) for key in x):
        items = {key: encoded(one, where, tensors, f"{name}.{key}") for key, one in x.items()}
        return {"dict": items}
    raise LayoutError(
        f"recording.save: an input is a {type(x).__name__} ({name}).",
        cause="an object of a class of your own among the inputs of a step.",
        fix="give the step tensors, numbers, texts, and tuples, lists and dicts of them; a "
        "recording that is not saved holds any object.",
    )


def decoded(x: Any, tensor: Callable[[str], Any]) -> Any:
    """Return the inputs. tensor: name -> what is put in its place."""
    ((kind, value),) = x.items()
    if kind == "tensor":
        return tensor(value)
    if kind == "dict":
        return {key: decoded(one, tensor) for key, one in value.items()}
    if kind in ("tuple", "list"):
        items = [decoded(one, tensor) for one in value]
        return tuple(items) if kind == "tuple" else items
    return value
