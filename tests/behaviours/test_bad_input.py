"""Bad input: a clear error, or a warning that shows the place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import fzero
from tests.behaviours.networks import STAGES, Place, at_every_place, virtual

PARAMS = {"w": torch.ones(5), "b": torch.ones(2)}
RANKS = 2
X = torch.tensor([1.0, 3.0])


def loss(params: Any, x: Tensor) -> Tensor:
    return (params["w"] * x).sum() + (params["b"] ** 2).sum()


def good_step(state: Any, x: Tensor) -> tuple[Any, Tensor]:
    state, value = fzero.grad_and_reduce(loss, state)(x)
    return fzero.apply_gradients(state), value


@contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[None]:
    """An error of `kind` that says each of `parts`, its usual cause and the fix."""
    with pytest.raises(kind) as caught:
        yield
    for part in (*parts, "Usual cause: ", "Fix: "):
        assert part in str(caught.value), str(caught.value)


# Losses.


def writes(params: Any) -> None:
    params["w"].mul_(2)


def writes_under_no_grad(params: Any) -> None:
    with torch.no_grad():
        params["w"].mul_(2)


def writes_to_a_frozen_one(params: Any) -> None:
    params["frozen"].mul_(2)


@pytest.mark.parametrize("ranks", [1, 2])
@at_every_place
@pytest.mark.parametrize("write", [writes, writes_under_no_grad, writes_to_a_frozen_one])
def test_a_loss_that_writes_to_a_parameter_is_refused(
    write: Callable[[Any], None], place: Place, ranks: int
) -> None:
    """Where torch allows the write a buffer of stages 0 to 2 has changed: the error says so."""
    params = {"w": torch.ones(3), "frozen": Parameter(torch.ones(3), requires_grad=False)}

    def bad(params: Any, x: Tensor) -> Tensor:
        write(params)
        return (params["w"] * params["frozen"]).sum() * x

    def run(x: Tensor) -> Any:
        state = fzero.init(params, fzero.optim.sgd(1.0), **place)
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError), match=r"in[- ]?place"):
                fzero.grad_and_reduce(bad, state)(x)
        return fzero.full_params(state)["w"]

    after = virtual(run, ranks, X[:ranks])
    if write is not writes_under_no_grad:
        assert torch.equal(after, torch.ones(ranks, 3))


@pytest.mark.parametrize("stage", STAGES)
def test_a_write_through_data_is_refused_at_stage_3_and_not_seen_below(stage: int) -> None:
    """Torch does not count it. docs/semantics.md says so."""

    def bad(params: Any, x: Tensor) -> Tensor:
        params["w"].data.zero_()
        return loss(params, x)

    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage)
        if stage == 3:
            with refused(fzero.LayoutError, "w", "is written in place", "clone it first"):
                fzero.grad_and_reduce(bad, state)(x)
        else:
            fzero.grad_and_reduce(bad, state)(x)
        return fzero.full_params(state)["w"]

    assert virtual(run, RANKS, X).unique().tolist() == [1.0 if stage == 3 else 0.0]


@at_every_place
def test_a_detached_loss_is_told(place: Place) -> None:
    """Its gradient is zero, on every rank, which nobody wants without knowing."""

    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.5), **place)
        state, value = fzero.grad_and_reduce(lambda p, x: loss(p, x).detach(), state)(x)
        return fzero.gradients(state), value

    with pytest.warns(UserWarning, match=r"requires no grad[\s\S]*Fix: return the loss as"):
        gradients, value = virtual(run, RANKS, X)
    assert value.tolist() == [7.0, 17.0]
    assert not gradients["w"].any() and not gradients["b"].any()


def test_a_loss_by_no_parameter_of_the_state_is_told() -> None:
    module = torch.nn.Linear(2, 1)
    _, params = fzero.functionalize(module)
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=0)
    other = torch.nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="by no parameter of the state"):
        fzero.grad_and_reduce(lambda p, x: other(x).sum(), state)(torch.ones(2))
    with pytest.raises(fzero.PhaseError, match="of what the state was made of"):
        fzero.grad_and_reduce(lambda p, x: module(x).sum(), state)(torch.ones(2))


# Batches that require grad.


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_that_requires_grad_is_told_at_the_next_step(stage: int, donate: bool) -> None:
    """The parameters would keep the graph of every step so far: memory that only grows."""
    step = fzero.shard(good_step, stage=stage, donate=donate)

    def run(x: Tensor, steps: int) -> Any:
        state = step.init(PARAMS, fzero.optim.sgd(0.5))
        for _ in range(steps):
            state, _ = step(state, x.requires_grad_())
        return fzero.full_params(state)["w"].detach()

    assert torch.equal(virtual(run, RANKS, X.clone(), 1), torch.full((RANKS, 5), 1 - 0.5 * 2.0))
    with pytest.warns(UserWarning, match=r"graph of all steps before[\s\S]*Fix: .*detach\(\)"):
        after = virtual(run, RANKS, X.clone(), 2)
    assert torch.equal(after, torch.full((RANKS, 5), 1 - 2 * 0.5 * 2.0))


@pytest.mark.parametrize("stage", STAGES)
def test_what_means_to_differentiate_through_steps_is_not_told(stage: int) -> None:
    """Through one step by autograd; through two by torch.func. Both are d(sum w)/dx."""
    step = fzero.shard(good_step, stage=stage)

    def through(x: Tensor, steps: int) -> Tensor:
        state = step.init(PARAMS, fzero.optim.sgd(0.5))
        for _ in range(steps):
            state, _ = step(state, x)
        return fzero.full_params(state)["w"].sum()

    x = torch.tensor(3.0, requires_grad=True)
    assert torch.autograd.grad(through(x, 1), x)[0] == -0.5 * 5
    assert torch.func.grad(through)(torch.tensor(3.0), 2) == -0.5 * 5 * 2


def test_a_warning_shows_the_line_that_made_the_call() -> None:
    step = fzero.shard(good_step, stage=0)
    state = step.init(PARAMS, fzero.optim.sgd(0.5))
    x = torch.tensor(3.0, requires_grad=True)
    with pytest.warns(UserWarning) as told:
        fzero.grad_and_reduce(lambda p: p["w"].sum().detach(), state)()
        state, _ = step(state, x)
        step(state, x)
    assert [warning.filename for warning in told] == [__file__, __file__]


# States.


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_of_virtual_ranks_outside_of_them(stage: int) -> None:
    def gradients(state: Any, x: Tensor) -> Any:
        return fzero.grad_and_reduce(loss, state)(x)

    step = fzero.simulate(fzero.shard(gradients, stage=stage), world_size=RANKS)
    state, _ = step(step.init(PARAMS, fzero.optim.sgd(0.5)), X)
    for use in (
        fzero.full_params,
        fzero.gradients,
        fzero.apply_gradients,
        fzero.global_norm,
        lambda state: gradients(state, X[0]),
        lambda state: fzero.coalesce(gradients)(state, X[0]),
        lambda state: fzero.psum(X[0], state.setup.axis),
    ):
        with refused(fzero.AxisError, "2 virtual ranks", "fzero.simulate"):
            use(state)
    assert "2 ranks" in repr(state)  # looking at it is what it is for


# Arguments of init, and of optimizers.


def test_an_axis_of_several_ranks_is_not_made_by_hand() -> None:
    with refused(fzero.AxisError, "size=2"):
        fzero.Axis(size=2)


TIED = Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("params", "options", "seen"),
    [
        (PARAMS, {"trainable": "w"}, "trainable='w'"),
        (PARAMS, {"units": ["w"]}, "units="),
        (None, {}, "there is no parameter"),
        ({}, {}, "there is no parameter"),
        ({"layers": [{"w": torch.nn.Linear(1, 1)}]}, {}, "layers.0.w is a Linear, not a tensor"),
        ({"a": TIED, "b": TIED}, {"trainable": lambda path: path != "a"}, "one tensor"),
        ({"b": TIED, "a": TIED}, {"trainable": lambda path: path != "a"}, "one tensor"),
    ],
)
def test_what_init_cannot_take(params: Any, options: dict[str, Any], seen: str) -> None:
    with refused(fzero.LayoutError, seen):
        fzero.init(params, fzero.optim.sgd(0.5), stage=0, **options)


def test_a_schedule_that_gives_no_number_says_so() -> None:
    state = fzero.init(PARAMS, fzero.optim.sgd(lambda t: None), stage=0)  # type: ignore[arg-type]
    with refused(fzero.LayoutError, "lr(0) = None"):
        good_step(state, X[0])


def updated_by(update: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The state after a step with an (init, update) pair."""
    params = {name: p.to(dtype) for name, p in PARAMS.items()}
    optimizer = (lambda params: [torch.zeros_like(p) for p in params], update)
    return good_step(fzero.init(params, optimizer, stage=0), X[0])[0]


def test_a_foreign_pair_keeps_dtypes_and_shapes_and_may_not_write() -> None:
    new = updated_by(lambda g, s, p: ([-x.float() for x in g], s), torch.bfloat16)
    assert {flat.dtype for flat in new.params.flats} == {torch.bfloat16}
    without_params = updated_by(lambda g, s: ([-x for x in g], s))
    assert fzero.full_params(without_params)["w"].tolist() == [0.0] * 5

    def overwrites(g: Any, s: Any, p: Any) -> Any:
        s[0].add_(1.0)
        return g, s

    for wrong, seen in (
        (lambda g, s, p: ([x.sum() for x in g], s), "an update is"),
        (lambda g, s, p: (g[:1], s), "it gave a list"),
        (lambda g, s, p: ([None] * len(g), s), "NoneType"),
        (overwrites, "it wrote to"),
    ):
        with refused(fzero.LayoutError, seen):
            updated_by(wrong)
