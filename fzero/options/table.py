"""Make the table of options, and of it a driver's signature, docstring and errors."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ParamSpec, TypeVar

from fzero.errors import CallError
from fzero.errors.check import called_as, unknown_option
from fzero.options.records import RECORDS
from fzero.state.points import Option, options_in

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

OPTIONS: Mapping[str, Option] = {one.name: one for kind in RECORDS for one in options_in(kind)}
"""Every option, by name, as the field of its record declares it."""

_CODEC = (
    "fzero.compress(step, {0}) for a step, compress=fzero.Compress({0}) for Engine, init and plan"
)
REPLACED: Mapping[str, str] = {
    "communication_dtype": _CODEC.format("gradients=fzero.codecs.cast(dtype)"),
    "quantized_gradients": _CODEC.format("gradients=fzero.codecs.int8()"),
    "quantized_weights": _CODEC.format("parameters=fzero.codecs.int8()"),
    "whole_parameters": "leave it out: where a rule needs whole parameters, each is updated by the "
    "rank that owns it, and flats stay even; from_torch(..., needs=) says what a rule needs",
}
"""{option of an earlier version: what to do now}."""

MARK = re.compile(r"^( *)\{options\}\n", re.MULTILINE)
"""The line of a docstring in whose place its options are described."""


def taken_by(driver: str) -> list[Option]:
    """Return the options that a driver takes, in the order of the table.

    Example:
        >>> engine = taken_by("Engine")
        >>> [option.name for option in taken_by("init") if option not in engine]
        ['trainable']
    """
    return [option for option in OPTIONS.values() if driver not in option.instead]


def check_values(*records: Any) -> None:
    """Raise `LayoutError`, naming the option, for a field with a value that it may not have.

    Fields that are no options are ignored; fields that are records are checked, too.
    """
    for record in records:
        for field in fields(record):
            value = getattr(record, field.name)
            if field.name in OPTIONS:
                OPTIONS[field.name].require(value)
            elif is_dataclass(value):
                check_values(value)


def renamed(function: str, given: Mapping[str, Any], older: Mapping[str, str]) -> dict[str, Any]:
    """Return keywords with older spellings replaced; raise `CallError` if both are there."""
    current = dict(given)
    for old, name in older.items():
        if old in current and name in current:
            raise CallError(
                f"{function} got {name}= and {old}=.",
                cause="two spellings of one option.",
                fix=f"give {name}= alone; {old}= is the older spelling.",
            )
        if old in current:
            current[name] = current.pop(old)
    return current


def takes(
    driver: str,
    usage: str,
    *,
    older: Mapping[str, str] | None = None,
    also: Iterable[str] = (),
    of_module: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function the options of the table that `driver` takes.

    Its signature lists them in the place of **options, and its docstring in that of "{options}".
    An option that it does not take is an error that names the nearest, or what serves instead.

    older: {older spelling: name}, which are accepted without a warning. also: other keywords that
    it takes. of_module: as in `called_as`.
    """

    def wrap(fn: Callable[P, R]) -> Callable[P, R]:
        signature = _expanded(inspect.signature(fn), driver)
        known = {*signature.parameters, *also} - {"axes", "self"}

        def prepare(given: dict[str, Any]) -> dict[str, Any]:
            given = renamed(driver, given, older or {})
            if not known.issuperset(given):
                raise _not_taken(driver, min(set(given) - known), {*known, *(older or {})}, usage)
            return given

        wrapped: Any = called_as(usage, driver, of_module=of_module, prepare=prepare)(fn)
        wrapped.__signature__ = signature
        wrapped.__doc__ = with_options_described(fn.__doc__, signature.parameters)
        return wrapped

    return wrap


def documents(cls: C) -> C:
    """Describe in a class's docstring the options that its `__init__` takes."""
    cls.__doc__ = with_options_described(cls.__doc__, inspect.signature(cls).parameters)
    return cls


def with_options_described(doc: str | None, names: Iterable[str]) -> str | None:
    """Return a docstring that describes the options of these names where its mark stands."""
    found = doc and MARK.search(doc)
    if not doc or not found:
        return doc
    lines: list[str] = []
    for one in (OPTIONS[name] for name in names if name in OPTIONS):
        first, rest = found[1], found[1] + "    "
        text = f"{one.name}: {one.only}{one.help}"
        lines.append(textwrap.fill(text, 100, initial_indent=first, subsequent_indent=rest) + "\n")
    return doc[: found.start()] + "".join(lines) + doc[found.end() :]


def _expanded(signature: inspect.Signature, driver: str) -> inspect.Signature:
    """The signature with every option of the driver, in the order of the table, for **options."""
    own = dict(signature.parameters)
    if own.pop("options", None) is None:
        return signature
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(one.name, kind, default=one.default, annotation=one.type)
        for one in taken_by(driver)
        if one.name not in own
    ]
    place = {name: number for number, name in enumerate(OPTIONS)}
    every = sorted(
        more + [one for one in own.values() if one.kind is kind],
        key=lambda one: place.get(one.name, -1),
    )
    first = [one for one in own.values() if one.kind is not kind]
    return signature.replace(parameters=[*first, *every])


def _not_taken(driver: str, option: str, known: Iterable[str], usage: str) -> CallError:
    """The error for an option: of another driver, of no driver, or of an axis of `certify`."""
    entry = OPTIONS.get(option)
    fix = REPLACED.get(option, "") if entry is None else entry.instead.get(driver, "")
    if driver == "certify" and entry is not None:
        fix = f"write {entry.axis}=, the values of it that are tried" if entry.axis else ""
    if not fix:
        return unknown_option(driver, option, known, usage)
    return CallError(
        f"{driver} got an unexpected keyword argument {option!r}.",
        cause="an option of another function." if entry else "an option of an earlier version.",
        fix=f"{fix}.",
    )
