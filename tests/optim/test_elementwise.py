"""Rules that would be wrong on shards are found by a trial."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.errors import LayoutError
from fzero.optim import as_optimizer, from_torch, require_elementwise
from tests.optim.cases import CASES
from tests.optim.torch_cases import ELEMENTWISE, NOT_ELEMENTWISE, Lamb

REFUSED = r"is not elementwise[\s\S]*Usual cause: a norm[\s\S]*Fix: use stage 0 or one rank"


def given(style: str, cls: Any, options: dict[str, Any], params: dict[str, nn.Parameter]) -> Any:
    if style == "instance":
        return from_torch(cls(list(params.values()), **options)).bind(params)
    return from_torch(lambda ps: cls(ps, **options)).bind(params)


def matrix() -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.ones(3, 5))}


@pytest.mark.parametrize("style", ["factory", "instance"])
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_formulas_for_each_element_pass(style: str, name: str) -> None:
    require_elementwise(given(style, *ELEMENTWISE[name], matrix()))


@pytest.mark.parametrize("style", ["factory", "instance"])
@pytest.mark.parametrize("name", sorted(NOT_ELEMENTWISE))
def test_rules_that_need_whole_parameters_are_refused(style: str, name: str) -> None:
    cls, options = NOT_ELEMENTWISE[name]
    with pytest.raises(LayoutError, match=REFUSED) as caught:
        require_elementwise(given(style, cls, options, matrix()))
    if style == "instance":
        assert f"from_torch({cls.__name__})" in str(caught.value)


@pytest.mark.parametrize("name", sorted(CASES))
def test_fzeros_own_pass(name: str) -> None:
    optimizer = CASES[name].ours()
    require_elementwise(optimizer)
    require_elementwise(as_optimizer((optimizer.init, optimizer.update)))  # and they are


def init(params: Any) -> Any:
    return ()


def norm_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack([x.norm() for x in tensors]).norm()


def clipped(max_norm: float) -> Any:
    """A chain of a clip by the global norm and SGD."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        factor = (max_norm / norm_of(grads)).clamp(max=1.0)
        return [-0.1 * factor * g for g in grads], state

    return (init, update)


def trusting(grads: Any, state: Any, params: Any) -> Any:
    return [-0.1 * p.norm() * g / g.norm() for g, p in zip(grads, params, strict=True)], state


def decays_matrices(grads: Any, state: Any, params: Any) -> Any:
    return [-0.1 * (g + p * (p.ndim > 1)) for g, p in zip(grads, params, strict=True)], state


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 100.0])
def test_a_pair_that_clips_by_a_norm_is_refused(max_norm: float) -> None:
    with pytest.raises(LayoutError, match=rf"pair\(clipped.<locals>.update\) {REFUSED}"):
        require_elementwise(as_optimizer(clipped(max_norm)))


@pytest.mark.parametrize("update", [trusting, decays_matrices])
def test_a_pair_that_asks_for_the_norm_or_the_shape_of_a_parameter_is_refused(update: Any) -> None:
    with pytest.raises(LayoutError, match=REFUSED):
        require_elementwise(as_optimizer((init, update)))


def test_an_elementwise_pair_passes() -> None:
    def update(grads: Any, state: Any, params: Any) -> Any:
        new = [0.9 * m + g for m, g in zip(state, grads, strict=True)]
        return [-0.1 * m.sign() - 0.01 * p for m, p in zip(new, params, strict=True)], new

    require_elementwise(as_optimizer((lambda ps: [torch.zeros_like(p) for p in ps], update)))


def test_each_param_group_is_tried() -> None:
    params = {"w": nn.Parameter(torch.ones(3, 5)), "b": nn.Parameter(torch.ones(5))}
    rate = {"lr": 1e-3, "relative_step": False, "scale_parameter": False}
    for change in ({}, {"clip_threshold": 1e9}):
        groups = [{"params": [params["w"]]}, {"params": [params["b"]], **change}]
        instance = NOT_ELEMENTWISE["hugging face's adafactor"][0](groups, **rate)
        assert not from_torch(instance).bind(params).elementwise


def test_a_rate_of_zero_at_the_start_of_a_warm_up_hides_nothing() -> None:
    params = matrix()
    optimizer = Lamb(params.values(), lr=1e-2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0.0
    with pytest.raises(LayoutError, match=REFUSED):
        require_elementwise(from_torch(optimizer).bind(params))


def test_an_option_that_only_the_instance_has_counts() -> None:
    params = matrix()
    require_elementwise(from_torch(Lamb(params.values(), adam=True)).bind(params))


def test_a_trial_leaves_the_instance_its_parameters_and_random_numbers_alone() -> None:
    params = matrix()
    cls, options = NOT_ELEMENTWISE["noisy"]
    optimizer = cls(params.values(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    steps: list[None] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(None))
    before, seen = torch.get_rng_state(), vars(optimizer).copy()
    bound = from_torch(optimizer).bind(params)
    assert not bound.elementwise and bound.instance is optimizer
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(params["w"], torch.ones(3, 5)) and params["w"].grad is None
    assert vars(optimizer) == seen and not optimizer.state and not steps
    assert optimizer.param_groups[0]["params"] == list(params.values())
    assert optimizer.param_groups[0]["lr"] == 0.1 and scheduler.last_epoch == 0


def test_a_rule_that_fails_on_whole_parameters_too_says_why() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise TypeError("step() missing 1 required positional argument: 'closure'")

    with pytest.raises(LayoutError, match=r"Broken could not step[\s\S]*TypeError: step\(\) miss"):
        given("instance", Broken, {}, matrix())


def test_the_trial_of_a_pair_raises_what_the_pair_does_wrong() -> None:
    with pytest.raises(LayoutError, match="it gave a NoneType"):
        require_elementwise(as_optimizer((init, lambda g, s, p: (None, s))))
