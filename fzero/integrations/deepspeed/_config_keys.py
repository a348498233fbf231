"""DeepSpeed's config as data: every key, its default in DeepSpeed, and what fzero does with it.

`names.json`, beside this file, has the keys, their other names, and what stands for the names of
DeepSpeed's engine that fzero's does not have. docs/deepspeed_config.md is made of it. Its tables:

    used         {key: {default, kind, here}}; without `here` the key sets an option of the engine
    harmless     {why: {key: default}}: any value is accepted, and has no effect
    refused      {fix: {key: default}}: for another value than DeepSpeed's default
    off          {fix: {section: [switch, off]}}: unless its switch is left out or `off`; a section
                 without a switch must be empty
    renamed      {another name of a key: the key}; `renamed_switches`: of one that was a bool
    near         {a name in other libraries: the key to suggest in the error}
    switches     {section: [key, value]}: with this value of its key it is off, and not read further
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from fzero.options import OPTIONS

_FILE = files("fzero.integrations.deepspeed") / "names.json"
NAMES: dict[str, Any] = json.loads(_FILE.read_text("utf-8"))


class Key(NamedTuple):
    """One key of DeepSpeed's config: a dotted path."""

    path: str
    use: str  # option (of `Engine`, which `says` names), read, harmless, refused or off
    default: Any
    says: str
    kind: str = ""  # of KINDS, for an option and for what is read


def _keys() -> Iterator[Key]:
    options = {one.deepspeed: one.name for one in OPTIONS.values()}
    for path, row in NAMES["used"].items():
        use = "read" if "here" in row else "option"
        yield Key(path, use, row["default"], row.get("here") or options[path], row["kind"])
    for use in ("harmless", "refused", "off"):
        for says, keys in NAMES[use].items():
            yield from (Key(path, use, default, says) for path, default in keys.items())


KEYS: dict[str, Key] = {key.path: key for key in _keys()}
"""Every key, by path."""

_STAGE_3 = "zero_optimization.stage3_"
RENAMED: dict[str, str] = {
    **NAMES["renamed"],
    **NAMES["renamed_switches"],
    # The names of DeepSpeed's Python fields.
    **{path.replace("stage3_", ""): path for path in KEYS if path.startswith(_STAGE_3)},
}
"""Other names of keys that DeepSpeed accepts."""


# Kinds of values. As in DeepSpeed: 0 and 1 and "true" are bools, 5e8 (a float in JSON) and
# "500000000" are ints, "1e-3" is a number. What is not of the kind raises ValueError or TypeError.


def as_number(value: Any) -> float:
    """Return a finite number; raise ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def as_int(value: Any) -> int:
    """Return a whole number; raise ValueError for anything else.

    Example:
        >>> as_int(5e8), as_int("16")
        (500000000, 16)
    """
    if isinstance(value, str):
        return int(value)
    if as_number(value) != int(value):
        raise ValueError(value)
    return int(value)


def _meant(words: Mapping[Any, Any], value: Any) -> Any:
    if (word := str(value).lower()) not in words:
        raise ValueError(value)
    return words[word]


as_bool = partial(
    _meant,
    dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True)
    | dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
)
_as_dtype = partial(
    _meant,
    dict.fromkeys(("fp32", "float32", "torch.float32", "float"), torch.float32)
    | dict.fromkeys(("fp16", "float16", "torch.float16", "half"), torch.float16)
    | dict.fromkeys(("bf16", "bfp16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
)
_as_place = partial(_meant, {"none": None, "cpu": "cpu", "nvme": "disk"})


def _as_names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _as_is(value: Any) -> Any:
    return value


KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool], str]] = {
    "bool": (as_bool, lambda _: True, "true or false"),
    "count": (as_int, lambda n: n >= 1, "a whole number of 1 or more"),
    "power": (as_int, lambda n: 0 <= n < 128, "a whole number from 0 to 127"),
    "numel": (as_int, lambda n: n >= 0, "a number of elements, 0 or more"),
    "number": (as_number, lambda n: n >= 0, "a number of 0 or more"),
    "norm": (
        lambda value: as_number(value) or None,
        lambda n: n is None or n >= 0,
        "a number of 0 or more; 0 is off",
    ),
    "stage": (as_int, lambda n: n in (0, 1, 2, 3), "0, 1, 2 or 3"),
    "dtype": (_as_dtype, lambda _: True, "fp32, fp16 or bf16"),
    "text": (_as_is, lambda x: isinstance(x, str), "a name"),
    "mapping": (_as_is, lambda x: isinstance(x, Mapping), "an object { ... }"),
    "place": (_as_place, lambda _: True, "none, cpu or nvme"),
    "op": (partial(_meant, {"mean": "mean", "sum": "sum"}), lambda _: True, "mean or sum"),
    "factor": (as_number, lambda n: n > 0, "a number above 0"),
    "names": (_as_names, lambda x: all(isinstance(n, str) for n in x), "a list of names"),
}
"""{kind: (conversion, whether what it gives is right, what a right value is, for errors)}."""


def converted(kind: str, value: Any) -> Any:
    """Return a value of the config as one of this kind; raise for one that is not."""
    convert, is_right, _ = KINDS[kind]
    if not is_right(found := convert(value)):
        raise ValueError(value)
    return found


def same(value: Any, default: Any) -> bool:
    """Return whether DeepSpeed would read `value` as `default`."""
    convert = {bool: as_bool, int: as_number, float: as_number}.get(type(default), _as_is)
    try:
        return convert(value) == convert(default)
    except ValueError:
        return False
