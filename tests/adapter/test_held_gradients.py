"""`p.grad` while the engine holds the gradients: nothing that is done with it is silent.

What works through it is in test_p_grad.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import Engine
from fzero.checkpoint import save
from fzero.errors import FzeroError, LayoutError, PhaseError
from tests.adapter.nets import Net, linear
from tests.adapter.on_ranks import Place, at_places, each_stage
from tests.adapter.plain import LR, Draw, back, engine_of, same, update


def params(e: Engine) -> list[nn.Parameter]:
    return list(e.module.parameters())


def unscale(e: Engine) -> None:
    """As after scaler.scale(loss).backward()."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(params(e), lr=LR))


@torch.no_grad()
def sort(e: Engine) -> None:
    for p in params(e):
        assert p.grad is not None
        p.grad.cumsum_(0)


# What is done with p.grad, and what the error names as the engine's own way.
REFUSED: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "GradScaler": (unscale, r"engine\.scale\(loss\)"),
    "no elementwise operator": (sort, r"engine\.set_full_gradient\(path, g\)"),
    "draws": (lambda e: [p.grad.normal_() for p in params(e) if p.grad is not None], "randn_like"),
    "a row": (lambda e: [p.grad[:1].cumsum_(0) for p in params(e) if p.grad is not None],
        "set_full_gradient"),
    "its memory": (lambda e: [p.grad.share_memory_() for p in params(e) if p.grad is not None],
        r"share_memory\(\) before the Engine"),
    "its address": (lambda e: [p.grad.data_ptr() for p in params(e) if p.grad is not None],
        r"full_gradient\(path\)"),
}  # fmt: skip
# At stage 0 every rank has all elements.
SHARDED: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "another optimizer": (
        lambda e: torch.optim.Adam(params(e)).step(),
        r"engine\.step\(\) runs the optimizer",
    ),
    "read": (lambda e: [p.grad.tolist() for p in params(e) if p.grad is not None], "full_gradient"),
    "reduced": (
        lambda e: [abs(p.grad).max() for p in params(e) if p.grad is not None],
        "full_grad",
    ),
    "into another tensor": (
        lambda e: [torch.zeros_like(p.grad).add_(p.grad) for p in params(e) if p.grad is not None],
        "full_gradient",
    ),
}


@at_places(1, 2)
def test_reading_or_writing_a_gradient_through_p_grad_raises_and_names_the_engines_way(
    at: Place,
) -> None:
    e, plain = at.both(Net)

    def tried(e: Any, draw: Draw) -> None:
        back(e, draw)
        if not isinstance(e, Engine):
            return
        for name, (do, way) in {**REFUSED, **(SHARDED if at.stage else {})}.items():
            with pytest.raises(FzeroError, match=f"(?s)Fix: .*{way}") as caught:
                do(e)
            assert "a.weight" in str(caught.value), f"{name}: {caught.value}"
        for p in params(e):  # the shape may be asked for
            assert p.grad is not None
            assert (
                p.grad.shape == p.shape
                and p.grad.dtype == p.dtype
                and "ShardedGrad" in repr(p.grad)
            )

    update(e, plain, at.rank, 0, tried)
    assert all(p.grad is None for p in params(e))


def stepping(p: nn.Parameter) -> Callable[[Any], None]:
    """An optimizer in the backward: it steps as soon as this parameter has its gradient."""
    own = torch.optim.SGD([p], lr=LR)
    return lambda _: own.step()


HOOKS: dict[str, Callable[[nn.Parameter], Callable[[Any], None]]] = {
    "an optimizer's step": stepping,
    "added to": lambda p: lambda p: p.grad.add_(1.0),
    "read": lambda p: lambda p: p.grad + 1.0,
}


