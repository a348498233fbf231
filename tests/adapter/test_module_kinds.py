"""Points 6 and 16: modules that are reused, tied, frozen, checkpointed, of mixed dtypes, unused.

Each is one program (tests/adapter/plain.py), run at every stage, for two steps or more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from tests.adapter.plain import (
    LR,
    Draw,
    Plain,
    Program,
    Reference,
    check_program,
    engine_of,
    learning,
    order_may_change,
    same,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")
Kind = tuple[Callable[[], nn.Module], Program]


def squares(*shape: int) -> Program:
    def program(e: Any, draw: Draw) -> None:
        e(draw(*shape)).square().sum().backward()

    return program


def several_calls(e: Any, draw: Draw) -> None:
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


def the_parameter_first(e: Any, draw: Draw) -> None:
    own = e(draw(2, 3))[1]
    (e(draw(2, 3))[0].square().sum() * own.exp().sum()).backward()


def dtypes(e: Any, draw: Draw) -> None:
    for _ in range(2):
        e(12 * draw.whole(5)).backward()  # so that means are exact, in bf16 too


def own_expert(e: Any, draw: Draw) -> None:
    e(draw(2, 3), draw.rank).square().sum().backward()
    e(draw(2, 3), (draw.rank + 1) % 4).square().sum().backward()


def expert_or_none(e: Any, draw: Draw) -> None:
    e(draw(2, 3), -1 if draw.rank % 2 else 2).square().sum().backward()


def gradient_for_the_inputs(e: Any, draw: Draw) -> None:
    x = draw(2, 3).requires_grad_()
    e(x * 2).square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


KINDS: Mapping[str, Kind] = {
    "a layer used three times": (Shared, squares(2, 2)),
    "a layer used nine times": (Shared, several_calls),
    "tied weights": (Tied, ids),
    "a foreign weight and a returned parameter": (Foreign, returned_parameter),
    "a backward from a returned parameter": (Foreign, only_the_returned_parameter),
    "a returned parameter of another forward": (Foreign, the_parameter_first),
    "scalars and nothing": (Shapes, lambda e, draw: e(draw(2, 7)).backward()),
    "adapters on a frozen base": (Adapted, squares(2, 3)),
    "adapters, with gradients for the inputs": (Adapted, gradient_for_the_inputs),
    "dtypes": (Dtypes, dtypes),
    "each rank its own experts": (Experts, own_expert),
    "an expert on some ranks, none on others": (Experts, expert_or_none),
} | {
    f"checkpoints, {reentrant=}, {outside=}": (
        lambda reentrant=reentrant, outside=outside: Checkpointed(
            reentrant=reentrant, outside=outside
        ),
        squares(2, 3),
    )
    for reentrant in (True, False)
    for outside in (True, False)
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_and_updates_of_every_kind_are_those_of_plain_pytorch(
    name: str, world_size: int
) -> None:
    run_ranks(one_kind, world_size, name, timeout_s=30)


def one_kind(rank: int, world_size: int, name: str) -> None:
    make, program = KINDS[name]
    if world_size != 3:
        check_program(rank, world_size, make, program, steps=3 if world_size == 2 else 2)
    if world_size != 4:
        check_program(rank, world_size, make, program, bucket_bytes=8, contiguous_gradients=False)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_part_that_is_frozen_for_a_while_gets_zeros_then_gradients_again(world_size: int) -> None:
    run_ranks(freeze_and_melt, world_size)


def freeze_and_melt(rank: int, world_size: int) -> None:
    for stage in range(4):
        for bucket_bytes in (8, 4096):
            e, plain = engine_of(Net, stage, bucket_bytes=bucket_bytes), Reference(Net, world_size)
            for number, learns in enumerate((True, False, False, True)):
                for module in (e.module, *plain.modules):
                    module.b.requires_grad_(learns)
                wanted = plain.run(squares(2, 3), number)
                with order_may_change():
                    squares(2, 3)(e, Draw(rank, number))
                zeros = {n: torch.zeros_like(p) for n, p in Net().named_parameters()}
                same(f"stage {stage}, {learns=}", e.full_gradients(), zeros | wanted, 1e-11)
                e.step()
                plain.step(wanted)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_frozen_at_construction_and_learns_now_is_refused_by_name(world_size: int) -> None:
    run_ranks(melt_the_frozen, world_size)


def melt_the_frozen(rank: int, world_size: int) -> None:
    for stage in range(4):
        e, plain = engine_of(Adapted, stage), Reference(Adapted, world_size)
        e.module.base.weight.requires_grad_(True)
        squares(2, 3)(e, Draw(rank, 1))
        with pytest.raises(ValueError, match=r"base\.weight requires grad now(.|\n)*Fix"):
            e.step()
        e.module.base.weight.requires_grad_(False)
        wanted = plain.run(squares(2, 3), 1)
        same(f"stage {stage}", e.full_gradients(), wanted, 1e-11)
        assert e.step()


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_is_left_by_forwards_without_gradient(world_size: int) -> None:
    run_ranks(evaluate, world_size)


def evaluate(rank: int, world_size: int) -> None:
    for stage in range(4):
        e = engine_of(Net, stage)
        before = e.hooks, e.state.progress, e.state.gradients, e.memory_report()
        for no_grad in (torch.no_grad, torch.inference_mode):
            with no_grad():
                assert torch.equal(e(torch.ones(2, 3, dtype=F64)), e(torch.ones(2, 3, dtype=F64)))
        after = e.hooks, e.state.progress, e.state.gradients, e.memory_report()
        assert before == after, f"stage {stage}: {after}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_engine_whose_model_is_frozen_passes_gradients_through(world_size: int) -> None:
    run_ranks(frozen_model, world_size)


def frozen_model(rank: int, world_size: int) -> None:
    for stage in range(4):
        e = engine_of(lambda: Net().requires_grad_(False), stage)
        plain = Reference(Net, 1).modules[0]
        x, y = (Draw(rank, 0)(2, 3).requires_grad_() for _ in range(2))
        with order_may_change():
            e(x).square().sum().backward()
            assert not e(Draw(rank, 1)(2, 3)).requires_grad
        plain(y).square().sum().backward()
        assert x.grad is not None and y.grad is not None
        assert torch.allclose(x.grad, y.grad, rtol=1e-12), f"stage {stage}"
        assert e.hooks.backward_active_depth == 0


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_backward_without_any_parameter_on_one_rank_counts_as_zeros_there(
    world_size: int,
) -> None:
    run_ranks(nothing_on_one_rank, world_size, timeout_s=20)


class Optional(Net):
    def forward(self, x: Tensor, use: bool) -> Tensor:
        return super().forward(x) if use else x * 2


def nothing_on_one_rank(rank: int, world_size: int) -> None:
    def program(e: Any, draw: Draw) -> None:
        e(draw(2, 3).requires_grad_(), draw.rank != 1).square().sum().backward()

    check_program(rank, world_size, Optional, program)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bf16_gradients_add_up_in_fp32_and_update_fp32_masters(world_size: int) -> None:
    run_ranks(low_precision, world_size)


class Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).float().sum()


def low_precision(rank: int, world_size: int) -> None:
    # 256 + 1 is 256 in bf16: what adds up in it would lose every 1.
    ones, big = torch.ones(7, dtype=torch.bfloat16), torch.full((7,), 256.0, dtype=torch.bfloat16)
    for stage in range(4):
        for contiguous in (True, False):
            e = engine_of(
                Low, stage, communication_dtype=torch.float32, contiguous_gradients=contiguous
            )
            with e.coalesce():
                for x in (big, ones, ones, ones):
                    e(x).backward()
            e(ones).backward()
            assert e.full_gradients()["w"].tolist() == [260.0] * 7, f"stage {stage}"
            e.step()
            assert e.full_parameters()["w"].tolist() == [1 - LR * 260.0] * 7
            e(ones * 2**-9).backward()
            e.step()
            assert e.full_parameters()["w"].tolist() == [1 - LR * (260.0 + 2**-9)] * 7


def test_the_reference_is_a_mean_over_ranks_of_other_data() -> None:
    plain = Reference(Net, 3)
    mean = plain.run(squares(2, 3), 0)
    alone = []
    for rank in range(3):
        module = Reference(Net, 1).modules[0]
        squares(2, 3)(Plain(module), Draw(rank, 0))
        alone.append(learning(module)["a.weight"].grad)
    assert not torch.allclose(alone[0], alone[1])
    assert torch.allclose(mean["a.weight"], torch.stack(alone).mean(0))
