"""Behaviour 34 and the issue's bad input: a clear error, and the old state still good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import fzero
from tests.behaviours.contents import PARAMS, RANKS, X, good_step, loss
from tests.behaviours.networks import PLACES, STAGES, virtual


@contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[None]:
    """An error of `kind` that says each of `parts`, its usual cause and the fix."""
    with pytest.raises(kind) as caught:
        yield
    for part in (*parts, "Usual cause: ", "Fix: "):
        assert part in str(caught.value), str(caught.value)


LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "per-sample losses": (lambda p, x: p["w"] * x, "the loss has shape (5,)"),
    "a vector of one": (lambda p, x: loss(p, x).reshape(1), "the loss has shape (1,)"),
    "a number": (lambda p, x: 1.5, "the loss is a float"),
    "nothing": (lambda p, x: None, "the loss is a NoneType"),
    "a pair": (lambda p, x: (loss(p, x), x), "the loss is a tuple of 2"),
    "a count": (lambda p, x: (p["w"] > 0).sum(), "dtype torch.int64"),
}


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_a_scalar(name: str, stage: int, reshard: Any) -> None:
    bad, seen = LOSSES[name]

    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage, reshard_after_forward=reshard)
        with refused(fzero.LayoutError, seen):
            fzero.grad_and_reduce(bad, state)(x)
        return fzero.full_params(good_step(state, x)[0])["w"]

    assert torch.equal(virtual(run, RANKS, X), torch.zeros(RANKS, 5))


def test_a_loss_without_its_aux() -> None:
    state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=0)
    with refused(fzero.LayoutError, "has_aux=True", "return (loss, aux)"):
        fzero.grad_and_reduce(loss, state, has_aux=True)(X[0])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (3.0, "parameter layers.0.w is a float, not a tensor"),
        ("text", "a str, not a tensor"),
        (torch.ones(2, dtype=torch.complex64), "a complex tensor"),
        (torch.eye(2).to_sparse(), "a torch.sparse_coo tensor"),
        (torch.nn.Linear(1, 1), "a Linear, not a tensor"),
    ],
)
def test_a_parameter_that_is_not_a_tensor(stage: int, value: Any, seen: str) -> None:
    with refused(fzero.LayoutError, seen):
        fzero.init({"layers": [{"w": value}]}, fzero.optim.sgd(0.5), stage=stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_of_another_stage(stage: int) -> None:
    other = (stage + 1) % 4
    state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=other)
    with refused(fzero.LayoutError, f"a state of stage {other}", f"a step of stage {stage}"):
        fzero.shard(good_step, stage=stage)(state, X[0])
    assert torch.equal(fzero.full_params(state)["w"], PARAMS["w"])


def test_a_state_of_another_world() -> None:
    step = fzero.shard(good_step, stage=2)
    two, three = (fzero.simulate(step, world_size=w) for w in (2, 3))
    state = two.init(PARAMS, fzero.optim.sgd(0.5))
    with refused(fzero.LayoutError, "dim 0 must be the 3 ranks"):
        three(state, X)
    with refused(fzero.AxisError, "2 virtual ranks", "step.init"):
        step(state, X)
    local = step.init(PARAMS, fzero.optim.sgd(0.5))
    with refused(fzero.LayoutError, "dim 0 must be the 2 ranks"):
        two(local, X)
    after, _ = two(state, X)
    assert after.step.tolist() == [1, 1]


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
    ):
        with refused(fzero.AxisError, "2 virtual ranks", "fzero.simulate"):
            use(state)
    assert "2 ranks" in repr(state)  # looking at it is what it is for


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_of_another_structure(stage: int) -> None:
    """The loss's own error comes through on every rank; accumulate and simulate say the place."""

    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage)
        with pytest.raises(KeyError, match="images"):
            fzero.grad_and_reduce(lambda p, batch: loss(p, batch["images"]), state)({"text": x})
        with pytest.raises(TypeError, match="argument"):
            fzero.grad_and_reduce(loss, state)(x, x)  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match="missing"):
            fzero.grad_and_reduce(loss, state)()  # pyright: ignore[reportCallIssue]
        with refused(fzero.LayoutError, "(3,) does not divide into 2"):
            batch: Any = {"x": x.expand(3)}
            fzero.accumulate(good_step, steps=2)(state, batch)
        return fzero.full_params(good_step(state, x)[0])["w"]

    assert torch.equal(virtual(run, RANKS, X), torch.zeros(RANKS, 5))
    step = fzero.simulate(fzero.shard(good_step, stage=stage), world_size=RANKS)
    state = step.init(PARAMS, fzero.optim.sgd(0.5))
    for batch in (torch.ones(3), torch.tensor(1.0)):
        with refused(fzero.LayoutError, "dim 0 must be the 2 ranks"):
            step(state, batch)


