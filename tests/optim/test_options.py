"""Options by leaf, schedules, and options that cannot be."""

from __future__ import annotations

import functools
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
from tests.optim.cases import trained
from tests.oracle import square_loss, train
from tests.strategies import everywhere, integers, same, seeds, stages, trees, worlds

LR, DECAY = 2.0**-8, 0.25
WIDE = (torch.float64,)


def is_matrix(leaf: Any) -> bool:
    """Also for a tensor, so that the reference can ask the same."""
    return len(leaf.shape) >= 2


def is_odd(leaf: Any) -> bool:
    return math.prod(leaf.shape) % 2 == 1


def reference(params: list[Tensor], *, masked: bool, momentum: float) -> torch.optim.Optimizer:
    """torch.optim with a param group for each tensor."""
    groups = []
    for p in params or [torch.ones(1)]:
        options = {"lr": LR, "momentum": momentum, "weight_decay": DECAY}
        if is_odd(p):
            options |= {"lr": 2 * LR, "momentum": 0.25}
        elif is_matrix(p):
            options |= {"lr": 4 * LR, "weight_decay": 2 * DECAY}
        if masked and not is_matrix(p):
            options |= {"weight_decay": 0.0}
        groups.append({"params": [p], **options})
    return torch.optim.SGD(groups, lr=LR)


@given(
    tree=trees(WIDE),
    ranks=worlds,
    stage=stages,
    bucket_bytes=st.integers(1, 300),
    masked=st.booleans(),
    momentum=st.sampled_from([0.0, 0.5]),
    seed=seeds,
)
def test_options_by_leaf_hold_across_shard_borders(
    tree: Any, ranks: int, stage: int, bucket_bytes: int, masked: bool, momentum: float, seed: int
) -> None:
    """The first group that matches counts, and the mask comes on top of it."""
    xs = integers((3, ranks), seed, bound=1)
    optimizer = fzero.optim.sgd(
        LR,
        momentum=momentum,
        weight_decay=DECAY,
        decay_mask=is_matrix if masked else None,
        groups=[
            (is_odd, {"lr": schedules.constant(2 * LR), "momentum": 0.25}),
            (is_matrix, {"lr": 4 * LR, "weight_decay": 2 * DECAY}),
        ],
    )
    got, _ = trained(tree, optimizer, xs, stage=stage, bucket_bytes=bucket_bytes)
    make = functools.partial(reference, masked=masked, momentum=momentum)
    everywhere(got, train(square_loss, tree, [list(x) for x in xs], make), ranks)


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


def test_schedules_are_their_formulas() -> None:
    assert [schedules.constant(0.5)(t) for t in (0, 9)] == [0.5, 0.5]
    assert [schedules.linear(1.0, 0.0, 4)(t) for t in (0, 1, 4, 9)] == [1.0, 0.75, 0.0, 0.0]
    cosine = schedules.warmup_cosine(2.0, 4, 12, floor=0.5)
    want = [0.5, 1.0, 1.5, 2.0]
    want += [0.5 + 0.75 * (1 + math.cos(math.pi * s / 8)) for s in range(9)]
    assert [cosine(t) for t in range(13)] == pytest.approx(want)
    assert cosine(99) == 0.5
    assert schedules.warmup_cosine(1.0, 0, 1)(5) == 0.0


NAN = float("nan")
NUMBER, PAIR = "use a number >= 0", "use two numbers in"
BAD = [
    (fzero.optim.sgd, {"lr": -1.0}, "use a number >= 0 or a schedule"),
    (fzero.optim.sgd, {"lr": "0.1"}, "use a number >= 0 or a schedule"),
    (fzero.optim.sgd, {"lr": 0.1, "momentum": 1.0}, "use a number in"),
    (fzero.optim.sgd, {"lr": 0.1, "nesterov": True}, "set momentum"),
    (fzero.optim.sgd, {"lr": 0.1, "weight_decay": -0.1}, NUMBER),
    (fzero.optim.adam, {"lr": 0.1, "eps": NAN}, "use a"),
    (fzero.optim.adamw, {"lr": 0.1, "betas": (0.9, 1.0)}, PAIR),
    (fzero.optim.adamw, {"lr": 0.1, "betas": (0.9,)}, PAIR),
    (fzero.optim.lion, {"lr": 0.1, "betas": (-0.1, 0.9)}, PAIR),
    (fzero.optim.lion, {"lr": 0.1, "groups": [(is_odd, {"eps": 1.0})]}, "use one of"),
    (fzero.optim.adam, {"lr": 0.1, "groups": [(is_odd, {"lr": -1})]}, NUMBER),
    (fzero.optim.adamw, {"lr": 0.1, "decay_mask": True}, "use leaf -> whether it decays"),
    (fzero.optim.adamw, {"lr": 0.1, "groups": [{"lr": 1.0}]}, r"use \[\(leaf -> bool"),
    (fzero.optim.adamw, {"lr": 0.1, "groups": [("a", {"lr": 1.0})]}, r"use \[\(leaf -> bool"),
    (fzero.optim.soap, {"lr": 0.1, "betas": (0.9, 1.0)}, PAIR),
    (fzero.optim.soap, {"lr": 0.1, "eps": -1.0}, NUMBER),
    (fzero.optim.soap, {"lr": 0.1, "weight_decay": -1.0}, NUMBER),
    (fzero.optim.shampoo, {"lr": 0.1, "eps": -1.0}, NUMBER),
]
NAMED = [
    (fzero.optim.soap, {"lr": -1.0}, "soap: lr=-1.0"),
    (fzero.optim.soap, {"lr": 0.1, "refresh_every": 0}, "soap: refresh_every=0"),
    (fzero.optim.soap, {"lr": 0.1, "max_size": 0}, "soap: max_size=0"),
    (fzero.optim.adafactor, {"lr": -1.0}, "adafactor: lr=-1.0"),
    (fzero.optim.shampoo, {"lr": 0.1, "roots_every": 0}, "shampoo: roots_every=0"),
    (schedules.linear, {"start": 0.0, "end": 1.0, "steps": 0}, "linear: 0 steps"),
    (
        schedules.warmup_cosine,
        {"peak": 1.0, "warmup_steps": 0, "total_steps": 0},
        "cosine: 0 steps",
    ),
]


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [*NAMED, *((*row, rf"is not possible[\s\S]*Fix: {fix}") for *row, fix in BAD)],
)
def test_options_that_cannot_be_are_refused(make: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        make(**options)


class Doubled(float):
    """A number that is another one in a product."""

    def __mul__(self, other: Any) -> Any:
        return 2 * float(self) * other

    __rmul__ = __mul__


def test_an_option_is_a_number_and_no_object_that_computes() -> None:
    p, g = [torch.ones(2)], [torch.ones(2)]
    masks: Any = {"groups": [(is_odd, {"weight_decay": Doubled(0.5)})]}
    made = [fzero.optim.lion(lr, weight_decay=0.25, **masks) for lr in (Doubled(0.1), 0.1)]
    assert [type(value) for _, value in made[0].options[:1]] == [float]
    assert type(made[0].overrides[0][1][0][1]) is float
    new = [one.update(g, one.init(p), p)[0][0] for one in made]
    assert torch.equal(*new)
