"""Options of the optimizer that are another number on some ranks, worlds or steps."""

# ruff: noqa: E501
# A table has a program a line.

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import fzero
from fzero.optim import adamw, sgd
from fzero.optim.schedules import warmup_cosine
from tests.descends import descends
from tests.tools.prove.adversary.programs import Program, usual_loss

KIND = "options"


def _size() -> int:
    return fzero.axis_size()


def _rank() -> int:
    return fzero.axis_index()


@dataclass(frozen=True)
class _Scaled:
    """The linear scaling rule, as an object."""

    by: float

    def __call__(self, t: int) -> float:
        return self.by * fzero.axis_size()


class _Method:
    def rate(self, t: int) -> float:
        return 0.1 * math.sqrt(fzero.axis_size())


def _with(power: float, t: int) -> float:
    return 0.1 * fzero.axis_size() ** power


def _scheduled(schedule: Any) -> Callable[[int], float]:
    """A schedule around one of the library."""
    return lambda t: schedule(t) * fzero.axis_size()


def _after(step: int) -> Callable[[int], float]:
    return lambda t: 0.1 * (fzero.axis_size() if t >= step else 1)


# A rate (or any option) by the number of updates: each is false on several ranks.
RATES: dict[str, Callable[[int], Any]] = {
    "times the number of ranks": lambda t: 0.1 * _size(),
    "over the number of ranks": lambda t: 0.1 / _size(),
    "times the root of the number of ranks": lambda t: 0.1 * _size() ** 0.5,
    "an object": _Scaled(0.1),
    "a bound method": _Method().rate,
    "a partial": functools.partial(_with, 0.5),
    "a partial of an object": functools.partial(_Scaled(0.1)),
    "around warmup_cosine": _scheduled(warmup_cosine(0.1, 2, 10)),
    "warm-up in samples": lambda t: 0.1 * min(1.0, (t + 1) * _size() / 10),
    "decay in samples": lambda t: 0.1 * 0.5 ** (t * _size() + 1 if _size() > 1 else t),
    "from the second update on": _after(1),
    "a number for one, another for many": lambda t: 0.1 if _size() == 1 else 0.05,
    "by rank": lambda t: 0.1 * (1 + _rank()),
    "rank 0 only": lambda t: 0.1 if _rank() == 0 else 0.0,
    "the last rank": lambda t: 0.1 * (1 + (_rank() == _size() - 1) * (_size() > 1)),
    "a sum over ranks": lambda t: float(fzero.psum(torch.tensor(0.1))),
    "a default argument": lambda t, of=fzero.axis_size: 0.1 * of(),
    "eval": lambda t: eval("0.1 * fzero.axis_size()", {"fzero": fzero}),
    "from a table": lambda t: {1: 0.1, 2: 0.2}.get(_size(), 0.3),
}


def _optimizers(rate: Any) -> dict[str, Callable[[], Any]]:
    """The same schedule for other options."""
    return {
        "lr of sgd": lambda: sgd(rate),
        "lr of sgd with momentum": lambda: sgd(rate, momentum=0.9),
        "lr of adamw": lambda: adamw(rate),
        "lr of adam": lambda: fzero.optim.adam(rate),
        "lr of lion": lambda: fzero.optim.lion(rate),
        "lr of a group": lambda: sgd(0.1, groups=[(lambda leaf: leaf.path == "['w']" or "w" in leaf.path, {"lr": rate})]),
        "lr of adamw with no decay": lambda: adamw(rate, weight_decay=0.0),
        "lr of a partition": lambda: fzero.optim.partition(
            {"a": sgd(rate), "b": adamw(0.1)}, lambda leaf: "a" if len(leaf.shape) == 2 else "b"
        ),
    }  # fmt: skip


def _option(**options: Callable[[], Any]) -> Callable[[], Any]:
    """AdamW with an option that is made while ranks are there."""
    return lambda: adamw(0.1, **{k: x() for k, x in options.items()})


# Options that are no schedule: numbers made where the optimizer is made are those of no rank, so
# they are made in `init` of each.
MASKS: dict[str, Callable[[], Any]] = {
    "decay_mask by the number of ranks": lambda: adamw(
        0.1, weight_decay=3.0, decay_mask=lambda leaf: fzero.axis_size() > 1
    ),
    "decay_mask by rank": lambda: adamw(
        0.1, weight_decay=3.0, decay_mask=lambda leaf: fzero.axis_index() == 0
    ),
    "groups by the number of ranks": lambda: sgd(
        0.1, groups=[(lambda leaf: fzero.axis_size() > 1, {"lr": 0.7})]
    ),
    "groups by rank": lambda: sgd(0.1, groups=[(lambda leaf: fzero.axis_index() == 1, {"lr": 0.7})]),
}  # fmt: skip


def programs() -> Iterator[Program]:
    def of(name: str, optimizer: Any, **options: Any) -> Program:
        return Program(
            kind=KIND,
            name=name,
            make=lambda: descends(usual_loss),
            optimizer=optimizer,
            calls=3,
            **options,
        )

    for i, (name, rate) in enumerate(RATES.items()):
        every = list(_optimizers(rate).items())
        for what, optimizer in (every[i % 5], every[(i + 2) % 8]):
            yield of(f"{what}, {name}", optimizer, world=2 + i % 2, options={"stage": i % 4})
    for name, optimizer in MASKS.items():
        yield of(name, optimizer)
