"""What one process has and an engine, or a state, has not: a graph of gradients. Never silent."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.errors import CallError, DonatedError, FzeroError, LayoutError, PhaseError
from tests.adapter.nets import Net, linear
from tests.adapter.on_ranks import each_stage
from tests.adapter.plain import Draw, Reference, back, engine_of, same

X = torch.ones(2, 3, dtype=torch.float64)
Loss = Callable[[nn.Module, Engine], Any]
SECOND: dict[str, Loss] = {
    "a norm": lambda m, e: m.get_parameter("a.weight").grad.norm(),
    "elements": lambda m, e: m.get_parameter("a.weight").grad.pow(2).sum(),
    "by another": lambda m, e: torch.autograd.grad(
        m.get_parameter("a.weight").grad.norm() + m.get_parameter("b.bias").sum(),
        m.get_parameter("b.bias"),
    )[0].sum(),
    "full_gradient": lambda m, e: e.full_gradient("a.weight").norm(),
    "full_gradients": lambda m, e: sum(g.norm() for g in e.full_gradients().values()),
    "local_gradient": lambda m, e: e.local_gradient("a.weight").norm() + e(X).sum(),
    "global_grad_norm": lambda m, e: e.global_grad_norm,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@each_stage
def test_a_second_loss_of_p_grad_raises_and_names_the_way(stage: int) -> None:
    e, plain = engine_of(Net, stage), Reference(Net, 1)
    for loss in SECOND.values():
        e(Draw(0, 0)(2, 3)).square().sum().backward(create_graph=True)
        with pytest.raises(PhaseError, match=r"torch\.autograd\.grad\("):
            loss(e.module, e).backward()
        e.zero_grad()
    wanted = plain.run(back, 0)
    e(Draw(0, 0)(2, 3)).square().sum().backward(create_graph=True)
    grad: Any = e.module.get_parameter("a.weight").grad
    assert torch.allclose(grad.norm(), wanted["a.weight"].norm())  # to look at it is right
    assert not grad.detach().norm().requires_grad and not grad.data.norm().requires_grad
    grad.detach().mul_(2.0)
    wanted["a.weight"] *= 2
    assert e.step()
    same(e.full_parameters(), plain.step(wanted))


def test_an_input_of_evaluate_that_requires_grad_is_said_once() -> None:
    state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1), stage=2)
    teacher = fzero.init({"w": torch.ones(3)}, fzero.optim.no_optimizer(), stage=2)

    def score(q: Any, y: Any) -> Any:
        return (q["w"] * y).sum()

    def loss(p: Any, cut: bool) -> Any:
        y = p["w"] * 2
        return fzero.evaluate(score, teacher)(y.detach() if cut else y) + y.sum()

    fzero.grad_and_reduce(loss, state)(True)
    with pytest.warns(UserWarning, match=r"(?s)requires grad.*detach.*wrt="):
        fzero.grad_and_reduce(loss, state)(False)
    fzero.grad_and_reduce(loss, state)(False)


def test_rates_that_require_grad_raise_and_slots_are_as_wide_as_parameters() -> None:
    lr: Any = torch.tensor(0.1, requires_grad=True)

    def rate(step: int) -> Any:
        return lr * 1

    state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(rate), stage=2)
    state, _ = fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()
    with pytest.raises(LayoutError, match=r"(?s)lr\(0\).*requires grad.*\(init, update\) pair"):
        fzero.apply_gradients(state)
    for made in (
        lambda: fzero.optim.sgd(lr),
        lambda: fzero.optim.adamw(0.1, weight_decay=lr),
        lambda: fzero.optim.adamw(0.1, betas=(0.9, lr)),
    ):
        with pytest.raises(LayoutError, match=r"(?s)is a tensor.*float\(") as caught:
            made()
        assert "schedule" not in str(caught.value)
    with pytest.raises(CallError, match=r"functools\.partial\(torch\.optim\.SGD, lr=0\.1\)"):
        fzero.optim.from_torch(torch.optim.SGD, lr=0.5)  # type: ignore[call-arg]


@each_stage
def test_a_state_that_a_step_used_up_is_not_set(stage: int) -> None:
    e = engine_of(Net, stage)
    back(e, Draw(0, 0))
    old = e.state
    assert e.step()
    before = e.full_parameters()
    with pytest.raises(DonatedError, match=r"copy\.deepcopy\(state\)"):
        e.state = old
    same(e.full_parameters(), before, 0.0)


def test_gradients_by_path_are_added_whatever_dict_they_are_in() -> None:
    e = engine_of(Net, 2)
    back(e, Draw(0, 0))
    params = {path: p.detach().clone() for path, p in e.full_parameters().items()}
    nested = {
        top: {k[2:]: x for k, x in params.items() if k[0] == top} for top in {k[0] for k in params}
    }

    for tree in (params, OrderedDict(params), nested):
        state = fzero.init(tree, fzero.optim.sgd(0.25), stage=2)
        state = fzero.apply_gradients(fzero.add_gradients(state, e.full_gradients()))
        wanted = {k: x - 0.25 * e.full_gradient(k) for k, x in params.items()}
        flat = fzero.full_params(state)
        flat = {f"{k}.{j}": x for k in flat for j, x in flat[k].items()} if tree is nested else flat
        same(flat, wanted)


def test_what_wrt_leaves_out_is_named() -> None:
    states = {k: fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(0.1), stage=2) for k in "mn"}

    def inner(p: Any) -> Any:
        product = (p["m"]["w"] * p["n"]["w"]).sum()
        return torch.autograd.grad(product, p["n"]["w"], create_graph=True)[0].sum()

    with pytest.raises(PhaseError, match=r"(?s)does not require grad.*wrt="):
        fzero.grad_and_reduce(inner, states, wrt="m")()
    states, _ = fzero.grad_and_reduce(
        lambda p: (p["m"]["w"] * p["n"]["w"]).sum(), states, wrt="m"
    )()
    with pytest.raises(PhaseError, match=r"(?s)1 of 2 states.*\['n'\].*wrt="):
        fzero.apply_gradients(states)


def test_a_list_of_optimizers_and_an_unfreezing_name_the_way() -> None:
    module = linear(3, 2)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(FzeroError, match=r"(?s)2 optimizers in a list.*one engine for each part"):
        Engine(module, [sgd([module.weight]), sgd([module.bias])], stage=2)
    module.bias.requires_grad_(False)
    e = Engine(module, sgd(module.parameters()), stage=2)
    module.bias.requires_grad_(True)
    e(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    with pytest.raises(LayoutError, match=r"(?s)make the engine while it learns, and freeze it"):
        e.step()
