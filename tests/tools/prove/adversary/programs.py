"""A training step as a record, with what is needed to run it with numbers and to prove it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fzero
from tests.descends import descends as descends

SGD = fzero.optim.sgd(0.3, momentum=0.5)


def batch_of(rank: int) -> tuple[Tensor, ...]:
    """Eight rows of six, other ones on each rank and in no way centred."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(8, 6, generator=generator) * (1 + rank / 4) + 0.3 * rank,)


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    w, b = torch.randn(4, 6, generator=generator), torch.randn(4, generator=generator)
    return {"b": b, "w": w}


def hidden(p: Any, x: Tensor) -> Tensor:
    """[8, 4] of the usual parameters and batch."""
    return x @ p["w"].T + p["b"]


def usual_loss(p: Any, x: Tensor) -> Tensor:
    return hidden(p, x).pow(2).mean()


@dataclass(frozen=True, kw_only=True)
class Program:
    """A step, and the calls of it that are looked at.

    make: a new step, without fzero.shard. inputs: the arguments of a rank. calls: so many steps
    are made in a row with numbers. options: of fzero.shard.
    """

    kind: str
    name: str
    make: Callable[[], Callable[..., Any]]
    params: Callable[[], Any] = weights
    optimizer: Callable[[], Any] = lambda: SGD
    inputs: Callable[[int], tuple[Any, ...]] = batch_of
    world: int = 2
    calls: int = 2
    options: dict[str, Any] = field(default_factory=lambda: {"stage": 2})

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def of_loss(kind: str, name: str, loss: Callable[..., Any], **options: Any) -> Program:
    """The usual step of a loss."""
    return Program(kind=kind, name=name, make=lambda: descends(loss), **options)


def of_step(kind: str, name: str, step: Callable[..., Any], **options: Any) -> Program:
    return Program(kind=kind, name=name, make=lambda: step, **options)


def proof_of(program: Program, **options: Any) -> Any:
    """The proof, or the error of a step that is refused."""
    try:
        step = fzero.shard(program.make(), **program.options)
        state = step.init(program.params(), program.optimizer())
        return fzero.prove(step, state, program.inputs(0), world=program.world, **options)
    except Exception as error:
        return error
