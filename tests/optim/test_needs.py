"""What a rule needs to update an element is known, declared, or tried; undeclared is "element"."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import LayoutError
from fzero.optim import as_optimizer, from_torch, require_elementwise, require_leafwise
from tests.covering import covered
from tests.optim.cases import CASES, trained
from tests.optim.torch_cases import ELEMENTWISE, NOT_ELEMENTWISE, Lamb, Noisy, by_torch, parameters
from tests.oracle import linear_loss
from tests.strategies import everywhere, integers, same

run = partial(trained, loss=linear_loss)
MATRIX = {"w": (3, 5)}


class Base(torch.optim.Optimizer):
    """A rule as users write them, of all parameters of a group."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = group["params"]
            for p, update in zip(params, self.updates(params), strict=True):
                p.sub_(0.05 * update)

    def updates(self, params: list[Any]) -> list[Tensor]:
        return [self.update(p, p.grad) for p in params]

    def update(self, p: Any, g: Tensor) -> Tensor:
        return g


class ByAllNorms(Base):
    def updates(self, params: list[Any]) -> list[Tensor]:
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        return [p.grad / norm for p in params]


class Joined(Base):
    def updates(self, params: list[Any]) -> list[Tensor]:
        joined = torch.cat([p.grad.flatten() for p in params])
        return [p.grad - joined.mean() for p in params]


class ByFirst(Base):
    """It looks at the first parameter, which is there in any list but an empty one."""

    def updates(self, params: list[Any]) -> list[Tensor]:
        one = torch.ones((), dtype=params[0].dtype)
        return [one * p.grad / (1 + p.grad.norm()) for p in params]


class Drawn(Base):
    def update(self, p: Any, g: Tensor) -> Tensor:
        return g + torch.rand_like(g)


class CentersFilters(Base):
    """As Ranger's `gc_conv_only`."""

    def update(self, p: Any, g: Tensor) -> Tensor:
        return g - g.mean(0) if p.ndim > 3 else g


class CentersLarge(Base):
    """As factored moments."""

    def update(self, p: Any, g: Tensor) -> Tensor:
        return g - g.mean(0) if p.ndim == 2 and min(p.shape) >= 128 else g


class Projects(Base):
    """As AdamP: another update where a gradient is orthogonal to the rows of a matrix."""

    def update(self, p: Any, g: Tensor) -> Tensor:
        if p.ndim < 2:
            return g
        rows, grads = p.flatten(1), g.flatten(1)
        near = torch.cosine_similarity(rows, grads, dim=1).abs().max() < 0.1 / len(rows[0]) ** 0.5
        return g + 0.1 * p if near else g


class Rectified(Base):
    """As Ralamb and its like: a plain rule in the first five steps, with a norm from then on."""

    def update(self, p: Any, g: Tensor) -> Tensor:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        return g / (1.0 if state["step"] < 6 else g.norm())


class Logs(Base):
    """An element for an element, and a number that it notes of each leaf, and reads nowhere."""

    def update(self, p: Any, g: Tensor) -> Tensor:
        self.state[p].update(norm=float(g.norm()), nothing=None)
        return g


class Sizes(Base):
    """It keeps rows of what is large, as quantizing and factored rules do."""

    def update(self, p: Any, g: Tensor) -> Tensor:
        size = 1 if p.numel() > 5e4 else p.shape[-1]
        kept = self.state[p].setdefault("kept", g.new_zeros(len(g), size))
        return kept.add_(g.mean(1, keepdim=True)) + 0 * g


class Own(torch.optim.AdamW):
    """A subclass, of which nothing is known."""


class Row(NamedTuple):
    """A rule, the shapes of parameters, and those that it needs whole."""

    rule: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    whole: str = ""  # "all": more than one of them at once


