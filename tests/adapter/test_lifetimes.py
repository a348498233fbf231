"""Engines that are made twice, gradients thrown away by ranks that are apart, inference between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine, gathered
from fzero.errors import AxisError, LayoutError, MismatchError, PeerFailedError, PhaseError
from tests.adapter.plain import STAGES, Draw, check_program, engine_of, same
from tests.failing import fails_in_backward
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


def linear() -> nn.Module:
    return nn.Linear(3, 2, dtype=torch.float64)


def twice_body(rank: int, world_size: int) -> None:
    """A module, or a part of it, has one open engine at most."""
    for stage in STAGES:
        engine = engine_of(linear, stage)
        whole = nn.Sequential(engine.module, linear())
        for second in STAGES:
            for module in (engine.module, whole):
                with pytest.raises(PhaseError, match="belongs to an engine that is open"):
                    Engine(module, torch.optim.SGD, stage=second)
        engine(Draw(rank, 0)(2, 3)).sum().backward()
        assert engine.full_gradient("bias").tolist() == [2.0, 2.0]
        assert engine.step()
        assert "Linear, stage=" in repr(engine) and "1 updates" in repr(engine)
        engine.close()
        assert repr(engine) == "Engine(closed)"
        Engine(whole, torch.optim.SGD, stage=stage).close()


def apart_body(rank: int, world_size: int) -> None:
    """Ranks that run another number of backwards before they throw the gradients away."""
    engine, x = engine_of(linear, 3), torch.ones(1, 3).double()
    for _ in range(1 + rank):
        engine(x).sum().backward()
    engine.zero_grad()
    (10 * engine(x)).sum().backward()
    assert engine.full_gradient("bias").tolist() == [10.0, 10.0]
    engine.step()
    with engine.coalesce():
        for _ in range(1 + rank):  # in a window nothing is reduced, and nobody waits
            engine(x).sum().backward()
            engine.zero_grad()
        engine(x).sum().backward()
    assert engine.full_gradient("bias").tolist() == [1.0, 1.0]
    engine.close()


def dropped_body(rank: int, world_size: int) -> None:
    """p.grad = None is seen at the next backward: it must be that of the other ranks, too."""
    engine, x = engine_of(linear, 3), torch.ones(1, 3).double()
    for _ in range(2):
        engine(x).sum().backward()
        engine.module.zero_grad()
        (10 * engine(x)).sum().backward()
        assert engine.full_gradient("bias").tolist() == [10.0, 10.0]
        engine.step()
    engine(x).sum().backward()
    with pytest.raises(MismatchError, match="gradients dropped just before: True"):
        for _ in range(rank):
            engine(x).sum().backward()
        engine.module.zero_grad()
        (10 * engine(x)).sum().backward()
    engine.zero_grad()
    engine(x).sum().backward()
    assert engine.full_gradient("bias").tolist() == [1.0, 1.0]
    engine.close()


def inference_program(e: Any, draw: Draw) -> None:
    """Gradients wait while somebody looks at the model in inference mode."""
    with e.coalesce():
        e(draw(2, 3)).sum().backward()
        with torch.inference_mode():
            e(draw(2, 3))
        e(draw(2, 3)).square().sum().backward()
    module = getattr(e, "module", e)
    module.a(draw(2, 3)).sum().backward()
    with torch.inference_mode():
        e(draw(2, 3))
    e(draw(2, 3)).square().sum().backward()


def inference_body(rank: int, world_size: int) -> None:
    check_program(rank, world_size, TwoParts, inference_program, steps=3)


def slopes_program(e: Any, draw: Draw) -> None:
    """Gradients wait on some ranks only while all of them take a slope by the input."""
    with e.no_sync():
        for _ in range(draw.rank):
            e(draw(2, 3)).sum().backward()
    x = draw(2, 3).requires_grad_()
    (slope,) = torch.autograd.grad(e(x).square().sum(), x)
    e(slope.detach()).sum().backward()


def slopes_body(rank: int, world_size: int) -> None:
    check_program(rank, world_size, TwoParts, slopes_program, stages=(0, 1, 2), steps=3)


class Branches(nn.Module):
    """A third part that some calls use, and a backward that raises below the second."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(3)]
        self.a, self.b, self.extra = parts

    def forward(self, x: Tensor, extra: bool = False, fails: bool = False) -> Tensor:
        h = self.a(x)
        h = self.b(fails_in_backward(h, ZeroDivisionError) if fails else h)
        return self.extra(h) if extra else h


