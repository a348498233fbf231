"""Rules that would be wrong on shards are found by a trial."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fzero.errors import LayoutError
from fzero.optim import _bind, as_optimizer, from_torch, require_elementwise
from tests.covering import covered
from tests.optim.cases import CASES
from tests.optim.torch_cases import ELEMENTWISE, NOT_ELEMENTWISE, Lamb

REFUSED = r"is not elementwise[\s\S]*Usual cause: a norm[\s\S]*Fix: use stage 0 or one rank"


def matrix() -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.ones(3, 5))}


@covered(style=["factory", "instance"], name=sorted(NOT_ELEMENTWISE))
def test_rules_of_torch_that_need_whole_parameters_are_refused(style: str, name: str) -> None:
    cls, options = NOT_ELEMENTWISE[name]
    params, made = matrix(), functools.partial(cls, **options)
    source = made if style == "factory" else made(list(params.values()))
    with pytest.raises(LayoutError, match=rf"from_torch\({cls.__name__}\) {REFUSED}"):
        require_elementwise(from_torch(source).bind(params))


@pytest.mark.parametrize("name", sorted(CASES))
def test_formulas_for_each_element_are_not_refused_as_a_pair(name: str) -> None:
    optimizer = CASES[name].ours()
    require_elementwise(as_optimizer((optimizer.init, optimizer.update)))


def init(params: Any) -> Any:
    return ()


def clipped(max_norm: float) -> Any:
    """A chain of a clip by the global norm and SGD."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        norm = torch.stack([g.norm() for g in grads]).norm()
        factor = (max_norm / norm).clamp(max=1.0)
        return [-0.1 * factor * g for g in grads], state

    return update


def trusting(grads: Any, state: Any, params: Any) -> Any:
    return [-0.1 * p.norm() * g / g.norm() for g, p in zip(grads, params, strict=True)], state


def decays_matrices(grads: Any, state: Any, params: Any) -> Any:
    return [-0.1 * (g + p * (p.ndim > 1)) for g, p in zip(grads, params, strict=True)], state


def gives_nothing(grads: Any, state: Any, params: Any) -> Any:
    return None, state


