"""Several engines under one loss, of different stages, optimizers, some of them frozen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import Engine
from fzero.collectives import count_collectives
from tests.adapter.nets import Checkpointed, Net, linear
from tests.adapter.plain import STAGES, Draw, Plain, Reference, engine_of, order_may_change, same
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")
Together = Callable[[Sequence[Any], Draw], None]


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
        for other in range(world_size):
            here = [Plain(plain.modules[other]) for plain in plains]
            for plain in here:
                plain.module.zero_grad()
            program(here, Draw(other, number))
        with order_may_change():
            program(engines, Draw(rank, number))
        for i, (engine, plain) in enumerate(zip(engines, plains, strict=True)):
            label = f"engine {i} of stages {stages}, step {number}, {options}"
            assert engine.hooks.backward_active_depth == 0, label
            if engine.optimizer is None:
                continue
            wanted = plain.gradients()
            same(f"{label}: gradients", engine.full_gradients(), wanted, 1e-10)
            engine.step()
            same(f"{label}: updated", engine.full_parameters(), plain.step(wanted), 1e-10)
    for engine in engines:
        engine.close()


PAIRS = list(itertools.product(STAGES, STAGES))


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


def other_parts_on_each_rank(es: Sequence[Any], draw: Draw) -> None:
    es[1](es[0](draw(2, 3), draw.rank == 1), draw.rank == 0).square().sum().backward()
    es[0](es[1](draw(2, 3), draw.rank == 0)).square().sum().backward()


def other_order_on_each_rank(es: Sequence[Any], draw: Draw) -> None:
    a, b = (es[0], es[1]) if draw.rank % 2 else (es[1], es[0])
    a(b(draw(2, 3)).sin()).square().sum().backward()
    a(b(draw(2, 3), False).sin(), False).square().sum().backward()


SAME_ON_ALL = [chain, side_by_side, interleaved, in_windows]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("program", SAME_ON_ALL)
def test_two_engines_of_any_stages_under_one_loss_each_have_their_gradients(
    program: Together, world_size: int
) -> None:
    run_ranks(two_engines, world_size, program, timeout_s=40)


def two_engines(rank: int, world_size: int, program: Together) -> None:
    pairs = PAIRS if world_size == 2 else PAIRS[:: 5 if world_size == 1 else 3]
    for pair in pairs:
        check(rank, world_size, (Net, Net), pair, program, bucket_bytes=100)


@pytest.mark.parametrize("pair", [(0, 0), (2, 2), (0, 2), (3, 2), (1, 3), (3, 3)])
@pytest.mark.parametrize("bucket_bytes", [8, 2**20])
def test_two_engines_of_which_ranks_use_other_parts_each_have_their_gradients(
    bucket_bytes: int, pair: tuple[int, int]
) -> None:
    run_ranks(two_choices, 2, other_parts_on_each_rank, pair, bucket_bytes, timeout_s=20)


def two_choices(
    rank: int, world_size: int, program: Together, pair: tuple[int, int], bucket_bytes: int
) -> None:
    check(rank, world_size, (Choice, Choice), pair, program, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("bucket_bytes", [8, 2**20])
def test_ranks_may_run_two_engines_in_another_order(bucket_bytes: int) -> None:
    run_ranks(two_orders, 2, bucket_bytes, timeout_s=30)


def two_orders(rank: int, world_size: int, bucket_bytes: int) -> None:
    for pair in ((0, 0), (2, 2), (0, 2), (3, 3), (2, 3)):
        order = other_order_on_each_rank
        check(rank, world_size, (Choice, Choice), pair, order, bucket_bytes=bucket_bytes)


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def distill(es: Sequence[Any], draw: Draw) -> None:
    teacher, student, head = es
    x = draw(2, 3).requires_grad_()
    with torch.no_grad():
        target = teacher(x)
    loss = (head(student(x)) - target).square().sum() + teacher(student(x)).sin().sum()
    loss.backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_engines_pass_gradients_on_and_others_learn_through_them(world_size: int) -> None:
    run_ranks(three_engines, world_size)


def three_engines(rank: int, world_size: int) -> None:
    def student() -> nn.Module:
        return Checkpointed(reentrant=True, outside=True)

    for stages in ((0, 2, 3), (3, 0, 2), (2, 3, 0), (3, 3, 3)):
        check(rank, world_size, (frozen, student, Net), stages, distill)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gan_trains_two_engines_of_other_stages_and_optimizers(world_size: int) -> None:
    run_ranks(gan, world_size)


def gan(rank: int, world_size: int) -> None:
    for stages in ((2, 3), (3, 0), (1, 1)):
        engines, plains, optimizers = [], [], []
        for stage, make in zip(stages, (torch.optim.AdamW, torch.optim.RMSprop), strict=True):
            torch.manual_seed(7)
            module = Net()
            made = make(module.parameters(), lr=0.01, weight_decay=0.1)
            engines.append(Engine(module, made, stage=stage))
            plains.append(Reference(Net, world_size))
            optimizers.append(
                [make(m.parameters(), lr=0.01, weight_decay=0.1) for m in plains[-1].modules]
            )
        for number in range(6):
            which = number % 2
            for other in range(world_size):
                here = [Plain(plain.modules[other]) for plain in plains]
                for e in here:
                    e.module.zero_grad()
                adversaries(here, Draw(other, number), which)
            with order_may_change():
                adversaries(engines, Draw(rank, number), which)
            mean = plains[which].gradients()
            same(f"{stages}, {number}", engines[which].full_gradients(), mean, 1e-10)
            engines[which].step()
            for e in engines:
                e.zero_grad()
            for module, optimizer in zip(plains[which].modules, optimizers[which], strict=True):
                for path, p in module.named_parameters():
                    p.grad = mean[path].clone()
                optimizer.step()
            wanted = dict(plains[which].modules[0].named_parameters())
            same(f"{stages}, {number}: updated", engines[which].full_parameters(), wanted, 1e-10)


def adversaries(es: Sequence[Any], draw: Draw, which: int) -> None:
    generator, critic = es
    made = generator(draw(2, 3))
    if which == 0:
        (-critic(made)).sum().backward()
        return
    made = made.detach().requires_grad_()
    (g,) = torch.autograd.grad(critic(made).sum(), made, create_graph=True)
    (critic(made).sum() - critic(draw(2, 3)).sum()).backward()
    (10 * (g.norm(dim=1) - 1).square().mean()).backward()


def test_one_backward_reduces_each_engine_once() -> None:
    run_ranks(count_each, 2)


def count_each(rank: int, world_size: int) -> None:
    engines = [engine_of(Net, stage) for stage in STAGES]
    h = Draw(rank, 0)(2, 3)
    for e in engines:
        h = e(h).tanh()
    with count_collectives() as log:
        h.sum().backward()
    wanted = {"all_reduce": 1, "reduce_scatter": 1 + 1 + 3}  # stage 3: one for each of 3 layers
    assert {op: n for op, n in log.counts().items() if op in wanted} == wanted
    assert [e.state.progress.backwards for e in engines] == [1] * 4