SHAPES = {"w": (3, 5), "b": (5,), "conv": (4, 2, 3, 3)}
FOUND: dict[str, Row] = {
    **{name: Row(partial(cls, **o), SHAPES) for name, (cls, o) in ELEMENTWISE.items()},
    **{name: Row(partial(c, **o), MATRIX, "w") for name, (c, o) in NOT_ELEMENTWISE.items()},
    "clipped": Row(partial(NOT_ELEMENTWISE["clipped"][0], lr=0.1), MATRIX, "all"),
    "noisy": Row(partial(Noisy, lr=0.1), MATRIX, "all"),
    "a subclass": Row(Own, SHAPES),
    "an option that only the instance has": Row(lambda ps: Lamb(list(ps), adam=True), MATRIX),
    "few dims": Row(CentersFilters, MATRIX),
    "more dims": Row(CentersFilters, {"w": (2, 2, 2, 2)}, "w"),
    "small": Row(CentersLarge, {"w": (127, 300)}),
    "large": Row(CentersLarge, {"w": (128, 300)}, "w"),
    "from the sixth step on": Row(Rectified, MATRIX, "w"),
    "joined": Row(Joined, SHAPES, "all"),
    "what is noted": Row(Logs, SHAPES),
    **{f"projects {x}": Row(Projects, {"w": x}, "w") for x in ((3, 5), (6, 4), (4, 3, 2, 2))},
    **{
        f"adamw of {x}": Row(partial(Own, lr=0.1), {"w": x})
        for x in ((), (1,), (1, 1), (2,), (3, 1), (2, 1, 1, 1, 1, 1))
    },
}


def bound_of(row: Row, needs: Any = None, *, instance: bool = False) -> tuple[Any, list[str]]:
    """Return the bound rule, and the warnings."""
    params = {path: nn.Parameter(torch.ones(shape)) for path, shape in row.shapes.items()}
    source = row.rule(list(params.values())) if instance else row.rule
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        bound = from_torch(source, needs=needs).bind(params)
    return bound, [str(one.message) for one in seen]


@pytest.mark.parametrize("instance", [False, True])
@pytest.mark.parametrize("name", sorted(FOUND))
def test_what_a_rule_needs_is_found_and_a_leaf_is_said_once(name: str, instance: bool) -> None:
    row = FOUND[name]
    bound, said = bound_of(row, instance=instance)
    assert bound.elementwise == (not row.whole) and bound.leafwise == (row.whole != "all")
    known = type(bound.instance).__module__.startswith("torch.optim")
    assert len(said) == (row.whole == "w" and not known)
    assert all('needs="leaf"' in text and "small" in text for text in said)
    for require, wrong in (
        (require_elementwise, row.whole),
        (require_leafwise, row.whole == "all"),
    ):
        if wrong:
            with pytest.raises(LayoutError, match=r"is not elementwise[\s\S]*Fix: use stage 0 or"):
                require(bound)
        else:
            require(bound)


