"""`p.grad` while the engine holds the gradients: nothing that is done with it is silent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine
from fzero.adapter._gradient import HeldGradient
from fzero.errors import FzeroError, LayoutError, PhaseError
from tests.adapter.nets import Net
from tests.adapter.plain import LR, STAGES, Draw, Reference, engine_of, same
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

WORLDS = pytest.mark.parametrize("world_size", [1, 2])


def back(e: Any, draw: Draw) -> None:
    e(draw(2, 3)).square().sum().backward()


def params(e: Engine) -> list[nn.Parameter]:
    return list(e.module.parameters())


# What is done with p.grad, and what the error names as the engine's own way.


def scaled(e: Engine) -> None:
    """As after scaler.scale(loss).backward()."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(params(e), lr=LR))


def by_hand(e: Engine) -> None:
    with torch.no_grad():
        for p in params(e):
            assert p.grad is not None
            p.grad.mul_(0.5)


REFUSED: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "clip_grad_norm_": (
        lambda e: nn.utils.clip_grad_norm_(params(e), 1.0),
        r"engine\.clip_grad_norm_\(max_norm\)",
    ),
    "clip_grad_norm_ one by one": (
        lambda e: nn.utils.clip_grad_norm_(params(e), 1.0, foreach=False),
        r"engine\.clip_grad_norm_\(max_norm\)",
    ),
    "clip_grad_value_": (lambda e: nn.utils.clip_grad_value_(params(e), 0.1), "register_hook"),
    "GradScaler": (scaled, r"engine\.scale\(loss\)"),
    "zero_grad in place": (
        lambda e: e.module.zero_grad(set_to_none=False),
        r"engine\.zero_grad\(\)",
    ),
    "another optimizer": (
        lambda e: torch.optim.Adam(params(e)).step(),
        r"engine\.step\(\) runs the optimizer",
    ),
    "another optimizer, one by one": (
        lambda e: torch.optim.SGD(params(e), lr=LR, foreach=False).step(),
        r"engine\.step\(\) runs the optimizer",
    ),
    "written in place": (by_hand, r"engine\.set_full_gradient\(path, g\)"),
    "read": (lambda e: [p.grad.tolist() for p in params(e) if p.grad is not None], "full_gradient"),
    "compared": (lambda e: params(e)[0].grad == 0, "full_gradient"),
}


def refused(rank: int, world_size: int) -> None:
    for stage in STAGES:
        e, plain = engine_of(Net, stage), Reference(Net, world_size)
        wanted = plain.run(back, 0)
        back(e, Draw(rank, 0))
        for name, (do, way) in REFUSED.items():
            with pytest.raises(FzeroError, match=f"(?s)Fix: .*{way}") as caught:
                do(e)
            assert "a.weight" in str(caught.value), f"stage {stage}: {name}: {caught.value}"
        for p in params(e):  # the shape may be asked for
            assert p.grad is not None
            assert p.grad.shape == p.shape and p.grad.dtype == p.dtype and "Held" in repr(p.grad)
        same(f"stage {stage}: gradients", e.full_gradients(), wanted, 1e-11)
        e.step()
        same(f"stage {stage}: updated", e.full_parameters(), plain.step(wanted), 1e-11)
        assert all(p.grad is None for p in params(e))
        e.close()


@WORLDS
def test_reading_or_writing_a_gradient_through_p_grad_raises_and_names_the_engines_way(
    world_size: int,
) -> None:
    run_ranks(refused, world_size)


DROPPED: dict[str, Callable[[Engine], Any]] = {
    "module.zero_grad()": lambda e: e.module.zero_grad(),
    "optimizer.zero_grad()": lambda e: e.optimizer and e.optimizer.zero_grad(),
    "p.grad = None": lambda e: [setattr(p, "grad", None) for p in params(e)],
    "engine.zero_grad()": lambda e: e.zero_grad(),
}


def dropped(rank: int, world_size: int) -> None:
    for stage in STAGES:
        for name, drop in DROPPED.items():
            e, plain = engine_of(Net, stage), Reference(Net, world_size)
            label = f"stage {stage}, {name}"
            back(e, Draw(rank, 5))
            drop(e)
            with pytest.raises(PhaseError, match="there are no gradients"):
                e.step()
            back(e, Draw(rank, 5))
            drop(e)
            with pytest.raises(PhaseError, match="there are no gradients"):
                e.full_gradients()
            back(e, Draw(rank, 6))
            drop(e)
            for path in ("a", "b"):  # the next one comes through the module, and by another way
                wanted = plain.run(back if path == "a" else submodule, 0)
                (back if path == "a" else submodule)(e, Draw(rank, 0))
                assert e.state.progress.backwards == 1, label
                same(f"{label}: {path}", e.full_gradients(), wanted, 1e-11)
                drop(e)
            wanted = plain.run(back, 1)
            back(e, Draw(rank, 1))
            e.step()
            same(label, e.full_parameters(), plain.step(wanted), 1e-11)
            with e.no_sync():
                back(e, Draw(rank, 7))
            drop(e)
            with e.no_sync():
                back(e, Draw(rank, 8))
                drop(e)
            wanted = plain.run(back, 2)
            back(e, Draw(rank, 2))
            same(f"{label}: what waited", e.full_gradients(), wanted, 1e-11)
            e.close()


def submodule(e: Any, draw: Draw) -> None:
    e.module.a(draw(2, 3)).square().sum().backward()


