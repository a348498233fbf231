"""Training loops of plain PyTorch and of engines are compared by what they tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.tools.diff import Log, LoopDifference

STEPS, ROWS = 3, 8


class Scaled(torch.autograd.Function):
    """A copy whose gradient is another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.001


class Net(nn.Module):
    def __init__(self, *, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i == 1 and self.wrong:
                x = Scaled.apply(x)
        return x.float()


def batches() -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 4, generator=source), torch.randint(0, 4, (ROWS,), generator=source))
        for _ in range(STEPS)
    ]


def plain(
    smoothing: float = 0.0, lr: float = 1e-2, *, wrong: bool = False, drops: int = 0
) -> Callable[[Log], None]:
    def run(log: Log) -> None:
        model = Net(wrong=wrong)
        log.start(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for x, y in batches():
            loss = F.cross_entropy(model(x), y, label_smoothing=smoothing)
            log.loss(loss)
            loss.backward()
            log.gradients(model)
            optimizer.step()
            log.parameters(model)
            optimizer.zero_grad()

    return run


def by_engine(
    stage: int, smoothing: float = 0.0, lr: float = 1e-2, *, wrong: bool = False, first: int = 0
) -> Callable[[Log], None]:
    """Each rank has its rows; `first`: rank 1 has those of rank 0."""

    def run(log: Log) -> None:
        model = Net(wrong=wrong)
        log.start(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        engine = Engine(model, optimizer, stage=stage)
        rank, size = engine.axis.rank, engine.axis.size
        rank = min(rank, first) if first < 0 else rank
        for x, y in batches():
            mine = slice(max(rank, 0) * ROWS // size, (max(rank, 0) + 1) * ROWS // size)
            loss = F.cross_entropy(engine(x[mine]), y[mine], label_smoothing=smoothing)
            log.loss(loss)
            engine.backward(loss)
            log.gradients(engine)
            engine.step()
            log.parameters(engine)
        engine.close()

    return run


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (0, 2), (2, 2), (3, 2)])
def test_an_engine_does_what_the_plain_loop_does(stage: int, world_size: int) -> None:
    assert fzero.diff(plain(), by_engine(stage), world_size=world_size) is None


@pytest.mark.parametrize("stage", [0, 3])
def test_another_loss_is_found_though_it_casts(stage: int) -> None:
    found = fzero.diff(plain(), by_engine(stage, smoothing=1e-6), world_size=2)
    assert found is not None and (found.operation, found.at.step) == ("loss", 1), found
    assert found.compared_in is torch.float64 and found.at.backward == 1
    assert "the full values" not in str(found)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_first_wrong_gradient_of_the_backward_is_named(stage: int) -> None:
    found = fzero.diff(plain(), by_engine(stage, wrong=True), world_size=2)
    assert isinstance(found, LoopDifference) and found.operation == "gradient"
    assert found.path.startswith("layers.1.") and found.ranks == (0, 1)
    assert {*found.agree} == {"layers.2.weight", "layers.2.bias"}
    assert found.differ[0] == found.path and len(found.differ) == 4


def test_another_update_and_other_rows_are_found() -> None:
    found = fzero.diff(plain(), by_engine(2, lr=1.01e-2), world_size=2)
    assert found is not None and (found.operation, found.at.step) == ("update", 1)
    found = fzero.diff(plain(), by_engine(2, first=-1), world_size=2)
    assert found is not None and (found.operation, found.at.step) == ("loss", 1)


def test_two_plain_loops_and_two_engines() -> None:
    assert fzero.diff(plain(), plain()) is None
    assert fzero.diff(by_engine(2), by_engine(3), world_size=(2, 2)) is None


def test_what_is_no_comparable_loop_is_refused() -> None:
    model = Net()

    def goes_on(log: Log) -> None:
        log.start(model)
        with torch.no_grad():
            next(model.parameters()).add_(1.0)

    def starts_late(log: Log) -> None:
        log.loss(torch.ones(()))

    def shorter(log: Log) -> None:
        log.start(Net())

    def tells_engine(log: Log) -> None:
        model: Any = Engine(Net(), stage=0)
        log.start(model)

    refused: list[tuple[Any, Any, Any, str]] = [
        (goes_on, goes_on, 1, "when it is called again"),
        (starts_late, plain(), 1, r"log\.start\(model\) once"),
        (plain(), shorter, 1, "run_b nothing"),
        (lambda log: None, plain(), 1, "tells nothing"),
        (tells_engine, plain(), 1, "before the engine is made"),
        (plain(), plain(), 0, "world_size=0"),
    ]
    for a, b, world_size, match in refused:
        with pytest.raises(fzero.LayoutError, match=match):
            fzero.diff(a, b, world_size=world_size)
