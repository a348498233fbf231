"""What a state carries beside tensors of parameters: small records of numbers, by their names.

Any field of a `TrainState` that is not named in `OTHERS` is such a part, a loss scale for example;
a part that is None is not there. Its numbers are saved as counters `<field>/<name>`. A record that
holds tensors has its numbers in them: what else is in it are options, which are not saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint._everywhere import CheckpointError
from fzero.errors import LayoutError, explain
from fzero.state import TrainState

Number = int | float | bool

OTHERS = ("params", "gradients", "optimizer", "window", "step", "progress", "schedule", "setup")
"""Saved in another way; or empty between two updates; or planned anew for other ranks."""


def numbers_of(state: TrainState) -> dict[str, Number]:
    """Return the numbers of the state's parts: {"scale/value": 65536.0}."""
    found = (_numbers(part, name) for name, part in _parts(state).items())
    return {name: _value(name, x) for some in found for name, x in some.items()}


def with_numbers(state: TrainState, saved: Mapping[str, Number]) -> dict[str, Any]:
    """Return the parts of `state` with the numbers of `saved`, by field.

    A part that only one of the two has stays as it is.

    Raises `LayoutError` for a part with other numbers, `CheckpointError` for one that does not fit.
    """
    made = {}
    for field, part in _parts(state).items():
        here = _numbers(part, field)
        there = {name for name in saved if name.startswith(f"{field}/")}
        if not there or not here:
            continue
        if there != here.keys():
            raise LayoutError(
                explain(
                    f"load: the {field} has the numbers {sorted(there)} in the checkpoint, "
                    f"{sorted(here)} in the state.",
                    cause=f"another kind of {field}.",
                    fix=f"make the state with the {field} that was saved. Nothing was changed.",
                )
            )
        values = {name: placed(name, x, saved[name]) for name, x in here.items()}
        made[field] = _rebuilt(part, field, values)
    return made


def placed(name: str, like: Tensor | Number, value: Number) -> Any:
    """Return `value` as a number of the form of `like`, a 1-element tensor or a number.

    Raises `CheckpointError` if it is none.
    """
    if isinstance(like, Tensor):
        kind: Any = like.dtype
        is_float, is_bool = like.is_floating_point(), like.dtype is torch.bool
    else:
        kind = type(like)
        is_float, is_bool = kind is float, kind is bool
    try:
        if (type(value) is bool) is is_bool and (is_float or type(value) is not float):
            made = float(value) if is_float else value
            return like.new_full(like.shape, made) if isinstance(like, Tensor) else made
    except (RuntimeError, OverflowError):  # a number that the dtype does not hold
        pass
    raise CheckpointError(
        explain(
            f"load: {name} is {value!r:.80} in the checkpoint, which is no {kind}.",
            cause="a manifest that another program wrote, or another kind of state.",
            fix="use another copy of the checkpoint. Nothing was changed.",
        )
    )


def _parts(state: TrainState) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(state)]
    return {name: getattr(state, name) for name in names if name not in OTHERS}


def _numbers(part: Any, name: str) -> dict[str, Tensor | Number]:
    found = dict(_walk(part, name))
    tensors: dict[str, Tensor | Number] = {
        key: x for key, x in found.items() if isinstance(x, Tensor)
    }
    return tensors or found


def _walk(part: Any, name: str) -> Iterator[tuple[str, Tensor | Number]]:
    if isinstance(part, Tensor | int | float):
        yield name, part
    for key, child in _children(part):
        yield from _walk(child, f"{name}/{key}")


def _rebuilt(part: Any, name: str, values: Mapping[str, Any]) -> Any:
    if name in values:
        return values[name]
    made = {key: _rebuilt(child, f"{name}/{key}", values) for key, child in _children(part)}
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return dataclasses.replace(part, **made)
    if isinstance(part, dict):
        return made
    if isinstance(part, list | tuple) and type(part) in (list, tuple):
        return type(part)(made.values())
    return part


def _children(part: Any) -> Iterator[tuple[Any, Any]]:
    if dataclasses.is_dataclass(part):
        yield from ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))
    elif isinstance(part, dict):
        yield from part.items()
    elif type(part) in (list, tuple):
        yield from enumerate(part)


def _value(name: str, x: Tensor | Number) -> Number:
    if not isinstance(x, Tensor):
        return x
    if x.numel() == 1 and not x.is_complex():
        return x.item()
    raise LayoutError(
        explain(
            f"save: the state has a tensor of shape {tuple(x.shape)} at {name}.",
            cause="a part of the state that is more than numbers.",
            fix="keep it beside the state, and give it to save(..., extra=...).",
        )
    )