@WORLDS
def test_whoever_sets_every_p_grad_to_none_drops_the_gradients(world_size: int) -> None:
    run_ranks(dropped, world_size)


class One(nn.Module):
    """A single parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def alone(rank: int, world_size: int) -> None:
    for stage in STAGES:
        e = engine_of(One, stage)
        x = torch.ones(3, dtype=torch.float64)
        e(x).backward()
        e.module.zero_grad()
        (2 * e.module.get_parameter("w")).sum().backward()  # by another way than the module
        assert e.full_gradient("w").tolist() == [2.0] * 3, f"stage {stage}"
        e.close()


@WORLDS
def test_the_gradient_of_a_single_parameter_is_dropped_too(world_size: int) -> None:
    run_ranks(alone, world_size)


def write_one(e: Engine) -> None:
    params(e)[1].grad = torch.ones_like(params(e)[1].detach())


def drop_some(e: Engine) -> None:
    torch.optim.SGD(params(e)[:3], lr=LR).zero_grad()


def half_done(rank: int, world_size: int) -> None:
    uses: list[Callable[[Engine], Any]] = [
        lambda e: e.step(),
        lambda e: e.full_gradients(),
        lambda e: e.clip_grad_norm_(1.0),
        lambda e: back(e, Draw(rank, 1)),
    ]
    for stage in STAGES:
        for change, seen in ((write_one, "a.bias was replaced"), (drop_some, "set to None")):
            e, plain = engine_of(Net, stage), Reference(Net, world_size)
            back(e, Draw(rank, 0))
            change(e)
            for use in uses * 2:  # it is not forgotten when it was said once
                with pytest.raises(LayoutError, match=f"(?s)p.grad of .*{seen}.*Fix: "):
                    use(e)
            assert int(e.state.step) == 0
            e.zero_grad()
            wanted = plain.run(back, 2)
            back(e, Draw(rank, 2))
            e.step()
            same(f"stage {stage}", e.full_parameters(), plain.step(wanted), 1e-11)
            e.close()


@WORLDS
def test_a_gradient_written_by_hand_or_dropped_in_part_raises_at_every_use_until_it_is_mended(
    world_size: int,
) -> None:
    run_ranks(half_done, world_size)


def clipped(rank: int, world_size: int) -> None:
    for stage in STAGES:
        for max_norm in (0.05, 1e6):
            e, plain = engine_of(Net, stage), Reference(Net, world_size)
            wanted = plain.run(back, 0)
            back(e, Draw(rank, 0))
            found = e.clip_grad_norm_(max_norm)
            leaves = [nn.Parameter(g) for g in wanted.values()]
            for p, g in zip(leaves, wanted.values(), strict=True):
                p.grad = g.clone()
            norm = nn.utils.clip_grad_norm_(leaves, max_norm)
            pairs = zip(wanted, leaves, strict=True)
            expected = {path: p.grad for path, p in pairs if p.grad is not None}
            label = f"stage {stage}, {max_norm}"
            assert torch.allclose(found.double(), norm, rtol=1e-11), label
            same(label, e.full_gradients(), expected, 1e-9)
            assert all(isinstance(p.grad, HeldGradient) for p in params(e)), label
            e.close()


@WORLDS
def test_the_engines_clip_grad_norm_does_what_torchs_does(world_size: int) -> None:
    run_ranks(clipped, world_size)


def accumulated(rank: int, world_size: int) -> None:
    """Backwards of every kind while the stand-ins are up: each adds to what is held."""

    def several(e: Any, draw: Draw) -> None:
        back(e, draw)
        submodule(e, draw)
        back(e, draw)
        sum(p.square().sum() for p in e.module.parameters()).backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward", UserWarning)
            e(draw(2, 3)).square().sum().backward(create_graph=True)
        with e.no_sync():
            back(e, draw)
        submodule(e, draw)

    for stage in STAGES:
        e, plain = engine_of(Net, stage), Reference(Net, world_size)
        for number in range(2):
            wanted = plain.run(several, number)
            several(e, Draw(rank, number))
            assert all(isinstance(p.grad, HeldGradient) for p in params(e)), f"stage {stage}"
            same(f"stage {stage}", e.full_gradients(), wanted, 1e-10)
            e.step()
            assert all(p.grad is None for p in params(e)), f"stage {stage}"
            same(f"stage {stage}", e.full_parameters(), plain.step(wanted), 1e-10)
        e.close()
        assert all(p.grad is None for p in params(e))


@WORLDS
def test_backwards_add_up_while_the_engine_holds_gradients(world_size: int) -> None:
    run_ranks(accumulated, world_size)


def after_errors(rank: int, world_size: int) -> None:
    """A use that raised leaves the gradients, and what stands for them, where they were."""

    def fails(gradient: Tensor) -> None:
        raise ValueError("raised in a hook")

    for stage in STAGES:
        e = engine_of(Net, stage)
        back(e, Draw(rank, 0))
        out = e(Draw(rank, 1)(2, 3))
        out.register_hook(fails)
        with pytest.raises((ValueError, FzeroError)):
            out.sum().backward()
        with pytest.raises(PhaseError, match=r"through p\.grad"):
            nn.utils.clip_grad_norm_(params(e), 1.0)
        e.module.zero_grad()
        with pytest.raises(PhaseError, match="there are no gradients"):
            e.step()
        e.close()


@WORLDS
def test_a_backward_that_raised_leaves_the_gradients_of_those_before_it_held(
    world_size: int,
) -> None:
    run_ranks(after_errors, world_size)
