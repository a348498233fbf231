"""Optimizers from elsewhere: anything with the (init, update) of optax or TorchOpt."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from tests.covering import covered
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


# Rules that need whole leaves: on one rank, and at stage 0


def straight(m: Tensor) -> Tensor:
    """A matrix without its singular values, as Muon makes it; others as they are."""
    if m.ndim != 2:
        return m
    left, _, right = torch.linalg.svd(m, full_matrices=False)
    return left @ right


def muon_update(grads: list[Tensor], state: Trace, params: list[Tensor]) -> Any:
    steps, state = moved(grads, state)
    assert [p.shape for p in params] == [m.shape for m in state.trace]
    return [LR * straight(step) for step in steps], state


class Muon(torch.optim.SGD):
    """The same rule, on parameters of a module."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        held = [self.state[p].get("trace", torch.zeros_like(p)) for p in params]
        grads = [p.grad for p in params]
        steps, state = muon_update(grads, Trace(held, torch.zeros(())), params)
        for p, step, trace in zip(params, steps, state.trace, strict=True):
            p += step
            self.state[p]["trace"] = trace


@covered(donate=[False, True], ranks=[0, 1, 3])
def test_a_rule_for_matrices_has_them_in_their_own_shapes(
    ranks: int, donate: bool, tmp_path: Path
) -> None:
    xs = integers((4, ranks) if ranks else (4,), 7, bound=1)
    steps = [x.reshape(-1).unbind() for x in xs]
    want = train(square_loss, PARAMS, steps, lambda ps: Muon(ps, LR))
    pair = Optax(init, muon_update)
    _, half = trained(PARAMS, pair, xs[:2], stage=0, donate=donate)
    fzero.checkpoint.save(tmp_path / "half", half)
    _, fresh = trained(PARAMS, pair, xs[:0], stage=0, donate=donate)
    half = fzero.checkpoint.load(tmp_path / "half", fresh)
    got, _ = trained(PARAMS, pair, xs[2:], stage=0, donate=donate, state=half)
    for path, x in got.items():  # a singular value decomposition is not exact
        torch.testing.assert_close(x, want[path].expand_as(x), rtol=1e-12, atol=1e-15)


def test_parts_of_matrices_are_refused_to_it() -> None:
    with pytest.raises(LayoutError, match=r"pair\(muon_update\) is not elementwise"):
        trained(PARAMS, Optax(init, muon_update), integers((1, 2), 1), stage=1)


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


def counted(grads: list[Tensor], count: int) -> tuple[list[Tensor], int]:
    """As TorchOpt's RAdam: a Python number counts, which as a tensor would compute in fp32."""
    return [-(0.9**count) * LR * g for g in grads], count + 1


@pytest.mark.parametrize("stage", [0, 3])
def test_a_count_that_is_a_python_number_stays_one_on_virtual_ranks(
    stage: int, tmp_path: Path
) -> None:
    xs, pair = integers((4, 2), 5), (lambda params: 1, counted)
    _, state = trained(PARAMS, pair, xs[:2], loss=square_loss, stage=stage)
    assert state.optimizer == 3
    fzero.checkpoint.save(tmp_path, state)
    fresh = trained(PARAMS, pair, xs[:0], loss=square_loss, stage=stage)[1]
    state = fzero.checkpoint.load(tmp_path, fresh)
    got, state = trained(PARAMS, pair, xs[2:], loss=square_loss, stage=stage, state=state)
    assert state.optimizer == 5
    want, _ = trained(PARAMS, pair, xs.mean(1), loss=square_loss, stage=0)
    for rank in range(2):
        torch.testing.assert_close({k: x[rank] for k, x in got.items()}, want)
