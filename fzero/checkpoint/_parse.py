"""The manifest's text -> its fields, each checked: a name, a type and a range. Pure.

A checksum finds damage; it does not tell who wrote a file. So nothing in the manifest is used
before it was found to be what `save` can have written.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable
from typing import Any

FORMAT = 2
INDEX = ".metadata"  # the file in which torch.distributed.checkpoint says where each tensor is
DATA = re.compile(r"data-[0-9a-f]{16}")
_FILE = re.compile(r"[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*")  # no folder, not . and not ..
_INT64 = 2**63
_RANKS = 2**20  # for each of which room may be made
_COUNTS = ("step", "optimizer/step", "optimizer/count")  # of updates
_SCALE: dict[str, Callable[[Any], bool]] = {
    "scale/scale": lambda x: type(x) is float and 0 < x < 3.5e38,  # as fp32 holds it
    "scale/good_updates": lambda x: _is_int(x, 0, 2**31),
    "scale/hysteresis_left": lambda x: _is_int(x, 0, 2**31),
}


class WrongError(ValueError):
    """What of the text is not as `save` writes it, in words that follow "is damaged"."""


class OtherFormatError(ValueError):
    """The manifest of another version of fzero."""


def crc32(body: Any) -> int:
    """Return the checksum of the manifest's body, of its values and not of its spaces."""
    return zlib.crc32(json.dumps(body).encode())


def parsed(text: str) -> dict[str, Any]:
    """Return the checked fields of a manifest.

    Raises `WrongError`, naming the field, for what is not as it was written, and
    `OtherFormatError` for a manifest of another format.
    """
    try:
        outer = json.loads(text)
        _require(isinstance(outer, dict), "it holds no dict")
        _require({"crc32", "checkpoint"} <= outer.keys(), "it lacks its checksum or its body")
        body = outer["checkpoint"]
        whole = crc32(body) == outer["crc32"]
    except WrongError:
        raise
    except (ValueError, RecursionError) as error:
        raise WrongError(f"{type(error).__name__}: {error}") from None
    _require(whole, "its checksum is wrong")
    _require(isinstance(body, dict), "its body is no dict")
    if body.pop("format", None) != FORMAT:
        raise OtherFormatError
    for name in sorted({*body, *_CHECKS}):
        _require(name in body, f"it lacks {name!r}")
        _require(name in _CHECKS, f"nobody knows its {name!r}")
        _CHECKS[name](body[name])
    return body


def _require(holds: bool, seen: str) -> None:
    if not holds:
        raise WrongError(seen)


def _is_int(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value < high


def _strings(value: Any, name: str) -> dict[str, str]:
    good = isinstance(value, dict) and all(isinstance(x, str) for x in value.values())
    _require(good, f"{name} is no dict of strings, but {value!r:.80}")
    return value


def _each(check: Callable[[Any, str], Any], name: str) -> Callable[[Any], None]:
    """The check of a dict, each value of which passes `check`."""

    def run(value: Any) -> None:
        _require(isinstance(value, dict), f"{name!r} is no dict, but {value!r:.80}")
        for key, one in value.items():
            check(one, f"{name!r} of {key}")

    return run


def _origin(value: Any) -> None:
    _require(isinstance(value, dict), f"'origin' is no dict, but {value!r:.80}")
    for key, good in (
        ("stage", _is_int(value.get("stage"), 0, 4)),
        ("ranks", _is_int(value.get("ranks"), 1, _RANKS)),
        ("torch", isinstance(value.get("torch"), str)),
        ("optimizer", isinstance(value.get("optimizer"), str)),
    ):
        _require(good, f"the {key} of 'origin' is {value.get(key)!r:.80}")
    residual = _strings(value.get("residual", {}), "the residual of 'origin'")
    good = {"torch.float32", "torch.float64"}.issuperset(residual.values())
    _require(good, f"the residual of 'origin' is {residual!r:.80}")


def _counters(value: Any) -> None:
    _require(isinstance(value, dict), f"'counters' is no dict, but {value!r:.80}")
    _require(_is_int(value.get("step"), 0, _INT64), f"the step is {value.get('step')!r:.80}")
    for key, one in value.items():
        good = type(one) in (bool, float) or _is_int(one, -_INT64, _INT64)
        if key.startswith("scale/"):
            good = key in _SCALE and _SCALE[key](one)
        if key in _COUNTS:
            good = good and type(one) is not bool and math.isfinite(one) and one >= 0
        _require(good, f"the counter {key} is {one!r:.80}")


def _module(value: Any) -> None:
    good = isinstance(value, dict) and value.keys() == {"buffers", "options"}
    _require(good, f"'module' is {value!r:.80}")
    _each(_of_ranks, "buffers")(value["buffers"])
    groups = value["options"]
    good = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    _require(good, f"'options' is no list of dicts, but {groups!r:.80}")


def _of_ranks(value: Any, name: str) -> None:
    found = _strings(value, name)
    good = "0" in found and all(rank.isascii() and rank.isdigit() for rank in found)
    _require(good, f"{name} has the ranks {list(found)!r:.80}")


def _data(value: Any) -> None:
    good = isinstance(value, str) and DATA.fullmatch(value) is not None
    _require(good, f"the data folder {value!r:.200} is not one that save makes")


def _file(value: Any, name: str) -> None:
    good = isinstance(value, list) and len(value) == 2
    good = good and _is_int(value[0], 0, _INT64) and _is_int(value[1], 0, 2**32)
    _require(good, f"{name} is no size and checksum, but {value!r:.80}")


def _files(value: Any) -> None:
    _each(_file, "files")(value)
    wrong = [name for name in value if not _FILE.fullmatch(name)]
    _require(not wrong, f"the file {wrong[:1]} is not one that save makes")
    _require(INDEX in value, f"'files' lacks {INDEX}: nothing could be checked")


def _dict(name: str) -> Callable[[Any], None]:
    return _each(lambda value, name: None, name)


_CHECKS: dict[str, Callable[[Any], object]] = {
    "origin": _origin,
    "leaves": lambda value: _strings(value, "'leaves'"),
    "slots": _each(_strings, "slots"),
    "counters": _counters,
    "module": _module,
    "data": _data,
    "files": _files,
    "extra": _dict("extra"),
}
