"""Whatever way a backward is begun, the gradients are those of plain PyTorch.

Each style is one program (tests/adapter/plain.py), run at every stage, for two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.adapter.nets import F64, Net, Outputs, Plainly, Record, Slots, Tiled, TiledLoss
from tests.adapter.plain import Draw, Program, check_program, engine_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")
Style = tuple[Callable[[], nn.Module], Program]
STYLES: dict[str, Style] = {}


def style(make: Callable[[], nn.Module] = Net) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        STYLES[program.__name__] = (make, program)
        return program

    return add


def outputs(name: str, wrap: Callable[[Tensor, Tensor], Any], pick: Any) -> None:
    """A style: the module returns wrap(h, out), the loss is made of the tensors pick(wrapped)."""

    def program(e: Any, draw: Draw) -> None:
        sum(x.square().sum() for x in pick(e(draw(2, 3)))).backward()

    STYLES[name] = (lambda: Outputs(wrap), program)


outputs("a_tuple", lambda h, y: (h, y), lambda r: r)
outputs("a_dict", lambda h, y: {"h": h, "y": y}, lambda r: r.values())
outputs("a_dataclass", lambda h, y: Record(h, {"y": [y, 3]}), lambda r: (r.hidden, r.rest["y"][0]))
outputs("nested", lambda h, y: {"a": ([h], {"b": (y, None)})}, lambda r: (r["a"][0][0],))
outputs("an_object", lambda h, y: Plainly(y), lambda r: (r.out,))
outputs("an_object_with_slots", lambda h, y: Slots(y), lambda r: (r.get(),))
outputs("a_closure", lambda h, y: lambda: y, lambda r: (r(),))
outputs("only_the_first_output", lambda h, y: (h, y), lambda r: r[:1])
outputs("an_output_twice", lambda h, y: (y, y, y[0]), lambda r: r)


@style()
def a_loss_outside(e: Any, draw: Draw) -> None:
    torch.nn.functional.mse_loss(e(draw(2, 3)), draw(2, 3)).backward()


@style()
def out_backward_with_a_gradient(e: Any, draw: Draw) -> None:
    e(draw(2, 3)).backward(draw(2, 3))


@style()
def engine_backward(e: Any, draw: Draw) -> None:
    e.backward(e(draw(2, 3)).square().sum())
    e.backward(e(draw(2, 3)), draw(2, 3))


@style()
def a_list_of_losses(e: Any, draw: Draw) -> None:
    losses = [e(draw(2, 3)).square().sum(), e(draw(4, 3)).sum(), e(draw(1, 3))]
    torch.autograd.backward(losses, [torch.ones_like(x) for x in losses])


@style()
def engine_module(e: Any, draw: Draw) -> None:
    e.module(draw(2, 3)).square().sum().backward()


@style()
def forwards_then_backwards_fifo(e: Any, draw: Draw) -> None:
    losses = [e(draw(2, 3)).square().sum() for _ in range(3)]
    for loss in losses:
        loss.backward()


@style()
def forwards_then_backwards_lifo(e: Any, draw: Draw) -> None:
    losses = [e(draw(2, 3)).square().sum() for _ in range(3)]
    for loss in reversed(losses):
        loss.backward()


@style()
def more_forwards_than_backwards(e: Any, draw: Draw) -> None:
    losses = [e(draw(2, 3)).square().sum() for _ in range(3)]
    losses[1].backward()


@style()
def two_backwards_through_one_forward(e: Any, draw: Draw) -> None:
    loss = e(draw(2, 3)).square().sum()
    for keep in (True, True, False):
        loss.backward(retain_graph=keep)


@style(lambda: Outputs(lambda h, y: (h, y)))
def a_backward_for_each_output(e: Any, draw: Draw) -> None:
    h, y = e(draw(2, 3))
    y.square().sum().backward(retain_graph=True)
    h.backward(draw(2, 5))


@style()
def an_output_changed_in_place(e: Any, draw: Draw) -> None:
    e(draw(2, 3)).mul_(2.0).sin_().sum().backward()


@style()
def a_gradient_of_the_input_first(e: Any, draw: Draw) -> None:
    x = draw(2, 3).requires_grad_()
    (g,) = torch.autograd.grad(e(x).sum(), x)
    e(x.detach() + g).square().sum().backward()


def penalty(e: Any, draw: Draw) -> tuple[Tensor, Tensor]:
    x = draw(2, 3).requires_grad_()
    out = e(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out, (g.norm(dim=1) - 1).square().mean()


@style()
def a_gradient_penalty_in_the_loss(e: Any, draw: Draw) -> None:
    out, extra = penalty(e, draw)
    (out.square().sum() + 3 * extra).backward()


@style()
def a_gradient_penalty_alone(e: Any, draw: Draw) -> None:
    penalty(e, draw)[1].backward()


@style()
def a_gradient_penalty_after_the_loss(e: Any, draw: Draw) -> None:
    e(draw(2, 3)).square().sum().backward()
    penalty(e, draw)[1].backward()


@style()
def the_gradients_of_the_parameters_in_the_loss(e: Any, draw: Draw) -> None:
    loss = e(draw(2, 3)).square().sum()
    found = torch.autograd.grad(loss, list(e.module.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in found)).backward()


@style()
def only_a_submodule(e: Any, draw: Draw) -> None:
    e.module.a(draw(2, 3)).square().sum().backward()


@style()
def a_submodule_by_engine_backward(e: Any, draw: Draw) -> None:
    e.backward(e.module.a(draw(2, 3)).square().sum())


@style()
def the_loss_then_a_submodule(e: Any, draw: Draw) -> None:
    e(draw(2, 3)).square().sum().backward()
    e.module.b(draw(2, 5)).square().sum().backward()


@style()
def a_submodule_then_the_loss(e: Any, draw: Draw) -> None:
    e.module.c(draw(2, 3)).square().sum().backward()
    e(draw(2, 3)).square().sum().backward()


@style()
def a_parameter_in_the_loss(e: Any, draw: Draw) -> None:
    decay = sum(p.square().sum() for p in e.module.parameters())
    (e(draw(2, 3)).square().sum() + 0.5 * decay).backward()


@style()
def a_loss_of_parameters_only(e: Any, draw: Draw) -> None:
    sum(p.square().sum() * (draw.rank + 1) for p in e.module.parameters()).backward()


@style(Tiled)
def a_tiled_loss_in_the_module(e: Any, draw: Draw) -> None:
    e(draw(5, 3)).backward()
    (2 * e(draw(5, 3))).backward()


@style()
def a_tiled_loss_outside(e: Any, draw: Draw) -> None:
    TiledLoss.apply(e(draw(5, 3)), e.module.c).backward()


@style(Tiled)
def two_tiled_forwards_first(e: Any, draw: Draw) -> None:
    losses = [e(draw(5, 3)), e(draw(3, 3))]
    losses[1].backward()
    losses[0].backward()


def whole(e: Any, draw: Draw, reentrant: bool) -> None:
    xs = [draw(2, 3).requires_grad_() for _ in range(3)]
    parts = [checkpoint(e, x, use_reentrant=reentrant).square().sum() for x in xs[:2]]
    torch.stack([*parts, e(xs[2]).sum()]).sum().backward()


@style()
def the_engine_in_reentrant_checkpoints(e: Any, draw: Draw) -> None:
    whole(e, draw, True)


@style()
def the_engine_in_checkpoints(e: Any, draw: Draw) -> None:
    whole(e, draw, False)


@style()
def an_evaluation_between_forward_and_backward(e: Any, draw: Draw) -> None:
    loss = e(draw(2, 3)).square().sum()
    with torch.no_grad():
        e(draw(4, 3))
    loss.backward()


@style()
def a_backward_into_the_inputs_only_before(e: Any, draw: Draw) -> None:
    x = draw(2, 3).requires_grad_()
    e(x).sum().backward(inputs=[x])
    assert x.grad is not None
    e(x.grad.detach()).square().sum().backward()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", STYLES)
def test_gradients_and_updates_of_every_style_are_those_of_plain_pytorch(
    name: str, world_size: int
) -> None:
    run_ranks(one_style, world_size, name, {}, timeout_s=30)


@pytest.mark.parametrize("name", STYLES)
def test_every_style_on_three_ranks_with_a_bucket_for_each_parameter(name: str) -> None:
    run_ranks(one_style, 3, name, {"bucket_bytes": 8, "contiguous_gradients": False}, timeout_s=30)


def one_style(rank: int, world_size: int, name: str, options: dict[str, Any]) -> None:
    make, program = STYLES[name]
    check_program(rank, world_size, make, program, **options)


class Summed(nn.Module):
    """Autograd gives both parameters one gradient, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, dtype=F64))
        self.b = nn.Parameter(torch.full((4,), 2.0, dtype=F64))

    def forward(self) -> Tensor:
        return (self.a.unsqueeze(0) + self.b.unsqueeze(0)).square().sum()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_two_parameters_share_is_counted_once_for_each(world_size: int) -> None:
    run_ranks(one_gradient_for_two_parameters, world_size)


