"""Behaviours 18 and 19: one global norm at every stage, and the clip that uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from tests.behaviours.draws import settings_of
from tests.behaviours.models import (
    Naive,
    as_params,
    batches_for,
    loss_of,
    optimizer,
    tensors_of,
    trees,
    uses_of,
)
from tests.behaviours.networks import PLACES, virtual
from tests.behaviours.programs import Setting


@pytest.mark.filterwarnings("ignore:the loss requires no grad:UserWarning")
@given(data=st.data(), setting=settings_of(), window=st.booleans(), split=st.sampled_from([1, 2]))
def test_18_the_norm_is_that_of_the_whole_mean_gradient(
    data: st.DataObject, setting: Setting, window: bool, split: int
) -> None:
    """Padding and replicas do not count, tied leaves count once, frozen ones never."""
    tree = data.draw(trees())
    uses = data.draw(uses_of(tree))
    batches = batches_for(tree, 0)

    def gradients(state: Any, batch: Tensor) -> tuple[Any, None]:
        for number in (0, 2):
            state, _ = fzero.grad_and_reduce(loss_of(tree, uses, number), state)(batch)
        return state, None

    def step(state: Any, batch: Tensor) -> tuple[Any, Tensor]:
        state, _ = fzero.accumulate(gradients, steps=split)(state, batch)
        norm = fzero.global_norm(state)
        assert state.progress.backwards == 2 * split  # reading it changes nothing
        return state, norm

    sharded = setting.shard(fzero.coalesce(step) if window else step)
    over = fzero.simulate(sharded, world_size=setting.ranks)
    _, norms = over(
        over.init(as_params(tree, tensors_of(tree)), optimizer()), batches[: setting.ranks]
    )
    naive = Naive(tree, uses, setting.ranks)
    for part in batches.chunk(split, dim=1):
        naive.grad(0, part, 1 / split)
        naive.grad(2, part, 1 / split)
    want = flat_norm([*naive.summed().values()])
    torch.testing.assert_close(norms, norms.new_full((setting.ranks,), want), rtol=1e-6, atol=0)


def flat_norm(tensors: list[Tensor]) -> float:
    """The norm of all numbers in one fp64 vector."""
    return torch.cat([t.double().reshape(-1) for t in [*tensors, torch.zeros(1)]]).norm().item()


PARAMS = {
    "tied": torch.arange(6.0, dtype=torch.float64).view(2, 3),
    "odd": torch.ones(5, dtype=torch.float64),
    "frozen": torch.full((4,), 100.0, dtype=torch.float64),
    "unused": torch.ones(3, dtype=torch.float64),
}
PARAMS["tied too"] = PARAMS["tied"]
X = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)


def clip_loss(params: Any, x: Tensor) -> Tensor:
    tied = (params["tied"] * params["tied too"]).sum()
    return x * (tied + params["odd"].sum() + params["frozen"].sum())


def clipped_update(max_norm: float | None, scale: float = 1.0, **place: Any) -> Any:
    """p - p' of one sgd step with lr 1 over three ranks: the gradient that it used."""

    @fzero.clip(max_norm=max_norm)
    def step(state: Any, x: Tensor) -> tuple[Any, None]:
        state, _ = fzero.grad_and_reduce(lambda p, x: scale * clip_loss(p, x), state)(x)
        return fzero.apply_gradients(state), None

    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(1.0), trainable=lambda p: p != "frozen", **place)
        after = fzero.full_params(step(state, x)[0])
        return {name: p - after[name] for name, p in PARAMS.items()}

    return virtual(run, 3, X)


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
@pytest.mark.parametrize("max_norm", [0.5, 10.0, 1e6])
def test_19_the_factor_is_that_of_torch(stage: int, reshard: Any, max_norm: float) -> None:
    leaves = {k: torch.nn.Parameter(p) for k, p in PARAMS.items() if k not in ("tied too",)}
    value = clip_loss({**leaves, "tied too": leaves["tied"]}, X.mean())
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_([leaves["tied"], leaves["odd"]], max_norm)
    assert (norm > max_norm) == (max_norm < 100)
    got = clipped_update(max_norm, stage=stage, reshard_after_forward=reshard)
    for rank in range(3):
        for name in ("tied", "odd"):
            torch.testing.assert_close(got[name][rank], leaves[name].grad, rtol=1e-12, atol=1e-12)
        assert not got["frozen"].any()
        assert not got["unused"].any()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_19_no_bound_means_no_clip_bit_for_bit(stage: int) -> None:
    plain = clipped_update(None, stage=stage)
    for bound in (float("inf"), 1e30):
        got = clipped_update(bound, stage=stage)
        assert all(torch.equal(got[name], plain[name]) for name in plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_19_the_clip_sees_the_gradient_after_every_scale(stage: int) -> None:
    """The bound holds for the mean over ranks and micro-batches, not for a sum of parts."""
    got = clipped_update(1.0, scale=1e3, stage=stage)
    used = [got["tied"][0], got["odd"][0]]
    assert flat_norm(used) == pytest.approx(1.0, rel=1e-6)

    @fzero.clip(max_norm=1e9)
    @fzero.accumulate(steps=2)
    def step(state: Any, x: Tensor) -> tuple[Any, None]:
        state, _ = fzero.grad_and_reduce(lambda p, x: clip_loss(p, x.mean()), state)(x)
        return fzero.apply_gradients(state), None

    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(1.0), stage=stage)
        return fzero.full_params(step(state, x.expand(2))[0])["odd"]

    assert torch.equal(virtual(run, 3, X), (1 - X.mean()).expand(3, 5))


def test_19_bounds_that_are_no_bounds_are_refused() -> None:
    for bound in (0, -1.0, float("nan"), True):
        with pytest.raises(fzero.LayoutError, match=r"max_norm[\s\S]*Fix: pass None"):
            fzero.clip(lambda state: (state, None), max_norm=bound)


def test_18_a_state_without_gradients_or_parameters_has_norm_zero() -> None:
    state = fzero.init({"n": torch.zeros(0)}, fzero.optim.sgd(1.0), stage=2)
    state, _ = fzero.grad_and_reduce(lambda p: p["n"].sum(), state)()
    assert fzero.global_norm(state).item() == 0.0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_18_leaves_that_nobody_used_add_nothing(stage: int) -> None:
    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(1.0), stage=stage)
        state, _ = fzero.grad_and_reduce(lambda p, x: x * p["unused"].sum(), state)(x)
        return fzero.global_norm(state)

    wanted = X.mean() * torch.tensor([3.0] * 3).double().sqrt()
    torch.testing.assert_close(virtual(run, 3, X), wanted)