def failed_body(rank: int, world_size: int) -> None:
    """All ranks raise in one backward, of which they had reduced other parts."""
    for stage in STAGES:
        for told in (True, False):
            one, two = (engine_of(Branches, stage, bucket_bytes=1) for _ in range(2))
            # At stage 3 the first one tells the others.
            with pytest.raises((ZeroDivisionError, AxisError)):
                loss = one(Draw(rank, 0)(2, 3), rank == 0, True).sum()
                one.backward(loss) if told else loss.backward()
            for engine in (one, two):
                engine(Draw(rank, 1)(2, 3)).square().sum().backward()
            same(f"stage {stage}", one.full_gradients(), two.full_gradients(), 0)
            for engine in (one, two):
                engine.step()
                engine.close()


def served_body(rank: int, world_size: int) -> None:
    """A window that raises, on ranks with other numbers of backwards, loses nobody else's."""
    engine, x = engine_of(linear, 3), torch.ones(1, 3).double()
    with pytest.raises(ZeroDivisionError), engine.coalesce():
        for _ in range(2 * rank):
            engine(x)
        raise ZeroDivisionError
    for _ in range(1 if rank else 2):
        engine(x).sum().backward()
    wanted = (world_size + 1) / world_size
    assert engine.full_gradient("bias").tolist() == [wanted] * 2
    engine.close()


def alone_body(rank: int, world_size: int) -> None:
    """One rank raises in its backward: the others raise in theirs, and nothing is changed."""
    for stage in STAGES:
        engine = engine_of(Branches, stage, bucket_bytes=1)
        loss = engine(Draw(rank, 0)(2, 3), fails=rank == 0).sum()
        with pytest.raises(PeerFailedError if rank else ZeroDivisionError):
            engine.backward(loss)
        with pytest.raises(PhaseError, match="there are no gradients"):
            engine.step()
        engine(Draw(rank, 1)(2, 3)).sum().backward()
        assert engine.step()
        engine.close()


def unreached_body(rank: int, world_size: int) -> None:
    """A plain backward of two engines of stage 3 raises on rank 0 before it reaches the first."""
    first, second = (engine_of(lambda: nn.Linear(3, 3, dtype=torch.float64), 3) for _ in range(2))
    x = torch.ones(1, 3).double()
    second(first(x)).sum().backward()  # a good one
    wanted = [engine.full_gradients() for engine in (first, second)]
    between = first(x)
    loss = second(fails_in_backward(between, ZeroDivisionError) if rank == 0 else between).sum()
    with pytest.raises((ZeroDivisionError, AxisError)):
        loss.backward()
        first.full_gradients()  # a rank that was through hears of it here
    for engine, gradients in zip((first, second), wanted, strict=True):
        same("only the good one", engine.full_gradients(), gradients, 0)
        engine.close()


def written_body(rank: int, world_size: int) -> None:
    """Ranks that hold other units come to a write together."""
    engine = engine_of(linear, 3, persistence_threshold_numel=100)
    if rank == 1:
        with torch.no_grad():
            engine(torch.ones(1, 3).double())
    engine.full_parameters()
    with gathered(engine.module, modify=True) as values, torch.no_grad():
        for value in values:
            value.fill_(7.0)
    for value in engine.full_parameters().values():
        assert value.unique().tolist() == [7.0]
    engine.close()


class TwoParts(nn.Module):
    """A part that is also run by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def shapes_body(rank: int, world_size: int) -> None:
    engine = engine_of(linear, 2)
    wrong: Any
    for wrong in (1.0, torch.ones(3), None):
        with pytest.raises(LayoutError, match=r"bias has the shape \(2,\)"):
            engine.set_full_parameter("bias", wrong)
    engine.close()


@pytest.mark.parametrize("body", [twice_body, inference_body, shapes_body])
@pytest.mark.parametrize("world_size", [1, 2])
def test_engines_are_made_once_and_evaluation_leaves_what_waits_alone(
    body: Any, world_size: int
) -> None:
    run_ranks(body, world_size, timeout_s=60)


@pytest.mark.parametrize(
    "body",
    [
        *(apart_body, dropped_body, slopes_body, failed_body, served_body, alone_body),
        *(unreached_body, written_body),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_are_apart_throw_away_and_keep_what_is_theirs(
    body: Any, world_size: int
) -> None:
    run_ranks(body, world_size, timeout_s=60)
