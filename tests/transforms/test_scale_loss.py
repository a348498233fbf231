"""`scale_loss`: an overflow on any rank is as if it had not been. Other scales: test_programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError, PhaseError
from fzero.state import DynamicScale
from tests.descends import descends
from tests.strategies import LEARNING, integers, learns, same, seeds, stages, tensors, trees, worlds
from tests.transforms.steps import LR, many_backwards, mean_loss, sgd

INF, NAN = float("inf"), float("nan")
WAYS = ["dynamic", 64, DynamicScale(init_scale=4.0, growth_interval=1, hysteresis=2)]
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": sgd,
    "adamw": lambda: fzero.optim.adamw(0.1, weight_decay=0.5),
    "lion": lambda: fzero.optim.lion(LR),
    "torch adamw": lambda: fzero.optim.from_torch(torch.optim.AdamW),
    "torch sgd, first momentum undamped": lambda: fzero.optim.from_torch(
        lambda ps: torch.optim.SGD(ps, LR, momentum=0.5, dampening=0.5)
    ),
    "torch rmsprop": lambda: fzero.optim.from_torch(torch.optim.RMSprop),
}


class Around(NamedTuple):
    """What is around the step, besides the scale."""

    coalesced: bool = False
    parts: int = 1
    max_norm: float | None = None
    inside: bool = False  # the scale is inside of all this

    def wrap(self, fn: Any, scale: Any) -> Any:
        fn = fzero.scale_loss(fn, scale) if self.inside else fn
        fn = fzero.coalesce(fn) if self.coalesced else fn
        fn = fzero.clip(fzero.accumulate(fn, steps=self.parts), max_norm=self.max_norm)
        return fn if self.inside else fzero.scale_loss(fn, scale)


arounds = st.builds(
    Around, st.booleans(), st.sampled_from([1, 2]), st.sampled_from([None, 0.5]), st.booleans()
)


class Bad(NamedTuple):
    """A batch that overflows: where, and with what."""

    rank: int
    example: int
    value: float


bads = st.lists(
    st.none() | st.builds(Bad, st.integers(0, 3), st.integers(0, 1), st.sampled_from([INF, NAN])),
    min_size=2,
    max_size=5,
)


def batches_of(schedule: list[Bad | None], ranks: int, seed: int) -> list[Tensor]:
    """[W, 2] examples for each step; those that are bad have one that is not finite."""
    xs = integers((len(schedule), ranks, 2), seed, bound=1).unbind()
    for x, bad in zip(xs, schedule, strict=True):
        if bad is not None:
            x[bad.rank % ranks, bad.example] = bad.value
    return list(xs)


def trained(step: Any, tree: Any, optimizer: Any, batches: list[Tensor]) -> Any:
    state = step.init(tree, optimizer)
    for batch in batches:
        state, _ = step(state, batch)
    return state


@settings(max_examples=40)
@given(
    tree=trees(LEARNING, learning=True),
    ranks=worlds,
    stage=stages,
    around=arounds,
    scale=st.sampled_from(WAYS),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    schedule=bads,
    donate=st.booleans(),
    bucket_bytes=st.sampled_from([1, 64, 2**20]),
    seed=seeds,
)
def test_steps_with_an_overflow_leave_no_trace_but_in_the_scale(
    tree: Any,
    ranks: int,
    stage: int,
    around: Around,
    scale: Any,
    optimizer: str,
    schedule: list[Bad | None],
    donate: bool,
    bucket_bytes: int,
    seed: int,
) -> None:
    options: Any = {"stage": stage, "donate": donate, "bucket_bytes": bucket_bytes}

    def step_of(scale: Any) -> Any:
        fn = fzero.shard(around.wrap(many_backwards, scale), **options)
        return fzero.simulate(fn, world_size=ranks)

    batches = batches_of(schedule, ranks, seed)
    good = [x for x, bad in zip(batches, schedule, strict=True) if bad is None]
    if not any(leaf.numel() and learns(leaf) for leaf in tensors(tree)):
        good = batches  # no gradient, and so no overflow
    got = trained(step_of(scale), tree, OPTIMIZERS[optimizer](), batches)
    want = trained(step_of(1), tree, OPTIMIZERS[optimizer](), good)
    for what in ("params", "gradients", "step", "optimizer"):
        same(getattr(got, what), getattr(want, what))
    if good is not batches:
        assert got.scale.overflowed.tolist() == [schedule[-1] is not None] * ranks
    assert len(set(got.scale.scale.tolist())) == 1, "the ranks have other scales"


step_fn = descends(mean_loss)


@pytest.mark.parametrize("scale", [1, 1.0, None])
def test_a_scale_of_one_looks_for_no_overflow(scale: Any) -> None:
    step = fzero.scale_loss(step_fn, scale)
    state, _ = step(fzero.init(torch.ones(5), sgd(), stage=1), torch.tensor([INF]))
    assert state.scale is None and int(state.step) == 1


def test_it_shows_its_scale_and_stands_in_every_way_around_a_step() -> None:
    assert repr(fzero.scale_loss(step_fn, "dynamic")) == "scale_loss(scale='dynamic') . step_fn"
    assert repr(fzero.scale_loss(step_fn, 8)) == (
        "scale_loss(scale=StaticScale(value=8.0)) . step_fn"
    )
    by_keyword, decorated = fzero.scale_loss(step_fn, scale=8), fzero.scale_loss(scale=8)(step_fn)
    for step in (by_keyword, decorated):
        state, _ = step(fzero.init(torch.ones(2), sgd(), stage=0), torch.ones(2))
        assert state.scale is not None and state.scale.scale.item() == 8.0


@pytest.mark.parametrize("outer", ["shard", "scale_loss", "simulate"])
def test_init_gives_states_with_the_scale_whatever_is_outermost(outer: str) -> None:
    params, opt = {"g": torch.ones(2), "d": torch.ones(3)}, fzero.optim.sgd(0.1)
    step: Any = fzero.shard(fzero.scale_loss(step_fn, 4), stage={"g": 0, "d": 2})
    if outer == "scale_loss":
        step = fzero.scale_loss(fzero.shard(step_fn, stage={"g": 0, "d": 2}), 4)
    if outer == "simulate":
        step = fzero.simulate(step, world_size=2)
    states = step.init(params, opt)
    for state in states.values():
        assert state.scale.scale.unique().tolist() == [4.0]


@pytest.mark.parametrize("wrap", [fzero.scale_loss, fzero.simulate])
def test_it_is_not_put_around_itself_or_simulate(wrap: Any) -> None:
    inner = wrap(step_fn, 8) if wrap is fzero.scale_loss else wrap(step_fn, world_size=2)
    with pytest.raises(LayoutError, match=r"scale_loss around[\s\S]*Fix: write fzero\.simulate"):
        fzero.scale_loss(inner, 8)


@pytest.mark.parametrize("before", [None, 2.0])
def test_gradients_of_another_scale_are_not_mixed_in(before: float | None) -> None:
    def gradient(state: Any) -> Any:
        return fzero.grad_and_reduce(lambda p: p.sum(), state)()[0], None

    state = fzero.init(torch.ones(2), sgd(), stage=0)
    state, _ = fzero.scale_loss(gradient, before)(state)
    with pytest.raises(PhaseError, match=r"scale_loss: the state holds[\s\S]*around the whole"):
        fzero.scale_loss(gradient, 4.0)(state)
    kept, _ = fzero.scale_loss(gradient, before)(state)  # the same goes on
    same(fzero.gradients(kept), torch.full((2,), 2.0))
