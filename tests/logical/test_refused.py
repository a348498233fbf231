"""What logical ranks refuse, by name, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import LayoutError, PhaseError
from fzero.state import Local


def init(**options: Any) -> Any:
    given = {"stage": 2, "logical_ranks": 4, **options}
    return fzero.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1), **given)


def loss_fn(p: Any, x: Tensor) -> Tensor:
    return (p["w"] * x).sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logical_ranks": 0}, "logical_ranks=0[.]"),
        ({"logical_ranks": 2.0}, "logical_ranks=2.0[.]"),
        ({"seed": -1}, "seed=-1[.]"),
        ({"logical_ranks": None, "seed": 3}, "seed=3 without logical_ranks="),
        (
            {"compress": fzero.Compress(gradients=fzero.codecs.int8())},
            "gradients=int8.* with logical_ranks=4",
        ),
        (
            {"stage": 3, "compress": fzero.Compress(parameters=fzero.codecs.int8())},
            "parameters=int8.* with logical_ranks=4",
        ),
        ({"local": Local(every=2)}, "local updates with logical_ranks=4"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        init(**options)


def test_more_ranks_than_logical_ranks() -> None:
    with pytest.raises(LayoutError, match="logical_ranks=2, and there are 3 ranks"):
        fzero.simulate(lambda: init(logical_ranks=2) and None, world_size=3)()


def test_stochastic_rounding() -> None:
    rule = fzero.optim.adamw(1e-3, master_weights=False, stochastic_rounding=True)
    with pytest.raises(LayoutError, match="stochastic_rounding with logical_ranks"):
        fzero.init({"w": torch.ones(4).bfloat16()}, rule, stage=2, logical_ranks=2)


def test_a_transform_with_slots_at_local() -> None:
    seen = fzero.transform(
        name="seen", init=lambda params, ctx: {"n": 0.0}, local=lambda slots, g, ctx: (slots, g)
    )
    with pytest.raises(LayoutError, match="'seen' keeps slots at `local`"):
        init(transforms=[seen])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight": 3.0}, "weight=3.0 for the 4 logical ranks"),
        ({"weight": [1.0, 2.0]}, "2 weights for the 4 logical ranks"),
        ({"weight": [1.0, 2.0, 3.0, -1.0]}, "weight=-1.0"),
        ({"weight": lambda x: -1.0}, "weight=-1.0"),
        ({"sizes": [2, 2]}, r"sizes=\[2, 2\]"),
        ({"sizes": [1, 1, 1, 1]}, "has 8 rows along dim 0, and the sizes are 4 together"),
        ({"in_axes": "x"}, "in_axes='x' has 'x'"),
        ({"in_axes": (0, 0)}, "does not fit the call"),
    ],
)
def test_arguments_of_a_call(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        fzero.grad_and_reduce(loss_fn, init(), **given)(torch.ones(8, 4))


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(LayoutError, match=r"grad_and_reduce: argument .* does not divide into 4"):
        fzero.grad_and_reduce(loss_fn, init())(torch.ones(6, 4))


def test_parts_without_logical_ranks() -> None:
    state = init(logical_ranks=None)
    cases: list[dict[str, Any]] = [{"sizes": [1]}, {"in_axes": None}]
    for given in cases:
        with pytest.raises(LayoutError, match="the state has no logical ranks"):
            fzero.grad_and_reduce(loss_fn, state, **given)(torch.ones(4))


def test_aux_that_cannot_be_stacked() -> None:
    def with_rows(p: Any, x: Tensor) -> Any:
        return loss_fn(p, x), x

    call = fzero.grad_and_reduce(with_rows, init(), has_aux=True, sizes=[1, 2, 3, 1])
    with pytest.raises(LayoutError, match="aux has tensors"):
        call(torch.ones(7, 4))


def test_a_step_that_is_differentiated() -> None:
    state = init()
    with pytest.raises(PhaseError, match="a state with logical_ranks"):
        fzero.grad_and_reduce(loss_fn, state)(torch.ones(4, 4, requires_grad=True))

    def after(x: Tensor) -> Tensor:
        return fzero.grad_and_reduce(loss_fn, state)(x)[1]

    with pytest.raises(PhaseError, match="a state with logical_ranks"):
        torch.func.grad(after)(torch.ones(4, 4))


def test_gradients_of_a_rank() -> None:
    state, grads = init(), {"w": torch.ones(4)}
    with pytest.raises(PhaseError, match="the state has logical ranks"):
        fzero.add_gradients(state, grads)
    state = fzero.add_gradients(state, grads, reduced=True)
    assert fzero.gradients(state)["w"].tolist() == [1.0] * 4


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["before", "after", "teacher", "in the loss"])
def test_draws_outside_of_a_loss(where: str, ranks: int) -> None:
    """Rows of several logical ranks are there together, so they would get other numbers."""

    def noisy(p: Any, x: Tensor) -> Tensor:
        return loss_fn(p, torch.nn.functional.dropout(x, 0.5))

    def step_fn(state: Any, x: Tensor) -> Any:
        if where == "before":
            x = x + torch.randn_like(x)
        if where == "teacher":
            fzero.evaluate(noisy, state)(x)
        loss = noisy if where == "in the loss" else loss_fn
        state, value = fzero.grad_and_reduce(loss, state)(x)
        if where == "after":
            torch.rand(2)
        torch.rand(2, generator=torch.Generator().manual_seed(3))  # anybody's
        return fzero.apply_gradients(state), value

    def run(logical: int | None) -> None:
        step: Any = fzero.shard(step_fn, stage=2, logical_ranks=logical)
        state = step.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1))
        if logical is None or where == "in the loss":
            step(state, torch.ones(4, 4))
            return
        with pytest.raises(PhaseError, match=r"logical_ranks=4 drew from torch's generator of cpu"):
            step(state, torch.ones(4, 4))

    for logical in (4, None):
        fzero.simulate(lambda logical=logical: run(logical), world_size=ranks)()


def test_a_sum_of_a_step_names_its_axis() -> None:
    def step_fn(state: Any, x: Tensor, axis: Any) -> Any:
        return state, fzero.psum(len(x), axis=axis)

    def run() -> Tensor:
        step: Any = fzero.shard(step_fn, stage=0, logical_ranks=6)
        state = step.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1))
        x = torch.ones(2 * len(state.setup.carried(fzero.axis_index())))
        with pytest.raises(PhaseError, match=r'as rows: fzero.psum\(x, axis="dp"\)'):
            step(state, x, None)
        return step(state, x, "dp")[1]

    for ranks in (1, 2, 4):
        assert fzero.simulate(run, world_size=ranks)().tolist() == [12.0] * ranks


def test_states_of_other_logical_ranks_under_one_loss() -> None:
    states = {"a": init(), "b": init(logical_ranks=2)}
    with pytest.raises(PhaseError, match="under one loss"):
        fzero.grad_and_reduce(lambda p: p["a"]["w"].sum() * p["b"]["w"].sum(), states)()


def test_an_error_of_one_logical_rank_is_everybodys() -> None:
    """The state is good after it, also one that donates."""

    def fails(p: Any, x: Tensor, where: int) -> Tensor:
        if fzero.axis_index() == where:
            raise RuntimeError("no such row")
        return loss_fn(p, x)

    @fzero.coalesce
    def step_fn(state: Any, x: Tensor, where: int) -> Any:
        for at in (-1, where):
            state, loss = fzero.grad_and_reduce(fails, state, in_axes=(0, None))(x, at)
        return fzero.apply_gradients(state), loss

    def run(where: int) -> Tensor:
        step: Any = fzero.shard(step_fn, stage=3, logical_ranks=5, donate=True)
        state = step.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1))
        x = torch.ones(len(state.setup.carried(state.setup.axis.rank)), 4)
        with pytest.raises(Exception, match=r"no such row|the step raised on rank"):
            step(state, x, where)
        return fzero.full_params(step(state, x, -1)[0])["w"]

    for where in range(5):
        for ranks in (1, 2, 5):
            if ranks == 1:
                found = run(where)
            else:
                found = fzero.simulate(lambda where=where: run(where), world_size=ranks)()[0]
            assert found.tolist() == run(where).tolist()
