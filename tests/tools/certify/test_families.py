"""Sound models of many families are certified; a fault in them is found."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.tools.certify import Report
from fzero.tools.certify.subject import seed_of, seeded
from tests.tools.certify import faults
from tests.zoo import FAMILIES

SGD = functools.partial(torch.optim.SGD, lr=0.25, momentum=0.5)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
FEW: dict[str, Any] = {**faults.PLAIN, "worlds": 2, "buckets": "default", "clipping": "off"}


def certified(name: str, optimizer: Any = SGD, train: bool = True, **options: Any) -> Report:
    family = FAMILIES[name]
    given = {**FEW, "stages": 3, "micro_batches": 2, "precisions": "fp64", **options}
    model = family.model(train=train)
    return fzero.certify(model, family.loss, family.examples, optimizer=optimizer, **given)


@pytest.mark.parametrize(
    ("name", "optimizer", "options"),
    [
        ("bert", SGD, {"train": False, "drivers": "step"}),  # the bias of keys has residues
        ("mlp cast", ADAMW, {"micro_batches": 3}),  # logits.float()
        ("dropout", SGD, {"precisions": ("fp64", "fp32"), "micro_batches": 3}),
        ("dropout", ADAMW, {"windows": ("coalesce", "accumulate")}),
    ],
)
def test_a_sound_model(name: str, optimizer: Any, options: Any) -> None:
    report = certified(name, optimizer, **options)
    assert report, report


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", FAMILIES)
def test_all_sound_models(name: str, optimizer: Any) -> None:
    options = {"precisions": ("fp64", "fp32"), "stages": (0, 3), "micro_batches": (2, 3)}
    report = certified(name, optimizer, **options)
    assert report, report


@pytest.mark.parametrize("name", ["scales_twice", "drops_a_micro_batch_on_rank_1"])
def test_a_fault_is_found_where_masks_are_drawn(name: str) -> None:
    report = certified("dropout", step=faults.STEPS[name])
    assert len(report.failures) == len(report.cells)


def test_a_small_fault_is_found_where_a_loss_casts() -> None:
    """The gradient of one leaf is off by 1e-3 of itself on one rank."""

    def step(loss_fn: Any, **options: Any) -> Any:
        def off(params: Any, one: Any) -> Tensor:
            bias = params["4.bias"]
            share = 1e-3 if fzero.axis_index() == 1 else 0.0
            return loss_fn({**params, "4.bias": bias + share * (bias - bias.detach())}, one)

        return lambda state, batches: faults._sum(off, state, batches)

    for precision in ("fp64", "fp32"):
        (cell,) = certified("mlp cast", step=step, precisions=precision).failures
        found = cell.checks[1].difference
        assert found is not None and found.parameter == "4.bias"


@pytest.mark.parametrize(
    "wrong", [{"lr": 0.0101}, {"eps": 1e-4}, {"weight_decay": 0.0}], ids=lambda x: next(iter(x))
)
def test_a_wrong_optimizer_is_found(wrong: dict[str, Any]) -> None:
    def engine(module: Any, optimizer: Any, **options: Any) -> Any:
        def other(params: Any) -> Any:
            made = optimizer(params)
            is_adam = isinstance(made, torch.optim.AdamW)
            return ADAMW(params, **wrong) if is_adam else made

        return fzero.adapter.Engine(module, other, **options)

    for precision in ("fp64", "fp32"):
        (cell,) = certified("mlp", ADAMW, engine=engine, precisions=precision).failures
        assert cell.agrees("gradient") and cell.agrees("update") is False


def test_a_batch_has_a_seed_of_its_own_and_nothing_else_is_drawn_otherwise() -> None:
    one, two = torch.arange(6.0), torch.arange(6.0).flip(0)
    assert seed_of([one]) == seed_of([one.clone()]) != seed_of([two])
    assert seed_of([one, two]) != seed_of([two, one])
    assert seed_of([torch.tensor(True)]) in range(2**48)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with seeded((one, {"y": two})):
        drawn = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    with seeded((one, {"y": two})):
        assert torch.equal(torch.rand(4), drawn)
    torch.func.vmap(lambda x: _under(x))(torch.ones(2, 3))  # whose values are hidden


def _under(x: Tensor) -> Tensor:
    with seeded(x):
        return 2 * x
