"""Where a function of a matrix stands in a step: in the loss, or in what is made of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fzero
from tests.tools.prove.adversary.programs import Program, hidden, of_loss, of_step, usual_loss
from tests.tools.prove.adversary.truth import by_hand

Fn = Callable[..., Any]


def on_many(alone: Fn, many: Fn) -> Fn:
    """One function on one rank alone, another one on several."""
    return lambda *args: (alone if fzero.axis_size() == 1 else many)(*args)


def score(x: Any) -> Tensor:
    """A positive number in which each element, and its place, counts."""
    xs = x if isinstance(x, tuple | list) else [x]
    flat = [torch.view_as_real(one) if one.is_complex() else one for one in xs]
    row = torch.cat([one.flatten().float() for one in flat])
    return ((row + 0.37) * torch.linspace(0.5, 1.5, row.numel())).pow(2).mean().add(1).log()


def own_gradients(state: Any, x: Tensor, loss: Fn = usual_loss) -> dict[str, Tensor]:
    """The gradients of this rank's own loss, made by hand."""
    p = {k: v.detach().clone().requires_grad_() for k, v in fzero.full_params(state).items()}
    return dict(zip(p, by_hand(loss(p, x), list(p.values())), strict=True))


def mean_gradients(state: Any, x: Tensor, loss: Fn = usual_loss) -> dict[str, Tensor]:
    return fzero.full_gradients(fzero.grad_and_reduce(loss, state)(x)[0])


def stepped(state: Any, gradients: Any, *, reduced: bool) -> Any:
    return fzero.apply_gradients(fzero.add_gradients(state, gradients, reduced=reduced))


def in_data(kind: str, name: str, fn: Fn, **options: Any) -> Program:
    return of_loss(
        kind, f"{name}, in data", lambda p, x: usual_loss(p, x) * score(fn(x)), **options
    )


def in_model(kind: str, name: str, fn: Fn, **options: Any) -> Program:
    return of_loss(
        kind,
        f"{name}, in the model",
        lambda p, x: usual_loss(p, x) + score(fn(hidden(p, x))),
        **options,
    )


def in_weights(kind: str, name: str, fn: Fn, **options: Any) -> Program:
    return of_loss(
        kind,
        f"{name}, of a parameter",
        lambda p, x: usual_loss(p, x) + score(fn(p["w"])),
        **options,
    )


def in_update(kind: str, name: str, fn: Fn, **options: Any) -> Program:
    """The mean gradient times a number that is made of it."""

    def step(state: Any, x: Tensor) -> Any:
        g = mean_gradients(state, x)
        return stepped(state, {**g, "w": g["w"] * score(fn(g["w"]))}, reduced=True), x.sum()

    return of_step(kind, f"{name}, in the update", step, **options)


def as_update(kind: str, name: str, fn: Fn, **options: Any) -> Program:
    """A function of the mean gradient in its place."""

    def step(state: Any, x: Tensor) -> Any:
        g = mean_gradients(state, x)
        return stepped(state, {**g, "w": fn(g["w"])}, reduced=True), x.sum()

    return of_step(kind, f"{name}, of the mean gradient", step, **options)


def as_own(kind: str, name: str, fn: Fn, **options: Any) -> Program:
    """A function of each rank's own gradient, before the reduction."""

    def step(state: Any, x: Tensor) -> Any:
        g = own_gradients(state, x)
        return stepped(state, {**g, "w": fn(g["w"])}, reduced=False), x.sum()

    return of_step(kind, f"{name}, of the own gradient", step, **options)


def as_data(kind: str, name: str, fn: Fn, **options: Any) -> Program:
    """A function of the batch in its place."""
    return of_loss(kind, f"{name}, of the batch", lambda p, x: usual_loss(p, fn(x)), **options)


def as_weights(kind: str, name: str, fn: Fn, **options: Any) -> Program:
    """A function of a parameter in its place."""
    return of_loss(
        kind,
        f"{name}, as a parameter",
        lambda p, x: usual_loss({**p, "w": fn(p["w"])}, x),
        **options,
    )
