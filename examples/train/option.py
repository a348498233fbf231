"""Options of the command line: a field of a record says all that there is to say of its option."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any


def option(default: Any, text: str, **how: Any) -> Any:
    """Return a field that is an option, too.

    Args:
        default: of the field.
        text: for `--help`; "{}" in it is the default.
        how: what argparse is told: `COUNT` or another kind of value, `choices`, an `action`.
    """
    how["help"] = text.format(default)
    return dataclasses.field(default=default, metadata=how)


def add_fields(group: argparse._ArgumentGroup, *records: Any) -> None:
    """Give `group` the options that are fields of these records, in their order."""
    for each in (each for record in records for each in dataclasses.fields(record)):
        if each.metadata:
            negative = "no-" if each.metadata.get("action") == "store_false" else ""
            name = f"--{negative}{each.name.replace('_', '-')}"
            group.add_argument(name, dest=each.name, **each.metadata)


def _number(kind: type, is_good: Callable[[Any], bool], wanted: str) -> dict[str, Any]:
    def value_of(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not is_good(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return {"type": value_of, "metavar": "N" if kind is int else "X"}


COUNT = _number(int, lambda n: n >= 1, "a whole number of at least 1")
WHOLE = _number(int, lambda n: n >= 0, "a whole number of at least 0")
POSITIVE = _number(float, lambda x: 0 < x < float("inf"), "a positive number")
SIZE = _number(float, lambda x: 0 <= x < float("inf"), "a number of at least 0")
FOLDER = {"type": Path, "metavar": "DIR"}
ABSOLUTE = {"type": lambda text: str(Path(text).resolve()), "metavar": "DIR"}
