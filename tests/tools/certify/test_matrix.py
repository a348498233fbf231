"""What the matrix consists of: its axes, its cells, what is exact, what is refused, the command."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fzero
from fzero.__main__ import main
from fzero.errors import LayoutError
from fzero.tools.certify import AXES
from fzero.tools.certify.matrix import covering
from tests.tools.certify import faults

FEW = ["--models=dyadic", "--stages=3", "--worlds=3", "--micro-batches=1", "--precisions=fp64"]
FEW += ["--windows=coalesce", "--loss-scales=1", "--buckets=64", "--offload=none", "--meshes=flat"]
FEW += ["--reductions=mean", "--wires=own", "--rules=given", "--ragged=off"]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 3))
def test_every_combination_of_so_many_values_is_in_a_row(sizes: list[int], strength: int) -> None:
    rows = covering(sizes, strength)
    assert len(set(rows)) == len(rows)
    assert all(0 <= value < size for row in rows for value, size in zip(row, sizes, strict=True))
    for axes in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        found = {tuple(row[axis] for axis in axes) for row in rows}
        assert found == set(itertools.product(*(range(sizes[axis]) for axis in axes)))
    if strength >= len(sizes):
        assert len(rows) == len([*itertools.product(*map(range, sizes))])


def linear(**options: Any) -> Any:
    given = {"model": nn.Linear(2, 1), "loss": lambda model, x: model(x).sum()}
    given["batches"] = [torch.randn(3, 2) for _ in range(4)]
    few = {"stages": 0, "worlds": 1, "micro_batches": 1, "precisions": "fp64", "buckets": "64"}
    few |= {"meshes": "flat", "reductions": "mean", "wires": "own"}
    few |= {"rules": "given", "ragged": "off"}
    given |= few | options
    return fzero.certify(given.pop("model"), given.pop("loss"), given.pop("batches"), **given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": "cpu"}, "offload has no value 'cpu'.*\n.*\n.*choose from none, disk"),
        ({"stages": 4}, "stages has no value '4'"),
        ({"worlds": 0}, "worlds has no value '0'.*\n.*\n.*or another count"),
        ({"worlds": ()}, r"worlds=\(\)"),
        ({"stages": (0, 0)}, r"stages=\(0, 0\)"),
        ({"updates": 0}, "updates=0"),
        ({"worlds": 3}, "batch 4 was wanted, and there are 4"),
        ({"batches": torch.ones(3)}, "the batches are a Tensor"),
        ({"loss": torch.ones(3)}, "the loss is a Tensor"),
        ({"loss": lambda model, x: model(x)}, "loss of batch 0 is tensor"),
        ({"loss": lambda model, x: model(x).sum().detach()}, "loss of batch 0 is tensor"),
        ({"loss": lambda model, x: model(x).sum() / 0}, "loss of batch 0 is tensor.-?inf"),
        ({"loss": lambda model, x: model(x).sum() * random.random()}, "and then"),
        ({"loss": lambda model, x: 0 * model(x).sum(), "clipping": "on"}, "update is zero"),
        ({"model": nn.Linear(2, 1).requires_grad_(False)}, "nothing in the model learns"),
        ({"model": {"w": torch.ones(2)}, "drivers": "engine"}, "an engine for a dict"),
        ({"model": {"w": torch.ones(2)}, "engine": fzero.adapter.Engine}, "an engine for a dict"),
        ({"step": faults.good_step, "drivers": "engine"}, "'step'. given, and drivers=.'engine'"),
    ],
)
def test_what_cannot_be_certified_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        linear(**options)


def test_batches_that_cannot_be_stacked_are_an_error_of_the_cells_that_would() -> None:
    batches = [torch.randn(3 + i % 2, 2) for i in range(4)]
    report = linear(batches=batches, micro_batches=2, windows=("each", "accumulate"))
    failed = {cell.at["windows"]: cell.error for cell in report.failures}
    assert [*failed] == ["accumulate"] and "cannot be stacked" in failed["accumulate"]
    assert {cell.at["drivers"] for cell in report.failures} == {"step"}


def test_the_model_that_is_given_stays_as_it_is() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    assert linear(model=model)
    assert torch.equal(model.weight, before) and model.weight.dtype == torch.float32
    assert model.weight.grad is None


def test_a_user_of_adamw_and_of_other_worlds_is_served() -> None:
    random = [torch.randn(2, 2) for _ in range(10)]
    report = linear(
        batches=random,
        worlds=5,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, eps=0.01),
        loss=lambda model, x: model(x).tanh().square().mean(),
    )
    assert report and not any(cell.exact for cell in report.cells)


def test_each_value_has_a_name_of_its_own_and_each_axis_is_an_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for axis in AXES:
        assert len({value.name for value in axis.values}) == len(axis.values)
    with pytest.raises(SystemExit):
        main(["certify", "--help"])
    told = capsys.readouterr().out
    assert all(f"--{axis.name.replace('_', '-')}" in told for axis in AXES)


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_the_page_names_each_axis_and_value(axis: Any) -> None:
    page = (Path(__file__).parents[3] / "docs" / "certify.md").read_text()
    row = re.search(rf"^\| `{axis.name}` \|(.*)$", page, re.MULTILINE)
    assert row is not None
    assert all(value.name in row.group(1) for value in axis.values)


def test_the_command_prints_the_table_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", *FEW]) == 0
    told = capsys.readouterr().out
    assert "In all cells: stage 3, W 3, N 1, precision fp64" in told
    assert re.search(r"engine +off +=  +=  +\S+  +=\n", told)
    assert "4 of 4 cells give the step of one process, 2 of them bit for bit." in told


def test_the_command_exits_with_1_where_a_cell_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.PATCHES["mean_is_a_sum"](monkeypatch)
    assert main(["certify", *FEW, "--clipping", "off", "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"] == "Dyadic" and not report["passed"]
    for cell in report["cells"]:
        gradient = cell["checks"][1]
        assert (gradient["what"], gradient["difference"]["rank"]) == ("gradient", 0)
        assert gradient["difference"]["found"] == 3 * gradient["difference"]["wanted"]


@pytest.mark.parametrize("args", [["--offload", "cpu"], ["--models", "gpt5"], ["--worlds", "x"]])
def test_the_command_exits_with_2_for_wrong_input(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certify", *args]) == 2
    assert "Fix: choose from" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_matrix_of_both_models_agrees() -> None:
    assert main(["certify"]) == 0


OFF: dict[str, Any] = {"offload": "none", "meshes": "flat", "rules": "given", "ragged": "off"}


@pytest.mark.slow
def test_a_rule_of_whole_parameters_is_known_as_one_whoever_gives_it() -> None:
    """What one element is off, all of its parameter may be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    g = torch.Generator().manual_seed(1)
    report = fzero.certify(
        model,
        lambda model, x: model(x).square().mean(),
        [torch.randn(2, 3, generator=g) for _ in range(16)],
        optimizer=functools.partial(torch.optim.Adafactor, lr=2.0**-6),
        stages=(0, 1),
        worlds=2,
        micro_batches=1,
        precisions=("fp32", "bf16"),
        **{**OFF, "loss_scales": "1024", "buckets": "default"},
    )
    assert report, report


class WithNothing(torch.nn.Module):
    """Parameters without elements among others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.nothing = torch.nn.Parameter(torch.zeros(0, 4))
        self.fixed = torch.nn.Parameter(torch.zeros(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.nothing.sum() + self.fixed.sum()


@pytest.mark.slow
def test_a_parameter_without_elements_is_no_obstacle() -> None:
    """torch's Adafactor divides by the number of elements."""

    def batch(number: int) -> torch.Tensor:
        return torch.arange(6.0).view(2, 3) - number

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    few: dict[str, Any] = {"worlds": 2, "precisions": "fp64", "stages": 2, "rules": "matrix"}
    report = fzero.certify(WithNothing(), loss, batch, **few)
    assert report, report.failures
