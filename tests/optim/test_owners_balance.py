"""Owners are balanced by what they compute and by what they keep of their parameters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.checkpoint import load, save
from fzero.machine import owners
from fzero.optim import from_torch
from tests.optim.test_needs import Base
from tests.optim.test_owners import STEPS, run
from tests.optim.torch_cases import Lamb, parameters
from tests.strategies import integers


class Factors(Base):
    """A user's rule with a square of each side."""

    def updates(self, params: list[Any]) -> list[Tensor]:
        for p in params:
            g = p.grad.flatten(1)
            self.state[p] = {"left": g @ g.T, "right": g.T @ g}
        return [p.grad for p in params]


UNEVEN = {"a": (600, 4), "b": (21, 21), "c": (21, 21), "d": (570, 4)}  # of nearly equal costs


def kept_by(state: Any, ranks: int) -> list[int]:
    """What each rank keeps of whole parameters."""
    found = owners.owners_of(state.setup)
    assert found is not None
    sizes = [0] * ranks
    for some in state.optimizer.owned.values():
        for one, x in zip(found.leaves, some, strict=True):
            sizes[one.owner] += x[one.owner].numel()
    return sizes


@pytest.mark.parametrize(
    "rule",
    [
        fzero.optim.soap(0.1),
        fzero.optim.soap(0.1, max_size=100),
        fzero.optim.shampoo(0.1),
        fzero.optim.adafactor(0.1),
        from_torch(torch.optim.Muon),
    ],
    ids=str,
)
def test_owners_balance_what_they_compute_and_what_they_keep(rule: Any) -> None:
    params = {path: torch.ones(shape) for path, shape in UNEVEN.items()}
    _, state = run(params, rule, torch.ones(1, 2), stage=2)
    found = owners.owners_of(state.setup)
    assert found is not None
    costs, planned = zip(*found.loads(), strict=True)
    kept = kept_by(state, 2)
    assert max(costs) < 1.1 * sum(costs) / 2 and max(kept) < 1.2 * sum(kept) / 2
    assert list(planned) == kept  # what is planned is what is kept


def test_the_sizes_of_an_unknown_rule_are_those_of_its_trial() -> None:
    params = {path: torch.ones(shape) for path, shape in {**UNEVEN, "e": (6, 3, 2, 2)}.items()}
    _, state = run(params, from_torch(Factors, needs="matrix"), torch.ones(1, 2), stage=2)
    found = owners.owners_of(state.setup)
    assert found is not None
    assert [kept for _, kept in found.loads()] == kept_by(state, 2)


def test_a_checkpoint_of_another_balance_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    params, xs = parameters(torch.float64), integers((STEPS, 3), 8)
    ours = partial(run, params, from_torch(Lamb, needs="matrix"), stage=2)
    want, whole = ours(xs)
    before = [one.owner for one in owners.owners_of(whole.setup).leaves]
    with monkeypatch.context() as patch:
        patch.setattr(owners, "assign", lambda costs, ranks, kept: [1] * len(costs))
        owners._owners.cache_clear()
        save(tmp_path, ours(xs[:2])[1])
    owners._owners.cache_clear()
    got, after = ours(xs[2:], state=load(tmp_path, ours(xs[:0])[1]))
    now = [one.owner for one in owners.owners_of(after.setup).leaves]
    assert now == before and set(before) != {1}
    for path, x in got.items():
        assert torch.equal(x, want[path])
