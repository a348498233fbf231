"""What each field of the manifest can be: a name, a type and a range. Pure.

A checksum finds damage; it does not tell who wrote a file. So nothing in the manifest is used
before it was found to have the form that `save` gives it. A form is one of

    a function        value -> whether it is good
    [form]            a list, each item of that form
    (form, form)      a list of so many items
    Named(...)        a dict
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DATA = re.compile(r"data-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DictForm:
    """The form of a dict."""

    must: Mapping[str, Any] = field(default_factory=dict)  # what is in it
    may: Mapping[str, Any] = field(default_factory=dict)  # what can be in it
    others: Any = None  # the form of all else in it; None: there is nothing else
    names: str = ".*"  # a pattern of the names of the others


def problems(value: Any, form: Any, place: str) -> Iterator[str]:
    """Yield a message, with its place, for each part of a value that does not have the form.

    Example:
        >>> form = DictForm(must={"step": _integer(0, 10)}, others=[_text])
        >>> list(problems({"step": -1, "names": ["a", 7]}, form, "it"))
        ['it/step is -1', 'it/names/1 is 7']
    """
    if isinstance(form, DictForm) and isinstance(value, dict):
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
    elif isinstance(form, list | tuple) and isinstance(value, list):
        forms = form if isinstance(form, tuple) else form * len(value)
        if len(forms) != len(value):
            yield f"{place} is {value!r:.80}"
        for number, (one, its) in enumerate(zip(value, forms, strict=False)):
            yield from problems(one, its, f"{place}/{number}")
    elif not callable(form) or not form(value):
        yield f"{place} is {value!r:.80}"


def _integer(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value < high


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _any(value: Any) -> bool:
    return True


def _number(value: Any) -> bool:
    return type(value) in (bool, float) or _integer(-(2**63), 2**63)(value)


def _updates(value: Any) -> bool:
    return type(value) is not bool and _number(value) and math.isfinite(value) and value >= 0


def _counts(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A number for all leaves, or one for each, by its name."""
    return lambda value: all(map(good, value.values())) if type(value) is dict else good(value)


_NATURAL = _integer(0, 2**63)
_ANYTHING = DictForm(others=_any)
_TEXTS = DictForm(others=_text)
_CHUNK = (_NATURAL, _integer(1, 2**63), _text, _NATURAL, _NATURAL)
_COUNTERS = DictForm(
    must={
        "step": _NATURAL,
        "optimizer": DictForm(
            may={"step": _counts(_updates), "count": _updates}, others=_counts(_number)
        ),
        "scale": DictForm(
            may={
                "scale": lambda x: type(x) is float and 0 < x < 3.5e38,  # as fp32 holds it
                "good_updates": _integer(0, 2**31),
                "hysteresis_left": _integer(0, 2**31),
                "hysteresis": _integer(1, 2**31),
            }
        ),
    },
    may={"unstepped": [_text]},
)
MANIFEST_FORM = DictForm(
    must={
        "origin": DictForm(
            must={
                "stage": _integer(0, 4),
                "ranks": _integer(1, 2**20),  # for each of which room may be made
                "torch": _text,
                "optimizer": _text,
            },
            may={
                "local": DictForm(
                    must={
                        "replicas": [
                            DictForm(
                                must={"counters": _COUNTERS, "counts": lambda x: type(x) is bool}
                            )
                        ],
                        "updates": _NATURAL,
                        "outer_updates": [_NATURAL],
                        "outer": _text,
                    },
                    may={
                        "coming": DictForm(must={"fragments": [_NATURAL], "timing": _text}),
                        "outer_counters": [
                            DictForm(
                                must={"count": _updates},
                                may={"step": _counts(_updates)},
                                others=_counts(_number),
                            )
                        ],
                    },
                )
            },
        ),
        "leaves": _TEXTS,
        "slots": DictForm(others=_TEXTS),
        "counters": _COUNTERS,
        "module": DictForm(
            must={
                "buffers": DictForm(
                    others=DictForm(must={"0": _text}, others=_text, names="[0-9]+")
                ),
                "options": [_ANYTHING],
            }
        ),
        "tensors": DictForm(others=DictForm(must={"dtype": _text, "chunks": [_CHUNK]})),
        "data": lambda x: isinstance(x, str) and DATA.fullmatch(x) is not None,
        # No folder, not . and not ..
        "files": DictForm(
            others=(_NATURAL, _integer(0, 2**32)),
            names="[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*",
        ),
        "extra": _ANYTHING,
    }
)
"""The body of checkpoint.json, without its format."""
