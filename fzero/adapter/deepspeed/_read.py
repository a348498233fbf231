"""A DeepSpeed-style config, a dict or a JSON file, as {dotted key: value}: checked, no tensors.

Every key is used, or may only say what fzero does anyway, or is refused by name. None is ignored,
except in a section that is switched off.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import torch

from fzero.adapter.deepspeed._keys import ALIASES, OFF, ONLY, REFUSED, USED
from fzero.errors import LayoutError, explain

Config = Mapping[str, Any] | str | os.PathLike[str]

_DTYPES = {
    **{name: torch.float32 for name in ("fp32", "float32", "torch.float32", "float")},
    **{name: torch.float16 for name in ("fp16", "float16", "torch.float16", "half")},
    **{name: torch.bfloat16 for name in ("bf16", "bfloat16", "torch.bfloat16")},
}

_SECTIONS = {
    ".".join(parts[:depth])
    for parts in (path.split(".") for path in (*USED, *ONLY))
    for depth in range(1, len(parts))
}


def read_config(config: Config) -> dict[str, Any]:
    """Return what `config` gives, by dotted key; what is null is left out.

    Raises `LayoutError` that names the key: unknown (with what comes near), unsupported (with
    what to do instead), "auto", or of a wrong kind; for a file, when it cannot be read.

    Example:
        >>> read_config({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})
        {'zero_optimization.stage': 2, 'zero_optimization.reduce_bucket_size': 500000000}
    """
    found: dict[str, Any] = {}
    _walk(config if isinstance(config, Mapping) else _load(config), "", found)
    return found


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given`, and DeepSpeed's defaults for what it leaves out."""
    return {path: used.default for path, used in USED.items()} | dict(given)


def micro_batches(values: Mapping[str, Any], ranks: int) -> int | None:
    """Micro-batches of one update, None if the config does not say.

    Raises `LayoutError` unless train_batch_size = micro-batch size x that x ranks.

    Example:
        >>> micro_batches({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, 4)
        3
    """
    train = values.get("train_batch_size")
    micro = values.get("train_micro_batch_size_per_gpu")
    count = values.get("gradient_accumulation_steps")
    if train is None:
        return count
    whole = (micro or 1) * (count or 1) * ranks
    known = micro is not None and count is not None
    if (train != whole) if known else (train % whole != 0):
        seen = f"micro-batch size {micro or '?'} x accumulation {count or '?'} x {ranks} ranks"
        is_not = "is not" if known else "is no multiple of"
        _refuse(
            f"train_batch_size={train} {is_not} {seen} = {whole}.",
            cause="a config that was written for another number of ranks.",
            fix=f"make it {whole}, or leave train_batch_size out: it is only checked."
            if known
            else f"make it a multiple of {whole}, or leave it out.",
        )
    return train // whole if micro is not None and count is None else count


def _walk(section: Mapping[str, Any], prefix: str, found: dict[str, Any]) -> None:
    for key, value in section.items():
        path = f"{prefix}{key}"
        if "." in str(key):
            _refuse(
                f"config: the key {key!r} has a dot.",
                cause="a dotted path in the place of a section.",
                fix='write {"zero_optimization": {"stage": 2}}.',
            )
        if _is_off(path, value):
            continue
        if isinstance(value, str) and value == "auto":
            _refuse(
                f'config: {path} = "auto".',
                cause="a config for the Hugging Face Trainer, which puts numbers in its place.",
                fix="write the value, or leave the key out.",
            )
        if path in _SECTIONS and value is not None:
            if not isinstance(value, Mapping):
                _wrong(path, value, "an object { ... }")
            _walk(value, path + ".", found)
        elif path in USED:
            if value is not None:
                found[path] = _checked(path, value)
        elif path in ONLY:
            _check_only(path, value)
        elif path not in _SECTIONS:
            _refuse_key(path, value)


def _is_off(path: str, value: Any) -> bool:
    """Whether a section is switched off: what else it says is for when it is on."""
    if path not in OFF or not isinstance(value, Mapping):
        return False
    switch, off = OFF[path]
    given = value.get(switch)
    return given == off and type(given) is type(off)


def _checked(path: str, value: Any) -> Any:
    good, wanted, convert = KINDS[USED[path].kind]
    if not good(value):
        _wrong(path, value, wanted)
    return convert(value)


def _check_only(path: str, value: Any) -> None:
    only, fix = ONLY[path]
    same = value == only and isinstance(value, bool) == isinstance(only, bool)
    if value is not None and not same:
        _refuse(
            f"config: {path} = {value!r} is not supported.",
            cause=f"a config for DeepSpeed; here only {only!r} is true of {path}.",
            fix=f"{fix}.",
        )


