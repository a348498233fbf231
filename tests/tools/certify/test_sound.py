"""Steps and models that are sound, and are not accused; what one process cannot do is said so."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.__main__ import main
from fzero.tools.certify import run
from tests.tools.certify.faults import PLAIN

FEW: dict[str, Any] = {
    **PLAIN,
    **{"stages": (0, 3), "worlds": 2, "micro_batches": 2, "precisions": "fp64"},
    **{"clipping": "off", "windows": "coalesce"},
}


def net(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *between, nn.Dropout(0.25), nn.Linear(6, 3))


def batch(number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(number)
    return torch.randn(4, 4, generator=source), torch.randint(3, (4,), generator=source)


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def certified(model: nn.Module, loss: Any = loss, **more: Any) -> fzero.certify.Report:
    return fzero.certify(model, loss, batch, **{**FEW, **more})


# Steps.


def by_func(transformed: Any) -> Any:
    def make(loss_fn: Any, **options: Any) -> Any:
        def step(state: Any, batches: Any) -> Any:
            for one in batches:
                made = transformed(loss_fn)(fzero.full_params(state), one)
                made = made[0] if isinstance(made, tuple) else made
                state = fzero.add_gradients(state, made)
            return fzero.apply_gradients(state), None

        return step

    return make


def by_sample(loss_fn: Any) -> Any:
    def gradient(params: Any, batch: Any) -> Any:
        alone = lambda p, x, y: loss_fn(p, (x[None], y[None]))  # noqa: E731
        each = torch.func.vmap(torch.func.grad(alone), in_dims=(None, 0, 0))(params, *batch)
        return {path: g.mean(0) for path, g in each.items()}

    return gradient


def looks_beside(loss_fn: Any, **options: Any) -> Any:
    def step(state: Any, batches: Any) -> Any:
        for one in batches:
            fzero.evaluate(loss_fn, state)(one)
            state, _ = fzero.grad_and_reduce(loss_fn, state)(one)
        state = fzero.apply_gradients(state)
        for one in batches:
            fzero.evaluate(loss_fn, state)((one[0] + 1, one[1]))
            fzero.evaluate(loss_fn, state)(one)
        return state, None

    return step


STEPS = {
    "grad": (by_func(torch.func.grad), True),
    "grad_and_value": (by_func(torch.func.grad_and_value), True),
    "vmap of grad": (by_func(by_sample), None),
    "losses beside": (looks_beside, True),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_sound_step_is_not_accused(name: str) -> None:
    step, tells = STEPS[name]
    # Under torch.func torch draws masks by another kernel, which gives others for one seed.
    report = certified(net() if step is looks_beside else net()[::2], step=step)
    assert report, report
    assert [cell.agrees("loss") for cell in report.cells] == [tells, tells]


@pytest.mark.filterwarnings("ignore:what apply_gradients returned was not used")
@pytest.mark.parametrize("returns_old", [False, True])
def test_a_fault_after_the_update_is_not_one_of_the_gradient(returns_old: bool) -> None:
    def faulty(loss_fn: Any, **options: Any) -> Any:
        def step(state: Any, batches: Any) -> Any:
            new = state
            for one in batches:
                new, _ = fzero.grad_and_reduce(loss_fn, new)(one)
            new = fzero.map_params(lambda p: p * 1.25, fzero.apply_gradients(new))
            return (state if returns_old else new), None

        return step

    for cell in certified(net(), step=faulty).cells:
        assert cell.agrees("gradient") is None and cell.agrees("update") is False


# Models and losses.


def decays(model: Any, batch: Any) -> Tensor:
    return loss(model, batch) + 0.125 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("precision", ["fp64", "autocast"])
def test_norms_that_keep_statistics_and_losses_of_parameters_are_certified(precision: str) -> None:
    report = certified(net(nn.BatchNorm1d(6)), decays, precisions=precision)
    assert report and len(report.cells) == 4, report


def test_a_loss_that_reads_a_part_of_the_model_is_told_what_to_do() -> None:
    report = certified(net(), lambda model, batch: loss(model[0], batch), micro_batches=1)
    for cell in report.cells:
        assert "certify: the loss reads [0] of the model." in cell.error
        assert "call the model as a whole" in cell.error


# What one process cannot do.


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.rfft(x).real)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed((x.sum(-1).abs() % 5).long())


UNSUPPORTED: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "an op in 16 bits": (Spectrum(), {"precisions": ("bf16", "fp64")}, "BFloat16"),
    "sparse gradients": (Sparse(), {}, "sparse"),
    "a closure": (net(), {"optimizer": torch.optim.LBFGS, "rules": ("given", "matrix")}, "closure"),
    "an instance": (
        net(),
        {"optimizer": torch.optim.SGD(net().parameters(), 0.1), "rules": ("given", "matrix")},
        "give its class",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_one_process_cannot_do_is_not_supported_and_other_cells_stay(name: str) -> None:
    model, more, why = UNSUPPORTED[name]
    report = certified(model, **more)
    left = [cell for cell in report.cells if not cell.unsupported]
    assert len(report.cells) - len(left) == 4 and not report.failures
    assert all(cell.passed for cell in left) and len(left) == 4 * (name != "sparse gradients")
    (line,) = [line for line in repr(report).splitlines() if line.startswith("not supported")]
    assert line.startswith("not supported, 4 cells: in one process, ") and why in line


# Many cells.


def test_cells_that_share_a_reference_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    one_process = run.one_process

    def counted(subject: Any, *given: Any) -> Any:
        made.append(given)
        return one_process(subject, *given)

    monkeypatch.setattr(run, "one_process", counted)
    came: list[Any] = []
    more = {"worlds": (1, 2), "clipping": ("off", "on"), "drivers": "step"}
    report = certified(net()[::2], on_cell=came.append, full=True, **more)
    assert report and len(made) == len(set(made)) == 8  # few are kept at once, none is made twice
    assert sorted(map(id, came)) == sorted(map(id, report.cells)) and came != [*report.cells]


def test_an_interrupt_keeps_the_cells_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = iter(range(9))
    check = run.check

    def interrupted(*given: Any) -> Any:
        if next(counts) == 8:  # of four for each cell
            raise KeyboardInterrupt
        return check(*given)

    monkeypatch.setattr(run, "check", interrupted)
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in {**FEW, "stages": "0,1,2,3"}.items()]
    assert main(["certify", "--models=dyadic", "--drivers=step", "--full", *flags]) == 130
    first, *_, last = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("drivers step, stages 0, ") and first.endswith("  =  =  1e-13  =")
    assert last == "2 of 2 cells give the step of one process, 2 of them bit for bit."
    counts = iter(range(9))
    assert main(["certify", "--models=dyadic", "--drivers=step", "--json", *flags]) == 130
    (found,) = json.loads(capsys.readouterr().out)
    assert len(found["cells"]) == 2
