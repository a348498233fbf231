"""A training that either driver makes, with a rule of fzero or an optimizer of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import load
from fzero.state import TrainState
from tests.strategies import integers

Style = Literal["engine", "engine with a rule", "steps", "steps with torch"]
STYLES: tuple[Style, ...] = ("engine", "engine with a rule", "steps", "steps with torch")
RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adamw": (
        functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        functools.partial(fzero.optim.adamw, 0.01, weight_decay=0.1),
    ),
    "sgd": (
        functools.partial(torch.optim.SGD, lr=2.0**-4, momentum=0.5),
        functools.partial(fzero.optim.sgd, 2.0**-4, momentum=0.5),
    ),
}
ROWS = 6  # of all ranks together


class Net(nn.Module):
    """Sizes that do not divide, a tied weight, a frozen one, one in 16 bits with a master.

    The output is linear in every parameter: if the loss is its sum, gradients are integers, and
    the same on any number of ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(3, 7), nn.Linear(3, 5)
        self.low, self.tied = nn.Linear(3, 4, bias=False).bfloat16(), nn.Linear(3, 5)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.frozen
        parts = (self.first(x), self.second(x), self.low(x.bfloat16()).float(), 2 * self.tied(x))
        return torch.cat(parts, dim=1)


def make(seed: int) -> Net:
    module = Net()
    with torch.no_grad():
        for number, p in enumerate(p for p in module.parameters() if p.requires_grad):
            p.copy_(integers(tuple(p.shape), 100 * seed + number, p.dtype))
    return module


def rows_of(update: int) -> Tensor:
    """This rank's rows [ROWS / W, 3] of the batch."""
    rows = integers((ROWS, 3), update, torch.float32)
    return rows.chunk(fzero.axis_size())[fzero.axis_index()]


def total(out: Tensor) -> Tensor:
    """The mean over ranks of this is the sum over all rows."""
    return fzero.axis_size() * out.sum()


def curved(out: Tensor) -> Tensor:
    return out.sin().sum()


class Trainer:
    """One driver at one stage with one of two optimizers that have the same rule."""

    def __init__(self, style: Style, stage: int, rule: str, *, seed: int, loss: Any) -> None:
        by_torch, by_rule = RULES[rule]
        self.loss = loss
        self.engine: Engine | None = None
        if style.startswith("engine"):
            chosen = by_rule() if style.endswith("rule") else by_torch
            self.engine = Engine(make(seed), chosen, stage=stage, bucket_bytes=64)
            return
        optimizer = fzero.optim.from_torch(by_torch) if style.endswith("torch") else by_rule()
        self.apply, params = fzero.functionalize(make(seed))
        self.step = fzero.shard(self._update, stage=stage, donate=True, bucket_bytes=64)
        self._state: TrainState = self.step.init(params, optimizer)

    def _update(self, state: TrainState, x: Tensor) -> Any:
        grad = fzero.grad_and_reduce(lambda p, x: self.loss(self.apply(p, x)), state)
        return fzero.apply_gradients(grad(x)[0]), None

    @property
    def state(self) -> TrainState:
        return self._state if self.engine is None else self.engine.state

    def train(self, *updates: int) -> None:
        for number in updates:
            if self.engine is None:
                self._state, _ = self.step(self._state, rows_of(number))
            else:
                self.loss(self.engine(rows_of(number))).backward()
                self.engine.step()

    def load(self, path: Path, load: Callable[..., Any] = load) -> None:
        if self.engine is None:
            self._state = load(path, self._state)
        else:
            self.engine.state = load(path, self.engine.state)

    def end(self) -> dict[str, Tensor]:
        """Close it; return the whole parameters as the module has them, and the step."""
        params = {path: p.detach() for path, p in fzero.full_params(self.state).items()}
        params["step"] = self.state.step
        params.pop("tied.weight", None)  # an engine names a tied parameter twice
        if self.engine is not None:
            self.engine.close()
        return params


class Place(NamedTuple):
    ranks: int
    stage: int
    style: Style


MOVES = (
    (Place(2, 2, "engine"), Place(3, 3, "engine")),
    (Place(2, 2, "engine"), Place(3, 3, "steps")),
    (Place(2, 2, "engine with a rule"), Place(3, 3, "steps with torch")),
    (Place(2, 3, "engine"), Place(2, 0, "steps with torch")),
    (Place(3, 3, "steps"), Place(1, 0, "engine")),
    (Place(3, 3, "steps with torch"), Place(2, 0, "engine with a rule")),
    (Place(3, 1, "steps"), Place(2, 3, "engine")),
    (Place(1, 3, "engine"), Place(3, 2, "steps")),
)
