"""16-bit parameters with fp32 masters, and parameters of any layout in memory.

Engines hold parameters contiguous, whatever their strides were, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero import Compress
from fzero.adapter import Engine, gathered
from fzero.machine.codecs import cast
from tests.adapter.nets import Low
from tests.adapter.on_ranks import Place, at_places, on_ranks
from tests.adapter.plain import LR, Draw, adamw_of, engine_of, same, update

LOW_LR = 2.0**-10  # an update that bf16 cannot hold: 1 - 2**-10 rounds to 1


def gradient_of(world_size: int, number: int, rank: int) -> Tensor:
    """Whole multiples of W, so that sums and means are exact in bf16."""
    return world_size * Draw(rank, number).whole(7, dtype=torch.float32) + world_size


def low_sgd_of(module: nn.Module) -> torch.optim.Optimizer:
    # On a CPU torch's fused SGD rounds bf16 in another way from 16 elements on.
    return torch.optim.SGD(module.parameters(), lr=LOW_LR, fused=False)


@at_places(1, 2, 3)
@pytest.mark.parametrize("masters", [True, False])
def test_masters_gather_updates_that_bf16_cannot_hold_and_without_them_they_are_lost(
    at: Place, masters: bool
) -> None:
    engine = at.engine(Low, low_sgd_of, master_weights=masters)
    kind = torch.float32 if masters else torch.bfloat16
    w, v = torch.ones(7, dtype=kind), torch.full((2, 3), -2.0, dtype=kind)
    for number in range(20):
        engine(gradient_of(at.ranks, number, at.rank).bfloat16()).backward()
        engine.step()
        mean = sum(gradient_of(at.ranks, number, r) / at.ranks for r in range(at.ranks))
        assert isinstance(mean, Tensor)
        w.sub_(mean.to(kind), alpha=LOW_LR)
        v.sub_(mean.to(kind)[:6].view(2, 3), alpha=LOW_LR)
    found = engine.full_parameters()
    assert found["w"].dtype == kind
    assert torch.equal(found["w"], w) and torch.equal(found["v"], v)
    engine.close()
    module: Any = engine.module
    assert module.w.dtype == torch.bfloat16
    assert torch.equal(module.w, w.bfloat16()) and torch.equal(module.v, v.bfloat16())


def write(engine: Engine, how: str, value: Tensor) -> None:
    module, rank = engine.module, engine.axis.rank
    if how == "set_full_parameter":
        engine.set_full_parameter("w", value)
    elif how == "gathered":
        with gathered(module, modify=True) as (w, _):
            w[2] = value[2] + rank  # rank 0's values win
    elif how == "load_state_dict":
        module.load_state_dict({"w": value, "v": module.get_parameter("v").detach().clone()})
    else:
        with torch.no_grad():
            at = 2 if how == "one element" else slice(None)
            module.get_parameter("w")[at] = value[at]


HOWS = ("set_full_parameter", "gathered", "load_state_dict", "all elements", "one element")


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("how", "stage"),
    [(how, stage) for how in HOWS for stage in range(4 if how in HOWS[:2] else 3)],
)
def test_what_a_user_writes_to_a_bf16_parameter_reaches_its_master(
    world_size: int, how: str, stage: int
) -> None:
    """Elements that were not written keep the low bits that bf16 does not show."""
    engine = engine_of(Low, stage, low_sgd_of)
    value, w, v = (torch.arange(7) + 5).bfloat16(), torch.ones(7), torch.full((2, 3), -2.0)
    for number in range(3):
        if number == 1:
            write(engine, how, value)
            at = 2 if how in ("gathered", "one element") else slice(None)
            w[at] = value[at].float()
            assert torch.equal(engine.full_parameters()["w"], w)
        engine(torch.full((7,), float(world_size), dtype=torch.bfloat16)).backward()
        engine.step()
        w, v = w - LOW_LR * world_size, v - LOW_LR * world_size
        found = engine.full_parameters()
        assert torch.equal(found["w"], w) and torch.equal(found["v"], v), f"step {number}"


@at_places(1, 2, 3)
@pytest.mark.parametrize("contiguous", [True, False])
def test_bf16_gradients_add_up_in_fp32(at: Place, contiguous: bool) -> None:
    """256 + 1 is 256 in bf16: what adds up in it would lose every 1."""
    wire = Compress(gradients=cast(torch.float32))
    options = {"compress": wire, "contiguous_gradients": contiguous}
    e = at.engine(Low, **options)
    ones, big = torch.ones(7, dtype=torch.bfloat16), torch.full((7,), 256.0, dtype=torch.bfloat16)
    with e.coalesce():
        for x in (big, ones, ones, ones):
            e(x).backward()
    e(ones).backward()
    assert e.full_gradients()["w"].tolist() == [260.0] * 7
    e.step()
    assert e.full_parameters()["w"].tolist() == [1 - LR * 260.0] * 7
    e(ones * 2**-9).backward()
    e.step()
    assert e.full_parameters()["w"].tolist() == [1 - LR * (260.0 + 2**-9)] * 7


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_sends_nothing_and_so_rounds_nothing_to_what_would_be_sent(stage: int) -> None:
    engine = engine_of(Low, stage)
    with engine.coalesce():
        for x in (256.0, 1.0):  # 257 is no number of bf16
            engine(torch.full((7,), x, dtype=torch.bfloat16)).backward()
    assert engine.full_gradient("w").tolist() == [257.0] * 7


class Scaled(nn.Module):
    """A parameter of any layout in memory."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).square()


