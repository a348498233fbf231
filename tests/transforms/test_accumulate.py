"""`accumulate(steps=k)`: arguments, aux and updates; that it is one batch is in test_programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError, PhaseError
from tests.oracle import train
from tests.strategies import Pair, integers, same, seeds, stages, worlds
from tests.transforms.steps import mean_loss, one_backward, run, sgd, torch_sgd

IN_PARTS = fzero.accumulate(one_backward, steps=2)
WRAPS: dict[str, Callable[[Any], Any]] = {
    "two parts": fzero.accumulate(steps=2),
    "around coalesce": lambda fn: fzero.accumulate(fzero.coalesce(fn), steps=2),
    "inside coalesce": lambda fn: fzero.coalesce(fzero.accumulate(fn, steps=2)),
}


def echo(state: Any, x: Tensor, pair: Pair, flag: str, *, scale: Tensor, none: None = None) -> Any:
    """Aux of every kind, from arguments of every kind."""
    aux = {
        "mean": x.mean(),
        "count": torch.tensor(len(x)),
        "outputs": 2 * x,
        "pair": Pair(pair.first.sum() / len(x), pair.second),
        "scale": scale,
        "float": x.mean().item(),
        "int": len(x),
        "word": flag,
        "none": none,
        "true": True,
    }
    return state, aux


@given(k=st.sampled_from([1, 2, 3, 6]), seed=seeds)
def test_arguments_are_split_and_aux_is_joined(k: int, seed: int) -> None:
    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    x = 60 * integers((6, 2), seed)
    pair = Pair(x + 60, "left alone")
    arguments: Any = (x, pair, "word")
    _, want = echo(state, *arguments, scale=torch.tensor(2.0))
    _, got = fzero.accumulate(echo, steps=k)(state, *arguments, scale=torch.tensor(2.0))
    same(got, want)


def test_steps_1_is_the_identity_whatever_the_batch() -> None:
    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    odd = object()
    new, aux = fzero.accumulate(lambda s, x, o: (s, (x, o)), steps=1)(state, torch.ones(3, 2), odd)
    same(aux[0], torch.ones(3, 2))
    assert aux[1] is odd
    same(new, state)


def two_updates(state: Any, xs: Tensor) -> Any:
    state, _ = one_backward(state, xs)
    return one_backward(state, xs)


def a_gradient_after_the_update(state: Any, xs: Tensor) -> Any:
    state, _ = one_backward(state, xs)
    return fzero.grad_and_reduce(mean_loss, state)(xs)


def two_updates_in_parts(state: Any, xs: Tensor) -> Any:
    state, _ = IN_PARTS(state, xs)
    return IN_PARTS(state, xs)


def an_update_and_one_in_parts(state: Any, xs: Tensor) -> Any:
    state, _ = one_backward(state, xs)
    return IN_PARTS(state, xs)


@pytest.mark.parametrize("outer", ["two parts", "around coalesce", "inside coalesce"])
@pytest.mark.parametrize(
    "fn",
    [two_updates, a_gradient_after_the_update, two_updates_in_parts, an_update_and_one_in_parts],
)
def test_a_step_that_goes_on_after_its_update_is_refused(fn: Any, outer: str) -> None:
    """The update waits for the last part: nothing may be added to its gradients before."""
    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    want = one_backward(state, torch.ones(4))
    message = r"after apply_gradients, inside fzero.accumulate[\s\S]*Fix: put fzero.accumul"
    with pytest.raises(PhaseError, match=message):
        WRAPS[outer](fn)(state, torch.ones(4))
    same(one_backward(state, torch.ones(4)), want)  # the state is whole


def test_two_updates_in_parts_after_each_other_are_two_updates() -> None:
    """Without an accumulation around them nothing waits."""
    params, xs = {"w": torch.ones(2).double()}, integers((4,), 1)
    got, _ = two_updates_in_parts(fzero.init(params, sgd(), stage=0), xs)
    same(fzero.full_params(got), train(mean_loss, params, [[xs], [xs]], torch_sgd))


@given(ranks=worlds, stage=stages, seed=seeds)
def test_gradients_before_an_update_in_parts_are_part_of_it(
    ranks: int, stage: int, seed: int
) -> None:
    def step_fn(state: Any, xs: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(mean_loss, state)(xs)
        return IN_PARTS(state, xs)

    def whole(state: Any, xs: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(mean_loss, state)(xs)
        return one_backward(state, xs)

    xs, params = integers((2, ranks, 4), seed, bound=1), {"w": integers((5,), 1)}
    got, _, _ = run(WRAPS["two parts"], step_fn, params, xs, ranks, stage=stage)
    want, _, _ = run(lambda fn: fn, whole, params, xs, ranks, stage=stage)
    same(got, want)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_steps_that_are_no_count_are_refused(steps: Any) -> None:
    with pytest.raises(LayoutError, match=r"accumulate: micro_batches=[\s\S]*Fix: "):
        fzero.accumulate(one_backward, steps=steps)


def test_a_batch_that_does_not_divide_is_named() -> None:
    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    step = fzero.accumulate(lambda state, a, *, b: (state, None), steps=2)
    message = r"b.* of shape \(3, 2\) does not divide into 2 parts[\s\S]*Fix: use batches of a mult"
    with pytest.raises(LayoutError, match=message):
        step(state, torch.ones(4), b={"deep": torch.ones(3, 2)})


@pytest.mark.parametrize("nested", [False, True])
def test_a_state_behind_the_first_argument_is_named(nested: bool) -> None:
    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    batch = {"teacher": state} if nested else state
    calls: list[Any] = []
    step = fzero.accumulate(lambda state, x, b: (state, calls.append(b)), steps=2)
    place = r"arguments\[0\]\[1\]\['teacher'\]" if nested else r"arguments\[0\]\[1\]"
    message = rf"argument {place} is a TrainState.*\n.*first argument.*\nFix: write step\(state, "
    with pytest.raises(LayoutError, match=message):
        step(state, torch.ones(4), batch)
    assert calls == []


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (lambda i: [torch.ones(1)] * i, "another structure[\\s\\S]*Fix: return the same structure"),
        (lambda i: f"part {i}", "aux differs between parts: 'part 1'[\\s\\S]*Fix: return tensors"),
    ],
)
def test_aux_that_cannot_be_joined_is_refused(aux: Any, message: str) -> None:
    calls = []

    def step_fn(state: Any, x: Tensor) -> Any:
        calls.append(x)
        return state, aux(len(calls))

    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    with pytest.raises(LayoutError, match=message):
        fzero.accumulate(step_fn, steps=2)(state, torch.ones(4))


TABLE = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def looked_up(p: Any, x: Any, table: Any, *, scale: Any = 1.0) -> Any:
    return (p["w"] * x["v"] * table.sum() * scale).mean() + (x["i"].double() ** 2).mean()


def lookup_step(state: Any, x: Any, table: Any, *, scale: Any = 1.0) -> Any:
    state, loss = fzero.grad_and_reduce(looked_up, state)(x, table, scale=scale)
    return fzero.apply_gradients(state), loss


X = {"v": torch.arange(8.0).view(2, 4), "i": torch.arange(4)}  # 4 examples, in dims 1 and 0
AXES: dict[str, Any] = {
    "a tuple": (({"v": 1, "i": 0}, None), {}),
    "from the end": (({"v": -1, "i": -1}, None), {}),
    "a list": ([{"v": 1, "i": 0}, None], {}),
    "by name": ({"x": {"v": 1, "i": 0}, "table": None}, {}),
    "keywords": ({"x": {"v": 1, "i": 0}, "table": None}, {"table": TABLE}),
    "keywords whole": (
        {"x": {"v": 1, "i": 0}, "table": None, "scale": None},
        {"table": TABLE, "scale": torch.ones(5).sum(0, keepdim=True)},
    ),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("form", AXES)
def test_in_axes_says_what_is_cut_and_where(form: str, stage: int) -> None:
    in_axes, keywords = AXES[form]
    args = (X,) if "table" in keywords else (X, TABLE)
    state = fzero.init({"w": torch.tensor(2.0)}, sgd(), stage=stage)
    whole, loss = lookup_step(state, *args, **keywords)
    for wrap in (lambda step: step, fzero.coalesce):
        step = wrap(fzero.accumulate(lookup_step, micro_batches=2, in_axes=in_axes))
        parts, mean = step(state, *args, **keywords)
        torch.testing.assert_close(mean, loss)
        torch.testing.assert_close(fzero.full_params(parts), fzero.full_params(whole))


def test_none_and_an_int_hold_for_all_arguments() -> None:
    state = fzero.init({"w": torch.tensor(2.0)}, sgd(), stage=0)
    found: list[Any] = []

    def step(state: Any, x: Any, y: Any = None, *, k: Any = None) -> Any:
        found.append((x, y, k))
        return state, None

    x = torch.arange(12.0).view(3, 4)
    fzero.accumulate(step, micro_batches=2, in_axes=None)(state, x, {"y": x}, k=state)
    assert all(a is x and b["y"] is x and c is state for a, b, c in found)
    found.clear()
    fzero.accumulate(step, micro_batches=2, in_axes=1)(
        state, x, [x, None, "word"], k=torch.ones(())
    )
    assert torch.equal(torch.cat([a for a, _, _ in found], 1), x)
    assert [b[1:] for _, b, _ in found] == [[None, "word"]] * 2 and found[0][1][0].shape == (3, 2)
    found.clear()
    fzero.accumulate(step, micro_batches=2, in_axes=(0, None))(state, torch.ones(2), state)
    assert [b for _, b, _ in found] == [state, state]


def test_in_axes_that_do_not_fit_are_refused_by_name() -> None:
    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)

    def step(state: Any, x: Any, table: Any = None) -> Any:
        return state, None

    def call(in_axes: Any, *args: Any, **kwargs: Any) -> None:
        fzero.accumulate(step, micro_batches=2, in_axes=in_axes)(state, *args, **kwargs)

    x = torch.ones(4, 6)
    with pytest.raises(
        LayoutError, match=r"\[0\]\[0\] has 4 examples.*\[0\]\[1\].*, 6 along dim 0"
    ):
        call(0, x, torch.ones(6, 2))
    with pytest.raises(LayoutError, match=r"\[1\]\['table'\]\['t'\], of shape \(2,\), 2 along dim"):
        call(0, x, table={"t": torch.ones(2)})
    with pytest.raises(LayoutError, match=r"\[1\]\['table'\] of shape \(3,\) does not divide"):
        call(0, x, table=torch.ones(3))
    with pytest.raises(LayoutError, match="there are 2 positional arguments after the state"):
        call((0,), x, x)
    with pytest.raises(LayoutError, match="there is no argument 'tabel'"):
        call({"tabel": None}, x, x)
    with pytest.raises(LayoutError, match=r"does not fit the call: of arguments\[0\]\[0\]"):
        call(({"a": 0, "b": 0},), {"a": x})
    with pytest.raises(LayoutError, match=r"arguments\[0\]\[0\] has 2 dims"):
        call((2,), x)
    for bad in ("0", True, (0, 1.0), {"x": "batch"}):
        with pytest.raises(LayoutError, match="is no int and not None"):
            fzero.accumulate(step, micro_batches=2, in_axes=bad)
    call({"table": None}, x)  # an argument that is not given has no parts
