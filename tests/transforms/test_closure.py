"""What a step reads without being given it: a compiled step follows it as the step itself does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.transforms.closure import MOST, values_read
from tests.descends import descends

GLOBAL = 1.0
RULE = fzero.optim.sgd(0.5)
X = torch.tensor([1.0, 2.0])


def stepped(loss_fn: Callable[..., Tensor], **options: Any) -> tuple[Any, Any]:
    """A step, and the same one compiled."""

    step_fn = descends(loss_fn)
    step = fzero.shard(step_fn, stage=2)
    return step, fzero.compile(step, backend="eager", **options)


def losses(loss_fn: Callable[..., Tensor], change: Callable[[], Any], **options: Any) -> list[Any]:
    """What both return before and after a change."""
    step, compiled = stepped(loss_fn, **options)
    state = step.init({"w": torch.ones(2)}, RULE)
    found = []
    for _ in range(2):
        found.append((step(state, X)[1].item(), compiled(state, X)[1].item()))
        change()
    return found


class Trainer:
    """A loss that is a method, with what it reads on the object and on its class."""

    power = 1.0

    def __init__(self) -> None:
        self.rate, self.options, self.seen = 1.0, SimpleNamespace(shift=0.0), 0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.rate**self.power + self.options.shift

    def loss(self, p: Any, x: Tensor) -> Tensor:
        return self.scaled(p["w"] * x).sum()


@dataclass(slots=True)
class Slotted:
    """An object without a `__dict__`."""

    rate: float = 1.0


def changes() -> dict[str, tuple[Callable[..., Tensor], Callable[[], Any]]]:
    """By what a loss reads: the loss, and how that changes."""
    rate, table, tensor = 1.0, {"rate": 1.0}, torch.tensor([1.0])
    moved = torch.tensor([1.0])
    trainer, other, third, slotted = Trainer(), Trainer(), Trainer(), Slotted()

    def in_cell(p: Any, x: Tensor) -> Tensor:
        return (p["w"] * x).sum() * rate

    def set_cell() -> None:
        nonlocal rate
        rate = 3.0

    def set_tensor() -> None:
        nonlocal moved
        moved = torch.tensor([3.0])

    def in_global(p: Any, x: Tensor) -> Tensor:
        return (p["w"] * x).sum() * GLOBAL

    def assigned(x: Any) -> None:
        tensor.data = x

    partial: Any = functools.partial(lambda by, p, x: (p["w"] * x).sum() * by["rate"], table)
    return {
        "a cell": (in_cell, set_cell),
        "a global": (in_global, lambda: globals().update(GLOBAL=3.0)),
        "a dict of a partial": (partial, lambda: table.update(rate=3.0)),
        "an attribute": (trainer.loss, lambda: setattr(trainer, "rate", 3.0)),
        "an attribute of it": (other.loss, lambda: setattr(other.options, "shift", 3.0)),
        "a slot": (
            lambda p, x: (p["w"] * x).sum() * slotted.rate,
            lambda: setattr(slotted, "rate", 3.0),
        ),
        "of the class": (third.loss, lambda: setattr(Trainer, "power", 0.0)),
        "written": (lambda p, x: (p["w"] * x * tensor).sum(), lambda: tensor.mul_(3)),
        "assigned": (lambda p, x: (p["w"] * x * tensor).sum(), lambda: assigned(tensor * 2)),
        "another": (lambda p, x: (p["w"] * x * moved).sum(), set_tensor),
        "by remat": (fzero.remat(in_cell), set_cell),
    }


@pytest.mark.parametrize("name", changes())
def test_what_a_loss_reads_is_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "power", 1.0)
    monkeypatch.setitem(globals(), "GLOBAL", 1.0)
    loss_fn, change = changes()[name]
    if name == "of the class":
        loss_fn.__self__.rate = 2.0
    before, after = losses(loss_fn, change)
    assert before[0] == before[1] and after[0] == after[1] and before[0] != after[0]


def test_a_counter_that_the_step_does_not_read_is_no_other_graph() -> None:
    trainer = Trainer()
    found = losses(trainer.loss, lambda: setattr(trainer, "seen", 1), max_graphs=1)
    assert found == [(3.0, 3.0)] * 2  # a warning would be an error


@pytest.mark.parametrize("functionalized", [True, False])
def test_dropout_follows_the_mode_of_the_module(functionalized: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    apply, params = fzero.functionalize(net)
    frozen = nn.Sequential(nn.Linear(2, 64), nn.Dropout(0.5)).requires_grad_(False)

    def by_apply(p: Any, x: Tensor) -> Tensor:
        return apply(p, x).sum()

    def by_module(p: Any, x: Tensor) -> Tensor:
        return (apply(p, x) * frozen(x)).sum()

    step, compiled = stepped(by_apply if functionalized else by_module)
    changed = net if functionalized else frozen
    state = step.init(params, RULE)
    found = []
    for mode in (True, False, True):
        if not functionalized:
            net.eval()
        changed.train(mode)
        for one in (step, compiled):
            torch.manual_seed(3)
            found.append(one(state, torch.ones(1, 2))[1].item())
    assert found[0::2] == found[1::2] and found[0] == found[4] != found[2]


def test_what_is_held_is_found_once_and_large_containers_are_left_out() -> None:
    many, few, same = list(range(MOST + 1)), [1, 2], "x"

    def inner() -> Any:
        return many, few, same

    def outer() -> Any:
        return inner(), inner, few, outer

    numbers = [x for x in values_read(outer) if x in ((int, 1), (int, 2), (str, "x"))]
    assert numbers == [(int, 1), (int, 2), (str, "x")]
    assert (int, MOST) not in values_read(outer)
