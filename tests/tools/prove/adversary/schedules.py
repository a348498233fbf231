"""Schedules that look like arithmetic, and are set or made by the number of ranks."""

# ruff: noqa: E501
# A table has a program a line.

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import fzero
from fzero.optim import adamw, sgd
from tests.descends import descends
from tests.tools.prove.adversary.places import Fn
from tests.tools.prove.adversary.programs import Program, of_loss, of_step, usual_loss

KIND = "schedules"


def _many() -> bool:
    return fzero.axis_size() > 1


# Schedules that read what the step sets, and sets back.
_RATE = 0.1
_RATES = [0.1]
_TABLE = {"lr": 0.1}


def _by_global(t: int) -> float:
    return _RATE


def _set_global(x: float) -> None:
    global _RATE
    _RATE = x


def _around(write: Callable[[float], None]) -> Fn:
    def step(state: Any, x: Any) -> Any:
        write(0.1 * fzero.axis_size())
        try:
            return descends(usual_loss)(state, x)
        finally:
            write(0.1)

    return step


def _cell() -> tuple[Fn, Fn]:
    rate = 0.1

    def read(t: int) -> float:
        return rate

    def write(x: float) -> None:
        nonlocal rate
        rate = x

    return read, write


def _default(t: int, held: list[float] = [0.1]) -> float:  # noqa: B006
    return held[0]


def _kept_code(t: int) -> float:
    return 0.1


def _usual(t: int) -> float:
    return 0.1


def _other(t: int) -> float:
    return 0.3


_READ, _WRITE = _cell()

DYNAMIC: dict[str, tuple[Any, Callable[[float], None]]] = {
    "a global": (_by_global, _set_global),
    "an element of a list": (lambda t: _RATES[0], lambda x: _RATES.__setitem__(0, x)),
    "a key of a dict": (lambda t: _TABLE["lr"], lambda x: _TABLE.update(lr=x)),
    "a variable of a closure": (_READ, _WRITE),
    "a default": (_default, lambda x: _default.__defaults__[0].__setitem__(0, x)),  # type: ignore[index]
    "its code": (
        _kept_code,
        lambda x: setattr(_kept_code, "__code__", (_usual if x == 0.1 else _other).__code__),
    ),
}


# Schedules that are read as arithmetic, and are not.
def _partial_with_attribute() -> Any:
    held = functools.partial(float, 1.0)
    held.pow = fzero.axis_size
    return lambda t: 0.1 * held.pow()


def _other_builtins() -> Any:
    own = {"abs": lambda t: fzero.axis_size(), "__name__": "other"}
    made = eval("lambda t: 0.1 * abs(1)", {"__builtins__": own})
    assert isinstance(made, types.FunctionType)
    return made


class _Number(float):
    """A number that is another one when it is multiplied."""

    def __mul__(self, other: Any) -> float:
        return float(self) * fzero.axis_size()

    __rmul__ = __mul__


class _Row(tuple[float, ...]):
    def __getitem__(self, i: Any) -> Any:
        return 0.1 * fzero.axis_size()


def _by_key() -> Any:
    class Key(int):
        def __hash__(self) -> int:
            return fzero.axis_size()

    table = {1: 0.1, 2: 0.2}
    key = Key(1)
    return lambda t: table.get(key, 0.3) if False else 0.1 * len(range(hash(key)))


def _by_iteration() -> Any:
    class Ranks(list[int]):
        def __iter__(self) -> Any:
            return iter(range(fzero.axis_size()))

    ranks = Ranks()
    return lambda t: 0.1 * sum(1 for _ in ranks)


def _nested() -> Any:
    def outer() -> Any:
        return lambda: fzero.axis_size()

    inner = outer()
    return lambda t: 0.1 * (lambda: inner())()


def _global_function(t: int) -> float:
    return 0.1 * _helper()


def _helper() -> int:
    return _many() + 1


def _decorated() -> Any:
    @functools.wraps(_kept_code)
    def rate(t: int) -> float:
        return 0.1 * fzero.axis_size()

    return rate


def _by_import() -> Any:
    def rate(t: int) -> float:
        from fzero import axis_size

        return 0.1 * axis_size()

    return rate


def _by_state() -> Any:
    """Code of a function that is replaced by attribute."""

    def rate(t: int) -> float:
        return 0.1

    rate.__globals__  # noqa: B018
    return lambda t: rate.__code__.co_argcount * 0.1 * fzero.axis_size()


class _Key:
    """A key that is there on several ranks only."""

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return _many()


def _by_key_of_dict() -> Any:
    table = {_Key(): 1.0}
    return lambda t: 0.2 if 0 * t in table else 0.1


def _by_key_of_row() -> Any:
    rows = [1.0, [2.0, {_Key(): 1.0}]]
    return lambda t: 0.1 * (1 + (0 in rows[1][1]))


CODE: dict[str, Callable[[], Any]] = {
    "a partial with an attribute": _partial_with_attribute,
    "other builtins": _other_builtins,
    "a number of its own": lambda: (lambda one: lambda t: one * 1.0)(_Number(0.1)),
    "a row of its own": lambda: (lambda row: lambda t: row[0])(_Row((0.1, 0.2))),
    "a hash": _by_key,
    "an iteration": _by_iteration,
    "a key of max": lambda: (
        lambda t: 0.1 * max((1, 2), key=lambda i: i * (1 if fzero.axis_size() > 1 else -1))
    ),
    "nested functions": _nested,
    "a function of the module": lambda: _global_function,
    "a decorator": _decorated,
    "an import": _by_import,
    "an attribute": _by_state,
    "a key of a dict": _by_key_of_dict,
    "a key of a dict in a list": _by_key_of_row,
}


def programs() -> Iterator[Program]:
    for name, (schedule, write) in DYNAMIC.items():
        for optimizer in (lambda s=schedule: sgd(s), lambda s=schedule: adamw(s)):
            yield of_step(KIND, f"a rate that is set for a step, {name}, {optimizer().rule.name}", _around(write), optimizer=optimizer)  # fmt: skip
    for name, make in CODE.items():
        yield of_loss(KIND, f"a rate, {name}", usual_loss, optimizer=lambda m=make: sgd(m()))
