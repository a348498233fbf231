"""The matrix finds what is wrong in a step, in an engine, and in fzero; it finds nothing else."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from fzero.machine.compress import Encoder
from fzero.tools.certify import Report
from fzero.tools.certify.command import Dyadic, batch, dyadic_loss
from tests.tools.certify import faults
from tests.tools.certify.faults import PLAIN

SGD = functools.partial(torch.optim.SGD, lr=2.0**-4, momentum=0.5)
CLIPPED = {"unclipped", "norm_is_local"}  # faults that show where gradients are clipped, only
WIRED: dict[str, dict[str, Any]] = {  # and faults that show in other cells than the plainest
    "replicas_are_not_reduced": {"meshes": "replicas", "worlds": 4},
    "divides_always_by_the_ranks": {"reductions": "sum", "wires": "predivided"},
}
QUIET = {"keeps_a_stale_batch", "Stale"}  # whose first gradient is right


def matrix(stages: Any = (0, 2), clipping: str = "off", **options: Any) -> Report:
    given: dict[str, Any] = {**PLAIN, "worlds": 2, **options}
    return fzero.certify(
        Dyadic(),
        dyadic_loss,
        batch,
        optimizer=SGD,
        stages=stages,
        micro_batches=2,
        precisions="fp64",
        clipping=clipping,
        **given,
    )


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    both = {"step": faults.good_step, "engine": fzero.adapter.Engine}
    report = matrix(windows=("each", "accumulate"), offload=("none", "disk"), stages=3, **both)
    assert report and all(cell.exact and cell.agrees("loss") for cell in report.cells)
    assert {cell.at["drivers"] for cell in report.cells} == {"step", "engine"}


@pytest.mark.slow
def test_nothing_is_found_on_other_meshes_and_wires() -> None:
    meshes: dict[str, Any] = {"meshes": ("flat", "replicas", "replicas-all")}
    exact = matrix(3, worlds=4, wires=("own", "predivided"), reductions=("mean", "sum"), **meshes)
    assert exact and all(cell.exact for cell in exact.cells), exact
    low = matrix(3, worlds=4, wires=("bf16", "int8"), meshes="replicas")
    assert low and not any(cell.exact for cell in low.cells), low


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
        **PLAIN,
    )
    assert report, report
    assert not any(cell.exact for cell in report.cells)


@pytest.mark.filterwarnings("ignore:what grad_and_reduce returned was not used")
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
        elif name in ("Misreports", "Misrounds"):
            assert [cell.agrees(what) for what in ("gradient", "norm", "update")] == [1, 0, 1]
        elif name == "Drifts":  # by a bit: the gradient of rank 1 differs by as much
            assert cell.agrees("update") is False and cell.exact
            assert "all bits must be equal" in cell.describe()
        else:
            # Of what follows the update no gradient is told.
            assert cell.agrees("gradient") is (None if name == "Swaps" else name in QUIET)
            assert cell.agrees("update") is False


@pytest.mark.parametrize("name", faults.PATCHES)
def test_a_fault_in_fzero_is_found_by_both_drivers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.PATCHES[name](monkeypatch)
    options = {"clipping": "on" if name in CLIPPED else "off", **WIRED.get(name, {})}
    report = matrix(stages=2, **options)
    assert {cell.at["drivers"] for cell in report.failures} == {"step", "engine"}
    for cell in report.failures:
        assert cell.agrees("update") is False
    monkeypatch.undo()
    assert matrix(stages=2, **options)


def test_a_residual_that_is_lost_is_found_where_gradients_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    int8: dict[str, Any] = {**PLAIN, "wires": "int8"}

    def run() -> Report:
        return fzero.certify(
            {"w": torch.linspace(-1, 1, 99)},
            lambda params, x: (params["w"] * x).sum(),
            lambda number: torch.cat([torch.full((98,), 1.4 / 127), torch.ones(1)]),
            optimizer=functools.partial(torch.optim.SGD, lr=2.0**-4),
            updates=40,  # 0.4 of a level is lost in each
            stages=2,
            worlds=2,
            micro_batches=1,
            precisions="fp64",
            clipping="off",
            **int8,
        )

    assert run()
    remembers_by = Encoder.remembers_by
    monkeypatch.setattr(
        Encoder,
        "remembers_by",
        lambda self, lent: remembers_by(self, lambda: _forgetful(lent())),
    )
    (cell,) = run().failures
    assert "w[" in cell.describe()


def _forgetful(lent: Any) -> Any:
    """What a state lends, without what it remembers."""
    slots = optree.tree_map(torch.zeros_like, lent.state.slots, namespace="fzero")
    return lent._replace(state=lent.state.replace(slots=slots))


class Stalls(fzero.adapter.Engine):
    """Masters are what they were before the update."""

    def step(self) -> bool:
        before = [master.clone() for master in self.state.optimizer.masters]
        done = super().step()
        for master, old in zip(self.state.optimizer.masters, before, strict=True):
            master.copy_(old)
        return done


def test_masters_that_do_not_move_are_found_by_a_small_learning_rate() -> None:
    slow = functools.partial(torch.optim.SGD, lr=2.0**-14)
    few = PLAIN | {"stages": (1, 2), "worlds": 2, "micro_batches": 1, "clipping": "off"}
    few |= {"precisions": "bf16"}

    def run(engine: Any) -> Report:
        return fzero.certify(Dyadic(), dyadic_loss, batch, engine=engine, optimizer=slow, **few)

    assert run(fzero.adapter.Engine)
    report = run(Stalls)
    assert len(report.failures) == len(report.cells) == 2


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
    few |= {"clipping": "off", **PLAIN}
    report = fzero.certify(params, loss, batches, optimizer=SGD, **few)
    assert report and any(cell.exact for cell in report.cells)
    assert not fzero.certify(params, loss, batches, optimizer=SGD, step=wrong, **few)


class Unweighted(fzero.adapter.Engine):
    """An engine for which each loss counts as much as any other."""

    def backward(self, loss: Any, *, weight: Any = None) -> None:
        super().backward(loss / 2)  # of micro-batches


def test_weights_that_are_left_aside_are_found() -> None:
    report = matrix(engine=Unweighted, ragged="on")
    assert report.cells and len(report.failures) == len(report.cells)
    assert all(cell.agrees("gradient") is False for cell in report.cells)
    assert matrix(engine=fzero.adapter.Engine, ragged="on")
    with pytest.raises(LayoutError, match="with a step of yours"):
        matrix(step=faults.good_step, ragged="on")


def test_a_rule_of_matrices_that_steps_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"rules": "matrix", "windows": "coalesce"}
    assert matrix(**options)
    step = torch.optim.Adafactor.step

    def twice(self: Any) -> None:  # once a micro-batch, for example
        step(self)
        step(self)

    kept = fzero.adapter.Engine
    monkeypatch.setattr(torch.optim.Adafactor, "step", twice)
    one_process = importlib.import_module("fzero.tools.certify.reference").Stepped.step

    def sound(self: Any, gradient: Any) -> None:
        with monkeypatch.context() as inner:
            inner.setattr(torch.optim.Adafactor, "step", step)
            one_process(self, gradient)

    monkeypatch.setattr("fzero.tools.certify.reference.Stepped.step", sound)
    report = matrix(engine=kept, **options)
    assert report.cells and not report
