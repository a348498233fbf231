"""Orders that cannot be, forms, and how a pipeline prints."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import fzero
from fzero.errors import LayoutError, PhaseError
from tests.strategies import integers
from tests.transforms.steps import one_backward, sgd

PARAMS = {"w": integers((5,), 1), "b": integers((), 2)}


SIMULATED = fzero.simulate(one_backward, world_size=2)
WRONG = [
    (lambda: fzero.shard(fzero.shard(one_backward, stage=1), stage=1), "with one shard"),
    (lambda: fzero.coalesce(fzero.coalesce(one_backward)), "with one coalesce"),
    (lambda: fzero.simulate(SIMULATED, world_size=2), "one fzero.simulate, outermost"),
    (lambda: fzero.shard(SIMULATED, stage=1), r"fzero.simulate\(fzero.shard\("),
    (lambda: fzero.coalesce(SIMULATED), r"fzero.simulate\(fzero.shard\(fzero.coalesce\("),
    (lambda: fzero.accumulate(SIMULATED, steps=2), r"fzero.simulate\(fzero.accumulate\("),
    (lambda: fzero.clip(SIMULATED, max_norm=1.0), r"fzero.simulate\(fzero.clip\("),
    (lambda: fzero.check_finite(SIMULATED), r"fzero.simulate\(fzero.check_finite"),
    (lambda: fzero.remat(SIMULATED), "remat around a layer inside the loss"),
    (lambda: fzero.remat(fzero.coalesce(one_backward)), "remat around a layer inside the loss"),
]


@pytest.mark.parametrize(("make", "right"), WRONG)
def test_an_order_that_cannot_be_right_is_refused_with_the_right_one(make: Any, right: str) -> None:
    with pytest.raises(LayoutError, match=rf"around [\s\S]*Fix: write .*{right}"):
        make()


def test_a_pipeline_prints_as_it_is_written() -> None:
    def step_fn(state: Any) -> Any:
        return state, None

    pipeline = fzero.shard(fzero.coalesce(step_fn), stage=3)
    assert repr(pipeline) == "shard(stage=3) . coalesce . step_fn"
    assert repr(fzero.simulate(pipeline, world_size=4)) == (
        "simulate(world_size=4) . shard(stage=3) . coalesce . step_fn"
    )
    clipped = fzero.clip(fzero.accumulate(step_fn, steps=2), max_norm=1.0)
    assert repr(clipped) == "clip(max_norm=1.0) . accumulate(micro_batches=2) . step_fn"
    kept = fzero.shard(step_fn, stage=3, reshard_after_forward="window", donate=True)
    assert repr(kept) == "shard(stage=3, reshard_after_forward='window', donate=True) . step_fn"
    more: Any = {"ordered": False, "reduce_op": "sum", "overlap": False}
    shown = repr(fzero.shard(step_fn, stage=3, **more))
    assert shown == "shard(stage=3, reduce_op='sum', overlap=False) . step_fn"
    encoded = fzero.compress(step_fn, gradients=fzero.codecs.bf16())
    assert repr(encoded) == "compress(gradients=bf16(memory=False)) . step_fn"
    assert fzero.remat(step_fn).__name__ == "remat . step_fn"


def test_the_decorator_form_is_the_call_form() -> None:
    def plain(state: Any, x: Any, *, flag: bool = False) -> Any:
        """What it does."""
        return state, (x, flag)

    decorators = [
        (fzero.shard(stage=1), fzero.shard(plain, stage=1)),
        (fzero.coalesce, fzero.coalesce(plain)),
        (fzero.coalesce(), fzero.coalesce(plain)),
        (fzero.accumulate(steps=1), fzero.accumulate(plain, steps=1)),
        (fzero.clip(max_norm=1.0), fzero.clip(plain, max_norm=1.0)),
    ]
    for decorator, called in decorators:
        made = decorator(plain)
        assert repr(made) == repr(called)
        assert made.__name__ == "plain"
        assert made.__doc__ == "What it does."
        assert inspect.unwrap(made) is plain
        state = fzero.init(PARAMS, sgd(), stage=1)
        _, aux = made(state, 3, flag=True)
        assert aux == (3, True)
    one = fzero.simulate(world_size=2)(lambda: fzero.axis_index())
    assert one().tolist() == [0, 1]


@pytest.mark.parametrize(
    "decorate",
    [
        fzero.shard(stage=1),
        fzero.coalesce(),
        fzero.accumulate(steps=2),
        fzero.clip(max_norm=1.0),
        fzero.simulate(world_size=4),
        fzero.remat(),
    ],
)
def test_what_is_no_function_is_refused(decorate: Any) -> None:
    with pytest.raises(LayoutError, match=r"got a int, not a function[\s\S]*Fix: write fzero\."):
        decorate(2)


@pytest.mark.parametrize("wrap", [fzero.coalesce, fzero.accumulate(steps=1), fzero.shard(stage=0)])
@pytest.mark.parametrize("returned", [lambda s: s, lambda s: (s, 1, 2), lambda s: [s, 1]])
def test_a_step_must_return_state_and_aux(wrap: Any, returned: Any) -> None:
    state = fzero.init(PARAMS, sgd(), stage=0)
    with pytest.raises(LayoutError, match=r"not \(state, aux\)[\s\S]*Fix: .*`return"):
        wrap(returned)(state)


def test_init_without_shard_is_refused() -> None:
    with pytest.raises(PhaseError, match=r"has no init[\s\S]*Fix: wrap it: fzero.shard"):
        fzero.coalesce(one_backward).init(PARAMS, sgd())
    with pytest.raises(LayoutError, match=r"Fix: fzero.simulate\(fzero.shard"):
        fzero.simulate(one_backward, world_size=2).init(PARAMS, sgd())


def test_init_is_found_through_the_transforms_around_shard() -> None:
    step = fzero.clip(fzero.shard(one_backward, stage=3), max_norm=1.0)
    assert step.init(PARAMS, sgd()).stage == 3


def test_a_state_of_another_stage_or_world_is_refused() -> None:
    state = fzero.init(PARAMS, sgd(), stage=1)
    with pytest.raises(LayoutError, match=r"stage 1 was given to a step of stage 2[\s\S]*Fix: use"):
        fzero.shard(one_backward, stage=2)(state, torch.ones(1))
    two = fzero.simulate(fzero.shard(one_backward, stage=1), world_size=2).init(PARAMS, sgd())
    with pytest.raises(fzero.AxisError, match=r"2 virtual ranks[\s\S]*Fix: call `fzero.simulate"):
        fzero.shard(one_backward, stage=1)(two, torch.ones(1))
    three = fzero.simulate(fzero.shard(one_backward, stage=1), world_size=3)
    with pytest.raises(LayoutError, match="dim 0 must be the 3 ranks"):
        three(two, torch.ones(3, 1))
