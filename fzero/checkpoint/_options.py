"""Options of saved param groups against those of an optimizer here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fzero.checkpoint.driven import options_by_name, plain_options, require_options
from fzero.checkpoint.everywhere import CheckpointError, damaged
from fzero.state import TrainState
from fzero.state.setup import ParamGroups

_HOW = ("foreach", "fused", "capturable", "differentiable")  # how it computes, not what


def options_for(
    file: Path,
    found: Mapping[str, Any],
    here: ParamGroups,
    state: TrainState,
    tied: Mapping[str, str],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the options to set in the instance, group by group; and which differ of a rule.

    A rule of fzero.optim has its options from code: they are not set. tied: {another name of a
    parameter there: its name}.

    Raises `CheckpointError` for an instance with other param groups, or with options of another
    rule.
    """
    if not any(here.options):  # a pair of functions shows none
        return [], []
    saved = found.get("param_groups")
    if not isinstance(saved, list) or not all(isinstance(one, dict) for one in saved):
        raise damaged(file, f"has no list of param_groups, but {saved!r:.80}")
    theirs = [one.get("param_names") for one in saved]
    if all(isinstance(names, list) for names in theirs):
        plain = [{k: x for k, x in one.items() if not k.startswith("param")} for one in saved]
        theirs = [[*some, *(x for x, name in tied.items() if name in some)] for some in theirs]
        saved = options_by_name(plain, theirs, state)
    if len(saved) != len(here.options):
        if here.instance is None:
            return [], [f"{len(saved)} param groups, {len(here.options)} here"]
        raise damaged(
            file, f"has {len(saved)} param groups, the optimizer here has {len(here.options)}"
        )
    made = [_known(theirs, ours) for theirs, ours in zip(saved, here.options, strict=True)]
    pairs = [
        (number, name, value, here.options[number][name])
        for number, group in enumerate(made)
        for name, value in group.items()
    ]
    if here.instance is None:
        return [], [
            f"{name}={value!r} in param group {number}, {own!r} here"
            for number, name, value, own in pairs
            if _comparable(value) != _comparable(own)
        ]
    require_options(here.instance, made)
    for number, name, value, own in pairs:
        if _kind(name, value) != _kind(name, own):
            raise CheckpointError(
                f"load_universal: param group {number} has {name}={value!r} in {file}, "
                f"{name}={own!r} here.",
                cause="an optimizer that keeps other numbers, or steps another way.",
                fix=f"make the optimizer with {name}={value!r}. Nothing was changed.",
            )
    return made, []


def _known(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    plain = plain_options(theirs)
    return {name: x for name, x in plain.items() if name in ours and name not in _HOW}


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _kind(name: str, value: Any) -> Any:
    """Return what of an option may not change: its type, its length, whether it is zero."""
    if isinstance(value, bool):
        return value
    if isinstance(value, tuple | list):
        return len(value)
    if name == "momentum":
        return bool(value.item() if isinstance(value, Tensor) else value)
    return None
