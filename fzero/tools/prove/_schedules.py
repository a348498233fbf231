"""Read the code of a schedule: is it a function of the number of updates and nothing else?"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import inspect
import math
import types
from typing import Any

from fzero.optim import schedules

_OWN = tuple(
    one
    for one in vars(schedules).values()
    if isinstance(one, type) and one.__module__ == schedules.__name__
)
_NAMES = ("abs", "all", "any", "bool", "divmod", "enumerate", "float", "int", "len", "max", "min")
_MORE = ("pow", "range", "reversed", "round", "sorted", "sum", "tuple", "zip")
_BUILTINS = frozenset(getattr(builtins, name) for name in (*_NAMES, *_MORE))
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_WRITES = ("STORE_GLOBAL", "STORE_ATTR", "STORE_DEREF", "STORE_SUBSCR", "STORE_SLICE", "DELETE_")
_OTHERS = ("IMPORT_", "SEND", "GET_AWAITABLE", "LOAD_BUILD_CLASS", "LOAD_NAME")


def unreadable(schedule: Any) -> str:
    """Return why a schedule is not known to depend on the step alone; "" if it is.

    Known are the schedules of `fzero.optim.schedules`, and functions of Python whose code has
    numbers, arithmetic, `math`, a few builtins, and other such functions.

    Example:
        >>> import fzero
        >>> unreadable(lambda t: 0.1 / (1 + t)), unreadable(lambda t: 0.1 * fzero.axis_size())
        ('', "a function that uses 'fzero', a module")
    """
    return _of_callable(schedule, set())


def _of_callable(fn: Any, seen: set[int]) -> str:
    if id(fn) in seen:
        return ""
    seen.add(id(fn))
    if type(fn) in _OWN:
        return _of_values({one.name: getattr(fn, one.name) for one in dataclasses.fields(fn)}, seen)
    if type(fn) is functools.partial:
        given = dict(enumerate(fn.args)) | fn.keywords
        return _of_callable(fn.func, seen) or _of_values(given, seen)
    if isinstance(fn, types.BuiltinFunctionType | type):
        known = fn in _BUILTINS or getattr(math, getattr(fn, "__name__", ""), None) is fn
        return "" if known else f"{fn!r}, which is not read"
    if type(fn) is not types.FunctionType:
        return f"an object of {type(fn).__name__}, which is not read"
    if vars(fn):
        return "a function with attributes"
    given = dict(enumerate(fn.__defaults__ or ())) | (fn.__kwdefaults__ or {})
    return _of_values(given, seen) or _of_code(fn.__code__, fn, seen)


def _of_code(code: types.CodeType, fn: types.FunctionType, seen: set[int]) -> str:
    for one in dis.get_instructions(code):
        if one.opname.startswith(_WRITES) and one.argval not in code.co_cellvars:
            return f"a function that writes {one.argval or 'elements'}"
        if one.opname.startswith(_OTHERS) or (code is fn.__code__ and code.co_flags & _GENERATOR):
            return f"a function with {one.opname}"
        if one.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")) and not hasattr(math, one.argval):
            return f"a function that reads the attribute {one.argval!r}"
        if one.opname.startswith("LOAD_GLOBAL"):
            missing = getattr(builtins, one.argval, None)
            if why := _of_value(one.argval, fn.__globals__.get(one.argval, missing), seen):
                return why
    held = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    try:
        if why := _of_values({name: cell.cell_contents for name, cell in held}, seen):
            return why
    except ValueError:
        return "a function of a variable that has no value"
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return next(filter(None, (_of_code(one, fn, seen) for one in inner)), "")


def _of_values(given: dict[Any, Any], seen: set[int]) -> str:
    return next(filter(None, (_of_value(name, x, seen) for name, x in given.items())), "")


def _of_value(name: Any, x: Any, seen: set[int]) -> str:
    if x is None or type(x) in (int, float, bool, str) or x is math:
        return ""
    if type(x) in (tuple, list):
        return _of_values(dict(enumerate(x)), seen)
    if type(x) is dict:
        return _of_values(x, seen)
    if isinstance(x, types.ModuleType):
        return f"a function that uses {name!r}, a module"
    if callable(x):
        return _of_callable(x, seen)
    return f"a function that uses {name!r}, a {type(x).__name__}"
