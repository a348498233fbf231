"""Optimizers from elsewhere: anything with the (init, update) of optax or TorchOpt."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from tests.optim.cases import trained
from tests.oracle import square_loss, train
from tests.strategies import everywhere, integers, seeds, stages, worlds

LR, MOMENTUM = 2.0**-8, 0.5
PARAMS = {"w": integers((3, 5), 1), "b": integers((), 2), "none": torch.zeros(0).double()}


class Trace(NamedTuple):
    """A foreign state: a NamedTuple that nobody registered, with a None in it."""

    trace: list[Tensor]
    count: Tensor
    extra: None = None


def init(params: Any) -> Trace:
    return Trace([torch.zeros_like(p) for p in params], torch.zeros((), dtype=torch.int64))


def moved(grads: list[Tensor], state: Trace) -> tuple[list[Tensor], Trace]:
    trace = [MOMENTUM * m + g for m, g in zip(state.trace, grads, strict=True)]
    return [-LR * m for m in trace], Trace(trace, state.count + 1)


class Optax(NamedTuple):
    """optax's GradientTransformation: update(updates, state, params=None)."""

    init: Any
    update: Any


def optax_update(updates: Any, state: Trace, params: Any = None) -> Any:
    assert len(params) == len(updates)
    return moved(updates, state)


class TorchOpt:
    """TorchOpt's: `params` by keyword only, and in place unless told otherwise."""

    init = staticmethod(init)

    @staticmethod
    def update(updates: Any, state: Trace, *, params: Any = None, inplace: bool = True) -> Any:
        assert len(params) == len(updates)
        if inplace:
            raise AssertionError("the gradients would be overwritten")
        return moved(updates, state)


OWN = fzero.optim.sgd(LR, momentum=MOMENTUM)  # so a loop written for optax takes it
PAIRS = [
    Optax(init, optax_update),
    TorchOpt(),
    (init, optax_update),
    TorchOpt,
    (OWN.init, OWN.update),
]


@given(pair=st.sampled_from(PAIRS), ranks=worlds, stage=stages, donate=st.booleans(), seed=seeds)
def test_a_foreign_pair_trains(pair: Any, ranks: int, stage: int, donate: bool, seed: int) -> None:
    xs = integers((3, ranks), seed, bound=1)
    got, state = trained(PARAMS, pair, xs, stage=stage, donate=donate)
    steps = [list(x) for x in xs]
    want = train(square_loss, PARAMS, steps, lambda ps: torch.optim.SGD(ps, LR, momentum=MOMENTUM))
    everywhere(got, want, ranks)
    assert state.optimizer.count.tolist() == [3] * ranks


def test_an_update_by_a_foreign_pair_can_be_differentiated() -> None:
    start = fzero.init(torch.tensor([1.0, 2.0]).double(), Optax(init, optax_update), stage=1)

    def trained(c: Tensor) -> Tensor:
        state, _ = fzero.grad_and_reduce(lambda p, c: (c * p**2).sum(), start)(c)
        return fzero.full_params(fzero.apply_gradients(state))

    c = torch.tensor([3.0, 4.0]).double()
    want = torch.diag(-LR * 2 * torch.tensor([1.0, 2.0]).double())
    torch.testing.assert_close(torch.func.jacrev(trained)(c), want)


@pytest.mark.parametrize(
    ("optimizer", "fix"),
    [
        (torch.optim.SGD, r"use fzero.optim.from_torch\("),
        (torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1), r"use fzero.optim.from_tor"),
        ("adamw", "use fzero.optim.adamw"),
        ((init, 3), "use fzero.optim.adamw"),
        (fzero.optim.adam, "use fzero.optim.adamw"),
    ],
)
def test_what_is_no_pair_is_refused(optimizer: Any, fix: str) -> None:
    with pytest.raises(LayoutError, match=rf"the optimizer is [\s\S]*Fix: {fix}"):
        fzero.init(PARAMS, optimizer, stage=0)
