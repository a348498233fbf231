"""Options by leaf, schedules, and options that cannot be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from fzero.optim import schedules
from fzero.state import Leaf
from tests.oracle import square_loss, train
from tests.strategies import everywhere, integers, same, seeds, stages, trees, worlds

LR, MOMENTUM, DECAY = 2.0**-8, 0.5, 0.25
WIDE = (torch.float64,)


def step_fn(state: Any, x: Tensor) -> Any:
    state, loss = fzero.grad_and_reduce(square_loss, state)(x)
    return fzero.apply_gradients(state), loss


def is_matrix(leaf: Any) -> bool:
    """Also for a tensor, so that the reference can ask the same."""
    return len(leaf.shape) >= 2


def is_odd(leaf: Any) -> bool:
    return math.prod(leaf.shape) % 2 == 1


def reference(params: list[Tensor], *, masked: bool) -> torch.optim.Optimizer:
    """torch.optim with a param group for each tensor."""
    groups = []
    for p in params:
        decays = not masked or is_matrix(p)
        options = {"lr": 2 * LR, "momentum": 0.25} if is_odd(p) else {"lr": LR}
        groups.append({"params": [p], "weight_decay": DECAY if decays else 0.0, **options})
    return torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)


@given(
    tree=trees(WIDE),
    ranks=worlds,
    stage=stages,
    bucket_bytes=st.integers(1, 300),
    masked=st.booleans(),
    seed=seeds,
)
def test_options_by_leaf_hold_across_shard_borders(
    tree: Any, ranks: int, stage: int, bucket_bytes: int, masked: bool, seed: int
) -> None:
    xs = integers((3, ranks), seed, bound=1)
    optimizer = fzero.optim.sgd(
        LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        decay_mask=is_matrix if masked else None,
        groups=[(is_odd, {"lr": 2 * LR, "momentum": 0.25})],
    )
    step = fzero.shard(step_fn, stage=stage, bucket_bytes=bucket_bytes)
    run = fzero.simulate(step, world_size=ranks)
    state = run.init(tree, optimizer)
    for x in xs if state.setup.layout.trainable else ():
        state, _ = run(state, x)
    got = fzero.simulate(fzero.full_params, world_size=ranks)(state)
    steps = [list(x) for x in xs]
    want = train(
        square_loss, tree, steps, lambda ps: reference(ps or [torch.ones(1)], masked=masked)
    )
    everywhere(got, want, ranks)


def test_the_first_group_that_matches_counts_and_the_mask_comes_on_top() -> None:
    seen: list[Leaf] = []

    def starts_with_h(leaf: Leaf) -> bool:
        seen.append(leaf)
        return leaf.path.startswith("h.")

    params = {"h": [torch.ones(2, 2), torch.ones(2)], "top": torch.ones(2)}
    groups = [(starts_with_h, {"lr": 1.0, "weight_decay": 0.5}), (lambda leaf: True, {"lr": 0.25})]
    optimizer = fzero.optim.sgd(9.0, decay_mask=is_matrix, groups=groups)
    state = fzero.init(params, optimizer, stage=0)
    state, _ = fzero.grad_and_reduce(lambda p: p["h"][0].sum() + p["top"].sum(), state)()
    got = fzero.full_params(fzero.apply_gradients(state))
    same(got["h"][0], torch.full((2, 2), 1 - 1.5))
    same(got["h"][1], torch.ones(2))  # no gradient, and the mask keeps it from decay
    same(got["top"], torch.full((2,), 1 - 0.25))
    assert {(leaf.path, leaf.shape, leaf.dtype) for leaf in seen} >= {
        ("h.0", (2, 2), torch.float32),
        ("top", (2,), torch.float32),
    }


def test_options_by_leaf_hold_where_the_update_is_differentiated() -> None:
    """Also with a leaf, and so a shard, of no elements."""
    params = {"a": torch.ones(3), "b": torch.ones(2), "z": torch.ones(0)}
    groups = [(lambda leaf: leaf.path == "a", {"lr": 0.5})]
    run = fzero.shard(lambda s: (s, None), stage=2)
    state = run.init(params, fzero.optim.sgd(1.0, groups=groups))

    def trained(c: Tensor) -> Tensor:
        new, _ = fzero.grad_and_reduce(lambda p: c * (p["a"].sum() + p["b"].sum()), state)()
        new = fzero.full_params(fzero.apply_gradients(new))
        return torch.cat([new["a"], new["b"], new["z"]])

    value, slope = torch.func.jvp(trained, (torch.tensor(2.0),), (torch.tensor(1.0),))[:2]
    same(value, torch.tensor([0.0, 0.0, 0.0, -1.0, -1.0]))
    same(slope, torch.tensor([-0.5, -0.5, -0.5, -1.0, -1.0]))


def test_a_group_may_have_momentum_where_the_rest_has_none() -> None:
    optimizer = fzero.optim.sgd(1.0, groups=[(is_matrix, {"momentum": 0.5})])
    state = fzero.init([torch.zeros(1, 1), torch.zeros(1)], optimizer, stage=0)
    for _ in range(3):
        state, _ = fzero.grad_and_reduce(lambda p: p[0].sum() + p[1].sum(), state)()
        state = fzero.apply_gradients(state)
    same(fzero.full_params(state), [torch.tensor([[-4.25]]), torch.tensor([-3.0])])


@given(
    lrs=st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=4),
    differentiated=st.booleans(),
)
def test_the_schedule_is_asked_with_the_updates_made_so_far(
    lrs: list[float], differentiated: bool
) -> None:
    state = fzero.init(torch.zeros(2), fzero.optim.sgd(lambda t: lrs[t]), stage=0)

    def run(c: Tensor) -> Tensor:
        new = state
        for _ in lrs:
            new, _ = fzero.grad_and_reduce(lambda p: c * p.sum(), new)()
            new = fzero.apply_gradients(new)
        return fzero.full_params(new).sum()

    one = torch.tensor(1.0)
    got = torch.func.grad_and_value(run)(one)[1] if differentiated else run(one)
    assert got == -2 * sum(lrs)


def test_a_group_may_have_a_schedule_of_its_own() -> None:
    groups = [(is_matrix, {"lr": lambda t: 0.0})]
    optimizer = fzero.optim.sgd(schedules.constant(1.0), groups=groups)
    state = fzero.init([torch.zeros(1, 1), torch.zeros(1)], optimizer, stage=0)
    state, _ = fzero.grad_and_reduce(lambda p: p[0].sum() + p[1].sum(), state)()
    same(fzero.full_params(fzero.apply_gradients(state)), [torch.zeros(1, 1), -torch.ones(1)])


def test_schedules_are_their_formulas() -> None:
    assert [schedules.constant(0.5)(t) for t in (0, 9)] == [0.5, 0.5]
    assert [schedules.linear(1.0, 0.0, 4)(t) for t in (0, 1, 4, 9)] == [1.0, 0.75, 0.0, 0.0]
    cosine = schedules.warmup_cosine(2.0, 4, 12, floor=0.5)
    want = [0.5, 1.0, 1.5, 2.0]
    want += [0.5 + 0.75 * (1 + math.cos(math.pi * s / 8)) for s in range(9)]
    assert [cosine(t) for t in range(13)] == pytest.approx(want)
    assert cosine(99) == 0.5
    assert schedules.warmup_cosine(1.0, 0, 1)(5) == 0.0


@pytest.mark.parametrize(
    "make", [lambda: schedules.linear(0.0, 1.0, 0), lambda: schedules.warmup_cosine(1.0, 0, 0)]
)
def test_a_schedule_of_no_steps_is_refused(make: Any) -> None:
    with pytest.raises(LayoutError, match=r"0 steps[\s\S]*Fix: give the number of updates"):
        make()


NAN = float("nan")
BAD = [
    (fzero.optim.sgd, {"lr": -1.0}, "use a number >= 0 or a schedule"),
    (fzero.optim.sgd, {"lr": "0.1"}, "use a number >= 0 or a schedule"),
    (fzero.optim.sgd, {"lr": True}, "use a number >= 0 or a schedule"),
    (fzero.optim.adamw, {"lr": torch.tensor(1e-3)}, r"pass float\(lr\), or a schedule"),
    (fzero.optim.lion, {"lr": 0.1, "groups": [(is_odd, {"lr": torch.ones(1)})]}, r"pass float\("),
    (fzero.optim.sgd, {"lr": NAN}, "use a number >= 0 or a schedule"),
    (fzero.optim.sgd, {"lr": 0.1, "momentum": 1.0}, "use a number in"),
    (fzero.optim.sgd, {"lr": 0.1, "nesterov": True}, "set momentum"),
    (fzero.optim.sgd, {"lr": 0.1, "weight_decay": -0.1}, "use a number >= 0"),
    (fzero.optim.adam, {"lr": 0.1, "eps": -1e-8}, "use a"),
    (fzero.optim.adam, {"lr": 0.1, "eps": NAN}, "use a"),
    (fzero.optim.adamw, {"lr": 0.1, "betas": (0.9, 1.0)}, "use two numbers in"),
    (fzero.optim.adamw, {"lr": 0.1, "betas": (0.9,)}, "use two numbers in"),
    (fzero.optim.adamw, {"lr": 0.1, "weight_decay": NAN}, "use a number >= 0"),
    (fzero.optim.lion, {"lr": 0.1, "betas": (-0.1, 0.9)}, "use two numbers in"),
    (fzero.optim.lion, {"lr": 0.1, "groups": [(is_odd, {"eps": 1.0})]}, "use one of"),
    (fzero.optim.adam, {"lr": 0.1, "groups": [(is_odd, {"lr": -1})]}, "use a number >= 0"),
    (fzero.optim.adam, {"lr": 0.1, "groups": [(is_odd, {"betas": (2, 0)})]}, "use two numbers"),
]


@pytest.mark.parametrize(("make", "options", "fix"), BAD)
def test_options_that_cannot_be_are_refused(make: Any, options: dict[str, Any], fix: str) -> None:
    with pytest.raises(LayoutError, match=rf"is not possible[\s\S]*Fix: {fix}"):
        make(**options)