@at_places(1, 2)
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("first", [True, False])
def test_a_hook_on_p_grad_raises_whether_it_or_the_engine_was_there_first(
    at: Place, name: str, first: bool
) -> None:
    module = linear(3, 2)
    handles: list[Any] = []

    def hook() -> None:
        for p in module.parameters():
            handles.append(p.register_post_accumulate_grad_hook(HOOKS[name](p)))

    if first:
        hook()
    e = Engine(module, torch.optim.SGD(module.parameters(), lr=LR), stage=at.stage)
    if not first:
        hook()
    before = e.full_parameters()
    for _ in range(2):  # the second time the stand-ins are there already
        with pytest.raises(FzeroError, match=r"engine\.step\(\)"):
            e.backward(e.module(torch.full((1, 3), 1.0 + at.rank, dtype=torch.float64)).sum())
    same(e.full_parameters(), before, 0.0)
    for handle in handles:
        handle.remove()
    e.zero_grad()
    e.backward(e.module(torch.ones(1, 3, dtype=torch.float64)).sum())
    assert e.full_gradient("bias").tolist() == [1.0] * module.bias.numel()


def set_to_none(e: Engine) -> None:
    for p in params(e):
        p.grad = None


DROPPED: dict[str, Callable[[Engine], Any]] = {
    "module.zero_grad()": lambda e: e.module.zero_grad(),
    "optimizer.zero_grad()": lambda e: e.optimizer and e.optimizer.zero_grad(),
    "p.grad = None": set_to_none,
    "engine.zero_grad()": lambda e: e.zero_grad(),
    "module.zero_grad(set_to_none=False)": lambda e: e.module.zero_grad(set_to_none=False),
    "foreach": lambda e: torch.optim.SGD(params(e), foreach=True).zero_grad(set_to_none=False),
}


def submodule(e: Any, draw: Draw) -> None:
    e.module.a(draw(2, 3)).square().sum().backward()


@at_places(1, 2)
@pytest.mark.parametrize("name", DROPPED)
def test_whoever_sets_every_p_grad_to_none_drops_the_gradients(at: Place, name: str) -> None:
    (e, plain), drop = at.both(Net), DROPPED[name]
    back(e, at.draw(5))
    drop(e)
    with pytest.raises(PhaseError, match="there are no gradients"):
        e.full_gradients()
    back(e, at.draw(5))
    drop(e)
    assert e.step()  # of nothing
    same(e.full_parameters(), plain.parameters())
    back(e, at.draw(6))
    drop(e)
    for program in (back, submodule):  # the next one comes by the engine's call, or around it
        program(e, at.draw(0))
        assert e.state.progress.backwards == 1
        same(e.full_gradients(), plain.run(program, 0))
        drop(e)
    update(e, plain, at.rank, 1)
    with e.no_sync():
        back(e, at.draw(7))
    drop(e)
    with e.no_sync():
        back(e, at.draw(8))
        drop(e)
    update(e, plain, at.rank, 2)


@at_places(1, 2)
def test_the_gradient_of_a_single_parameter_is_dropped_too(at: Place) -> None:
    e = engine_of(lambda: linear(3, 1, bias=False), at.stage)
    e(torch.ones(1, 3, dtype=torch.float64)).backward()
    e.module.zero_grad()
    (2 * e.module.get_parameter("weight")).sum().backward()  # by another way than the module
    assert e.full_gradient("weight").tolist() == [[2.0] * 3]


@at_places(1, 2)
@pytest.mark.parametrize("window", [False, True])
def test_the_state_has_no_gradients_after_zero_grad_of_an_optimizer_and_is_saved(
    at: Place, window: bool, tmp_path: Path
) -> None:
    e, plain = at.both(Net)
    with e.no_sync() if window else nullcontext():
        back(e, at.draw(0))
    torch.optim.SGD(params(e), lr=LR).zero_grad()
    save(tmp_path / "state", e)  # it refuses gradients
    assert not e.state.gradients.held and not e.state.window.pending.held
    update(e, plain, at.rank, 1)


@each_stage
def test_a_module_is_not_moved_to_shared_memory_under_its_gradients(stage: int) -> None:
    """torch would share the memory that the stand-in has not, and end the process."""
    e = engine_of(Net, stage)
    back(e, Draw(0, 0))
    with pytest.raises((PhaseError, LayoutError), match=r"(?s)share.*before"):
        e.module.share_memory()
