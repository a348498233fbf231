"""Whatever way a backward is begun, the gradients are those of plain PyTorch.

Each style is one program (tests/adapter/plain.py), run at every stage, for two steps. What
test_random_programs.py draws, several losses in any order say, is not here again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.adapter.nets import Net, Outputs, Record, TiledLoss
from tests.adapter.on_ranks import Place, at_places, on_ranks
from tests.adapter.plain import Draw, Program, back, check_program

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
outputs("a_closure", lambda h, y: lambda: y, lambda r: (r(),))
outputs("only_the_first_output", lambda h, y: (h, y), lambda r: r[:1])
outputs("an_output_twice", lambda h, y: (y, y, y[0]), lambda r: r)


@style()
def backwards_with_a_gradient(e: Any, draw: Draw) -> None:
    e(draw(2, 3)).backward(draw(2, 3))
    e.backward(e(draw(2, 3)), draw(2, 3))


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


@style()
def a_backward_into_the_inputs_only_before(e: Any, draw: Draw) -> None:
    x = draw(2, 3).requires_grad_()
    e(x).sum().backward(inputs=[x])
    assert x.grad is not None
    e(x.grad.detach()).square().sum().backward()


@style()
def a_gradient_penalty_in_the_loss(e: Any, draw: Draw) -> None:
    x = draw(2, 3).requires_grad_()
    out = e(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().sum() + 3 * (g.norm(dim=1) - 1).square().mean()).backward()


@style()
def the_gradients_of_the_parameters_in_the_loss(e: Any, draw: Draw) -> None:
    loss = e(draw(2, 3)).square().sum()
    found = torch.autograd.grad(loss, list(e.module.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in found)).backward()


@style()
def a_parameter_in_the_loss(e: Any, draw: Draw) -> None:
    decay = sum(p.square().sum() for p in e.module.parameters())
    (e(draw(2, 3)).square().sum() + 0.5 * decay).backward()


@style()
def a_tiled_loss_outside(e: Any, draw: Draw) -> None:
    TiledLoss.apply(e(draw(5, 3)), e.module.c).backward()


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
def one_after_another_of_every_kind(e: Any, draw: Draw) -> None:
    """Each adds to what is held, while the stand-ins are in p.grad."""
    back(e, draw)
    e.module.a(draw(2, 3)).square().sum().backward()
    back(e, draw)
    sum(p.square().sum() for p in e.module.parameters()).backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward", UserWarning)
        e(draw(2, 3)).square().sum().backward(create_graph=True)
    with e.no_sync():
        back(e, draw)
    e.module.a(draw(2, 3)).square().sum().backward()


@style()
def inference_mode_while_gradients_wait(e: Any, draw: Draw) -> None:
    with e.coalesce():
        back(e, draw)
        with torch.inference_mode():
            e(draw(2, 3))
        back(e, draw)
    e.module.a(draw(2, 3)).sum().backward()
    with torch.inference_mode():
        e(draw(2, 3))
    back(e, draw)


@on_ranks(1, 2, pytest.param(3, marks=pytest.mark.slow), timeout_s=30)
@pytest.mark.parametrize("name", STYLES)
def test_gradients_and_updates_of_every_style_are_those_of_plain_pytorch(
    rank: int, world_size: int, name: str
) -> None:
    """On one rank in one bucket; on several with a bucket for each parameter."""
    options: Any = {} if world_size == 1 else {"bucket_bytes": 8}
    check_program(rank, world_size, *STYLES[name], **options)


@at_places(1, 2)
def test_a_gradient_of_the_input_is_no_backward(at: Place) -> None:
    e = at.engine(Net)
    x = at.draw(0)(2, 3).requires_grad_()
    torch.autograd.grad(e(x).sum(), x)
    assert e.state.progress.backwards == 0 and not e.state.gradients.held
    assert all(p.grad is None for p in e.module.parameters())
    assert e.hooks.backward_active_depth == 0
    with pytest.raises(RuntimeError, match="no gradients"):
        e.full_gradients()
