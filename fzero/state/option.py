"""`option`: a field of a record that users set, with all that is known of it.

In: a default, and the facts of an option. Out: a field of a frozen dataclass. The table of
options, signatures, docstrings, docs/support.md and the DeepSpeed reader are made from such fields:
see `fzero.options`. A field without `option` is what a record works out for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

import torch

from fzero.errors.check import is_count, require


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED: Any = _Required()
"""The default of an option that has none."""

ZERO = "zero_optimization."
"""The section of DeepSpeed's config that most keys are in."""


@dataclasses.dataclass(frozen=True, slots=True)
class ValueCheck:
    """Which values an option accepts: a predicate, its description, the usual cause of others."""

    good: Callable[[Any], bool]
    wanted: str
    cause: str = "a value of another kind or out of range."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """What is known of one option, but for its name, type and default: those are its field's.

    Attributes:
        check: of its value alone; None: whoever uses it first checks it.
        stages: those at which it changes anything.
        instead: {driver: what to do there}, of the drivers that do not take it, with the reason.
        deepspeed: the key of DeepSpeed's config that sets it; "" for none.
        axis: the axis of `fzero.certify` that tries its values; "" where cells have the default.
    """

    name: str = ""
    default: Any = REQUIRED
    type: Any = None
    help: str
    check: ValueCheck | None = None
    stages: tuple[int, ...] = (0, 1, 2, 3)
    instead: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    deepspeed: str = ""
    axis: str = ""

    @property
    def only(self) -> str:
        """The prefix of its help that names its stages, as "stages 1 to 3: "; "" for all four."""
        if len(self.stages) == 4:
            return ""
        first, last = self.stages[0], self.stages[-1]
        return f"stage {last} only: " if first == last else f"stages {first} to {last}: "

    def require(self, value: Any, of: str = "") -> None:
        """Raise `LayoutError`, naming the option, for a value that it may not have."""
        check = self.check
        if check is not None:
            require(of + self.name, value, check.good, check.wanted, cause=check.cause)


def option(default: Any, help: str, **facts: Any) -> Any:
    """Return a field of a frozen dataclass that users set, by its name, as a keyword.

    Args:
        default: its value where nothing is given; `REQUIRED` for an option that must be given.
        help: what it does: whole sentences, which docstrings show.
        **facts: the other attributes of `Option`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Coffee:
        ...     cups: int = option(1, "how many.", check=ValueCheck(is_count, "a number"))
        ...     hot: bool = True  # not an option
        >>> [(one.name, one.type, one.default, one.help) for one in options_in(Coffee)]
        [('cups', <class 'int'>, 1, 'how many.')]
        >>> Coffee().cups
        1
    """
    entry = {"option": Option(help=help, **facts)}
    if default is REQUIRED:
        return dataclasses.field(metadata=entry)
    return dataclasses.field(default=default, metadata=entry)


def options_in(record: type) -> Iterator[Option]:
    """Yield the options among the fields of a record, and of records in its fields, in order."""
    types = get_type_hints(record)
    for field in dataclasses.fields(record):
        entry, kind = field.metadata.get("option"), types[field.name]
        if entry is not None:
            default = REQUIRED if field.default is dataclasses.MISSING else field.default
            yield dataclasses.replace(entry, name=field.name, type=kind, default=default)
        elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from options_in(kind)


def one_of(*values: Any, wanted: str = "") -> ValueCheck:
    """Return a check that accepts these values only, compared with their type: 1 is not True."""
    good: set[tuple[type, Any]] = {(type(value), value) for value in values}

    def is_one(x: Any) -> bool:
        return isinstance(x, bool | str | torch.dtype | None) and (type(x), x) in good

    return ValueCheck(is_one, wanted or " or ".join(map(repr, values)))


def of_path(name: str) -> ValueCheck:
    """Return the check for a function of a path, or None."""
    wanted = f"a function of a leaf's path: {name}=lambda path: ..."
    return ValueCheck(lambda x: x is None or callable(x), wanted, "a list of paths, or a prefix.")


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLAG = ValueCheck(
    lambda x: isinstance(x, bool), "True or False", "a word from a config file or a command line."
)
DTYPE = one_of(None, *_DTYPES, wanted=f"None or one of {_DTYPES}")
NUMEL = ValueCheck(lambda x: is_count(x, 0), "a number of elements: an int of 0 or more")
