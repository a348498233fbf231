"""Read a DeepSpeed-style config, a dict or JSON, to {dotted key: value}, and check it.

Problems are collected, so that one error lists all that is wrong in a config.
"""

from __future__ import annotations

import base64
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

from fzero.errors import LayoutError
from fzero.integrations.deepspeed._keys import Key, KeyUse
from fzero.integrations.deepspeed._kinds import KINDS, as_bool, same
from fzero.integrations.deepspeed._zero_keys import KEYS, NEAR, RENAMED, SWITCHES

Config = Mapping[str, Any] | str | os.PathLike[str]
Problem = str
"""A line of the error: a key, and what to do instead."""

_SECTIONS = {
    ".".join(parts[:depth])
    for parts in (path.split(".") for path, key in KEYS.items() if key.use is not KeyUse.SECTION)
    for depth in range(1, len(parts))
}


@dataclass(slots=True, kw_only=True)
class Reading:
    """A config while it is read.

    given: {key: value} of the keys that fzero uses.
    autos: keys whose value is still "auto".
    instead: the user's {key: value} for keys with "auto".
    harmless: {key: value} of those that have no effect.
    """

    given: dict[str, Any] = field(default_factory=dict)
    autos: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    instead: dict[str, Any] = field(default_factory=dict)
    harmless: dict[str, Any] = field(default_factory=dict)


