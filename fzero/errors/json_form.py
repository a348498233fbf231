"""What JSON can be: a name, a type and a range for each field of it. Pure.

A checksum finds damage; it does not tell who wrote a file. So nothing that a file says is used
before it was found to have the form that is written. A form is one of

    a function        value -> whether it is good
    [form]            a list, each item of that form
    (form, form)      a list of so many items
    DictForm(...)     a dict
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard


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
        >>> form = DictForm(must={"step": integer(0, 10)}, others=[text])
        >>> list(problems({"step": -1, "names": ["a", 7]}, form, "it"))
        ['it/step is -1', 'it/names/1 is 7']
    """
    if isinstance(form, DictForm) and _is_dict(value):
        known = {**form.must, **form.may}
        for name in form.must:
            if name not in value:
                yield f"{place} lacks {name!r}"
        for name, one in value.items():
            fits = form.others is not None and re.fullmatch(form.names, name)
            if name in known or fits:
                yield from problems(one, known.get(name, form.others), f"{place}/{name}")
            else:
                yield f"{place} has the name {name!r:.80}, which save does not write"
    elif (_is_list(form) or _is_tuple(form)) and _is_list(value):
        forms = form if _is_tuple(form) else [*form] * len(value)
        if len(forms) != len(value):
            yield f"{place} is {value!r:.80}"
        for place_in, (one, its) in enumerate(zip(value, forms, strict=False)):
            yield from problems(one, its, f"{place}/{place_in}")
    elif not callable(form) or not form(value):
        yield f"{place} is {value!r:.80}"


def _is_dict(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)  # of JSON: its names are texts


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def integer(low: int, high: int) -> Callable[[Any], bool]:
    """Return the form of an int of low..high, without `high`."""
    return lambda value: type(value) is int and low <= value < high


def text(value: Any) -> bool:
    """Whether it is a str."""
    return isinstance(value, str)


def number(value: Any) -> bool:
    """Whether it is a float, a bool, or an int that 8 bytes hold."""
    return type(value) in (bool, float) or integer(-(2**63), 2**63)(value)


def amount(value: Any) -> bool:
    """Whether it is a finite number of at least 0."""
    return type(value) is not bool and number(value) and math.isfinite(value) and value >= 0


def natural(value: Any) -> bool:
    """Whether it is an int of at least 0 that 8 bytes hold."""
    return integer(0, 2**63)(value)


def anything(_: Any) -> bool:
    """Whether it is there."""
    return True


ANYTHING = DictForm(others=anything)
TEXTS = DictForm(others=text)
