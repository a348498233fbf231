"""A loss or a gradient that is not finite stops every rank before its update, with one report."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.collectives import performer_of
from fzero.errors import MismatchError, NonFiniteError, PhaseError
from fzero.state import NAMESPACE
from tests.descends import descends
from tests.ranks import run_ranks
from tests.strategies import same, stages
from tests.transforms.steps import sgd

NAN, INF = float("nan"), float("inf")
FIRST, MIDDLE, LAST = "0.first", "1.middle", "2.last"


def params() -> Any:
    """Blocks of which each multiplies; a frozen, an unused, an empty and a tied parameter."""
    tied = torch.ones(3)
    return [
        {"first": torch.ones(3), "empty": torch.ones(0)},
        {"middle": torch.ones(5), "tied": tied},
        {"last": torch.ones(()), "tied": tied, "unused": torch.ones(2)},
        {"frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False)},
    ]


def loss_fn(p: Any, x: Tensor) -> Tensor:
    """x[0] is what the loss is made of; x[1] = 0 makes a gradient infinite, x[2] = 0 another one.

    sqrt(p x) at x = 0 is 0, and its derivative 0 / 0. The loss itself stays finite.
    """
    h = (p[0]["first"] * p[1]["tied"]).sum() * x[0] + (p[0]["first"] * x[1]).sqrt().sum()
    h = h * p[1]["middle"].mean() * p[2]["tied"].sum() + (p[1]["middle"] * x[2]).sqrt().sum()
    return h * p[2]["last"] + p[0]["empty"].sum() + p[3]["frozen"].sum()


def stepping(loss: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Any]:
    step_fn = descends(loss)
    return step_fn


one_call = stepping(loss_fn)


def two_calls(state: Any, x: Tensor) -> Any:
    state, _ = fzero.grad_and_reduce(loss_fn, state)(torch.ones(3))
    return one_call(state, x)


def in_parts(fn: Any) -> Any:
    return fzero.accumulate(fn, steps=2)


check, window = fzero.check_finite, fzero.coalesce
PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {  # and the backward in which x is used
    "one call": (check(one_call), 0),
    "two calls": (check(two_calls), 1),
    "a window": (window(check(two_calls)), 1),
    "around a window": (check(window(two_calls)), 1),
    "clipped": (fzero.clip(check(one_call), max_norm=1.0), 0),
    "twice": (check(check(one_call)), 0),
    "under autocast": (check(fzero.autocast(one_call, dtype=torch.bfloat16)), 0),
}
BAD: dict[str, tuple[list[float], str, str]] = {
    "loss": ([NAN, 1.0, 1.0], "loss", LAST),
    "infinite loss": ([-INF, 1.0, 1.0], "loss", LAST),
    "first": ([1.0, 0.0, 1.0], "gradient", FIRST),
    "middle": ([1.0, 1.0, 0.0], "gradient", MIDDLE),
    "both": ([1.0, 0.0, 0.0], "gradient", MIDDLE),  # which the backward makes before `first`
}


def _facts(error: NonFiniteError) -> tuple[Any, ...]:
    return error.step, error.rank, error.what, error.path, error.backward, error.ranks


def _after(step: Any, state: Any, good: Tensor, bad: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The state after a good step, one that raises, and another good one; what was raised."""
    state, _ = step(state, good)
    with pytest.raises(NonFiniteError) as caught:
        step(state, bad)
    return step(state, good)[0], _facts(caught.value)


