"""What a step reads besides its arguments: the functions that it calls, and their free variables.

A compiled graph has the numbers as constants, so they are part of its cache key. Tensors are inputs
of the graph, which therefore sees writes to them; another tensor in the same variable is another
graph. And a step whose functions name no update makes none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fzero.state.points import Points
from fzero.transforms.pipeline import Step

MOST = 64
"""Containers of more entries are not looked into: a data set would cost time in each call."""

_USUAL = frozenset({bool, int, float, str, type(None)})
_PLAIN = (Number, str, bytes, type(None), torch.dtype, torch.device)
_LIBRARIES = ("torch.", "fzero.")


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A tensor in a cache key, equal to the same tensor of the same shape."""

    tensor: Tensor
    shape: torch.Size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Held):
            return False
        return other.tensor is self.tensor and other.shape == self.shape

    __hash__ = None  # type: ignore[assignment]


def values_read(step: Callable[..., Any], transforms: Sequence[Any] = ()) -> list[Any]:
    """Return the numbers, strings and tensors that a step reads, in one order.

    Those in the cells, defaults and globals that the code of its functions names; in attributes of
    objects there, if the code names them, too; in containers of at most `MOST` entries. Of an
    nn.Module, its numbers and flags and those of its submodules. All of it through functions,
    partials, methods and transforms of fzero.

    transforms: of the states that the step is given.

    Example:
        >>> def make(rate):
        ...     return lambda state, x: (state, x * rate)
        >>> values_read(make(0.5))
        [0.5]
    """
    found = _reached(step) + [x for one in transforms for x in _reached(one)]
    return [x for x in found if type(x) is not FunctionType]


def reaches(step: Callable[..., Any], fn: Callable[..., Any]) -> bool:
    """Whether a step calls `fn`, or reaches a function of the user's whose code names it.

    Example:
        >>> from textwrap import dedent, indent
        >>> step = functools.partial(dedent, "")
        >>> reaches(step, dedent), reaches(step, indent)
        (True, False)
    """
    found = _reached(step)
    mine = (x for x in found if type(x) is FunctionType and not _is_library(x))
    return any(x is fn for x in found) or any(fn.__name__ in _names(x.__code__) for x in mine)


def _reached(step: Any) -> list[Any]:
    """Return the functions that a step reaches, and the values that it reads."""
    found: list[Any] = []
    _look(step, frozenset(), {}, found)
    return found


def _look(
    x: Any, names: frozenset[str], seen: dict[tuple[int, frozenset[str]], Any], found: list[Any]
) -> None:
    kind = type(x)
    if kind is FunctionType:  # the most frequent types first, as this runs in each call of a step
        names = _names(x.__code__)
    elif kind in _USUAL or isinstance(x, _PLAIN):
        found.append(x)
        return
    elif isinstance(x, Tensor):
        found.append(_Held(x, x.shape))
        return
    elif kind is _Attributes:
        names = x.names
    if (id(x), names) in seen:
        return
    seen[id(x), names] = x  # a reference, so that the id is not used again
    if kind is FunctionType:
        found.append(x)
    for part in _parts(x, names):
        _look(part, names, seen, found)


def _parts(x: Any, names: frozenset[str]) -> Iterator[Any]:
    """Yield the objects that `x` reads: its callees, and attributes in `names`."""
    if isinstance(x, FunctionType):
        yield from _of_function(x, names)
    elif isinstance(x, Step):
        yield from (x.inner, *x.init_options.get("transforms", ()))
    elif isinstance(x, Points):
        yield from (getattr(x, point) for point in x.at)
    elif isinstance(x, functools.partial):
        yield from (x.func, *x.args, *x.keywords.values())
    elif isinstance(x, MethodType):
        yield from (x.__func__, _Attributes(x.__self__, _names_of(x.__func__)))
    elif isinstance(x, _Attributes):
        yield from _attributes(x.owner, x.names)
    elif isinstance(x, nn.Module):
        for part in x.modules():
            yield from [v for v in vars(part).values() if type(v) in (bool, int, float)]
    elif isinstance(x, dict | list | tuple | set | frozenset):
        values = x.values() if isinstance(x, dict) else x
        yield from values if len(x) <= MOST else ()
    elif isinstance(x, ModuleType):  # torch, mostly
        known = {} if f"{x.__name__}.".startswith(_LIBRARIES) else vars(x)
        named = (known[name] for name in sorted(names) if name in known)
        yield from (value for value in named if isinstance(value, (*_PLAIN, Tensor, FunctionType)))
    elif not isinstance(x, type):
        yield from _attributes(x, names)
        called = getattr(type(x), "__call__", None)  # noqa: B004
        if isinstance(called, FunctionType) and not _is_library(called):
            yield MethodType(called, x)


@dataclass(frozen=True, slots=True)
class _Attributes:
    """An object and the names of its attributes that a method reads."""

    owner: Any
    names: frozenset[str]


def _of_function(fn: FunctionType, names: frozenset[str]) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    if (wrapped := vars(fn).get("__wrapped__")) is not None:
        yield wrapped
    if not _is_library(fn):
        yield from [fn.__globals__[name] for name in sorted(names) if name in fn.__globals__]


def _attributes(owner: Any, names: frozenset[str]) -> Iterator[Any]:
    own = getattr(owner, "__dict__", {})
    yield from (own[name] for name in sorted(names) if name in own)
    for cls in type(owner).__mro__:
        if cls.__module__ == "builtins" or cls.__module__.startswith(_LIBRARIES):
            continue
        for name in sorted(names.intersection(vars(cls)).difference(own)):
            value = vars(cls)[name]
            if isinstance(value, MemberDescriptorType):  # of __slots__
                value = getattr(owner, name, None)
            yield MethodType(value, owner) if isinstance(value, FunctionType) else value


def _names_of(fn: Any) -> frozenset[str]:
    return _names(fn.__code__) if isinstance(fn, FunctionType) else frozenset()


def _is_library(fn: FunctionType) -> bool:
    return f"{fn.__module__}.".startswith(_LIBRARIES)


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function and its inner functions."""
    inside = (_names(x) for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(code.co_names).union(*inside)
