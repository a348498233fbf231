"""`Engine(check_finite=True)`: what is not finite stops `step()` on every rank, with one report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.adapter import Engine
from fzero.collectives import gather_objects, performer_of
from fzero.errors import LayoutError, NonFiniteError
from tests.adapter.nets import TiledLoss
from tests.adapter.on_ranks import Place, at_places, on_ranks
from tests.adapter.scaled import loss_of

NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    """A frozen, an unused, an empty and a tied parameter; x = (of the loss, of first, of middle).

    sqrt(p x) at x = 0 is 0, and its derivative 0 / 0: the loss stays finite.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Parameter(torch.ones(3)), nn.Linear(5, 1, bias=False)
        nn.init.ones_(self.middle.weight)
        self.last, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused, self.tied = nn.Parameter(torch.ones(2)), self.last

    def forward(self, x: Tensor) -> Tensor:
        h = self.first.sum() * x[0] + (self.first * x[1]).sqrt().sum()
        h = self.middle(torch.ones(5) * h).sum() + (self.middle.weight * x[2]).sqrt().sum()
        return h * self.last + self.tied + self.empty.sum() + self.frozen.sum()


class Recomputed(Net):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=True)


GOOD = torch.ones(3)
BAD = {
    "loss": torch.tensor([NAN, 1.0, 1.0]),
    "first": torch.tensor([1.0, 0.0, 1.0]),
    "both": torch.tensor([1.0, 0.0, 0.0]),  # middle is nearer to the loss
}


def _plain(engine: Engine, x: Tensor) -> None:
    engine(x).backward()


def _engines(engine: Engine, x: Tensor) -> None:
    engine.backward(engine(x))


def _in(window: Callable[[Engine], Any], back: Callable[[Engine, Tensor], None]) -> Any:
    def program(engine: Engine, x: Tensor) -> None:
        with window(engine):
            back(engine, GOOD)
            back(engine, x)

    return program


WAYS = (  # (name, program, the backward in which x is used, what is wrong with x, what is named)
    ("a loss that nobody showed to the engine", _plain, 0, "loss", "gradient"),
    ("engine.backward", _engines, 0, "loss", "loss"),
    ("a gradient", _engines, 0, "both", "gradient"),
    ("two backwards", _in(lambda _: nullcontext(), _plain), 1, "first", "gradient"),
    ("coalesce", _in(lambda e: e.coalesce(), _engines), 1, "loss", "loss"),
    ("no_sync", _in(lambda e: e.no_sync(), _plain), 1, "both", "gradient"),
)


def _facts(error: NonFiniteError) -> tuple[Any, ...]:
    return error.step, error.rank, error.what, error.path, error.backward, error.ranks


def _raised(engine: Engine) -> tuple[Any, ...]:
    """What `step()` raises, on all ranks alike."""
    with pytest.raises(NonFiniteError) as caught:
        engine.step()
    (found,) = set(gather_objects(_facts(caught.value), fzero.world()))
    return found


def _assert_same(one: Engine, two: Engine) -> None:
    a, b = one.full_state_dict(), two.full_state_dict()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert int(one.state.step) == int(two.state.step)


@at_places(1, 2, 3)
def test_every_rank_raises_the_same_and_the_engine_goes_on(at: Place) -> None:
    """For each way of a backward, and one fault; the last rank has it, or all but the first."""
    options: dict[str, Any] = {"stage": at.stage, "bucket_bytes": 16}
    engine = Engine(Net(), torch.optim.AdamW, check_finite=True, **options)
    oracle = Engine(Net(), torch.optim.AdamW, **options)  # which never sees a bad batch
    for step, (name, way, backward, fault, what) in enumerate(WAYS, 1):
        for each in (engine, oracle):
            way(each, GOOD)
            each.step()
        first = at.ranks - 1 if fault == "loss" else min(1, at.ranks - 1)
        way(engine, BAD[fault] if at.rank >= first else GOOD)
        path = {"loss": "last", "first": "first", "both": "middle.weight"}[fault]
        wanted = (step, first, what, path, backward, tuple(range(first, at.ranks)))
        assert _raised(engine) == wanted, name
        assert _raised(engine) == wanted  # nothing has changed
        engine.zero_grad()
        _assert_same(engine, oracle)
    engine.close()
    oracle.close()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_has_as_many_rounds_as_without_it(stage: int) -> None:
    rounds = []
    for check in (False, True):
        engine = Engine(Net(), torch.optim.AdamW, stage=stage, check_finite=check)
        performer = performer_of(engine.axis)
        assert performer is not None
        for _ in range(3):
            before = performer.rounds
            _engines(engine, GOOD)
            engine.step()
        rounds.append(performer.rounds - before)
        engine.close()
    assert rounds[0] == rounds[1] > 0