@given(
    ranks=st.integers(1, 3),
    stage=stages,
    program=st.sampled_from(list(PROGRAMS)),
    bad=st.sampled_from(list(BAD)),
    where=st.sets(st.integers(0, 2), min_size=1),
    donate=st.booleans(),
    bucket_bytes=st.sampled_from([1, 30, 2**20]),
)
def test_the_first_rank_and_parameter_are_named_and_nothing_is_updated(
    ranks: int, stage: int, program: str, bad: str, where: set[int], donate: bool, bucket_bytes: int
) -> None:
    fn, backward = PROGRAMS[program]
    sharded = fzero.shard(fn, stage=stage, donate=donate, bucket_bytes=bucket_bytes)
    step = fzero.simulate(sharded, world_size=ranks)
    good = torch.ones(ranks, 3)
    x = good.clone()
    rows = sorted({row % ranks for row in where})
    values, what, path = BAD[bad]
    x[rows] = torch.tensor(values)
    state, facts = _after(step, step.init(params(), sgd()), good, x)
    assert facts == (1, rows[0], what, path, backward, tuple(rows))
    want = step.init(params(), sgd())
    for _ in range(2):
        want, _ = step(want, good)
    same(state, want)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_no_exchange_is_added(stage: int) -> None:
    def counted(fn: Any) -> list[int]:
        def body(state: Any, x: Tensor) -> Any:
            with fzero.count_collectives() as log:
                state, _ = inner(state, x)
            performer = performer_of(fzero.world())
            assert performer is not None
            return state, (len(log.of(fzero.axis_index())), performer.rounds)

        inner = fzero.shard(fn, stage=stage)
        step = fzero.simulate(fzero.shard(fn, stage=stage), world_size=2)
        state = step.init(params(), sgd())
        both = fzero.simulate(body, world_size=2)
        return [int(x[0]) for x in both(state, torch.ones(2, 3))[1]]

    assert counted(check(two_calls)) == counted(two_calls)


@pytest.mark.parametrize(("bad", "part"), [([0], 0), ([2], 1), ([0, 2], 0)])
def test_inside_of_accumulate_the_part_is_named_at_the_update(bad: list[int], part: int) -> None:
    fn = stepping(lambda p, x: (p * x).sqrt().mean())
    state = fzero.init(torch.ones(()), sgd(), stage=2)
    x = torch.ones(4)
    x[bad] = 0.0
    for step in (in_parts(check(fn)), check(in_parts(fn))):
        with pytest.raises(NonFiniteError) as caught:
            step(state, x)
        assert _facts(caught.value) == (0, 0, "gradient", ".", part, (0,))


def test_of_several_states_the_path_has_the_key() -> None:

    fn = stepping(lambda p, x: (p["d"]["v"] * x).sqrt().sum() * p["g"]["w"].sum())

    step = fzero.simulate(fzero.shard(check(fn), stage={"g": 2, "d": 3}), world_size=2)
    states = step.init({"g": {"w": torch.ones(3)}, "d": {"v": torch.ones(2)}}, sgd())
    states, _ = step(states, torch.ones(2))
    with pytest.raises(NonFiniteError) as caught:
        step(states, torch.tensor([1.0, 0.0]))
    assert _facts(caught.value) == (1, 1, "gradient", "d.v", 0, (1,))
    with pytest.raises(NonFiniteError) as caught:
        step(states, torch.tensor([NAN, 1.0]))
    assert _facts(caught.value) == (1, 0, "loss", "g.w", 0, (0,))
    other = stepping(lambda p, x: p["d"]["v"].sum() + (p["g"]["w"] * x).sum())
    step = fzero.simulate(fzero.shard(check(other), stage={"g": 2, "d": 3}), world_size=2)
    with pytest.raises(NonFiniteError) as caught:  # only one of them has a NaN in its gradients
        step(states, torch.tensor([1.0, NAN]))
    assert _facts(caught.value) == (1, 1, "loss", "g.w", 0, (1,))


