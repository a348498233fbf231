"""What users do to parameters after the engine is made: seen, or refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine, gathered
from fzero.errors import LayoutError
from tests.adapter.nets import F64, linear
from tests.adapter.on_ranks import Place, at_places, on_ranks, virtually
from tests.adapter.plain import Draw, engine_of, update

X = torch.ones(1, 4, dtype=F64)


def ones() -> nn.Module:
    module = linear(4, 3, bias=False)
    nn.init.ones_(module.weight)
    return module


def values(engine: Engine) -> list[float]:
    return engine.full_parameter("weight").unique().tolist()


def train(engine: Engine) -> None:
    engine(X).sum().backward()  # the gradient is 1 everywhere, the rate 0.25
    engine.step()


@at_places(1, 2)
def test_what_is_written_in_place_is_trained_on_and_so_is_what_converts_nothing(at: Place) -> None:
    engine = at.engine(ones)
    weight = engine.module.get_parameter("weight")
    with gathered(engine.module, modify=True) if at.stage == 3 else torch.no_grad():
        weight.data.mul_(3.0)
    assert values(engine) == [3.0]
    engine(X).sum().backward()
    engine.module.double().to("cpu")  # what it is already, its gradients too
    engine.module.to(device="cpu", dtype=F64, non_blocking=True)
    engine.step()
    assert values(engine) == weight.detach().clone().unique().tolist() == [2.75]


def assign(module: Any) -> None:
    module.weight.data = module.weight.data * 3


def convert(module: Any) -> None:
    module.to(torch.bfloat16)


def move(module: Any) -> None:
    module.to("meta")


def replace(module: Any) -> None:
    module.weight = nn.Parameter(torch.ones(3, 4, dtype=F64))


@at_places(1, 2)
@pytest.mark.parametrize(
    ("change", "seen", "lazily"),
    [
        (assign, "weight has other memory now", "written in place"),
        (convert, "weight has other memory now", r"given data of torch\.bfloat16"),
        (move, "weight ", None),
        (replace, "weight is another tensor now", None),
    ],
)
def test_other_memory_or_another_tensor_is_refused_at_once_or_by_the_next_step(
    at: Place, change: Callable[[Any], None], seen: str, lazily: str | None
) -> None:
    engine = at.engine(ones)
    train(engine)
    if change in (assign, replace):  # stand-ins in p.grad would refuse a conversion
        engine(X).sum().backward()
    if lazily and at.is_lazy:
        with pytest.raises(LayoutError, match=lazily):
            change(engine.module)
        train(engine)
        return
    change(engine.module)
    with pytest.raises(LayoutError, match=f"(?s){seen}.*Fix: "):
        engine.step()
    assert int(engine.state.step) == 1
    assert values(engine) == [0.75]


@on_ranks(2, 3)
@pytest.mark.parametrize("options", [{}, {"persistence_threshold_numel": 100}])
def test_writes_through_several_views_of_a_placeholder_are_refused_as_others_are(
    options: dict[str, Any],
) -> None:
    engine = engine_of(ones, 3, **options)
    train(engine)
    engine(X)
    weight = engine.module.get_parameter("weight")
    for views in (weight.unbind(0), weight.split(1), weight.data.chunk(3), weight.split([1, 2])):
        assert torch.equal(torch.cat([v.reshape(-1) for v in views]), weight.reshape(-1))
        with pytest.raises(LayoutError, match="written in place"), torch.no_grad():
            views[0].fill_(7.0)
    assert values(engine) == [0.75]
    with gathered(engine.module, modify=True), torch.no_grad():
        for row in weight.unbind(0):
            row.fill_(2.0)
    assert values(engine) == [2.0]


class Listed(nn.Module):
    """An LSTM one weight of which is also used through a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(2, 3, dtype=F64)
        self.decayed = [self.cell.get_parameter("weight_ih_l0")]

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0].sum() + self.decayed[0].square().sum()


@at_places(1, 2)
def test_other_references_to_a_parameter_are_used_with_it(at: Place) -> None:
    def program(e: Any, draw: Draw) -> None:
        e(draw(2, 1, 2)).backward()

    engine, reference = at.both(Listed)
    update(engine, reference, at.rank, 0, program)
    engine.close()
    module: Any = engine.module  # as an ordinary one again
    assert module.decayed[0] is module.cell.weight_ih_l0
    program(module, at.draw(1))


@virtually(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("make", [ones, Listed])
def test_weak_references_of_before_lead_to_the_parameters(
    stage: int, make: Callable[[], nn.Module]
) -> None:
    """An average of the weights, as torch-ema keeps it."""
    module = make()
    plain = [p.detach().clone() for p in module.parameters()]
    held = [weakref.ref(p) for p in module.parameters()]
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.25), stage=stage)

    def now() -> list[Any]:
        return [one().detach().clone() for one in held]

    assert all(map(torch.equal, now(), plain))
    engine(X if make is ones else X.view(2, 1, 2)).sum().backward()
    engine.step()
    after = list(engine.full_parameters().values())
    assert all(map(torch.equal, now(), after)) and not torch.equal(after[0], plain[0])
    engine.close()
    assert all(map(torch.equal, now(), after))
    assert all(one() is p for one, p in zip(held, module.parameters(), strict=True))
