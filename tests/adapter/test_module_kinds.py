"""Modules that are reused, tied, frozen, checkpointed, of mixed dtypes, unused.

Each is one program (tests/adapter/plain.py), run at every stage, for two steps or more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapter.nets import (
    F64,
    Adapted,
    Checkpointed,
    Dtypes,
    Experts,
    Foreign,
    Net,
    Shapes,
    Shared,
    Tied,
)
from tests.adapter.on_ranks import Place, at_places, on_ranks
from tests.adapter.plain import (
    Draw,
    Plain,
    Program,
    Reference,
    back,
    check_program,
    gradients_of,
    same,
)

Kind = tuple[Callable[[], nn.Module], Program]


class Skipped(Net):
    """No parameter is used by some calls."""

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return super().forward(x) if use else x * 2


def reused(e: Any, draw: Draw) -> None:
    torch.stack([e(draw(2, 2)).square().sum() for _ in range(3)]).sum().backward()


def ids(e: Any, draw: Draw) -> None:
    x = draw(5).abs().mul(3).long().clamp(max=6)
    torch.nn.functional.cross_entropy(e(x), x).backward()


def returned_parameter(e: Any, draw: Draw) -> None:
    out, own = e(draw(2, 3))
    (out.square().sum() + own.exp().sum()).backward()


def only_the_returned_parameter(e: Any, draw: Draw) -> None:
    out, own = e(draw(2, 3))
    out.sum().backward()
    own.exp().sum().backward()


def scalars(e: Any, draw: Draw) -> None:
    e(draw(2, 7)).backward()


def dtypes(e: Any, draw: Draw) -> None:
    for _ in range(2):
        e(12 * draw.whole(5)).backward()  # so that means are exact, in bf16 too


def own_expert(e: Any, draw: Draw) -> None:
    e(draw(2, 3), draw.rank).square().sum().backward()
    e(draw(2, 3), (draw.rank + 1) % 4).square().sum().backward()


def expert_or_none(e: Any, draw: Draw) -> None:
    e(draw(2, 3), -1 if draw.rank % 2 else 2).square().sum().backward()


def no_parameter_on_one_rank(e: Any, draw: Draw) -> None:
    e(draw(2, 3).requires_grad_(), draw.rank != 1).square().sum().backward()


def gradient_for_the_inputs(e: Any, draw: Draw) -> None:
    x = draw(2, 3).requires_grad_()
    e(x * 2).square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def checkpoints(*, reentrant: bool, outside: bool) -> Kind:
    return functools.partial(Checkpointed, reentrant=reentrant, outside=outside), back


KINDS: dict[str, Kind] = {
    "a layer used nine times": (Shared, reused),
    "tied weights": (Tied, ids),
    "a foreign weight and a returned parameter": (Foreign, returned_parameter),
    "a backward from a returned parameter": (Foreign, only_the_returned_parameter),
    "scalars and nothing": (Shapes, scalars),
    "adapters on a frozen base": (Adapted, back),
    "adapters, with gradients for the inputs": (Adapted, gradient_for_the_inputs),
    "dtypes": (Dtypes, dtypes),
    "each rank its own experts": (Experts, own_expert),
    "an expert on some ranks, none on others": (Experts, expert_or_none),
    "no parameter at all on one rank": (Skipped, no_parameter_on_one_rank),
    "reentrant checkpoints": checkpoints(reentrant=True, outside=False),
    "reentrant checkpoints of what is used outside": checkpoints(reentrant=True, outside=True),
    "checkpoints": checkpoints(reentrant=False, outside=False),
    "checkpoints of what is used outside": checkpoints(reentrant=False, outside=True),
}


DIFFER_BY_RANK = (
    "each rank its own experts",
    "an expert on some ranks, none on others",
    "no parameter at all on one rank",
)


@on_ranks(1, 2, *(pytest.param(world_size, marks=pytest.mark.slow) for world_size in (3, 4)))
@pytest.mark.parametrize("name", KINDS)
def test_gradients_and_updates_of_every_kind_are_those_of_plain_pytorch(
    rank: int, world_size: int, name: str
) -> None:
    """On one rank in one bucket; on several with a bucket for each parameter, and in a window."""
    make, program = KINDS[name]

    def in_a_window(e: Any, draw: Draw) -> None:
        with e.coalesce():
            program(e, draw)
            program(e, draw)

    options: Any = {} if world_size == 1 else {"bucket_bytes": 8}
    check_program(rank, world_size, make, program, **options)
    if world_size > 1:
        check_program(rank, world_size, make, in_a_window)


@on_ranks(4)
@pytest.mark.parametrize("name", DIFFER_BY_RANK)
def test_kinds_that_differ_by_rank_on_four_of_them(rank: int, world_size: int, name: str) -> None:
    check_program(rank, world_size, *KINDS[name])


class Summed(nn.Module):
    """Autograd gives both parameters one gradient, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, dtype=F64))
        self.b = nn.Parameter(torch.full((4,), 2.0, dtype=F64))

    def forward(self) -> Tensor:
        return (self.a.unsqueeze(0) + self.b.unsqueeze(0)).square().sum()


@at_places(1, 2)
@pytest.mark.parametrize("windows", [False, True])
def test_a_gradient_that_two_parameters_share_is_counted_once_for_each(
    at: Place, windows: bool
) -> None:
    """In plain PyTorch the second backward would add to the memory of both, twice."""
    e = at.engine(Summed, bucket_bytes=8)
    for _ in range(6):  # a bucket that is reduced may be faster than the rest, or not
        with e.coalesce() if windows else nullcontext():
            e().backward()
            e().backward()
        for path, gradient in e.full_gradients().items():
            assert gradient.tolist() == [12.0] * 4, path
        e.zero_grad()


@at_places(1, 2)
@pytest.mark.parametrize("bucket_bytes", [8, 4096])
def test_a_part_that_is_frozen_for_a_while_gets_zeros_then_gradients_again(
    at: Place, bucket_bytes: int
) -> None:
    e, plain = at.both(Net, bucket_bytes=bucket_bytes)
    zeros = {path: torch.zeros_like(p) for path, p in Net().named_parameters()}
    for number, learns in enumerate((True, False, False, True)):
        for module in (e.module, plain.module):
            module.b.requires_grad_(learns)
        wanted = zeros | plain.run(back, number)
        back(e, at.draw(number))
        same(e.full_gradients(), wanted)
        e.step()
        same(e.full_parameters(), plain.step(wanted))


@at_places(1, 2)
def test_nothing_is_left_by_forwards_without_gradient(at: Place) -> None:
    e = at.engine(Net)
    before = e.hooks, e.state.progress, e.state.gradients, e.memory_report()
    for no_grad in (torch.no_grad, torch.inference_mode):
        with no_grad():
            assert torch.equal(e(torch.ones(2, 3, dtype=F64)), e(torch.ones(2, 3, dtype=F64)))
    assert (e.hooks, e.state.progress, e.state.gradients, e.memory_report()) == before


def test_the_reference_is_a_mean_over_ranks_of_other_data() -> None:
    plain = Reference(Net, 3)
    alone = []
    for rank in range(3):
        plain.module.zero_grad()
        back(Plain(plain.module), Draw(rank, 0))
        alone.append(gradients_of(plain.module)["a.weight"])
    assert not torch.allclose(alone[0], alone[1])
    found = plain.run(back, 0)["a.weight"]
    assert torch.allclose(found, torch.stack(alone).mean(0))