def test_with_a_loss_scale_an_overflow_is_skipped_and_the_loss_is_looked_at() -> None:
    fn = stepping(lambda p, x: (p * x[0]).sum() + (p * x[1]).sqrt().sum())
    for wrapped in (check(fzero.scale_loss(fn)), fzero.scale_loss(check(fn))):
        step = fzero.simulate(fzero.shard(wrapped, stage=2), world_size=2)
        state = step.init(torch.ones(4), sgd())
        good, bad = torch.ones(2, 2), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
        large = torch.tensor([[1e37, 1.0], [1.0, 1.0]])  # finite, until it is scaled
        for x in (bad, large):
            state, _ = step(state, x)
            assert state.scale.overflowed.tolist() == [True, True]
        state, _ = step(state, good)
        with pytest.raises(NonFiniteError) as caught:
            step(state, torch.tensor([[1.0, 1.0], [INF, 1.0]]))
        assert _facts(caught.value) == (1, 1, "loss", None, 0, (1,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_finite_number_is_finite_in_every_dtype(dtype: torch.dtype) -> None:
    """Also where the sum of the gradient's elements is not."""
    most = torch.finfo(dtype).max
    fn = check(stepping(lambda p, x: (p * x / 2).sum()))
    for value, raises in ((most, False), (-most, False), (INF, True), (-INF, True), (NAN, True)):
        x = torch.full((3,), value, dtype=dtype)
        params = torch.tensor([1.0, -1.0, 0.0], dtype=dtype)
        state = fzero.init(params, fzero.optim.sgd(1e-6), stage=1)
        if raises:
            with pytest.raises(NonFiniteError):
                fn(state, x)
        else:
            fn(state, x)


def test_a_gradient_that_is_dropped_by_an_error_is_forgotten() -> None:
    state = fzero.init(params(), sgd(), stage=3)

    def wrong(p: Any, x: Tensor) -> Tensor:
        p[0]["first"].register_hook(fail)
        return loss_fn(p, x)

    def fail(_: Tensor) -> None:
        raise ValueError("a hook that raises")

    @fzero.check_finite
    def fn(state: Any, x: Tensor) -> Any:
        with pytest.raises(ValueError, match="a hook that raises"):
            fzero.grad_and_reduce(wrong, state)(torch.full((3,), NAN))
        return one_call(state, x)

    assert int(fn(state, torch.ones(3))[0].step) == 1


def test_arguments_that_require_grad_are_checked_and_transforms_refused() -> None:
    """There all gradients are made at once: the last parameter is the first."""
    state = fzero.init(params(), sgd(), stage=2)
    x = torch.tensor([1.0, 0.0, 0.0], requires_grad=True)
    with pytest.raises(NonFiniteError) as caught:
        check(one_call)(state, x)
    assert _facts(caught.value) == (0, 0, "gradient", MIDDLE, 0, (0,))
    fine, _ = check(one_call)(state, torch.ones(3, requires_grad=True))
    assert int(fine.step) == 1

    def loss_after(x: Tensor) -> Tensor:
        return check(one_call)(state, x)[1]

    message = r"check_finite: grad_and_reduce inside a torch.func transform[\s\S]*Fix: leave"
    with pytest.raises(PhaseError, match=message):
        torch.func.grad(loss_after)(torch.ones(3))
    with pytest.raises(PhaseError, match=message):
        torch.func.vmap(loss_after)(torch.ones(2, 3))


def test_the_error_says_it_all_and_is_pickled() -> None:
    error = NonFiniteError(12, 1, "loss", "blocks.0.w", 3, (1, 3))
    text = str(error)
    assert text.startswith("after 12 updates, in backward 4 since the last one: the loss of rank 1")
    assert "the gradient of blocks.0.w" in text and "Ranks [3]" in text
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == text and _facts(again) == _facts(error)


def only_some_ranks(state: Any, x: Tensor) -> Any:
    fn = check(one_call) if fzero.axis_index() else one_call
    return fzero.shard(fn, stage=2)(state, x)


def test_ranks_of_which_only_some_check_are_refused() -> None:
    init = fzero.simulate(fzero.shard(one_call, stage=2), world_size=2).init
    with pytest.raises(MismatchError, match="check_finite"):
        fzero.simulate(only_some_ranks, world_size=2)(init(params(), sgd()), torch.ones(2, 3))


def _on_gloo(rank: int, size: int, stage: int) -> tuple[Any, ...]:
    step = fzero.shard(window(check(two_calls)), stage=stage, donate=True)
    good = torch.ones(3)
    bad = torch.tensor([1.0, 0.0, 1.0]) if rank == 1 else good
    state, facts = _after(step, step.init(params(), sgd()), good, bad)
    whole = optree.tree_leaves(fzero.full_params(state), namespace=NAMESPACE)
    return (*facts, [x.tolist() for x in whole])


@pytest.mark.smoke
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", [0, 3])
def test_processes_report_the_same(stage: int) -> None:
    found = run_ranks(_on_gloo, 2, stage)
    assert found[0] == found[1]
    assert found[0][:-1] == (1, 1, "gradient", FIRST, 1, (1,))