def _refuse_key(path: str, value: Any) -> None:
    parts = path.split(".")
    for depth in range(len(parts), 0, -1):
        fix = REFUSED.get(".".join(parts[:depth]))
        if fix is not None:
            if value is None and depth == len(parts):
                return
            _refuse(
                f"config: {path} is not supported.",
                cause="a config for DeepSpeed; fzero ignores no key in silence.",
                fix=f"{fix}.",
            )
    near = _near(path)
    _refuse(
        f"config: unknown key {path!r} (near: {', '.join(near) or 'nothing'}).",
        cause="a misspelt key, one in another section, or one of another library.",
        fix=f"use one of {sorted(USED)}.",
    )


def _near(path: str) -> list[str]:
    """Known keys with a similar name, in whatever section; those of the same section first."""
    section, _, last = path.rpartition(".")
    if last in ALIASES:
        return [ALIASES[last]]
    known = [*USED, *ONLY, *_SECTIONS]
    named: dict[str, list[str]] = {}
    for key in sorted(known, key=lambda key: (key.rpartition(".")[0] != section, key)):
        named.setdefault(key.rpartition(".")[2], []).append(key)
    close = get_close_matches(last, named, n=3, cutoff=0.6)
    return [key for name in close for key in named[name]][:3]


def _load(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    if not isinstance(path, str | os.PathLike):
        _refuse(
            f"config is a {type(path).__name__}.",
            cause="initialize() without config, or with an object of DeepSpeed.",
            fix="pass a dict, or the path of a JSON file; without either there is "
            "fzero.adapter.Engine(model, optimizer, stage=...).",
        )
    try:
        loaded = json.loads(Path(path).read_text(), object_pairs_hook=_without_duplicates)
    except OSError as error:
        _refuse(
            f"config file {str(path)!r}: {error.strerror or error}.",
            cause="a path relative to another folder.",
            fix=f"give a path from here ({Path.cwd()}), or an absolute one.",
        )
    except ValueError as error:  # json's error is one, and so is that of wrong bytes
        if isinstance(error, LayoutError):
            raise
        _refuse(
            f"config file {str(path)!r} is not JSON: {error}.",
            cause="a comment, a trailing comma, or another format.",
            fix="write plain JSON, or pass a dict.",
        )
    if not isinstance(loaded, Mapping):
        _wrong(f"file {str(path)!r}", loaded, "an object { ... }")
    return loaded


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        _refuse(
            f"config: {', '.join(twice)} is there twice.",
            cause="a key that was copied, and is read as its last value.",
            fix="keep one of them.",
        )
    return dict(pairs)


def _wrong(path: str, value: Any, wanted: str) -> NoReturn:
    _refuse(
        f"config: {path} = {value!r}.",
        cause="a value of another kind or out of range.",
        fix=f"give {wanted}.",
    )


def _refuse(seen: str, *, cause: str, fix: str) -> NoReturn:
    raise config_error(seen, cause=cause, fix=fix) from None


def config_error(seen: str, *, cause: str, fix: str) -> LayoutError:
    """The error of a config that cannot be followed."""
    return LayoutError(explain(seen, cause=cause, fix=fix))


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value)  # 5e8 is a float in JSON


def _are_names(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, Iterable) and all(isinstance(x, str) for x in names)


def _listed(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


Kind = tuple[Callable[[Any], bool], str, Callable[[Any], Any]]

KINDS: dict[str, Kind] = {
    "bool": (lambda x: isinstance(x, bool), "true or false", bool),
    "count": (lambda x: _is_whole(x) and x >= 1, "a whole number of 1 or more", int),
    "some": (lambda x: _is_whole(x) and x >= 1, "a number of elements, 1 or more", int),
    "whole": (_is_whole, "a whole number of 0 or more", int),
    "numel": (_is_whole, "a number of elements, 0 or more", int),
    "number": (_is_number, "a number of 0 or more; 0 is off", float),
    "stage": (lambda x: _is_whole(x) and x <= 3, "0, 1, 2 or 3", int),
    "dtype": (
        lambda x: isinstance(x, str) and x.lower() in _DTYPES,
        "fp32, fp16 or bf16",
        lambda x: _DTYPES[x.lower()],
    ),
    "text": (lambda x: isinstance(x, str), "a name", str),
    "mapping": (lambda x: isinstance(x, Mapping), "an object { ... }", dict),
    "names": (_are_names, "a list of names", _listed),
}
"""What a value must be, how to say so, and what is made of it."""
