"""A pytree of models: each at a stage of its own, with an optimizer of its own, in one step."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import DonatedError, LayoutError
from tests.covering import covered
from tests.strategies import everywhere, integers, same

PARAMS = {"g": {"w": integers((5,), 1), "b": integers((), 2)}, "d": integers((2, 3), 3)}
STAGES: list[Any] = [0, 1, 2, 3, {"g": 2, "d": 3}, {"g": 3, "d": 0}, {"g": 1, "d": 2}]


def make_optimizers() -> dict[str, Any]:
    return {"g": fzero.optim.sgd(2.0**-4, momentum=0.5), "d": fzero.optim.sgd(2.0**-6)}


def made(g: Any, xs: Tensor) -> Tensor:
    return xs * g["w"].sum() + g["b"]


def d_loss(params: Any, xs: Tensor) -> Tensor:
    return 24 * ((made(params["g"], xs).detach() - xs) * params["d"].sum()).mean()


def g_loss(params: Any, xs: Tensor) -> Tensor:
    return 24 * (made(params["g"], xs) * (params["d"] * torch.arange(3.0)).sum()).mean()


def gan_step(states: Any, xs: Tensor) -> tuple[Any, Tensor]:
    """One update of the discriminator; then, with the new one, of the generator."""
    found, of_d = fzero.grad_and_reduce(d_loss, states)(xs)
    states = {**states, "d": fzero.apply_gradients(found["d"])}
    found, of_g = fzero.grad_and_reduce(g_loss, states)(xs)
    return {**states, "g": fzero.apply_gradients(found["g"])}, torch.stack([of_d, of_g])


def joint_step(states: Any, xs: Tensor) -> tuple[Any, Tensor]:
    """One update of both by one loss."""
    states, loss = fzero.grad_and_reduce(g_loss, states)(xs)
    return fzero.apply_gradients(states), loss


UPDATES = {gan_step: [(["d"], d_loss), (["g"], g_loss)], joint_step: [(["g", "d"], g_loss)]}


def plain(step: Any, batches: Tensor) -> dict[str, Any]:
    """The same on whole parameters, for batches [step, rank, n], by torch.optim."""
    w, b, d = (x.clone().requires_grad_() for x in (*PARAMS["g"].values(), PARAMS["d"]))
    params = {"g": {"w": w, "b": b}, "d": d}
    optimizers = {
        "g": torch.optim.SGD([w, b], 2.0**-4, momentum=0.5),
        "d": torch.optim.SGD([d], 2.0**-6),
    }
    for batch in batches:
        for names, loss in UPDATES[step]:
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            (torch.stack([loss(params, xs) for xs in batch]).sum() / len(batch)).backward()
            for name in names:
                optimizers[name].step()
    return {"g": {"w": w.detach(), "b": b.detach()}, "d": d.detach()}


@covered(
    stage=STAGES,
    ranks=[1, 2, 3],
    how=[
        (gan_step, lambda step: step),
        (gan_step, fzero.coalesce),
        (joint_step, fzero.coalesce),
        (joint_step, fzero.accumulate(steps=2)),
    ],
)
def test_a_step_over_two_models_is_that_of_torch_and_all_of_it_is_donated(
    stage: Any, ranks: int, how: Any
) -> None:
    step, wrap = how
    run = fzero.simulate(fzero.shard(wrap(step), stage=stage, donate=True), world_size=ranks)
    batches = integers((2, ranks, 2), 4, bound=1)
    states = run.init(PARAMS, make_optimizers())
    for batch in batches:
        old = states
        states, _ = run(states, batch)
        for used in old.values():
            with pytest.raises(DonatedError, match="this state was donated"):
                fzero.simulate(fzero.full_params, world_size=ranks)(used)
    held = fzero.simulate(fzero.full_params, world_size=ranks)(states)
    everywhere(held, plain(step, batches), ranks)


def test_one_stage_or_one_optimizer_is_that_of_all_models() -> None:
    three = fzero.shard(gan_step, stage=3).init(PARAMS, make_optimizers())
    assert {name: (s.stage, str(s.setup.optimizer)) for name, s in three.items()} == {
        "g": (3, str(make_optimizers()["g"])),
        "d": (3, str(make_optimizers()["d"])),
    }
    shared = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage={"g": 0, "d": 2})
    assert [(s.stage, s.setup.optimizer) for s in (shared["g"], shared["d"])] == [
        (0, fzero.optim.sgd(0.5)),
        (2, fzero.optim.sgd(0.5)),
    ]
    same(fzero.full_params(shared), PARAMS)


def test_without_trees_a_dict_of_models_is_one_state() -> None:
    state = fzero.shard(gan_step, stage=2).init(PARAMS, fzero.optim.sgd(0.5))
    assert isinstance(state, fzero.TrainState)
    assert [leaf.path for leaf in state.setup.layout.leaves] == ["g.w", "g.b", "d"]


def test_an_init_and_an_update_function_are_one_optimizer_and_not_two_models() -> None:
    rule = fzero.optim.sgd(0.5)
    state = fzero.init((torch.ones(2), torch.ones(3)), (rule.init, rule.update), stage=0)
    assert isinstance(state, fzero.TrainState)
    several = fzero.init((torch.ones(2), torch.ones(3)), (rule, rule), stage=0)
    assert [one.setup.layout.leaves[0].shape for one in several] == [(2,), (3,)]


def test_trees_may_be_deep_and_paths_begin_inside_of_each_model() -> None:
    params: Any = [PARAMS["d"], {"left": PARAMS["g"], "right": PARAMS["g"]}]
    seen: list[str] = []
    states = fzero.init(
        optree.tree_map(lambda x: x.to("meta"), params),
        fzero.optim.sgd(0.5),
        stage=[3, {"left": 0, "right": 2}],
        trainable=lambda path: path != "b",
        initializer=lambda path, leaf: (seen.append(path), torch.ones_like(leaf, device="cpu"))[1],
    )
    assert sorted(seen) == [".", "b", "b", "w", "w"]
    assert (states[0].stage, states[1]["left"].stage, states[1]["right"].stage) == (3, 0, 2)
    assert [leaf.trainable for leaf in states[1]["left"].setup.layout.leaves] == [True, False]


W, SGD = torch.ones(2), fzero.optim.sgd(0.5)
BOTH = {"g": SGD, "d": SGD}


@pytest.mark.parametrize(
    ("params", "optimizers", "stage", "what", "keys"),
    [
        ({"g": W, "e": W}, BOTH, {"g": 2, "d": 3}, "parameters do not fit the stages", "deg"),
        ({"g": W, "d": W}, {"g": SGD}, {"g": 2, "d": 3}, "optimizers do not fit the stages", "dg"),
        ({"g": W, "e": W}, BOTH, 2, "parameters do not fit the optimizers", "deg"),
        ([W, W], [SGD, SGD], (2, 3), "parameters do not fit the stages", ()),
        ({"a": {"g": W}}, SGD, {"a": {"g": 2, "d": 3}}, "parameters do not fit the stages", "dg"),
    ],
)
def test_trees_that_do_not_fit_are_refused_by_their_keys(
    params: Any, optimizers: Any, stage: Any, what: str, keys: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        fzero.shard(gan_step, stage=stage).init(params, optimizers)
    assert f"init: the {what}" in str(caught.value)
    assert all(repr(key) in str(caught.value) for key in keys)
    assert "Fix: give each model one of everything under the same key" in str(caught.value)


@pytest.mark.parametrize("stage", [{}, {"g": 2, "d": 4}, {"g": 2, "d": None}, [1, "2"], (True,)])
def test_what_is_no_stage_is_refused_in_a_tree_too(stage: Any) -> None:
    with pytest.raises(LayoutError, match=r"stage=[\s\S]*Fix: give 0 \(replicas\)"):
        fzero.shard(gan_step, stage=stage)


def test_states_that_do_not_fit_a_step_are_refused_before_it_runs() -> None:
    calls: list[Any] = []
    step = fzero.shard(lambda states, x: (calls.append(x), states)[::-1], stage={"g": 2, "d": 3})
    states = step.init(PARAMS, make_optimizers())
    for wrong, message in (
        (states["g"], "the states do not fit the stages: Expected an instance of dict"),
        ({"g": states["g"]}, "missing key(s): ['d']"),
        ({**states, "e": states["g"]}, "extra key(s): ['e']"),
        ({**states, "d": {"a": states["d"]}}, "there is a dict of states at ['d']"),
        ({**states, "d": states["g"]}, "stage 2 was given to a step of stage 3, at ['d']"),
    ):
        with pytest.raises(LayoutError) as caught:
            step(wrong, 1.0)
        assert message in str(caught.value)
    assert calls == []
    assert step(states, 1.0) == (states, None)