@pytest.mark.parametrize(
    ("update", "text"),
    [
        (clipped(0.01), rf"pair\(clipped.<locals>.update\) {REFUSED}"),
        (clipped(100.0), REFUSED),
        (trusting, REFUSED),
        (decays_matrices, REFUSED),
        (gives_nothing, "it gave a NoneType"),
    ],
)
def test_a_pair_that_asks_for_a_norm_or_a_shape_is_refused(update: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        require_elementwise(as_optimizer((init, update)))


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


def test_what_an_option_that_only_the_instance_has_allows_is_not_refused() -> None:
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


def test_a_rule_for_matrices_says_so_of_a_vector() -> None:
    """A class is given the parameters themselves, and says it as it does without fzero."""
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        from_torch(torch.optim.Muon).bind({"bias": nn.Parameter(torch.ones(3))})


def centering(when: Callable[[Any], bool]) -> type[torch.optim.SGD]:
    """Gradients of some parameters without their mean over the first dim."""

    class Centers(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in (p for group in self.param_groups for p in group["params"] if when(p)):
                p.grad -= p.grad.mean(0)
            return super().step(closure)

    return Centers


CentersFilters = centering(lambda p: p.ndim > 3)  # as Ranger's `gc_conv_only` has it
CentersLarge = centering(lambda p: p.ndim == 2 and min(p.shape) >= 128)  # as factored moments


@pytest.mark.parametrize(
    ("cls", "small", "large"),
    [
        (CentersFilters, torch.ones(3, 5), torch.ones(4, 2, 3, 3)),
        (CentersLarge, torch.ones(127, 300), torch.ones(128, 300)),
    ],
)
def test_a_rule_is_tried_on_the_dims_and_the_sizes_that_the_parameters_have(
    cls: Any, small: Any, large: Any
) -> None:
    layers = {"small": nn.Parameter(small), "large": nn.Parameter(large)}
    rule = functools.partial(cls, lr=0.1)
    require_elementwise(from_torch(rule).bind({"small": layers["small"]}))
    with pytest.raises(LayoutError, match=REFUSED):
        require_elementwise(from_torch(rule).bind(layers))
    groups = [{"params": [p]} for p in layers.values()]
    bound = from_torch(cls(groups, lr=0.1)).bind(layers)
    assert [bound.needs_whole(path) for path in layers] == [False, True]


class Projects(torch.optim.SGD):
    """As AdamP: another update where a gradient is orthogonal to the rows of a matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.ndim > 1):
            rows, grads = p.flatten(1), p.grad.flatten(1)
            if torch.cosine_similarity(rows, grads, dim=1).abs().max() < 0.1 / len(rows[0]) ** 0.5:
                p.grad += 0.1 * p
        return super().step(closure)


@pytest.mark.parametrize("shape", [(3, 5), (6, 4), (4, 3, 2, 2), (128, 300)])
def test_a_rule_that_projects_where_a_gradient_is_orthogonal_is_seen(
    shape: tuple[int, ...],
) -> None:
    bound = from_torch(functools.partial(Projects, lr=0.1)).bind({"w": torch.ones(shape)})
    assert not bound.elementwise and bound.leafwise


class Rectified(torch.optim.SGD):
    """As Ralamb and its like: a plain rule in the first five steps, with a norm from then on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            p.grad /= 1.0 if state["step"] < 6 else p.grad.norm()
        return super().step(closure)


def test_a_rule_that_is_plain_in_its_first_steps_is_seen() -> None:
    bound = from_torch(functools.partial(Rectified, lr=0.1)).bind(matrix())
    assert not bound.elementwise and bound.leafwise


@pytest.mark.parametrize("cls", [torch.optim.Muon, torch.optim.Adafactor])
def test_torchs_rules_for_matrices_are_not_declared_to_need_elements(cls: Any) -> None:
    """Adafactor steps a flat shard without an error: as a vector, by another rule."""
    with pytest.raises(LayoutError, match=r"needs='element'.*looks at whole matrices"):
        from_torch(cls, needs="element").bind(matrix())
    assert from_torch(cls, needs="matrix").bind(matrix()).by_owners


def test_no_class_of_torch_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they need is known; the experiment agrees with the table."""
    known = [cls for cls, _ in ELEMENTWISE.values() if cls.__module__.startswith("torch.optim")]
    params = {path: torch.ones(shape) for path, shape in {"w": (3, 5), "b": (5,)}.items()}
    own = [type("Own", (cls,), {}) for cls in known]
    assert all(from_torch(cls).bind(params).elementwise for cls in own)
    monkeypatch.setattr(_bind, "beyond_elements", None)
    assert all(from_torch(cls).bind(params).elementwise for cls in known)
    with pytest.raises(LayoutError, match="could not step"):
        from_torch(own[0]).bind(params)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,), (3, 1), (2, 1, 1, 1, 1, 1)])
def test_the_smallest_parameters_are_not_refused(shape: tuple[int, ...]) -> None:
    rule = functools.partial(torch.optim.AdamW, lr=0.1)
    require_elementwise(from_torch(rule).bind({"w": torch.ones(shape)}))


def filters_centered(grads: Any, state: Any, params: Any) -> Any:
    return [-0.1 * (g - g.mean() if g.ndim > 3 else g) for g in grads], state


def test_a_pair_is_tried_on_as_many_dims_as_the_parameters_have() -> None:
    pair = as_optimizer((init, filters_centered))
    require_elementwise(pair.bind(matrix()))
    with pytest.raises(LayoutError, match=REFUSED):
        require_elementwise(pair.bind({"conv": torch.ones(2, 2, 2, 2)}))
