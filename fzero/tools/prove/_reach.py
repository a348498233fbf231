"""What a step reaches and a call may leave changed: variables, attributes, containers.

A program is recorded once, and runs in every call: so what a call writes for the next one to read
is no part of it. Looked at are variables of enclosing functions, globals that code names, default
arguments, attributes of objects and elements of containers, from the step on. Objects of fzero and
torch are passed through for what of the user's is in them; what they keep for themselves is not
looked at.
"""

from __future__ import annotations

import functools
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fzero.tools.prove._read import bytes_of

_MOST, _SMALL = 20_000, 4096
_PASSED_BY = ("fzero.", "torch._", "torch.fx", "torch.utils._", "threading", "logging", "weakref")
_LOOKED_INTO = ("fzero.optim", "fzero.transforms.pipeline")
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_LIBRARIES = frozenset(
    ("fzero", "torch", "numpy", "optree", "builtins", *sys.stdlib_module_names)
) - {"__main__"}


def snapshot(*roots: Any) -> dict[str, Hashable]:
    """Return what is there, by where it is: equal snapshots show no write between them."""
    found: dict[str, Hashable] = {}
    rest = deque((f"root {i}", x) for i, x in enumerate(roots))
    seen = set[int]()
    while rest and len(seen) < _MOST:
        path, x = rest.popleft()
        if isinstance(x, _PLAIN):
            found[path] = type(x).__name__, repr(x)
            continue
        found[path] = _token(x)
        if id(x) in seen:
            continue
        seen.add(id(x))
        rest.extend((f"{path}{name}", inner) for name, inner in _inside(x))
    found["root random"] = hash(random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        found["root numpy.random"] = repr(numpy.random.get_state())
    return found


def changed(before: dict[str, Hashable], after: dict[str, Hashable]) -> str:
    """Return where two snapshots differ first; "" if they do not."""
    for path in {**before, **after}:
        if before.get(path) != after.get(path):
            return path.split(" ", 1)[1].lstrip("0123456789.") if " " in path else path
    return ""


def _token(x: Any) -> Hashable:
    """Return what changes if an object is written to, beside what is inside of it."""
    if isinstance(x, Tensor):
        return id(x), 0 if x.is_inference() else x._version, _numbers(x)
    if isinstance(x, list | tuple | set | frozenset | dict | deque):
        return type(x).__name__, len(x)
    if isinstance(x, random.Random):
        return hash(x.getstate())
    if isinstance(x, types.MethodType):
        return id(x.__func__)
    if isinstance(x, bytearray | memoryview) or _is_of_numpy(x):
        return bytes(x) if len(bytes(x)) < _SMALL else id(x)
    if (generator := _bits_of(x)) is not None:
        return repr(generator.state)
    if isinstance(x, types.GeneratorType):
        return id(x), x.gi_frame and x.gi_frame.f_lasti
    if type(x).__module__ in ("builtins", "itertools") and hasattr(x, "__next__"):
        return id(x), _place_of(x)
    return id(x)


def _is_of_numpy(x: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray | numpy.generic)


def _bits_of(x: Any) -> Any:
    """Return the generator of bits that an object of numpy is, or has; None for others."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(x, numpy.random.Generator):
        return x.bit_generator
    return x if isinstance(x, numpy.random.BitGenerator) else None


def _numbers(x: Tensor) -> Hashable:
    """Return the elements of a small tensor: `x.data.add_(1)` has no version."""
    if type(x) not in (Tensor, nn.Parameter) or x.device.type != "cpu" or x.layout != torch.strided:
        return None
    if x.numel() > _SMALL:
        return None
    return bytes_of(x)


def _place_of(iterator: Any) -> Hashable:
    """Return where an iterator of Python is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # itertools' are to lose it in Python 3.14
        try:
            return repr(iterator.__reduce__()[1:])
        except TypeError:
            return None


def _inside(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, what) of all that can be reached from an object at once."""
    if isinstance(x, types.FunctionType):
        yield from _of_function(x)
    elif isinstance(x, types.MethodType):
        yield from ((".self", x.__self__), (".function", x.__func__))
    elif isinstance(x, functools.partial):
        yield from ((".function", x.func), (".args", x.args), (".keywords", x.keywords))
    elif isinstance(x, dict):
        yield from (
            (f"[{key!r}]" if isinstance(key, _PLAIN) else "[...]", one) for key, one in x.items()
        )
    elif isinstance(x, types.GeneratorType):
        yield from ((f".{name}", one) for name, one in _locals_of(x).items())
    elif isinstance(x, list | tuple | deque):
        yield from ((f"[{i}]", one) for i, one in enumerate(x))
    elif isinstance(x, set | frozenset):
        yield from ((f".{one!r}", one) for one in x if isinstance(one, _PLAIN))
    elif isinstance(x, type | types.ModuleType | Tensor | torch._ops.OpOverload):
        if isinstance(x, type) and not _is_library(x.__module__):
            yield from ((f".{name}", one) for name, one in _own(vars(x)))
    else:
        yield from _of_object(x)


def _locals_of(x: types.GeneratorType) -> dict[str, Any]:
    return x.gi_frame.f_locals if x.gi_frame is not None else {}


def _of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            yield f".{name}", None
    if _is_library(fn.__module__):
        return
    yield from ((f".default {i}", one) for i, one in enumerate(fn.__defaults__ or ()))
    yield from ((f".{name}", one) for name, one in (fn.__kwdefaults__ or {}).items())
    yield from ((f".{name}", one) for name, one in vars(fn).items())
    yield from _globals(fn.__code__, fn.__globals__)


def _globals(code: types.CodeType, held: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    names = code.co_names
    for name in names:
        if name in held:
            one = held[name]
            yield f".{name}", one
            if isinstance(one, types.ModuleType) and not _is_library(one.__name__):
                yield from ((f".{name}.{x}", getattr(one, x)) for x in names if hasattr(one, x))
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _globals(one, held)


def _of_object(x: Any) -> Iterator[tuple[str, Any]]:
    module = type(x).__module__
    if module.startswith(_PASSED_BY) and not module.startswith(_LOOKED_INTO):
        return
    library = _is_library(module)
    yield from ((f".{name}", one) for name, one in getattr(x, "__dict__", {}).items())
    for kind in type(x).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(x, name):
                yield f".{name}", getattr(x, name)
    if not library:
        yield ".class", type(x)


def _own(held: Any) -> Iterator[tuple[str, Any]]:
    return ((name, one) for name, one in held.items() if not name.startswith("__"))


def _is_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in _LIBRARIES
