"""What JSON can be: a name, a type and a range for each field of it. Pure.

A checksum finds damage; it does not tell who wrote a file. So nothing that a file says is used
before it was found to have the form that is written. A form is one of

    a type            a value of it; `object` for any
    a range           an int in it
    a pattern         a text that it matches, from its first letter to its last
    a function        value -> whether it is good
    [form]            a list, each item of that form
    (form, form)      a list of so many items
    DictForm(...)     a dict
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class DictForm:
    """The form of a dict."""

    must: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what is in it
    may: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what can be in it
    others: Any = None  # the form of all else in it; None: there is nothing else
    names: str = ".*"  # a pattern of the names of the others


def problems(value: Any, form: Any, place: str) -> Iterator[str]:
    """Yield a message, with its place, for each part of a value that does not have the form.

    Example:
        >>> form = DictForm(must={"step": range(10)}, others=[text])
        >>> list(problems({"step": -1, "names": ["a", 7]}, form, "it"))
        ['it/step is -1', 'it/names/1 is 7']
    """
    kind = type(value).__name__
    if kind == "dict" and isinstance(form, DictForm):
        for name in form.must:
            if name not in value:
                yield f"{place} lacks {name!r}"
        for name, one in value.items():
            its = form.must.get(name, form.may.get(name))
            if its is None and form.others is not None and re.fullmatch(form.names, name):
                its = form.others
            if its is None:
                yield f"{place} has the name {name!r:.80}, which save does not write"
            else:
                yield from problems(one, its, f"{place}/{name}")
        return
    if kind == "list" and isinstance(form, list | tuple):
        forms = cast("tuple[Any, ...]", form if isinstance(form, tuple) else (*form,) * len(value))
        if len(forms) != len(value):
            yield f"{place} is {value!r:.80}"
        for number, (one, its) in enumerate(zip(value, forms, strict=False)):
            yield from problems(one, its, f"{place}/{number}")
        return
    if isinstance(form, type):
        good = isinstance(value, form)
    elif isinstance(form, re.Pattern):
        good = kind == "str" and cast("re.Pattern[str]", form).fullmatch(value) is not None
    elif isinstance(form, range):
        good = kind == "int" and value in form
    else:
        good = callable(form) and form(value)
    if not good:
        yield f"{place} is {value!r:.80}"


integer, natural, text = range, range(2**63), str


def number(value: Any) -> bool:
    """Whether it is a float, a bool, or an int that 8 bytes hold."""
    return type(value) in (bool, float) or (type(value) is int and value in range(-(2**63), 2**63))


def amount(value: Any) -> bool:
    """Whether it is a finite number of at least 0."""
    return type(value) is not bool and number(value) and math.isfinite(value) and value >= 0


ANYTHING = DictForm(others=object)
TEXTS = DictForm(others=text)