@pytest.mark.parametrize("stage", STAGES)
def test_a_donated_state_used_again(stage: int) -> None:
    """Every way to use it; what the donating step returned is good."""
    step = fzero.shard(good_step, stage=stage, donate=True)
    used = step.init(PARAMS, fzero.optim.adam(0.5))
    new, _ = step(used, X[0])
    uses: list[Callable[[], Any]] = [
        lambda: step(used, X[0]),
        lambda: fzero.full_params(used),
        lambda: fzero.grad_and_reduce(loss, used)(X[0]),
        lambda: fzero.coalesce(good_step)(used, X[0]),
        lambda: fzero.apply_gradients(used),
        lambda: fzero.global_norm(used),
        lambda: fzero.gradients(used),
    ]
    for use in uses:
        with refused(fzero.DonatedError, "donated", "keep a copy"):
            use()
    assert fzero.full_params(new)["w"].shape == (5,)
    again, _ = step(new, X[0])
    assert again.step.item() == 2


def test_donation_leaves_the_callers_own_tensors_alone() -> None:
    """Neither the parameters given to init nor what full_params gave are overwritten."""
    mine = {"w": Parameter(torch.ones(5)), "b": torch.ones(2)}
    step = fzero.shard(good_step, stage=0, donate=True)
    state = step.init(mine, fzero.optim.sgd(0.5))
    shown = fzero.full_params(state)
    step(state, X[1])
    for held in (mine, shown):
        assert torch.equal(held["w"], torch.ones(5))
        assert torch.equal(held["b"], torch.ones(2))


@pytest.mark.parametrize("stage", STAGES)
def test_34_an_update_without_gradients(stage: int) -> None:
    state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage)
    for made in (state, good_step(state, X[0])[0]):
        with refused(fzero.PhaseError, "holds no gradients", "pass on the state it returned"):
            fzero.apply_gradients(made)
        for read in (fzero.gradients, fzero.global_norm):
            with refused(fzero.PhaseError, "holds no gradients", "ask the state that"):
                read(made)
        assert good_step(made, X[0])[0].step.item() == made.step.item() + 1


def test_parameters_in_the_place_of_a_state() -> None:
    for use in (
        lambda: fzero.grad_and_reduce(loss, PARAMS),
        lambda: fzero.apply_gradients(PARAMS),
        lambda: fzero.full_params(None),
        lambda: fzero.shard(good_step, stage=1)(PARAMS, X),
    ):
        with refused(fzero.LayoutError, "TrainState"):
            use()


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
def test_a_detached_loss_is_told(stage: int, reshard: Any) -> None:
    """Its gradient is zero, on every rank, which nobody wants without knowing."""

    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage, reshard_after_forward=reshard)
        state, value = fzero.grad_and_reduce(lambda p, x: loss(p, x).detach(), state)(x)
        return fzero.gradients(state), value

    with pytest.warns(UserWarning, match=r"requires no grad[\s\S]*Fix: return the loss as"):
        gradients, value = virtual(run, RANKS, X)
    assert value.tolist() == [7.0, 17.0]
    assert not gradients["w"].any() and not gradients["b"].any()


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_loss_that_is_a_parameter_itself(ranks: int, stage: int, reshard: Any) -> None:
    """A leaf of the graph: its gradient is one where it was used, on two of three ranks."""

    def leaf(params: Any) -> Tensor:
        return params["s"] if fzero.axis_index() < 2 else 4 * params["w"].sum()

    def run(_: Tensor) -> Any:
        params = {"s": torch.tensor(5.0), "w": torch.ones(3)}
        state = fzero.init(params, fzero.optim.sgd(0.5), stage=stage, reshard_after_forward=reshard)
        state, value = fzero.grad_and_reduce(leaf, state)()
        return fzero.gradients(state), value

    gradients, value = virtual(run, ranks, torch.zeros(ranks))
    used = min(ranks, 2) / ranks
    assert value.tolist() == [5.0, 5.0, 12.0][:ranks]
    torch.testing.assert_close(gradients["s"], torch.full((ranks,), used))
    torch.testing.assert_close(gradients["w"], torch.full((ranks, 3), 4 * (ranks == 3) / 3))


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


@pytest.mark.parametrize("stage", STAGES)
def test_a_write_through_data_is_refused_at_stage_3_and_not_seen_below(stage: int) -> None:
    """Torch does not count it. docs/semantics.md says so."""

    def writes(params: Any, x: Tensor) -> Tensor:
        params["w"].data.zero_()
        return loss(params, x)

    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage)
        if stage == 3:
            with refused(fzero.LayoutError, "w", "is written in place", "clone it first"):
                fzero.grad_and_reduce(writes, state)(x)
        else:
            fzero.grad_and_reduce(writes, state)(x)
        return fzero.full_params(state)["w"]

    assert virtual(run, RANKS, X).unique().tolist() == [1.0 if stage == 3 else 0.0]


def test_a_warning_shows_the_line_that_made_the_call() -> None:
    step = fzero.shard(good_step, stage=0)
    state = step.init(PARAMS, fzero.optim.sgd(0.5))
    x = torch.tensor(3.0, requires_grad=True)
    with pytest.warns(UserWarning) as told:
        fzero.grad_and_reduce(lambda p: p["w"].sum().detach(), state)()
        state, _ = step(state, x)
        step(state, x)
    assert [warning.filename for warning in told] == [__file__, __file__]
