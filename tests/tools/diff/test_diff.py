"""What is compared with what: the text, what is refused, several states, the trusted run wrong."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from tests.optim.torch_cases import Lamb
from tests.tools.diff.faults import FAULTS
from tests.tools.diff.runs import FIRST, loss, parameters, run, step_with, updated
from tests.zoo import FAMILIES
from tests.zoo.runs import run_of


@pytest.mark.parametrize(
    "name",
    [
        "a dropped micro-batch on rank 1",
        "a negated gradient",
        "swapped shards of gradients",
        "swapped shards on rank 1",
        "no clipping on rank 1",
        "no update on rank 1",
        "old parameters",
        "no update",
        "a replica that drifts",
    ],
)
def test_it_is_found_in_the_first_run_too(name: str) -> None:
    fault = FAULTS[name]
    a, b = fault.runs()
    found = fzero.diff(b, a)
    assert found is not None and found.operation == fault.named, found
    assert fault.path in (None, found.path)


def test_the_text_says_what_differs_and_what_does_not() -> None:
    found = fzero.diff(run(calls=2), run(doubled_in_call_2(), 2, 2, calls=2))
    assert found is not None
    lines = str(found).splitlines()
    assert lines[0].startswith("step 2, backward 1, ranks 0, 1 of loss: ")
    assert f"{found.a:.9g} in run a, {found.b:.9g} in run b" in lines[0]
    assert abs(found.b - 2 * found.a) < 1e-6 and 0 < found.bound < 1e-9
    assert found.compared_in is torch.float64 and "(compared in float64)" in lines[0]
    assert "all of steps 1 to 1, and in step 2: " in lines[2]
    assert "the full values that a loss reads" in lines[2] and "summed as its" not in lines[2]
    assert lines[3].startswith("Usual cause: another model or loss")


def doubled_in_call_2() -> Any:
    calls: list[int] = []

    def step(state: Any, batch: Any) -> Any:
        if fzero.axis_index() == 0:
            calls.append(1)
        factor = 2.0 if len(calls) == 2 else 1.0
        return updated(state, batch, lambda p, x: factor * loss(p, x))

    return step


def test_a_replica_is_compared_within_its_run() -> None:
    found = fzero.diff(*FAULTS["a replica that drifts"].runs())
    assert found is not None and found.bound == 0
    assert "on the lowest rank" in str(found) and "run b" not in str(found).splitlines()[0]


def test_other_parameters_to_start_from() -> None:
    found = fzero.diff(run(), run(params=parameters(seed=1)))
    assert found is not None
    assert (found.operation, found.path, found.at.step) == ("start", FIRST, 0)
    assert str(found).startswith(f"the start, parameter {FIRST}[")


def test_a_nan_on_one_side_is_a_difference_and_on_both_is_none() -> None:
    def nan(p: Any, batch: Any) -> Tensor:
        return loss(p, batch) + p["scale"] * float("nan")

    found = fzero.diff(run(), run(step_with(nan), 2, 2))
    assert found is not None and found.operation == "loss" and found.b != found.b
    assert fzero.diff(run(step_with(nan)), run(step_with(nan), 2, 2)) is None


def test_an_overflow_of_fp32_is_found_although_float64_has_none() -> None:
    def unstable(p: Any, batch: Any) -> Tensor:
        shift = 300 * p["scale"].detach().sign()
        return loss(p, batch) + 0 * ((p["scale"] + shift).abs() ** 40).log()

    found = fzero.diff(run(), run(step_with(unstable), 2, 2))
    assert found is not None and found.compared_in is torch.float32 and found.b != found.b


def test_several_states_are_named_by_their_keys() -> None:
    def step_with_factor(factor: float) -> Any:
        def step(states: Any, x: Tensor) -> Any:
            def both(p: Any, x: Tensor) -> Tensor:
                scaled = factor * p["d"]["w"] + (1 - factor) * p["d"]["w"].detach()
                return (p["g"]["w"] * x).mean() + (scaled * x).square().mean()

            states, _ = fzero.grad_and_reduce(both, states)(x)
            return fzero.apply_gradients(states), None

        return step

    def one(factor: float, world_size: int) -> fzero.tools.Run:
        return fzero.tools.Run(
            step=fzero.shard(step_with_factor(factor), stage={"g": 0, "d": 3}),
            params={"g": {"w": torch.ones(3)}, "d": {"w": torch.ones(3)}},
            optimizer=fzero.optim.adam(0.1),
            batches=[torch.arange(12.0).view(world_size, -1, 3)],
            world_size=world_size,
        )

    assert fzero.diff(one(1.0, 1), one(1.0, 2)) is None
    found = fzero.diff(one(1.0, 1), one(2.0, 2))
    assert found is not None and (found.operation, found.path) == ("gradient", "d.w")


def test_what_is_no_run_is_refused() -> None:
    good: Any = run()
    bad: Any = updated
    with pytest.raises(fzero.LayoutError, match=r"Fix: give fzero\.tools\.Run\(step=fzero\.shard"):
        fzero.diff(good, bad)
    with pytest.raises(fzero.LayoutError, match=r"run_b has .*in the place of a sharded step"):
        fzero.diff(good, replace(good, step=updated))
    with pytest.raises(fzero.LayoutError, match="leave it out, and give world_size"):
        fzero.diff(replace(good, step=fzero.simulate(good.step, world_size=2)), good)
    with pytest.raises(fzero.LayoutError, match="run_a has 1 batches, run_b 2"):
        fzero.diff(good, run(calls=2))
    fewer = {name: x for name, x in parameters().items() if name != "unused"}
    with pytest.raises(fzero.LayoutError, match=r"other parameters: unused \(2,\)"):
        fzero.diff(good, replace(good, params=fewer))


def test_what_a_step_raises_is_raised() -> None:
    def breaks(state: Any, batch: Any) -> Any:
        raise ZeroDivisionError("in the step")

    with pytest.raises(ZeroDivisionError, match="in the step"):
        fzero.diff(run(), run(breaks))


def test_rules_whose_states_lie_with_owners_are_refused() -> None:
    rule = fzero.optim.from_torch(Lamb, needs="leaf")
    first, second = (
        dataclasses.replace(run_of(FAMILIES["conv"], *at), optimizer=rule)
        for at in ((0, 1), (2, 2))
    )
    with pytest.raises(LayoutError, match=r"diff: from_torch\(Lamb\) updates whole parameters"):
        fzero.diff(first, second)
