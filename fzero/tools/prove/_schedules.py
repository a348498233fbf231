"""Read the code of a schedule: is it a function of the number of updates and nothing else?"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import inspect
import math
import types
from collections.abc import Iterable
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
_NUMBERS = (int, float, bool, str, type(None))
_MAKES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_WRITES = ("STORE_GLOBAL", "STORE_ATTR", "STORE_DEREF", "STORE_SUBSCR", "STORE_SLICE", "DELETE_")
_OTHERS = ("IMPORT_", "SEND", "GET_AWAITABLE", "LOAD_BUILD_CLASS", "LOAD_NAME", "LOAD_FROM_DICT")


def unreadable(schedule: Any) -> str:
    """Return why a schedule is not known to depend on the step alone; "" if it is.

    Known are the schedules of `fzero.optim.schedules`, and functions of Python whose code has
    numbers, arithmetic, `math`, a few builtins, and other such functions.

    Example:
        >>> import fzero
        >>> unreadable(lambda t: 0.1 / (1 + t)), unreadable(lambda t: 0.1 * fzero.axis_size())
        ('', "a function that uses 'fzero', a module")
    """
    return facts_of(schedule)[0]


def facts_of(schedule: Any) -> tuple[str, tuple[Any, ...]]:
    """Return (why it is unreadable or "", all code and numbers that it reads as they are now)."""
    reader = _Reader()
    return reader.callable(schedule), tuple(reader.facts)


class _Reader:
    """Reads one schedule. Each method returns why it cannot, or "".

    facts: what was read, in order.
    """

    def __init__(self) -> None:
        self.facts: list[Any] = []
        self._seen = set[int]()

    def callable(self, fn: Any) -> str:
        if id(fn) in self._seen:
            return ""
        self._seen.add(id(fn))
        if type(fn) in _OWN:
            self.facts.append(type(fn))
            return self.values((x.name, getattr(fn, x.name)) for x in dataclasses.fields(fn))
        if type(fn) is functools.partial and not vars(fn):
            given = [*enumerate(fn.args), *fn.keywords.items()]
            return self.callable(fn.func) or self.values(given)
        if isinstance(fn, types.BuiltinFunctionType | type):
            known = fn in _BUILTINS or _is_of_math(fn)
            self.facts.append(fn)
            return "" if known else f"{fn!r}, which is not read"
        if type(fn) is not types.FunctionType:
            return f"an object of {type(fn).__name__}, which is not read"
        held: Any = (fn.__globals__, fn.__builtins__)
        if vars(fn) or any(type(x) is not dict for x in held):
            return "a function with attributes, or names, of its own kind"
        given = [*enumerate(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).items()]
        return self.values(given) or self.cells(fn) or self.code(fn.__code__, fn)

    def cells(self, fn: types.FunctionType) -> str:
        try:
            held = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
            return self.values([(name, cell.cell_contents) for name, cell in held])
        except ValueError:
            return "a function of a variable that has no value"

    def code(self, code: types.CodeType, fn: types.FunctionType) -> str:
        self.facts.append(code)
        of_module = False  # whether the instruction before has loaded `math`
        for one in dis.get_instructions(code):
            name: Any = one.argval
            if one.opname.startswith(_WRITES) and name not in code.co_cellvars:
                return f"a function that writes {name or 'elements'}"
            if one.opname.startswith(_OTHERS) or (code is fn.__code__ and code.co_flags & _MAKES):
                return f"a function with {one.opname}"
            if one.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")):
                if not of_module or not _is_of_math(getattr(math, name, None)):
                    return f"a function that reads the attribute {name!r}"
                self.facts.append(getattr(math, name))
            of_module = False
            if one.opname.startswith("LOAD_GLOBAL"):
                held: Any = {**fn.__builtins__, **fn.__globals__}
                of_module = held.get(name) is math
                if why := self.value(name, held.get(name)):
                    return why
        inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
        return next(filter(None, (self.code(one, fn) for one in inner)), "")

    def values(self, given: Iterable[tuple[Any, Any]]) -> str:
        return next(filter(None, (self.value(name, x) for name, x in given)), "")

    def value(self, name: Any, x: Any) -> str:
        if type(x) in _NUMBERS or x is math:
            self.facts.append((name, type(x), repr(x)))
            return ""
        if type(x) in (tuple, list, dict):
            if id(x) in self._seen:
                return ""
            self._seen.add(id(x))
            self.facts.append((name, type(x), len(x)))
            if type(x) is dict and any(type(key) not in _NUMBERS for key in x):
                return f"a function that looks up {name!r}, whose keys are no numbers"
            return self.values(x.items() if type(x) is dict else enumerate(x))
        if isinstance(x, types.ModuleType):
            return f"a function that uses {name!r}, a module"
        return self.callable(x) if callable(x) else f"a function that uses {name!r}"


def _is_of_math(x: Any) -> bool:
    if type(x) is float:
        return True
    mine = isinstance(x, types.BuiltinFunctionType) and x.__module__ == "math"
    return mine and type(x.__self__) is types.ModuleType