def test_each_param_group_is_tried_and_a_rate_of_zero_hides_nothing() -> None:
    layers = {"few": torch.ones(3, 5), "filters": torch.ones(4, 2, 3, 3)}
    params = {path: nn.Parameter(x) for path, x in layers.items()}
    optimizer = CentersFilters([{"params": [p]} for p in params.values()], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    with pytest.warns(UserWarning, match="CentersFilters looks at more than single elements"):
        bound = from_torch(optimizer).bind(params)
    assert [bound.needs_whole(path) for path in params] == [False, True]


@covered(needs=["element", "leaf", "matrix"], rule=[ByAllNorms, Joined], place=[(0, 1), (2, 2)])
def test_a_rule_that_sees_all_parameters_may_not_say_that_it_needs_one(
    rule: Any, needs: Any, place: tuple[int, int]
) -> None:
    stage, ranks = place
    with pytest.raises(LayoutError, match=f"{rule.__name__}, needs='{needs}'.*both together"):
        run(parameters(), from_torch(rule, needs=needs), torch.ones(1, ranks), stage=stage)


@pytest.mark.parametrize("rule", [torch.optim.Muon, torch.optim.Adafactor, Lamb, CentersFilters])
def test_what_looks_at_a_leaf_may_not_say_that_it_needs_elements(rule: Any) -> None:
    """Adafactor steps a flat shard without an error: as a vector, by another rule."""
    params = {"w": torch.ones(2, 2, 2, 2) if rule is CentersFilters else torch.ones(3, 5)}
    with pytest.raises(LayoutError, match=r"needs='element'.*looks at whole matrices"):
        from_torch(rule, needs="element").bind(params)
    for needs in ("leaf", "matrix"):
        assert from_torch(rule, needs=needs).bind(params).by_owners


@pytest.mark.parametrize("needs", ["element", "leaf", "matrix"])
def test_a_rule_that_draws_is_believed(needs: Any) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(parameters(), from_torch(Drawn, needs=needs), torch.ones(1, 2), stage=2)
    assert len(seen) == (needs == "element")
    assert all("draws random numbers" in str(one.message) for one in seen)


@pytest.mark.parametrize("place", [(0, 1), (0, 2), (1, 3), (2, 2), (3, 5)])
@pytest.mark.parametrize("rule", [Lamb, ByFirst])
def test_an_undeclared_rule_goes_on_as_a_leaf_rule_with_one_warning(
    rule: Any, place: tuple[int, int]
) -> None:
    (stage, ranks), params = place, parameters(torch.float64)
    xs = integers((4, ranks), 8)
    with pytest.warns(UserWarning, match=f"from_torch\\({rule.__name__}, needs=") as seen:
        got, _ = run(params, from_torch(rule), xs, stage=stage)
    declared, _ = run(params, from_torch(rule, needs="leaf"), xs, stage=stage)
    assert len(seen) == 1
    same(got, declared)
    everywhere(got, by_torch(params, xs, lambda of: rule(of.values())), ranks)


def test_a_warning_that_is_an_error_comes_before_anything_has_changed() -> None:
    params = parameters()
    optimizer = Lamb(params.values())
    before = {path: p.detach().clone() for path, p in params.items()}
    with pytest.raises(UserWarning, match="Lamb looks at more than single elements"):
        fzero.init(params, from_torch(optimizer), stage=0)
    same({path: p.detach() for path, p in params.items()}, before)
    assert not optimizer.state and optimizer.param_groups[0]["params"] == [*params.values()]


@pytest.mark.parametrize("place", [(0, 1), (2, 2)])
def test_a_rule_is_asked_what_it_keeps_of_a_leaf_of_its_size(place: tuple[int, int]) -> None:
    (stage, ranks), params = place, {"w": nn.Parameter(torch.ones(200, 300).double())}
    xs = integers((2, ranks), 5)
    rule = from_torch(Sizes, needs="leaf")
    got, state = run(params, rule, xs, stage=stage)
    everywhere(got, by_torch(params, xs, lambda of: Sizes(of.values())), ranks)
    assert max(x.numel() for x in state.optimizer.owned["kept"]) == 200 * max(1, ranks)
    assert state.setup.layout.options.kept == (200,)


def test_a_trial_leaves_the_instance_its_parameters_and_random_numbers_alone() -> None:
    params = {"w": nn.Parameter(torch.ones(3, 5))}
    optimizer = Noisy(params.values(), lr=0.1)
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


# (init, update) pairs


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


def filters_centered(grads: Any, state: Any, params: Any) -> Any:
    return [-0.1 * (g - g.mean() if g.ndim > 3 else g) for g in grads], state


PAIRS: list[tuple[Any, Any]] = [
    *((one.ours().init, one.ours().update) for one in CASES.values()),
    ((lambda params: ()), filters_centered),
]
NO_ELEMENTS: list[tuple[Any, dict[str, Any], str]] = [
    (clipped(0.01), {}, r"pair\(clipped.<locals>.update\) is not elementwise"),
    (clipped(100.0), {}, "is not elementwise"),
    (trusting, {}, "is not elementwise"),
    (decays_matrices, {}, "is not elementwise"),
    (filters_centered, {"conv": torch.ones(2, 2, 2, 2)}, "is not elementwise"),
    (lambda grads, state, params: (None, state), {}, "it gave a NoneType"),
]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_of_elements_is_taken(pair: Any) -> None:
    require_elementwise(as_optimizer(pair).bind({"w": torch.ones(3, 5)}))


@pytest.mark.parametrize(("update", "params", "text"), NO_ELEMENTS)
def test_a_pair_that_asks_for_a_norm_or_a_shape_is_refused(
    update: Any, params: Any, text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        pair = as_optimizer((lambda params: (), update))
        require_elementwise(pair.bind(params) if params else pair)
