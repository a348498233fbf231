"""Read the code of a schedule: is it a function of the number of updates and nothing else?

Traces tell schedules apart by all that they read; a proof is about those of which all is read.
"""

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


def facts_of(schedule: Any) -> tuple[str, tuple[Any, ...]]:
    """Return why a schedule is not known to depend on the step alone, or "", and all it reads.

    Known are the schedules of `fzero.optim.schedules`, and functions of Python whose code has
    numbers, arithmetic, `math`, a few builtins, and other such functions. What is read is code and
    numbers as they are now: two with the same facts do the same.

    Example:
        >>> import fzero
        >>> facts_of(lambda t: 0.1 / (1 + t))[0], facts_of(lambda t: 0.1 * fzero.axis_size())[0]
        ('', "a function that uses 'fzero', a module")
        >>> facts_of(lambda t: 0.1 * t) == facts_of(lambda t: 0.1 * t)
        True
    """
    reader = _Reader()
    reader.callable(schedule)
    return reader.why, tuple(reader.facts)


class _Reader:
    """Reads one schedule, and all that it reaches.

    why: the first thing that is not read. facts: what was seen, in order.
    """

    def __init__(self) -> None:
        self.why = ""
        self.facts: list[Any] = []
        self._seen = set[int]()

    def callable(self, fn: Any) -> None:
        if id(fn) in self._seen:
            return
        self._seen.add(id(fn))
        if type(fn) in _OWN:
            self.facts.append(type(fn).__name__)
            self.values((x.name, getattr(fn, x.name)) for x in dataclasses.fields(fn))
        elif type(fn) is functools.partial and not vars(fn):
            self.callable(fn.func)
            self.values([*enumerate(fn.args), *fn.keywords.items()])
        elif isinstance(fn, types.BuiltinFunctionType | type):
            self.facts.append((fn.__module__, fn.__qualname__))
            if fn not in _BUILTINS and not _is_of_math(fn):
                self._lacks(f"{fn!r}, which is not read")
        elif type(fn) is not types.FunctionType:
            self._lacks(f"an object of {type(fn).__name__}, which is not read")
            call = type(fn).__call__ if callable(fn) else None
            self.values([("", type(fn)), ("", call), *getattr(fn, "__dict__", {}).items()])
        else:
            if vars(fn) or any(type(x) is not dict for x in (fn.__globals__, fn.__builtins__)):
                self._lacks("a function with attributes, or names, of its own kind")
            self.values([*enumerate(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).items()])
            try:
                held = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
                self.values([(name, cell.cell_contents) for name, cell in held])
            except ValueError:
                self._lacks("a function of a variable that has no value")
            self.code(fn.__code__, fn)

    def code(self, code: types.CodeType, fn: types.FunctionType) -> None:
        inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
        consts = [repr(one) for one in code.co_consts if one not in inner]
        self.facts.append((code.co_code, code.co_names, code.co_varnames, *consts))
        of_module = False  # whether the instruction before has loaded `math`
        for one in dis.get_instructions(code):
            name: Any = one.argval
            if one.opname.startswith(_WRITES) and name not in code.co_cellvars:
                self._lacks(f"a function that writes {name or 'elements'}")
            if one.opname.startswith(_OTHERS) or (code is fn.__code__ and code.co_flags & _MAKES):
                self._lacks(f"a function with {one.opname}")
            if one.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")):
                if not of_module or not _is_of_math(getattr(math, name, None)):
                    self._lacks(f"a function that reads the attribute {name!r}")
                self.facts.append(repr(getattr(math, name, None)))
            of_module = False
            if one.opname.startswith("LOAD_GLOBAL"):
                held: Any = {**fn.__builtins__, **fn.__globals__}
                of_module = held.get(name) is math
                self.value(name, held.get(name))
        for one in inner:
            self.code(one, fn)

    def values(self, given: Iterable[tuple[Any, Any]]) -> None:
        for name, x in given:
            self.value(name, x)

    def value(self, name: Any, x: Any) -> None:
        if type(x) in _NUMBERS or x is math:
            self.facts.append((name, type(x).__name__, repr(x)))
        elif type(x) in (tuple, list, dict):
            if id(x) in self._seen:
                return
            self._seen.add(id(x))
            self.facts.append((name, type(x).__name__, len(x)))
            if type(x) is dict and any(type(key) not in _NUMBERS for key in x):
                self._lacks(f"a function that looks up {name!r}, whose keys are no numbers")
            self.values(x.items() if type(x) is dict else enumerate(x))
        elif isinstance(x, types.ModuleType):
            self._lacks(f"a function that uses {name!r}, a module")
        elif callable(x):
            self.callable(x)
        else:
            self.facts.append((name, type(x).__name__, id(x)))
            self._lacks(f"a function that uses {name!r}")

    def _lacks(self, what: str) -> None:
        self.why = self.why or what


def _is_of_math(x: Any) -> bool:
    if type(x) is float:
        return True
    mine = isinstance(x, types.BuiltinFunctionType) and x.__module__ == "math"
    return mine and type(x.__self__) is types.ModuleType
