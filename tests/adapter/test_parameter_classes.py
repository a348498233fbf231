"""Parameters of a class of their own: kept with what they compute, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, sharded_init
from fzero.errors import LayoutError
from fzero.machine.partition import own_names
from tests.adapter.on_ranks import Place, virtually
from tests.adapter.plain import STAGES, Draw, mean, same, seeded


class Scaled(nn.Parameter):
    """Its values are twice what is stored, wherever `linear` reads it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply in `linear`."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                x, w, *rest = args
                return func(x, 2 * w, *rest)
            return func(*args, **(kwargs or {}))


class Named(nn.Parameter):
    """A class with attributes of its objects alone."""

    def __repr__(self) -> str:
        return "named"


class Disabled(nn.Parameter):
    """As the classes of some libraries have it; so has nn.Parameter itself."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Helped(nn.Parameter):
    def dequantized(self) -> Tensor:
        return 2 * self


class Pair(Tensor):
    """Made of two tensors, as quantized weights are."""

    def __new__(cls, a: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Only what nn.Parameter needs."""
        return Pair(torch.ones(args[0].shape))


def net_of(kind: Any, *, learns: bool = True) -> nn.Module:
    """Its second weight is of this class."""
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False)).double()
    made: Any = torch.Tensor._make_subclass(kind, module[1].weight.detach(), learns)
    made.note = "mine"
    module[1].weight = made
    return module


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)


def trained(at: Place, kind: Any, *, learns: bool, at_end: Any = None) -> None:
    """Three updates as plain training has them; then the module is what it was."""
    plain, module = (seeded(lambda: net_of(kind, learns=learns)) for _ in range(2))
    ours, theirs = sgd(module), sgd(plain)
    engine = Engine(module, ours, stage=at.stage)
    for number in range(3):
        ranks = []
        for rank in range(at.ranks):
            plain.zero_grad()
            plain(Draw(rank, number)(2, 3)).square().sum().backward()
            named = plain.named_parameters()
            ranks.append({k: p.grad.detach().clone() for k, p in named if p.grad is not None})
        for path, gradient in mean(ranks).items():
            plain.get_parameter(path).grad = gradient
        theirs.step()
        engine(at.draw(number)(2, 3)).square().sum().backward()
        engine.step()
        if at_end is not None and number == 1:
            at_end(engine)
    same(engine.full_parameters(), dict(plain.named_parameters()), 1e-12)
    engine.close()
    weight: Any = module.get_parameter("1.weight")
    assert type(weight) is kind and weight.note == "mine" and weight.requires_grad is learns
    x = at.draw(9)(2, 3)
    assert torch.allclose(module(x), plain(x), atol=1e-12)


@virtually(1, 2)
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("kind", [Scaled, Named, Helped])
def test_an_engine_that_keeps_the_objects_keeps_their_classes(
    at: Place, stage: int, kind: Any, learns: bool
) -> None:
    trained(at._replace(stage=stage), kind, learns=learns)


@virtually(1, 2)
@pytest.mark.parametrize("learns", [True, False])
def test_a_class_of_attributes_comes_back_from_stage_3_by_a_reshard_or_at_the_end(
    at: Place, learns: bool
) -> None:
    trained(at._replace(stage=3), Named, learns=learns)
    trained(at._replace(stage=3), Named, learns=learns, at_end=lambda e: e.reshard(stage=2))
    trained(at._replace(stage=2), Named, learns=learns, at_end=lambda e: e.reshard(stage=3))


@virtually(2)
def test_a_rule_that_would_be_lost_is_refused_before_anything_changes(at: Place) -> None:
    for kind, name in ((Scaled, "__torch_function__"), (Helped, "dequantized")):
        module = net_of(kind)
        weight = module.get_parameter("1.weight")
        refused = pytest.raises(LayoutError, match=f"1.weight is a {kind.__name__}.*own {name}")
        with refused:
            Engine(module, sgd(module), stage=3)
        with refused, sharded_init():
            nn.Sequential(module)
        engine = Engine(module, sgd(module), stage=2)
        with refused:
            engine.reshard(stage=3)
        engine.close()
        assert module.get_parameter("1.weight") is weight and type(weight) is kind


@pytest.mark.parametrize("stage", STAGES)
def test_functional_steps_refuse_a_rule_and_take_attributes(stage: int) -> None:
    for kind in (Scaled, Helped):
        with pytest.raises(LayoutError, match=f"1.weight is a {kind.__name__}"):
            fzero.functionalize(net_of(kind))
        with pytest.raises(LayoutError, match=f"1.weight is a {kind.__name__}"):
            named = dict(net_of(kind).named_parameters())
            fzero.init(named, fzero.optim.sgd(0.1), stage=stage)
    module = net_of(Named)
    apply, params = fzero.functionalize(module)
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage)
    x = Draw(0, 0)(2, 3)
    assert torch.equal(fzero.evaluate(apply, state)(x), module(x))


def test_a_tensor_made_of_others_has_no_place_in_a_state() -> None:
    module: Any = nn.Linear(3, 3)
    module.weight = nn.Parameter(Pair(torch.ones(3, 3)), requires_grad=False)
    for stage in STAGES:
        with pytest.raises(LayoutError, match="weight is a Pair, a tensor that is made of others"):
            Engine(module, None, stage=stage)
        with pytest.raises(LayoutError, match="weight is a Pair"):
            fzero.init({"weight": module.weight}, fzero.optim.sgd(0.1), stage=stage)
    with pytest.raises(LayoutError, match="weight is a Pair"):
        fzero.functionalize(module)


def test_what_nn_parameter_says_itself_is_nothing_of_a_class() -> None:
    assert own_names(Disabled(torch.ones(2))) == []
    assert own_names(Scaled(torch.ones(2))) == ["__torch_function__"]
