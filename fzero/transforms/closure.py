"""What a step reads besides its arguments: the functions that it calls, and their free variables.

A compiled graph has the numbers as constants, so they are part of its cache key. Tensors are inputs
of the graph, which therefore sees writes to them; another tensor in the same variable is another
graph. And a step whose functions name no update makes none.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fzero.state.points import Points
from fzero.transforms.functionalize import Apply, StatefulApply
from fzero.transforms.pipeline import Step

MOST = 64
"""Containers of more entries are not looked into: a data set would cost time in each call."""

MOST_OF_ARRAY = 1024
"""NumPy arrays of more elements are not looked at."""

_USUAL = frozenset({bool, int, float, str, type(None)})
_PLAIN = (Number, str, bytes, type(None), torch.dtype, torch.device, range, np.generic)
_ATOMS = (Enum, BuiltinFunctionType, np.ufunc, torch.Generator, torch._ops.OpOverload)
"""What is told apart by being the same object, and has nothing to be looked into."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_BY_TEXT = {"getattr", "attrgetter", "vars", "__dict__"}
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


def told_apart(x: Any) -> Any:
    """Return what a value is told apart by in a cache key: 1, 1.0 and True are not the same."""
    if isinstance(x, float | complex):
        return type(x), repr(x)
    if isinstance(x, np.ndarray):
        return x.dtype, x.shape, x.tobytes()
    return x if isinstance(x, torch.Generator) else (type(x), x)


def values_read(
    step: Callable[..., Any], transforms: Sequence[Any] = (), given: Sequence[Any] = ()
) -> list[Any]:
    """Return what a step reads and does, told apart by value or by identity, in one order.

    Numbers, strings, small arrays, tensors and generators in the cells, defaults and globals that
    the code of its functions names; in attributes of objects and classes there, if the code names
    them, too (also as a text, beside `getattr`); in containers of at most `MOST` entries. Of an
    nn.Module, its numbers, texts and tensors and those of its submodules. All of it through
    functions, partials, methods and transforms of fzero; and the code of these functions.

    transforms: of the states that the step is given. given: the leaves of its arguments, of which
    objects are looked into.

    Example:
        >>> def make(rate):
        ...     return lambda state, x: (state, x * rate)
        >>> values_read(make(0.5)) == values_read(make(0.5)), values_read(make(0.5))[1:]
        (True, [(<class 'float'>, '0.5')])
    """
    found = _reached(step) + [x for one in transforms for x in _reached(one)]
    objects = [x for x in given if not isinstance(x, (Tensor, *_PLAIN))]
    if objects:
        codes = [x.__code__ for x in found if type(x) is FunctionType and not _is_library(x)]
        names = frozenset().union(*map(_attribute_names, codes))
        for x in objects:
            _look(x, names, {}, found)
    return [x.__code__ if type(x) is FunctionType else told_apart(x) for x in found]


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
        names = _attribute_names(x.__code__)
    elif kind in _USUAL or isinstance(x, (*_PLAIN, *_ATOMS)):
        found.append(x)
        return
    elif isinstance(x, Tensor):
        found.append(_Held(x, x.shape))
        return
    elif isinstance(x, np.ndarray):
        found.append(x if x.size <= MOST_OF_ARRAY else id(x))
        return
    elif kind is _Attributes:
        names = x.names
    if (id(x), names) in seen:
        return
    seen[id(x), names] = x  # a reference, so that the id is not used again
    if kind is FunctionType:
        found.append(x)
    elif kind is not _Attributes and kind is not MethodType:
        found.append(_kind_of(x))
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
            yield type(part)
            yield from [v for v in vars(part).values() if type(v) in _USUAL or type(v) is tuple]
            yield from (*part._parameters.values(), *part._buffers.values())
            yield from _forward_of(part)
    elif isinstance(x, Apply | StatefulApply):
        kinds = {type(part): part for part in x.template.module.modules()}
        yield from (one for part in kinds.values() for one in _forward_of(part))
    elif isinstance(x, _CONTAINERS):
        values = [y for pair in x.items() for y in pair] if isinstance(x, dict) else x
        yield from values if len(x) <= MOST else ()
    elif isinstance(x, ModuleType):  # torch, mostly
        known = {} if f"{x.__name__}.".startswith(_LIBRARIES) else vars(x)
        named = (known[name] for name in sorted(names) if name in known)
        yield from (value for value in named if not isinstance(value, ModuleType))
    elif isinstance(x, random.Random):
        yield repr(x.getstate())
    elif isinstance(x, np.random.Generator):
        yield repr(x.bit_generator.state)
    elif isinstance(x, type):
        yield from _of_classes(x, x, names)
    else:
        yield from _attributes(x, names)
        called = getattr(type(x), "__call__", None)  # noqa: B004
        if isinstance(called, FunctionType) and not _is_library(called):
            yield MethodType(called, x)


def _kind_of(x: Any) -> Any:
    """Return the class of an object, with the length of a container that is looked into."""
    if isinstance(x, type):
        return x
    return (type(x), len(x)) if isinstance(x, _CONTAINERS) and len(x) <= MOST else type(x)


def _forward_of(module: nn.Module) -> Iterator[Any]:
    """Yield the forward of a module of the user's own."""
    forward = getattr(type(module), "forward", None)
    if isinstance(forward, FunctionType) and not _is_library(forward):
        yield MethodType(forward, module)


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
    yield from (value for name, value in vars(fn).items() if name in names)
    if not _is_library(fn):
        known = fn.__globals__
        yield from [known[name] for name in sorted(_names(fn.__code__)) if name in known]


def _attributes(owner: Any, names: frozenset[str]) -> Iterator[Any]:
    own = getattr(owner, "__dict__", {})
    yield from (own[name] for name in sorted(names) if name in own)
    yield from _of_classes(type(owner), owner, names.difference(own))


def _of_classes(kind: type, owner: Any, names: frozenset[str]) -> Iterator[Any]:
    """Yield what is read by `names` in a class and its bases, methods bound to `owner`."""
    for cls in kind.__mro__:
        if cls.__module__ == "builtins" or cls.__module__.startswith(_LIBRARIES):
            continue
        for name in sorted(names.intersection(vars(cls))):
            value = vars(cls)[name]
            if isinstance(value, MemberDescriptorType):  # of __slots__
                value = getattr(owner, name, None)
            if isinstance(value, property):
                value = value.fget
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            yield MethodType(value, owner) if isinstance(value, FunctionType) else value


def _names_of(fn: Any) -> frozenset[str]:
    return _attribute_names(fn.__code__) if isinstance(fn, FunctionType) else frozenset()


def _is_library(fn: FunctionType) -> bool:
    return f"{fn.__module__}.".startswith(_LIBRARIES)


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function and its inner functions."""
    inside = (_names(x) for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(code.co_names).union(*inside)


@functools.lru_cache(maxsize=4096)
def _attribute_names(code: CodeType) -> frozenset[str]:
    """Return the names by which code may read attributes: also texts, if it asks `getattr`."""
    names = _names(code)
    return names | frozenset(_texts(code)) if names & _BY_TEXT else names


def _texts(x: Any) -> Iterator[str]:
    if isinstance(x, str):
        yield x
    elif isinstance(x, CodeType | tuple | frozenset):
        for part in x.co_consts if isinstance(x, CodeType) else x:
            yield from _texts(part)