def read_config(config: Config, auto: Mapping[str, Any] | None = None) -> Reading:
    """Return the values of `config` by dotted key, without those that are null.

    auto: {dotted key: value} for keys that say "auto".

    Raises `LayoutError` if there is nothing to read.

    Example:
        >>> found = read_config({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})
        >>> found.given, found.problems
        ({'zero_optimization.stage': 2, 'zero_optimization.reduce_bucket_size': 500000000}, [])
        >>> read_config({"steps_per_prnt": 1}).problems
        ['steps_per_prnt = 1: unknown (near: steps_per_print).']
    """
    reading = Reading(instead=dict(auto or {}))
    _walk(config if isinstance(config, Mapping) else _load(config), "", reading)
    left = reading.instead
    reading.problems += [f'auto: the config has no {path} that is "auto".' for path in left]
    return reading


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given`, completed with DeepSpeed's defaults."""
    used = (key for key in KEYS.values() if key.use in (KeyUse.OPTION, KeyUse.READ))
    return {key.path: key.default for key in used} | dict(given)


def options_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `Engine` that one key each sets."""
    keys = [key for key in KEYS.values() if key.use is KeyUse.OPTION]
    return {key.says: values[key.path] for key in keys if values[key.path] is not None}


def require_none(problems: Sequence[Problem], errors: Sequence[LayoutError] = ()) -> None:
    """Raise one `LayoutError` that lists all problems and errors, if there are any."""
    if len(errors) == 1 and not problems:
        raise errors[0]
    if problems or errors:
        lines = "\n".join(f"  {one}" for one in [*problems, *map(_as_line, errors)])
        raise LayoutError(
            f"config: fzero cannot do what these keys say:\n{lines}",
            cause="a config for DeepSpeed, or for the Hugging Face Trainer; no key is ignored.",
            fix="change each as said beside it; docs/deepspeed_config.md has every key.",
        )


def _as_line(error: LayoutError) -> Problem:
    seen, *_, fix = str(error).splitlines()
    return f"{seen.removeprefix('config: ').removesuffix('.')}: {fix.removeprefix('Fix: ')}"


def _walk(section: Mapping[str, Any], at: str, reading: Reading) -> None:
    for name, value in section.items():
        written = f"{at}{name}"
        value = value.value if isinstance(value, Enum) else value  # of DeepSpeed: a word or number
        if "." in str(name):
            reading.problems.append(f"{written}: a name with a dot; write sections in sections.")
            continue
        path, value = _renamed(written, value)
        if path == "zero_optimization" and isinstance(value, bool):  # of old configs
            path, value = f"{path}.stage", int(value)
        if value == "auto":
            value = reading.instead.pop(path, value)
        said, key = written if written == path else f"{written} ({path})", KEYS.get(path)
        if value is None and (key or path in _SECTIONS):
            continue
        if path in _SECTIONS and isinstance(value, Mapping):
            if not _is_off(path, value):
                _walk(value, f"{path}.", reading)
        elif path in _SECTIONS:
            reading.problems.append(f"{said} = {value!r}: give an object {{ ... }}.")
        elif key is None:
            known = ", ".join(near(path)) or "nothing"
            reading.problems.append(f"{said} = {value!r:.60}: unknown (near: {known}).")
        elif value == "auto" and key.use is not KeyUse.HARMLESS and value != key.default:
            reading.autos.append(path)
        elif path in reading.given:
            reading.problems.append(f"{said} = {value!r}: it is there twice, by two names.")
        else:
            _take(key, said, value, reading)


def _take(key: Key, said: str, value: Any, reading: Reading) -> None:
    """Convert and store the value of one key, or note a problem."""
    if key.use in (KeyUse.OPTION, KeyUse.READ):
        convert, wanted = KINDS[key.kind]
        try:
            converted = convert(value)
        except (ValueError, TypeError, OverflowError):
            reading.problems.append(f"{said} = {value!r}: give {wanted}.")
            return
        opens = key.kind == "mapping"
        reading.given[key.path] = _open(key.path, converted, reading) if opens else converted
    elif key.use is KeyUse.HARMLESS:
        reading.harmless[key.path] = value
    elif key.use is KeyUse.REFUSED and not same(value, key.default):
        reading.problems.append(f"{said} = {value!r}: {key.says}.")
    elif key.use is KeyUse.SECTION and not _is_empty(key, value):
        switch = key.default[0]
        on = switch is not None and isinstance(value, Mapping)
        seen = f"{said}.{switch} = {value[switch]!r}" if on else f"{said} = {value!r:.60}"
        reading.problems.append(f"{seen}: {key.says}.")


def _open(path: str, params: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """Return `params` without those that are null, or "auto", which are noted."""
    params_given = {}
    for name, value in params.items():
        at = f"{path}.{name}"
        if value == "auto":
            value = reading.instead.pop(at, value)
        if value == "auto":
            reading.autos.append(at)
        elif value is not None:
            params_given[str(name)] = value
    return params_given


def _renamed(path: str, value: Any) -> tuple[str, Any]:
    """Return the current key for an older or another name, and the value converted to it."""
    new = RENAMED.get(path)
    if new is None:
        return path, value
    with suppress(ValueError):
        value = value if new.values is None or value is None else new.values[as_bool(value)]
    return new.path, value


def _is_off(path: str, value: Mapping[str, Any]) -> bool:
    """Return whether a section is switched off, so that its other keys are not read."""
    if path not in SWITCHES:
        return False
    switch, off = SWITCHES[path]
    given = value.get(switch, off if isinstance(off, str) else None)
    return given is not None and same(given, off)


def _is_empty(key: Key, value: Any) -> bool:
    """Return whether a refused section is empty or switched off."""
    switch, off = key.default
    if not isinstance(value, Mapping):
        return False
    return not value if switch is None else same(value.get(switch, off), off)


def near(path: str) -> list[str]:
    """Return known keys with a similar name, of any section; those of the same section first."""
    section, _, last = path.rpartition(".")
    if last in NEAR:
        return [NEAR[last]]
    known = sorted([*KEYS, *_SECTIONS], key=lambda key: (key.rpartition(".")[0] != section, key))
    names = [key.rpartition(".")[2] for key in known]
    close = get_close_matches(last, dict.fromkeys(names), n=3)
    return [key for name in close for key, own in zip(known, names, strict=True) if own == name][:3]


def close_to(word: str, known: Iterable[str]) -> str:
    """Return known words that are close to a misspelt one, as text; "nothing" without any."""
    return NEAR.get(word) or ", ".join(get_close_matches(word, known, n=3)) or "nothing"


def without_type(section: str, values: Mapping[str, Any]) -> list[Problem]:
    """Return the problem of a section (optimizer, scheduler) with params but no type."""
    params = f"{section}.params"
    wrong = f"{params} without {section}.type: name the {section}."
    return [] if values[params] is None else [wrong]


def without_switch(given: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each key of a section without its switch, such as "enabled"."""
    switches = {section: f"{section}.{switch}" for section, (switch, _) in SWITCHES.items()}
    return [
        f"{path} without {switches[section]}: set it to true, or leave {section} out."
        for path in given
        if (section := path.rpartition(".")[0]) in switches and switches[section] not in given
    ]


def unknown_params(
    section: str, params: Mapping[str, Any], factory: Callable[..., Any], name: str
) -> list[Problem]:
    """Return a problem for each of the params that `factory`, called `name`, does not take."""
    known = [x for x in inspect.signature(factory).parameters if x not in ("params", "optimizer")]
    return [
        f"{section}.params.{key} = {value!r}: {name} does not have it "
        f"(near: {close_to(key, known)})."
        for key, value in params.items()
        if key not in known
    ]


def _load(given: Any) -> Mapping[str, Any]:
    """Return the JSON object in a file, or in a base64 text; raise `LayoutError` for others."""
    if not isinstance(given, str | os.PathLike):
        raise LayoutError(
            f"config is a {type(given).__name__}.",
            cause="initialize() without config, or with an object of DeepSpeed.",
            fix="pass a dict, or the path of a JSON file; without either there is "
            "fzero.adapter.Engine(model, optimizer, stage=...).",
        )
    try:
        loaded = json.loads(
            _decoded(given) or Path(given).read_text(), object_pairs_hook=_without_duplicates
        )
        if not isinstance(loaded, Mapping):
            raise ValueError(f"it has {loaded!r:.60}")
    except OSError as error:
        raise LayoutError(
            f"config file {str(given)!r:.200}: {error.strerror or error}.",
            cause="a path relative to another folder.",
            fix=f"give a path from here ({Path.cwd()}), or an absolute one.",
        ) from None
    except ValueError as error:  # of json, and of bytes that are not UTF-8
        raise LayoutError(
            f"config file {str(given)!r:.200} is no JSON object: {error}.",
            cause="a comment, a trailing comma, or another file.",
            fix="write plain JSON, { ... }, or pass a dict.",
        ) from None
    return loaded


def _decoded(given: Any) -> str | None:
    """Return the JSON text in a base64 string, as launchers pass it; None for other strings."""
    with suppress(TypeError, ValueError):
        text = base64.urlsafe_b64decode(given).decode()
        if text.lstrip().startswith("{"):
            return text
    return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} is there twice")
    return dict(pairs)
