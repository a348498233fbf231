"""`derivatives.py` does what it prints: alone, on ranks that share the rows, at each stage."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch

import derivatives
import fzero
from tests.descends import descends
from tests.ranks import run_ranks
from tests.test_examples_small import run

TIER_INPUTS = ("examples",)  # tests/tiers.py: a push that changes them runs these tests

SCRIPT = "derivatives.py"
FLOAT64 = 1e-9


def require_claims(said: str, ranks: int) -> None:
    """What any number of ranks must print."""
    names = re.findall(r"^(\S.*?)  +loss +\S+ to", said, re.MULTILINE)
    assert names == ["MeanFlow", "score matching", "PINN"], said
    check = re.findall(r"^check: .* on (\d+) rank\(s\) .* to (\S+)$", said, re.MULTILINE)
    assert len(check) == 1 and int(check[0][0]) == ranks, said
    assert float(check[0][1]) < FLOAT64, said


def on_a_rank(rank: int, world_size: int, command: str) -> str:
    return run(command)


def test_alone() -> None:
    require_claims(run(SCRIPT), ranks=1)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    "stage", [pytest.param(s, marks=[pytest.mark.slow] * (s < 3)) for s in range(4)]
)
def test_on_two_ranks(stage: int) -> None:
    require_claims(run_ranks(on_a_rank, 2, f"{SCRIPT} --stage {stage}")[0], ranks=2)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["MeanFlow", "score matching", "PINN"])
def test_with_logical_ranks_the_bits_are_those_of_one_process(name: str, stage: int) -> None:
    make, objective = derivatives.OBJECTIVES[name]
    torch.manual_seed(0)
    apply, params = fzero.functionalize(make())
    rows = torch.rand(3, 12, 6)

    def loss(p: Any, rows: torch.Tensor) -> torch.Tensor:
        return objective(lambda *x: apply(p, *x), rows)

    def train(cut: torch.Tensor) -> dict[str, torch.Tensor]:
        step = fzero.shard(descends(loss), stage=stage, logical_ranks=4)
        state = step.init(params, fzero.optim.adam(1e-2))
        for batch in cut:
            state, _ = step(state, batch)
        return fzero.full_params(state)

    alone = train(rows)
    halves = torch.stack(rows.split(6, dim=1))
    found = fzero.simulate(train, world_size=2)(halves)
    assert any(not torch.equal(alone[path], params[path]) for path in params)
    for path, each in found.items():
        assert all(torch.equal(x, alone[path]) for x in each), path


@pytest.mark.xdist_group("gloo")
def test_a_number_of_ranks_that_does_not_divide_the_rows_is_refused() -> None:
    for said in run_ranks(refused_on_a_rank, 5, SCRIPT):
        assert "96 rows are not shared evenly by 5 ranks" in said


def refused_on_a_rank(rank: int, world_size: int, command: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit, match="2"):
        run(command)
    return said.getvalue()