def one_gradient_for_two_parameters(rank: int, world_size: int) -> None:
    for stage in range(4):
        for windows in (False, True):
            e = engine_of(Summed, stage, bucket_bytes=8)
            for _ in range(6):  # a bucket that is reduced may be faster than the rest, or not
                with e.coalesce() if windows else nullcontext():
                    for _ in range(2):
                        e().backward()
                for path, gradient in e.full_gradients().items():
                    label = f"stage {stage}, {windows=}, {path}: {gradient.tolist()}"
                    assert gradient.tolist() == [12.0] * 4, label
                e.zero_grad()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_of_the_input_is_no_backward(world_size: int) -> None:
    run_ranks(only_a_gradient_of_the_input, world_size)


def only_a_gradient_of_the_input(rank: int, world_size: int) -> None:
    for stage in range(4):
        e = engine_of(Net, stage)
        x = Draw(rank, 0)(2, 3).requires_grad_()
        torch.autograd.grad(e(x).sum(), x)
        seen = e.state.progress
        assert seen.backwards == 0 and not e.state.gradients.held, f"stage {stage}: {seen}"
        assert all(p.grad is None for p in e.module.parameters())
        assert e.hooks.backward_active_depth == 0
        with pytest.raises(RuntimeError, match="no gradients"):
            e.step()
