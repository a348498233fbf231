"""Several engines under one loss, of different stages, some of them frozen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from fzero.collectives import count_collectives
from tests.adapter.nets import Checkpointed, Net, linear
from tests.adapter.on_ranks import STAGES, on_ranks
from tests.adapter.plain import (
    Draw,
    Reference,
    Together,
    engine_of,
    is_idle,
    run_together,
    same,
)

PAIRS = list(itertools.product(STAGES, STAGES))


class Choice(nn.Module):
    """Uses `a` or not, as each rank likes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(3, 3), linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        return self.b(x) + self.a(x) if both else self.b(x)


def check(
    rank: int,
    world_size: int,
    makes: Sequence[Callable[[], nn.Module]],
    stages: Sequence[int],
    program: Together,
    **options: Any,
) -> None:
    """Gradients and updates of every engine, for three steps."""
    engines = [engine_of(make, stage, **options) for make, stage in zip(makes, stages, strict=True)]
    plains = [Reference(make, world_size) for make in makes]
    for number in range(3):
        all_wanted = run_together(plains, program, number)
        program(engines, Draw(rank, number))
        for i, engine in enumerate(engines):
            label = f"engine {i} of stages {stages}, step {number}, {options}"
            assert is_idle(engine), label
            if engine.optimizer is not None:
                wanted = all_wanted[i]
                same(engine.full_gradients(), wanted, 1e-10, f"{label}: gradients")
                engine.step()
                same(engine.full_parameters(), plains[i].step(wanted), 1e-10, label)
    for engine in engines:
        engine.close()


def chain(es: Sequence[Any], draw: Draw) -> None:
    es[1](torch.sin(es[0](draw(2, 3)))).square().sum().backward()


def side_by_side(es: Sequence[Any], draw: Draw) -> None:
    x = draw(2, 3)
    (es[0](x) - es[1](x)).square().mean().backward()
    (es[1](x) * es[0](x)).sum().backward()


def interleaved(es: Sequence[Any], draw: Draw) -> None:
    first, second = es[0](draw(2, 3)), es[1](draw(2, 3))
    loss = es[0](second).square().sum() + es[1](first).sum()
    loss.backward(retain_graph=True)
    first.sum().backward()


def in_windows(es: Sequence[Any], draw: Draw) -> None:
    with es[0].coalesce(), es[1].no_sync():
        chain(es, draw)
        side_by_side(es, draw)
    with ExitStack() as stack:
        for e in es:
            stack.enter_context(e.coalesce())
        chain(es, draw)
    with es[1].coalesce():
        chain(es, draw)


def adversaries(es: Sequence[Any], draw: Draw) -> None:
    """A generator's loss through its critic; the critic's, with a gradient penalty."""
    generator, critic = es
    made = generator(draw(2, 3))
    (-critic(made)).sum().backward()
    made = made.detach().requires_grad_()
    (g,) = torch.autograd.grad(critic(made).sum(), made, create_graph=True)
    (critic(made).sum() - critic(draw(2, 3)).sum()).backward()
    (10 * (g.norm(dim=1) - 1).square().mean()).backward()


@on_ranks(1, 2, pytest.param(3, marks=pytest.mark.slow))
@pytest.mark.parametrize("program", [chain, side_by_side, interleaved, in_windows, adversaries])
def test_two_engines_of_any_stages_under_one_loss_each_have_their_gradients(
    rank: int, world_size: int, program: Together
) -> None:
    for pair in PAIRS[:: {1: 5, 2: 3, 3: 1}[world_size]]:  # each stage is first, and is second
        check(rank, world_size, (Net, Net), pair, program, bucket_bytes=100)


def other_parts_on_each_rank(es: Sequence[Any], draw: Draw) -> None:
    es[1](es[0](draw(2, 3), draw.rank == 1), draw.rank == 0).square().sum().backward()
    es[0](es[1](draw(2, 3), draw.rank == 0)).square().sum().backward()


def other_order_on_each_rank(es: Sequence[Any], draw: Draw) -> None:
    a, b = (es[0], es[1]) if draw.rank % 2 else (es[1], es[0])
    a(b(draw(2, 3)).sin()).square().sum().backward()
    a(b(draw(2, 3), False).sin(), False).square().sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("pair", [(0, 0), (2, 2), (0, 2), (3, 2), (1, 3), (3, 3)])
@pytest.mark.parametrize("bucket_bytes", [8, 2**20])
@pytest.mark.parametrize("program", [other_parts_on_each_rank, other_order_on_each_rank])
def test_ranks_may_use_other_parts_of_two_engines_or_run_them_in_another_order(
    rank: int, world_size: int, program: Together, bucket_bytes: int, pair: tuple[int, int]
) -> None:
    check(rank, world_size, (Choice, Choice), pair, program, bucket_bytes=bucket_bytes)


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def checkpointed() -> nn.Module:
    return Checkpointed(reentrant=True, outside=True)


def distill(es: Sequence[Any], draw: Draw) -> None:
    teacher, student, head = es
    x = draw(2, 3).requires_grad_()
    with torch.no_grad():
        target = teacher(x)
    loss = (head(student(x)) - target).square().sum() + teacher(student(x)).sin().sum()
    loss.backward()


@on_ranks(1, 2)
@pytest.mark.parametrize("stages", [(0, 2, 3), (3, 0, 2), (2, 3, 0), (3, 3, 3)])
def test_frozen_engines_pass_gradients_on_and_others_learn_through_them(
    rank: int, world_size: int, stages: tuple[int, int, int]
) -> None:
    check(rank, world_size, (frozen, checkpointed, Net), stages, distill)


@on_ranks(2)
def test_one_backward_reduces_each_engine_once(rank: int) -> None:
    engines = [engine_of(Net, stage) for stage in STAGES]
    h = Draw(rank, 0)(2, 3)
    for e in engines:
        h = e(h).tanh()
    with count_collectives() as log:
        h.sum().backward()
    wanted = {"all_reduce": 1, "reduce_scatter": 1 + 1 + 3}  # stage 3: one for each of 3 layers
    assert {op: n for op, n in log.counts().items() if op in wanted} == wanted
    assert [e.state.progress.backwards for e in engines] == [1] * 4
