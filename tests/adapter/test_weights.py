"""Law 15 under the engine: sum(w g) / sum(w), whatever the split over backwards and ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError, MismatchError, PhaseError
from tests.covering import covered
from tests.strategies import integers, seeds, stages, worlds

LR = 0.5


def model() -> Any:
    made = nn.Linear(3, 1)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[1.0, 2.0, -1.0]]))
        made.bias.fill_(1.0)
    return made


def engine(stage: int, **options: Any) -> Engine:
    module = model()
    return Engine(module, torch.optim.SGD(module.parameters(), LR), stage=stage, **options)


def loss_of(engine: Engine, x: Tensor, y: Tensor) -> Tensor:
    """The mean over rows: NaN for none."""
    return ((engine(x)[:, 0] - y) ** 2).mean()


def by_backward(engine: Engine, loss: Tensor, weight: Any) -> None:
    engine.backward(loss, weight=weight)


def by_scale(engine: Engine, loss: Tensor, weight: Any) -> None:
    engine.scale(loss, weight=weight).backward()


@given(
    st.data(),
    worlds,
    stages,
    seeds,
    st.sampled_from([by_backward, by_scale]),
    st.sampled_from(["plain", "window", "loss scale", "checked"]),
)
def test_any_split_gives_the_gradient_of_one_process_bit_for_bit(
    data: Any, ranks: int, stage: int, seed: int, way: Any, how: str
) -> None:
    calls = data.draw(st.integers(1, 3))
    own = st.lists(st.sampled_from([0, 1, 2, 4]), min_size=calls, max_size=calls)
    every = st.lists(own, min_size=ranks, max_size=ranks)
    split = data.draw(every.filter(lambda s: sum(map(sum, s))))
    total = sum(map(sum, split))
    x, y = integers((total, 3), seed).float(), integers((total,), seed + 1).float()
    options: dict[str, Any] = {
        "loss scale": {"loss_scale": 1024.0},
        "checked": {"check_finite": True},
    }
    ends = torch.tensor([n for own in split for n in own]).cumsum(0).view(ranks, calls)

    def body() -> Any:
        rank, trained = fzero.axis_index(), engine(stage, **options.get(how, {}))
        with trained.coalesce() if how == "window" else contextlib.nullcontext():
            for rows, end in zip(split[rank], ends[rank].tolist(), strict=True):
                some = slice(end - rows, end)
                way(trained, loss_of(trained, x[some], y[some]), rows)
        gradient, norm = trained.full_gradient("weight"), trained.global_grad_norm
        trained.step()
        return gradient, norm, trained.full_parameters()["weight"], trained.step_was_skipped

    gradients, norms, weights, skipped = fzero.simulate(body, world_size=ranks)()
    plain = model()
    ((plain(x)[:, 0] - y) ** 2).sum().backward()
    for p in plain.parameters():
        p.grad /= total
    assert all(torch.equal(one, plain.weight.grad) for one in gradients)
    assert all(torch.equal(one, plain.weight - LR * plain.weight.grad) for one in weights)
    want = torch.cat([p.grad.reshape(-1) for p in plain.parameters()]).norm()
    torch.testing.assert_close(norms, want.expand(ranks))
    assert not any(skipped)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_update_of_total_weight_0_changes_nothing_and_says_so(stage: int) -> None:
    def body() -> Any:
        trained = engine(stage, check_finite=True)
        before = trained.full_parameters()["weight"]
        by_backward(trained, loss_of(trained, torch.ones(0, 3), torch.ones(0)), 0)
        trained.step()
        skipped = trained.step_was_skipped
        by_backward(trained, loss_of(trained, torch.ones(1, 3), torch.zeros(1)), 1)
        trained.step()
        after = trained.full_parameters()["weight"]
        return skipped, trained.step_was_skipped, int(trained.state.step), before != after

    with pytest.warns(UserWarning, match="weights of all calls since the last update are 0"):
        skipped, later, step, moved = fzero.simulate(body, world_size=2)()
    assert all(skipped) and not any(later) and step.tolist() == [1, 1] and bool(moved.all())


def test_what_does_not_go_with_weights_raises_and_the_engine_goes_on() -> None:
    trained = engine(2)
    x, y = torch.ones(2, 3), torch.zeros(2)
    losses = [loss_of(trained, x, y) for _ in range(2)]
    with pytest.raises(PhaseError, match="losses with two weights"):
        both = trained.scale(losses[0], weight=1) + trained.scale(losses[1], weight=2)
        both.backward()
    by_backward(trained, loss_of(trained, x, y), 2)
    with pytest.raises(PhaseError, match="no weight, and the state holds"):
        trained.backward(loss_of(trained, x, y))
    trained.zero_grad()
    trained.backward(loss_of(trained, x, y))
    with pytest.raises(PhaseError, match="a weight, and the state holds"):
        by_backward(trained, loss_of(trained, x, y), 2)
    trained.step()
    with pytest.raises(LayoutError, match="weight that requires grad"):
        by_backward(trained, loss_of(trained, x, y), torch.ones((), requires_grad=True))
    with pytest.raises(LayoutError, match="weight=-1"):
        by_scale(trained, loss_of(trained, x, y), -1)
    averaging = engine(2, average_micro_batches=True)
    with pytest.raises(LayoutError, match="average_micro_batches"):
        by_backward(averaging, loss_of(averaging, x, y), 2)


@covered(
    stage=[0, 1, 2, 3],
    way=[by_backward, by_scale],
    how=["plain", "window", "loss scale"],
    weights=[[1.0, -1.0], [2.0, float("nan")], [float("inf"), 1.0], [-3.0, 1.0]],
)
def test_tensors_that_are_no_weights_raise_in_the_step_and_the_engine_goes_on(
    stage: int, way: Any, how: str, weights: list[float]
) -> None:
    def body() -> Any:
        options: dict[str, Any] = {"loss_scale": 1024.0} if how == "loss scale" else {}
        trained, plain = engine(stage, **options), engine(stage, **options)
        x, y = integers((2, 3), 1).float(), torch.zeros(2)
        with trained.coalesce() if how == "window" else contextlib.nullcontext():
            way(trained, loss_of(trained, x, y), torch.tensor(weights[fzero.axis_index()]))
        with pytest.raises(LayoutError, match=r"negative, infinite or NaN[\s\S]*the\s+loss"):
            trained.step()
        trained.zero_grad()
        for one in (trained, plain):
            way(one, loss_of(one, x, y), torch.tensor(3))
            one.step()
        found = [one.full_parameters()["weight"] for one in (trained, plain)]
        return torch.equal(*found), trained.step_was_skipped

    same, skipped = fzero.simulate(body, world_size=2)()
    assert all(same) and not any(skipped)


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_two_losses_of_one_weight_in_one_backward_are_refused(scale: Any) -> None:
    trained = engine(2, loss_scale=scale)
    x, y = torch.ones(2, 3), torch.zeros(2)
    weight = torch.tensor(2)
    for one, other in ((2, 2), (weight, weight)):
        a, b = (trained.scale(loss_of(trained, x, y), weight=w) for w in (one, other))
        with pytest.raises(PhaseError, match=r"two weights[\s\S]*scale\(a \+ b, weight=n\)"):
            (a + b).backward()
        trained.zero_grad()
        both = [trained.scale(loss_of(trained, x, y), weight=w) for w in (one, other)]
        with pytest.raises(PhaseError, match="two weights"):
            trained.backward(both)
        trained.zero_grad()
    trained.scale(loss_of(trained, x, y) + loss_of(trained, x, y), weight=2).backward()
    trained.scale(loss_of(trained, x, y), weight=2).backward()  # one for each backward
    trained.step()


def test_ranks_of_which_one_gives_no_weight_all_raise() -> None:
    def body() -> None:
        trained = engine(1)
        loss = loss_of(trained, torch.ones(1, 3), torch.zeros(1))
        trained.backward(loss, weight=1 if fzero.axis_index() else None)
        trained.step()

    with pytest.raises(MismatchError, match="weight"):
        fzero.simulate(body, world_size=2)()


def test_p_grad_says_that_the_total_weight_is_not_known_on_one_rank() -> None:
    def body() -> None:
        trained = engine(0)
        by_backward(trained, loss_of(trained, torch.ones(1, 3), torch.zeros(1)), 2)
        weight: Any = trained.module.weight
        _ = weight.grad + 0

    with pytest.raises(PhaseError, match=r"p.grad was read[\s\S]*full_gradient"):
        fzero.simulate(body, world_size=2)()


@pytest.mark.filterwarnings("ignore:KeyError left a coalesce")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_block_that_raises_takes_its_weights_with_it(stage: int) -> None:
    def body() -> Any:
        trained, x = engine(stage), torch.ones(1, 3)
        with contextlib.suppress(KeyError), trained.coalesce():
            trained.backward(loss_of(trained, x, torch.zeros(1)), weight=5)
            raise KeyError
        with trained.coalesce():
            trained.backward(loss_of(trained, x, torch.zeros(1)), weight=1)
        found = trained.full_gradient("weight")
        trained.zero_grad()
        with contextlib.suppress(KeyError), trained.coalesce():
            trained.backward(loss_of(trained, x, torch.zeros(1)), weight=5)
            raise KeyError
        trained.backward(loss_of(trained, x, torch.zeros(1)))  # without a weight
        return found, trained.full_gradient("weight")

    alone = model()
    ((alone(torch.ones(1, 3))[:, 0]) ** 2).mean().backward()
    for found in fzero.simulate(body, world_size=2)():
        assert all(torch.equal(one, alone.weight.grad) for one in found)


class Nested(nn.Module):
    """A module whose forward runs a backward, from its second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.nests = False

    def forward(self, x: Tensor) -> Tensor:
        if self.nests:
            (self.w * x).sum().backward()
        return (self.w * x).sum()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_backward_inside_of_a_forward_has_not_the_weight_of_an_earlier_step(stage: int) -> None:
    module = Nested()
    trained = Engine(module, torch.optim.SGD(module.parameters(), lr=1.0), stage=stage)
    trained.backward(trained(torch.ones(3)), weight=4.0)
    trained.step()
    before = fzero.full_params(trained.state)["w"]
    module.nests = True
    trained.backward(trained(torch.ones(3)))
    trained.step()
    assert torch.equal(before - fzero.full_params(trained.state)["w"], torch.full((3,), 2.0))
