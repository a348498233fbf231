"""Through `p.grad` works what torch's users do with gradients: clipping, norms, zero_grad.

The right values are those of plain PyTorch on one process, which has the mean of the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import FzeroError, MismatchError, PhaseError
from tests.adapter.nets import Net
from tests.adapter.on_ranks import STAGES, Place, at_places, on_ranks
from tests.adapter.plain import Draw, Reference, back, engine_of, learning, same

INF = float("inf")
ORDERS = (2.0, 1.0, INF, 3.0)


def clip(p: Any, order: float, foreach: bool | None) -> Tensor:
    return nn.utils.clip_grad_norm_(p, 0.5, norm_type=order, foreach=foreach)


def in_two_calls(p: Any, order: float, foreach: bool | None) -> Tensor:
    some = list(p)
    norm = nn.utils.get_total_norm([x.grad for x in some], order, foreach=foreach)
    nn.utils.clip_grads_with_norm_(some, 0.5, norm, foreach)
    return norm


def by_hand(p: Any, order: float, foreach: bool | None) -> Tensor:
    some = list(p)
    norm = torch.stack([x.grad.detach().data.norm(order) for x in some]).norm(order)
    for x in some:
        x.grad.data *= 0.5 / max(float(norm), 0.5)
    return norm


def of_a_part(p: Any, order: float, foreach: bool | None) -> Tensor:
    return clip(list(p)[1:3], order, foreach)


def by_value(p: Any, order: float, foreach: bool | None) -> Tensor:
    some = list(p)
    nn.utils.clip_grad_value_(some, 0.05, foreach=foreach)
    return in_two_calls(some, order, foreach)


def scaled_and_zeroed(p: Any, order: float, foreach: bool | None) -> Tensor:
    some = list(p)
    some[0].grad.zero_()
    some[1].grad.div_(torch.tensor(4.0))
    return sum((x.grad.norm() ** 2 for x in some), torch.zeros(())) ** 0.5


DO = (clip, in_two_calls, by_hand, of_a_part, by_value, scaled_and_zeroed)
DoesThis = Callable[[Any, float, bool | None], Tensor]


def follow(e: Engine, plain: Reference, rank: int, do: DoesThis, label: str) -> None:
    """Two steps of both with what is done between backward and step, and norms after it."""
    for number in range(2):
        order, foreach = ORDERS[number + 2 * (do is clip)], (None, True, False)[number % 3]
        gradients = plain.run(back, number)
        for path, p in learning(plain.module).items():
            p.grad = gradients[path]
        back(e, Draw(rank, number))
        for _ in range(2):  # the second time the gradients are others
            wanted = do(learning(plain.module).values(), order, foreach)
            found = do(e.module.parameters(), order, foreach)
            assert torch.allclose(found, wanted.to(found), rtol=1e-10), label
        left = {path: p.grad for path, p in learning(plain.module).items() if p.grad is not None}
        same(e.full_gradients(), left, 1e-10, label)
        for p, q in zip(e.module.parameters(), left.values(), strict=True):
            assert p.grad is not None and torch.allclose(p.grad.norm(), q.norm(), rtol=1e-10), label
        assert e.step()
        same(e.full_parameters(), plain.step(left), 1e-10, label)


@on_ranks(*(pytest.param(w, marks=pytest.mark.slow) for w in (1, 2)), 3)
def test_clipping_and_norms_by_torchs_own_functions_are_those_of_one_process(
    rank: int, world_size: int
) -> None:
    for stage in STAGES:
        for do in DO:
            e, plain = engine_of(Net, stage), Reference(Net, world_size)
            follow(e, plain, rank, do, f"stage {stage}, {do.__name__}")
            e.close()


OPTIONS: tuple[dict[str, Any], ...] = (
    {"loss_scale": 1024.0},
    {"average_micro_batches": True},
    {"loss_scale": "dynamic", "average_micro_batches": True},
    {"offload": fzero.Offload(optimizer="cpu", gradients="cpu")},
)


@at_places(2)
def test_what_is_clipped_is_what_an_update_uses(at: Place) -> None:
    """Without the loss scale, averaged; masters in fp32 for parameters in bf16."""
    for options in OPTIONS:
        for dtype in (torch.float64, torch.bfloat16):
            module = Net().to(dtype)
            e = Engine(
                module, torch.optim.SGD(module.parameters(), lr=0.5), stage=at.stage, **options
            )
            for number in range(2):
                e.backward(e(at.draw(number)(2, 3, dtype=dtype)).square().sum())
            before = e.full_gradients()
            norm = torch.stack([x.norm() for x in before.values()]).norm()
            found = nn.utils.clip_grad_norm_(module.parameters(), float(norm) / 2)
            assert torch.allclose(found.double(), norm.double(), rtol=1e-5), options
            bound = float(norm) / 8
            (e.clip_grad_value_ if at.rank < 0 or dtype is torch.float64 else clamp(e))(bound)
            wanted = {path: (x / 2).clamp(-bound, bound) for path, x in before.items()}
            same(e.full_gradients(), wanted, 1e-5, f"{options}")
            if at.stage == 0:
                for path, p in module.named_parameters():
                    assert p.grad is not None
                    assert torch.equal(p.grad.clone(), e.full_gradient(path).to(dtype))
            assert e.step()
            e.close()


def clamp(e: Engine) -> Callable[[float], None]:
    return lambda bound: nn.utils.clip_grad_value_(e.module.parameters(), bound)


@at_places(2)
def test_what_one_rank_does_alone_raises_on_every_rank(at: Place) -> None:
    e = at.engine(Net)
    first = next(e.module.parameters())

    def alone() -> Any:
        return first.grad.norm() if at.rank == 0 else e.step()

    def differs() -> Any:
        first.grad.mul_(0.5 + at.rank)
        return e.step()

    def dropped() -> Any:
        if at.rank == 0:
            first.grad.zero_()
        return e.step()

    for do, seen in (
        (alone, r"p\.grad\.norm\(2\)"),
        (differs, r"mul_\(1\.5\)"),
        (dropped, "zero_"),
    ):
        back(e, at.draw(0))
        before = e.full_parameters()
        with pytest.raises(MismatchError, match=seen):
            do()
        same(e.full_parameters(), before, 0.0)
        e.zero_grad()
    with e.no_sync():
        back(e, at.draw(1))
        for refused in (first.grad.norm, lambda: first.grad.mul_(2.0)):
            with pytest.raises(PhaseError, match="inside a window"):
                refused()
    assert first.grad.norm() > 0  # what waited is reduced for it, on both ranks
    with torch.inference_mode():
        first.grad.mul_(0.5)
        assert first.grad.norm() > 0
    assert e.step()


@on_ranks(1, 2)
def test_at_stage_0_the_elements_of_p_grad_are_read_as_those_of_any_gradient(
    rank: int, world_size: int
) -> None:
    e, plain = engine_of(Net, 0), Reference(Net, world_size)
    wanted = plain.run(back, 0)
    with e.no_sync():
        back(e, Draw(rank, 0))
    some = dict(e.module.named_parameters())
    same({path: p.grad.clone() for path, p in some.items()}, wanted)
    joined = torch.cat([p.grad.flatten() for p in some.values()])
    assert torch.allclose(joined, torch.cat([g.flatten() for g in wanted.values()]))
    weight = some["a.weight"].grad
    assert weight is not None and type(weight[0] + 1) is Tensor and "tensor" in repr(weight)
    assert weight.tolist() == e.full_gradient("a.weight").tolist() == weight.numpy().tolist()
    if rank == 0:  # nothing waits: it is no collective
        assert torch.isfinite(weight).all() and weight.abs().max() > 0
    before, copy = e.full_gradients(), weight.float()
    copy.zero_()
    same(e.full_gradients(), before, 0.0)
    for write in (lambda: weight.normal_(), lambda: weight.cumsum_(0)):
        with pytest.raises(FzeroError, match="set_full_gradient"):
            write()
    assert e.step()


@at_places(2)
def test_each_engine_has_its_norms_and_none_after_it_is_closed(at: Place) -> None:
    a, b = at.engine(Net), at.engine(Net)
    loss = a(at.draw(0)(2, 3)).sum() + 3 * b(at.draw(0)(2, 3)).sum()
    loss.backward()
    every = [*a.module.parameters(), *b.module.parameters()]
    norm = nn.utils.clip_grad_norm_(every, 1.0)
    both = torch.stack([x.global_grad_norm for x in (a, b) if x.global_grad_norm is not None])
    assert torch.allclose(both.norm(), torch.ones(()).double(), atol=1e-5)
    assert torch.allclose(both[1], 3 * both[0]) and norm > 1
    assert a.step() and b.step()
    back(a, at.draw(1))
    kept = next(a.module.parameters()).grad
    a.close()
    assert kept is not None and "shape" in repr(kept)
    with pytest.raises(PhaseError, match="closed"):
        kept.norm()
