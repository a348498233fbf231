"""Options of saved param groups against those of an optimizer here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fzero.checkpoint._driven import plain_options, require_options
from fzero.checkpoint._everywhere import CheckpointError, damaged
from fzero.state.setup import ParamGroups

_HOW = ("foreach", "fused", "capturable", "differentiable")  # how it computes, not what
_SHOWN = 4


def options_for(file: Path, found: Mapping[str, Any], here: ParamGroups) -> list[dict[str, Any]]:
    """Return the options to set in the instance, group by group; [] for a rule, which has none.

    Raises `CheckpointError` for other param groups, and for options of another rule.
    """
    if here.instance is None:
        return []
    saved = _groups(file, found)
    if len(saved) != len(here.options):
        raise damaged(
            file, f"has {len(saved)} param groups, the optimizer here has {len(here.options)}"
        )
    made = [_known(theirs, ours) for theirs, ours in zip(saved, here.options, strict=True)]
    require_options(here.instance, made)
    for number, (theirs, ours) in enumerate(zip(made, here.options, strict=True)):
        for name, value in theirs.items():
            if _kind(name, value) != _kind(name, ours[name]):
                raise CheckpointError(
                    f"load_universal: param group {number} has {name}={value!r} in {file}, "
                    f"{name}={ours[name]!r} here.",
                    cause="an optimizer that keeps other numbers, or steps another way.",
                    fix=f"make the optimizer with {name}={value!r}. Nothing was changed.",
                )
    return made


def differing(file: Path, found: Mapping[str, Any], here: ParamGroups) -> list[str]:
    """Say which options of a rule, which are fixed by code, are others in the checkpoint."""
    if here.instance is not None or not any(here.options):
        return []
    saved = _groups(file, found)
    if len(saved) != len(here.options):
        return [f"{len(saved)} param groups, {len(here.options)} here"]
    lines = list(_differences(saved, here.options))
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _groups(file: Path, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = found.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(one, dict) for one in groups):
        raise damaged(file, f"has no list of param_groups, but {groups!r:.80}")
    return groups


def _known(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    plain = plain_options(theirs)
    return {name: x for name, x in plain.items() if name in ours and name not in _HOW}


def _differences(
    saved: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    for number, (theirs, ours) in enumerate(zip(saved, here, strict=True)):
        for name, value in _known(theirs, ours).items():
            own = ours[name]
            both = _several(value) and _several(own)
            if not (tuple(value) == tuple(own) if both else value == own):
                yield f"{name}={value!r} in param group {number}, {own!r} here"


def _several(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _kind(name: str, value: Any) -> Any:
    """What may not change: switches, how many numbers, and, as more is kept then, momentum."""
    if isinstance(value, bool):
        return value
    if _several(value):
        return len(value)
    if name == "momentum":
        return bool(value.item() if isinstance(value, Tensor) else value)
    return None
