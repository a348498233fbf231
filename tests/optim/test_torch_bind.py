"""`from_torch`: which parameters an optimizer has, and what cannot be."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import CallError, LayoutError, PhaseError
from fzero.optim import from_torch
from tests.optim.cases import trained
from tests.optim.torch_cases import parameters


def test_parameters_are_found_by_identity_or_by_their_memory() -> None:
    module = nn.Linear(3, 2)
    instance = torch.optim.SGD([{"params": [module.bias]}, {"params": [module.weight]}], lr=0.1)
    tied = {"w": module.weight.detach(), "b": module.bias, "again": module.weight}
    optimizer = from_torch(instance).bind(tied.items())
    assert [optimizer.group_of(path) for path in ("w", "b", "again", "none")] == [1, 0, 1, -1]
    other = from_torch(instance).bind(tied)
    assert other == optimizer and hash(other) == hash(optimizer)


def test_a_class_has_one_group_of_what_learns() -> None:
    params = {"w": torch.ones(2), "frozen": nn.Parameter(torch.ones(2), requires_grad=False)}
    params["ids"] = torch.ones(2, dtype=torch.int64)
    optimizer = from_torch(torch.optim.SGD).bind(params)
    assert [optimizer.group_of(path) for path in params] == [0, -1, -1]
    assert optimizer.instance.param_groups[0]["params"] == []


def used(params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(params.values())
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def doubled(params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p.detach()]} for p in [params["b"], params["b"]]], lr=0.1)


def with_a_momentum(params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params.values(), momentum=0.5)
    for p in params.values():
        optimizer.state[p] = {"momentum_buffer": torch.ones_like(p), "more": torch.ones_like(p)}
    return optimizer


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise TypeError("step() missing 1 required positional argument: 'closure'")


class Remembers(torch.optim.SGD):
    """It keeps a list of gradients."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("history", []).append(p.grad)


def two_rates(params: list[nn.Parameter]) -> Any:
    raise KeyError("lr of the second group")


def itself(params: list[nn.Parameter]) -> Any:
    return params


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda _: "adam", LayoutError, r"the optimizer is 'adam'"),
    (lambda _: nn.Linear, LayoutError, r"the optimizer is <class"),
    (lambda _: itself, LayoutError, r"itself, which gives a Named"),
    (lambda _: two_rates, KeyError, "lr of the second group"),
    (lambda _: torch.optim.LBFGS, LayoutError, r"LBFGS cannot step[\s\S]*closure"),
    (lambda p: torch.optim.LBFGS(p.values()), LayoutError, "LBFGS cannot step"),
    (lambda _: functools.partial(torch.optim.SparseAdam, lr=1.0), LayoutError, "SparseAdam cannot"),
    (lambda _: torch.optim.SGD(parameters().values()), LayoutError, "is not the module's"),
    (doubled, LayoutError, "b is in the optimizer's groups 0 and 1"),
    (with_a_momentum, LayoutError, r"has \['momentum_buffer', 'more'\] for a.bias; its rule"),
    (lambda _: Remembers, LayoutError, "Remembers keeps history = list"),
    (
        lambda p: Broken(p.values()),
        LayoutError,
        r"Broken could not step[\s\S]*TypeError: step\(\) m",
    ),
]


@pytest.mark.parametrize(("make", "kind", "text"), WRONG)
def test_what_cannot_be_is_refused_before_the_layout(make: Any, kind: Any, text: str) -> None:
    params = parameters()
    with pytest.raises(kind, match=text):
        from_torch(make(params)).bind(params)


def test_an_update_that_is_to_be_differentiated_is_refused() -> None:
    params = parameters()
    state = fzero.init(params, from_torch(torch.optim.SGD), stage=0)

    def trained(scale: Tensor) -> Tensor:
        new, _ = fzero.grad_and_reduce(lambda p: scale * p["b"].sum(), state)()
        return fzero.full_params(fzero.apply_gradients(new))["b"].sum()

    with pytest.raises(PhaseError, match=r"to be differentiated[\s\S]*Fix: use fzero.optim.sgd"):
        torch.func.grad(trained)(torch.ones(()))


def test_an_option_of_the_optimizer_is_given_to_it() -> None:
    wrong: Any = {"lr": 0.5}
    with pytest.raises(
        CallError, match=r"lr[\s\S]*functools\.partial\(torch\.optim\.SGD, lr=0\.1\)"
    ):
        from_torch(torch.optim.SGD, **wrong)


def test_what_is_not_bound_says_so() -> None:
    with pytest.raises(PhaseError, match=r"from_torch\(SGD\) is not bound"):
        from_torch(torch.optim.SGD).init([torch.ones(1)])


def add_a_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def load_a_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(used(parameters()).state_dict())


@pytest.mark.parametrize("change", [add_a_group, load_a_state])
def test_groups_and_state_that_come_later_are_refused(change: Any) -> None:
    params = parameters()
    instance = torch.optim.Adam(params.values())
    state = fzero.init(params, from_torch(instance), stage=0)
    change(instance)
    with pytest.raises(PhaseError, match="when the train state was made it had 1"):
        trained(params, None, torch.ones(1), stage=0, state=state)


def test_an_option_that_adds_state_later_is_refused() -> None:
    params = parameters()
    instance = torch.optim.SGD(params.values(), lr=0.1)
    state = fzero.init(params, from_torch(instance), stage=0)
    instance.param_groups[0]["momentum"] = 0.9
    with pytest.raises(LayoutError, match=r"SGD now keeps \['momentum_buffer'\]"):
        trained(params, None, torch.ones(1), stage=0, state=state)
    assert not instance.state


@pytest.mark.parametrize("is_factory", [True, False])
def test_ranks_can_compare_what_it_says(is_factory: bool) -> None:
    params = parameters()
    made = functools.partial(torch.optim.AdamW, lr=torch.tensor(0.25))
    source = made if is_factory else made(params.values())
    state = fzero.init(params, from_torch(source), stage=0)
    first, second = state.setup.optimizer.describe(state.setup.layout.leaves)
    assert first == "optimizer from_torch(AdamW)"
    assert "lr=tensor(0.25)" in second and "betas=(0.9, 0.999)" in second


@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_is_made_from_parameters_without_values(stage: int) -> None:
    """The rule is tried where the values will be: the meta device has none to compare."""
    optimizer = from_torch(functools.partial(torch.optim.AdamW, lr=0.5, weight_decay=0.0))
    params = {"w": torch.empty(3, device="meta")}
    made = fzero.init(params, optimizer, stage=stage, initializer=lambda path, leaf: torch.ones(3))
    state, _ = fzero.grad_and_reduce(lambda p: (2 * p["w"]).sum(), made)()
    after = fzero.full_params(fzero.apply_gradients(state))["w"]
    torch.testing.assert_close(after, torch.full((3,), 0.5))
