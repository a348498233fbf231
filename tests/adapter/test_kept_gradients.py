"""A `p.grad` that is kept over zero_grad() or step() shows what it showed, or raises.

It is compared with plain PyTorch, where a gradient that was dropped is a tensor as any.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.adapter import Engine
from fzero.errors import FzeroError, PhaseError
from tests.adapter.nets import Net
from tests.adapter.on_ranks import STAGES, Place, each_stage, on_ranks
from tests.adapter.plain import Draw, Reference, back, engine_of, learning, same

Drop = Callable[[Engine], Any]


def set_to_none(e: Engine) -> None:
    for p in e.module.parameters():
        p.grad = None


DROPS: tuple[Drop, ...] = (
    lambda e: e.zero_grad(),
    lambda e: e.module.zero_grad(),
    lambda e: e.optimizer and e.optimizer.zero_grad(),
    set_to_none,
    lambda e: e.step(),
)


def grads_of(e: Engine) -> dict[str, Any]:
    return {path: p.grad for path, p in learning(e.module).items()}


def norms(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path: g.norm() for path, g in grads.items()}


@on_ranks(1, 2, pytest.param(4, marks=pytest.mark.slow))
def test_gradients_of_tasks_are_compared_as_in_torch(rank: int, world_size: int) -> None:
    for stage in STAGES:
        for drop in DROPS:
            e, plain = engine_of(Net, stage), Reference(Net, world_size)
            wanted, kept = [], []
            for number in range(3):
                wanted.append(plain.run(back, number))
                back(e, Draw(rank, number))
                kept.append(grads_of(e))
                if number < 2:
                    drop(e)
                if drop is DROPS[-1] and number < 2:
                    plain.step(wanted[-1])
            label = f"stage {stage}, drop {DROPS.index(drop)}"
            for mine, theirs in zip(kept, wanted, strict=True):
                same(norms(mine), norms(theirs), label=label)
                if stage == 0:
                    same({path: g.clone() for path, g in mine.items()}, theirs, label=label)
                    assert (kept[0]["a.weight"] - kept[1]["a.weight"]).norm() > 0
                else:
                    with pytest.raises(PhaseError, match="full_gradient"):
                        mine["a.weight"].tolist()
            with pytest.raises(PhaseError, match=r"(?s)earlier gradient of a.weight.*Fix: "):
                kept[0]["a.weight"].mul_(2.0)
            assert e.module.get_parameter("a.weight").grad is kept[2]["a.weight"]
            assert e.step()
            same(e.full_parameters(), plain.step(wanted[-1]), label=label)
            e.close()


@each_stage
def test_a_gradient_shows_the_sum_while_nobody_drops_it(stage: int) -> None:
    e, plain = engine_of(Net, stage), Reference(Net, 1)
    first = plain.run(back, 0)
    back(e, Draw(0, 0))
    kept = grads_of(e)
    back(e, Draw(0, 1))
    both = {path: g + first[path] for path, g in plain.run(back, 1).items()}
    assert all(p.grad is kept[path] for path, p in learning(e.module).items())
    same(norms(kept), norms(both))
    e.module.zero_grad(set_to_none=False)  # in torch the same tensor goes on
    if stage == 0:
        assert all(not g.clone().any() for g in kept.values())
    back(e, Draw(0, 2))
    assert all(p.grad is kept[path] for path, p in learning(e.module).items())
    same(norms(kept), norms(plain.run(back, 2)))
    copies = norms(kept)
    e.zero_grad()
    back(e, Draw(0, 3))
    same(norms(kept), copies)


@each_stage
def test_what_was_never_reduced_or_is_used_up_raises(stage: int) -> None:
    e = engine_of(Net, stage, max_norm=1e-3)
    for drop in DROPS[:-1]:
        with e.no_sync():
            back(e, Draw(0, 0))
            kept = grads_of(e)
            drop(e)
        back(e, Draw(0, 1))
        with pytest.raises(PhaseError, match=r"(?s)before it was dropped or used.*Fix: "):
            kept["a.weight"].norm()
        e.zero_grad()
    back(e, Draw(0, 0))
    kept = grads_of(e)
    assert e.step()  # which has scaled them
    back(e, Draw(0, 1))
    with pytest.raises(PhaseError, match=r"(?s)max_norm.*Fix: "):
        kept["a.weight"].norm()
    back(e, Draw(0, 2))
    kept, shown = grads_of(e), e.full_gradients()
    e.zero_grad()
    same(norms(kept), norms(shown))
    e.close()
    with pytest.raises(FzeroError, match="closed"):
        kept["a.bias"].norm(3)


@each_stage
def test_a_fused_kernel_divides_by_the_loss_scale_in_place(stage: int) -> None:
    e, plain = engine_of(Net, stage, loss_scale=8.0), Reference(Net, 1)
    wanted = plain.run(back, 0)
    e.scale(e(Draw(0, 0)(2, 3)).square().sum()).backward()
    kept = grads_of(e)
    same(norms(kept), norms(wanted))
    assert e.step()
    with pytest.raises(PhaseError, match=r"(?s)loss scale.*Fix: "):
        kept["a.weight"].norm()
    same(e.full_parameters(), plain.step(wanted))


def test_gradients_that_nobody_keeps_go_with_the_update() -> None:
    e = engine_of(Net, 0)
    for _ in range(2):
        back(e, Draw(0, 0))
        flat = weakref.ref(e.state.gradients.flats[0].untyped_storage())
        kept = e.module.get_parameter("a.weight").grad
        assert e.step()
        gc.collect()
        assert kept is not None and kept.norm() > 0
        del kept
        gc.collect()
        assert flat() is None


@on_ranks(2)
def test_one_rank_that_asks_for_an_earlier_norm_alone_raises_everywhere(
    rank: int, world_size: int
) -> None:
    for stage in (0, 2):
        e = Place(rank, world_size, stage).engine(Net)
        back(e, Draw(rank, 0))
        kept: Any = next(e.module.parameters()).grad
        e.zero_grad()
        with pytest.raises(FzeroError, match="earlier gradient"):
            kept.norm() if rank == 0 else e.full_parameters()
        assert torch.isfinite(kept.norm())
        e.close()
