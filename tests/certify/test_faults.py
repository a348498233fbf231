"""The matrix finds what is wrong in a step, in an engine, and in fzero; it finds nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.certify import Report
from tests.certify import faults

SGD = functools.partial(torch.optim.SGD, lr=2.0**-4, momentum=0.5)
CLIPPED = {"unclipped", "norm_is_local"}  # faults that show where gradients are clipped, only
QUIET = {"keeps_a_stale_batch", "Stale"}  # whose first gradient is right


def matrix(stages: Any = (0, 2), clipping: str = "off", **options: Any) -> Report:
    return fzero.certify(
        faults.Net(),
        faults.loss,
        faults.batch,
        optimizer=SGD,
        stages=stages,
        worlds=2,
        micro_batches=2,
        precisions="fp64",
        loss_scales="1",
        buckets="64",
        clipping=clipping,
        **{"windows": "each", "offload": "none", **options},
    )


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    both = {"step": faults.good_step, "engine": fzero.adapter.Engine}
    report = matrix(windows=("each", "accumulate"), offload=("none", "disk"), stages=3, **both)
    assert report and all(cell.exact and cell.agrees("loss") for cell in report.cells)
    assert {cell.at["drivers"] for cell in report.cells} == {"step", "engine"}


def test_a_sum_in_another_order_is_no_fault() -> None:
    random = [torch.randn(3, 4) for _ in range(8)]
    report = fzero.certify(
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.LayerNorm(3)),
        lambda model, x: model(x).square().mean() + model(x).sum(),
        random,
        step=faults.reordered_step,
        stages=(0, 3),
        worlds=2,
        micro_batches=2,
        precisions=("fp64", "bf16"),
        windows="each",
        loss_scales="1",
        buckets="64",
        offload="none",
    )
    assert report, report
    assert not any(cell.exact for cell in report.cells)


@pytest.mark.parametrize("name", faults.STEPS)
def test_a_fault_in_a_step_is_found(name: str) -> None:
    report = matrix(step=faults.STEPS[name], stages=(0, 3))
    assert len(report.failures) == len(report.cells) == 2
    for cell in report.failures:
        assert cell.at["drivers"] == "step" and not cell.error
        gradient = cell.agrees("gradient")
        assert gradient is (name in QUIET)
        assert cell.agrees("update") is False


def test_the_first_parameter_that_differs_is_named_with_both_values() -> None:
    report = matrix(step=faults.adds_a_parameter_twice, stages=3)
    (cell,) = report.failures
    difference = cell.checks[1].difference
    assert difference is not None and difference.parameter == "shift"
    assert difference.found == 2 * difference.wanted != 0
    assert f"shift: {difference.found:.15g} and not {difference.wanted:.15g}" in repr(report)
    assert "stages 3, worlds 2" in repr(report)


@pytest.mark.parametrize("name", faults.ENGINES)
def test_a_fault_in_an_engine_is_found(name: str) -> None:
    clipping = "on" if name in CLIPPED else "off"
    report = matrix(engine=faults.ENGINES[name], clipping=clipping)
    assert len(report.failures) == len(report.cells) == 2
    for cell in report.failures:
        assert cell.at["drivers"] == "engine"
        if name == "raising":
            assert cell.error == "RuntimeError: no such device\n(raised on virtual rank 0 of 2)"
        elif name == "Misreports":
            assert [cell.agrees(what) for what in ("gradient", "norm", "update")] == [1, 0, 1]
        elif name == "Drifts":  # by a bit: the gradient of rank 1 differs by as much
            assert cell.agrees("update") is False and cell.exact
            assert "all bits must be equal" in cell.describe()
        else:
            assert cell.agrees("gradient") is (name in QUIET)
            assert cell.agrees("update") is False


@pytest.mark.parametrize("name", faults.PATCHES)
def test_a_fault_in_fzero_is_found_by_both_drivers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.PATCHES[name](monkeypatch)
    clipping = "on" if name in CLIPPED else "off"
    report = matrix(stages=2, clipping=clipping)
    assert {cell.at["drivers"] for cell in report.failures} == {"step", "engine"}
    for cell in report.failures:
        assert cell.agrees("update") is False
    monkeypatch.undo()
    assert matrix(stages=2, clipping=clipping)


def test_a_cell_that_a_factory_does_not_have_neither_passes_nor_fails() -> None:
    def engine(module: Any, optimizer: Any, **options: Any) -> Any:
        if options["stage"] == 3:
            raise NotImplementedError("no stage 3")
        return fzero.adapter.Engine(module, optimizer, **options)

    report = matrix(engine=engine, stages=(0, 3))
    left = [cell for cell in report.cells if cell.unsupported]
    assert report and [cell.unsupported for cell in left] == ["no stage 3"]
    assert not left[0].passed and not left[0].failed
    assert "not supported" in repr(report)
    assert not matrix(engine=engine, stages=3)  # nothing was shown


def test_a_pytree_of_parameters_is_certified_by_steps() -> None:
    shared = torch.tensor([1.0, -2.0, 3.0])
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    params = {"a": shared, "b": [shared, frozen, torch.ones(())]}

    def loss(params: Any, x: Tensor) -> Tensor:
        tied, fixed, scale = params["b"]
        return 12 * ((params["a"] * x).sum() * scale + tied.sum() + fixed.sum())

    def wrong(loss_fn: Callable[..., Tensor], **options: Any) -> Any:
        return faults.scales_twice(loss_fn)

    batches = [torch.tensor([1.0, 2.0, i]) for i in range(12)]
    few: dict[str, Any] = {"stages": (0, 3), "worlds": 3, "micro_batches": 2, "precisions": "fp64"}
    few |= {"windows": "each", "clipping": "off", "offload": "none"}
    report = fzero.certify(params, loss, batches, optimizer=SGD, **few)
    assert report and any(cell.exact for cell in report.cells)
    assert not fzero.certify(params, loss, batches, optimizer=SGD, step=wrong, **few)