@on_ranks(2)
def test_accumulation_recomputation_and_what_comes_inside_a_forward(rank: int) -> None:
    engine = Engine(
        Recomputed(), torch.optim.AdamW, stage=3, check_finite=True, gradient_accumulation_steps=3
    )
    for number in range(3):
        x = (BAD["both"] if rank == 1 and number == 1 else GOOD).clone().requires_grad_()
        _plain(engine, x)
        if number < 2:
            assert not engine.step()
    assert _raised(engine) == (0, 1, "gradient", "middle.weight", 1, (1,))
    engine.close()

    class Tiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 1, dtype=torch.float64)

        def forward(self, x: Tensor) -> Any:
            return TiledLoss.apply(x, self.head)

    tiled = Engine(Tiled(), torch.optim.AdamW, stage=2, check_finite=True)
    x = torch.full((2, 3), NAN if rank == 0 else 1.0, dtype=torch.float64, requires_grad=True)
    tiled(x).sum().backward()
    found = _raised(tiled)
    assert found[:2] == (0, 0) and str(found[3]).startswith("head.")
    tiled.close()


def test_a_loss_that_brings_nothing_to_the_parameters_is_not_reported() -> None:
    engine = Engine(Net(), torch.optim.AdamW, stage=1, check_finite=True)
    engine.backward(torch.tensor(NAN, requires_grad=True) * 2)
    _plain(engine, GOOD)
    assert engine.step()
    engine.close()


def test_what_a_backward_brought_that_raised_is_forgotten() -> None:
    module = Net()
    engine = Engine(module, torch.optim.AdamW, stage=1, check_finite=True)
    bad, good = engine(BAD["both"]), engine(GOOD)

    def fail(_: Tensor) -> None:
        raise ValueError("a hook that raises")

    handle = module.first.register_hook(fail)  # after the gradient of `middle`, which is NaN
    with pytest.raises(ValueError, match="a hook that raises"):
        bad.backward()
    handle.remove()
    good.backward()
    assert engine.step()
    engine.close()


@pytest.mark.parametrize("way", ["backward", "scale"])
def test_with_a_loss_scale_overflows_are_skipped_and_losses_looked_at(way: str) -> None:
    module = nn.Linear(2, 1)
    nn.init.ones_(module.weight)
    engine = Engine(module, torch.optim.AdamW, stage=2, check_finite=True, loss_scale="dynamic")

    def back(loss: Tensor) -> None:
        engine.backward(loss) if way == "backward" else engine.scale(loss).backward()

    back(loss_of(engine(torch.full((1, 2), 1e17))))  # its scaled gradient overflows
    assert engine.step() and engine.step_was_skipped
    back(loss_of(engine(torch.ones(1, 2))))
    assert engine.step() and not engine.step_was_skipped
    before = engine.full_state_dict()
    back(loss_of(engine(torch.full((1, 2), INF))))
    assert _raised(engine) == (1, 0, "loss", None, 0, (0,))
    assert all(torch.equal(value, before[key]) for key, value in engine.full_state_dict().items())
    engine.zero_grad()
    back(loss_of(engine(torch.ones(1, 2))))
    assert engine.step()
    engine.close()


def test_what_is_no_flag_is_refused() -> None:
    no_flag: Any = "yes"
    with pytest.raises(LayoutError, match=r"check_finite='yes'[\s\S]*Fix: give True or False"):
        Engine(Net(), torch.optim.AdamW, stage=0, check_finite=no_flag)
