"""What somebody writes who has read the prover, and wants a false proof."""

# ruff: noqa: E501
# A table has a program a line.

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero.optim import sgd
from tests.descends import descends
from tests.tools.prove.adversary.places import (
    Fn,
    in_data,
    on_many,
    own_gradients,
    stepped,
)
from tests.tools.prove.adversary.programs import Program, of_loss, of_step, usual_loss

KIND = "sly"


def _many() -> bool:
    return fzero.axis_size() > 1


# Draws that nobody reads shift those that are read.
def _unread(draw: Callable[[], Any]) -> Fn:
    def loss(p: Any, x: Tensor) -> Tensor:
        if _many():
            draw()
        return usual_loss(p, x * torch.rand(x.shape))

    return loss


DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(4)),
    "randperm": lambda: torch.randperm(5),
    "normal_": lambda: torch.empty(3).normal_(),
    "two, in another order": lambda: (torch.rand(1), torch.randn(2)),
    "of no elements, and one": lambda: (torch.rand(0), torch.rand(1)),
    "multinomial": lambda: torch.multinomial(torch.ones(3), 2),
    "bernoulli": lambda: torch.bernoulli(torch.full((3,), 0.5)),
    "in a graph": lambda: torch.func.grad(lambda t: (t * torch.rand(())).sum())(torch.ones(())),
}


@torch.library.custom_op("fzero_adversary_sly::draw", mutates_args=())
def _draw(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@_draw.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


RANDOM: dict[str, Fn] = {
    "a draw of a custom op": lambda x: (_draw(torch.ones(3)) if _many() else None, torch.rand(x.shape))[1],
    "a draw of a function of autograd": lambda x: (torch.nn.functional.gumbel_softmax(torch.ones(2)) if _many() else None, torch.rand(x.shape))[1],
}  # fmt: skip


# Parts of the buffers of a state, read by hand.
def _of_flats(fn: Callable[[Any], Tensor]) -> Fn:
    """A loss times a number of what is in the buffers of this rank."""

    def step(state: Any, x: Tensor) -> Any:
        number = fn(state).detach()
        state, loss = fzero.grad_and_reduce(lambda p, x: usual_loss(p, x) * number, state)(x)
        return fzero.apply_gradients(state), loss

    return step


def _decayed(state: Any, x: Tensor) -> Any:
    """Weight decay of the own part, by the norm of the own part."""
    new, loss = descends(usual_loss)(state, x)
    flats = tuple(f * (1 - 0.1 * f.norm()) for f in new.params.flats)
    return new.replace(params=dataclasses.replace(new.params, flats=flats)), loss


FLATS: dict[str, Callable[[Any], Tensor]] = {
    "norm of the flat": lambda s: s.params.flats[0].norm(),
    "sum of the flat": lambda s: s.params.flats[0].sum(),
    "mean of the flat": lambda s: s.params.flats[0].mean(),
    "largest of the flat": lambda s: s.params.flats[0].abs().amax(),
    "first of the flat": lambda s: s.params.flats[0][0],
    "last of the flat": lambda s: s.params.flats[0][-1] + 1,
    "norm of the moments": lambda s: 1 + s.optimizer.moments[0][0].norm(),
    "mean of the norms of flats": lambda s: fzero.pmean(s.params.flats[0].norm()),
    "sum of flats, over ranks, twice": lambda s: fzero.psum(fzero.psum(s.params.flats[0].sum())),
    "the count": lambda s: 1 + s.step * (fzero.axis_size() - 1),
}  # fmt: skip


# Between the gradient and its reduction.
def _in_window(change: Fn) -> Fn:
    def step(state: Any, x: Tensor) -> Any:
        g = own_gradients(state, x)
        state, loss = fzero.grad_and_reduce(usual_loss, state)(x)
        more = {"b": torch.zeros(4), "w": change(g["w"]) - g["w"]}
        return fzero.apply_gradients(fzero.add_gradients(state, more)), loss

    return step


def _window_only(change: Fn) -> Fn:
    def step(state: Any, x: Tensor) -> Any:
        g = own_gradients(state, x)
        return stepped(state, {**g, "w": change(g["w"])}, reduced=False), x.sum()

    return step


def _clamp(g: Tensor) -> Tensor:
    return g.clamp(-0.1, 0.1)


# What of a state is no tensor.
def _other_optimizer(optimizer: Any) -> Fn:
    def step(state: Any, x: Tensor) -> Any:
        new, loss = descends(usual_loss)(state, x)
        if _many():
            new = new.replace(setup=dataclasses.replace(new.setup, optimizer=optimizer))
        return new, loss

    return step


def _around_update(optimizer: Any) -> Fn:
    """Another optimizer for one update."""

    def step(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(usual_loss, state)(x)
        kept = state.setup.optimizer
        if _many():
            state = state.replace(setup=dataclasses.replace(state.setup, optimizer=optimizer))
        state = fzero.apply_gradients(state)
        return state.replace(setup=dataclasses.replace(state.setup, optimizer=kept)), loss

    return step


# Constants with the same bytes.
def _negative() -> Tensor:
    return torch.tensor([1 + 2j]).conj().imag  # its bytes are those of +2


_PLUS, _MINUS = torch.tensor([1 + 2j]).imag, _negative()
_ROWS = torch.arange(24.0).view(4, 6)
_COLUMNS = torch.arange(24.0).view(6, 4).t()


CONSTANTS: dict[str, tuple[Fn, Fn]] = {
    "a sign bit of a view": (lambda x: x + _PLUS, lambda x: x + _MINUS),
    "a transposed constant": (lambda x: x[:4, :4] + _ROWS[:, :4], lambda x: x[:4, :4] + _COLUMNS[:, :4]),
    "an expanded constant": (lambda x: x[:3, :2] * _ROWS[0, 1:2].expand(3, 2), lambda x: x[:3, :2] * _ROWS[:3, 1:3]),
    "a constant of int and float": (lambda x: x * torch.tensor(1), lambda x: x * torch.tensor(1, dtype=torch.int32).view(torch.float32)),
}  # fmt: skip


def programs() -> Iterator[Program]:
    for name, draw in DRAWS.items():
        yield of_loss(KIND, f"an unread draw: {name}", _unread(draw))
    for name, fn in RANDOM.items():
        yield of_loss(KIND, name, lambda p, x, fn=fn: usual_loss(p, x * fn(x)))
    for i, (name, read) in enumerate(FLATS.items()):
        yield of_step(KIND, name, _of_flats(read), options={"stage": 3 if i < 7 else 1 + i % 3}, calls=3)  # fmt: skip
    yield of_step(KIND, "decay of the own part", _decayed, options={"stage": 3})
    for stage in range(4):
        at: Any = {"stage": stage}
        yield of_step(KIND, f"clamped in a window, stage {stage}", fzero.coalesce(_window_only(_clamp)), options=at)  # fmt: skip
        yield of_step(KIND, f"changed in a window, stage {stage}", fzero.coalesce(_in_window(_clamp)), options=at)  # fmt: skip
        yield of_step(KIND, f"changed, stage {stage}", _in_window(_clamp), options=at)
        yield of_step(KIND, f"clamped, accumulated, stage {stage}", fzero.accumulate(_window_only(_clamp), micro_batches=2), options=at)  # fmt: skip
    yield of_step(KIND, "another optimizer in the new state", _other_optimizer(sgd(0.9, momentum=0.5)))  # fmt: skip
    yield of_step(KIND, "another optimizer for an update", _around_update(sgd(0.9, momentum=0.5)))
    for name, pair in CONSTANTS.items():
        yield in_data(KIND, name, on_many(*pair))