def filled(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "a slice": lambda: filled(3, 5)[:, 1:4],
    "strided": lambda: filled(3, 6)[:, ::2],
    "transposed": lambda: filled(4, 3).t(),
    "channels last": lambda: filled(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: filled(1, 4).repeat(3, 1),
}


@at_places(1, 2, 3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parameter_of_any_layout_trains_and_is_read_and_written_like_any_other(
    at: Place, layout: str
) -> None:
    def make() -> nn.Module:
        return Scaled(LAYOUTS[layout]())

    def program(e: Any, draw: Draw) -> None:
        e(draw.whole(*shape)).sum().backward()

    engine, reference = at.both(make, adamw_of)
    shape = reference.module.get_parameter("weight").shape
    tol = 1e-12 if at.ranks > 1 else 0.0  # on one rank, bit for bit
    for number in range(3):
        update(engine, reference, at.rank, number, program, tol)
    value, zeros = filled(*shape) / 3, torch.zeros(shape, dtype=torch.float64)
    program(engine, at.draw(3))
    engine.set_full_gradient("weight", value)
    engine(zeros).sum().backward()  # adds zero to it
    assert torch.equal(engine.full_gradient("weight"), value)
    optimizer: Any = reference.optimizer
    engine.set_full_optimizer_state("weight", "exp_avg", value)
    optimizer.state[reference.module.get_parameter("weight")]["exp_avg"].copy_(value)
    assert torch.equal(engine.full_optimizer_states()["weight"]["exp_avg"], value)
    engine.set_full_parameter("weight", -value)
    reference.module.get_parameter("weight").data.copy_(-value)
    assert torch.equal(engine.full_parameter("weight"), -value)
    engine.step()
    same(engine.full_parameters(), reference.step({"weight": value}))
    engine.close()
    same(dict(engine.module.named_parameters()), reference.parameters())
    mine: Any = engine.optimizer
    assert mine.param_groups[0]["fused"] is None
    program(engine.module, Draw(0, 4))  # as an ordinary module again
    mine.step()
    gradient: Any = engine.module.get_parameter("weight").grad
    wanted = reference.step({"weight": gradient})
    same(dict(engine.module.named_parameters()), wanted)
