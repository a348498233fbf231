"""Law 15: sum(w g) / sum(w), whatever the split of the examples over calls and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.errors import LayoutError, MismatchError, PhaseError
from tests.covering import covered
from tests.strategies import integers, seeds, stages, worlds

NAN = float("nan")
PARAMS = {
    "w": torch.tensor([1.0, 2.0, -1.0]),
    "b": torch.tensor(1.0),
    "e": torch.zeros(0),
    "frozen": torch.nn.Parameter(torch.tensor([3.0]), requires_grad=False),
}


def squares(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the rows of x [n, 3]: NaN for none."""
    return ((x @ params["w"] + params["b"] * params["frozen"] - y) ** 2).mean()


def mean_over_rows(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradients of the mean over all rows, by plain autograd in one process."""
    own = {k: v.detach().clone().requires_grad_() for k, v in PARAMS.items()}
    squares(own, x, y).mul(len(x)).backward()
    return {k: own[k].grad / len(x) for k in ("w", "b")}


def trained(split: list[list[int]], x: Tensor, y: Tensor, wrap: Any, **options: Any) -> Any:
    """One update, of ranks that make calls of split[rank][call] rows."""
    starts = iter(torch.tensor([0, *(n for own in split for n in own)]).cumsum(0).tolist())
    rows = [
        [slice(start, start + n) for n, start in zip(own, starts, strict=False)] for own in split
    ]

    def step(state: Any, _: Any) -> Any:
        for one in rows[fzero.axis_index()]:
            weight = one.stop - one.start
            state, _ = fzero.grad_and_reduce(squares, state, weight=weight)(x[one], y[one])
        found = fzero.gradients(state), fzero.global_norm(state)
        return fzero.apply_gradients(state), found

    run = fzero.simulate(fzero.shard(wrap(step), **options), world_size=len(split))
    state, found = run(run.init(PARAMS, fzero.optim.sgd(0.5)), torch.zeros(len(split)))
    return found, fzero.simulate(fzero.full_params, world_size=len(split))(state), state


WRAPS = {
    "as it is": lambda fn: fn,
    "in a window": fzero.coalesce,
    "with a loss scale": lambda fn: fzero.scale_loss(fn, scale=2.0**10),
    "checked": fzero.check_finite,
    "offloaded": lambda fn: fzero.offload(fn, optimizer="cpu"),
}


@given(st.data(), worlds, stages, seeds, st.sampled_from([*WRAPS]), st.booleans())
def test_any_split_gives_the_gradient_of_one_process_bit_for_bit(
    data: Any, ranks: int, stage: int, seed: int, wrap: str, donate: bool
) -> None:
    calls = data.draw(st.integers(1, 3))
    size = st.sampled_from([0, 1, 2, 4])
    own = st.lists(size, min_size=calls, max_size=calls)
    split = data.draw(
        st.lists(own, min_size=ranks, max_size=ranks).filter(lambda s: sum(map(sum, s)))
    )
    total = sum(map(sum, split))
    x, y = integers((total, 3), seed).float(), integers((total,), seed + 1).float()
    (gradients, norm), params, state = trained(split, x, y, WRAPS[wrap], stage=stage, donate=donate)
    want = mean_over_rows(x, y)
    for key, gradient in want.items():
        assert all(torch.equal(one, gradient) for one in gradients[key]), (split, key)
        assert torch.equal(params[key][0], PARAMS[key] - 0.5 * gradient)
    size_of_all = torch.cat([g.reshape(-1) for g in want.values()]).norm()
    torch.testing.assert_close(norm[0], size_of_all)
    assert state.step.tolist() == [1] * ranks


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("donate", [False, True])
def test_an_update_of_total_weight_0_changes_nothing_and_says_so(stage: int, donate: bool) -> None:
    def step(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(squares, state, weight=torch.tensor(0))(x, x[:, 0])
        return fzero.apply_gradients(state), None

    run = fzero.simulate(fzero.shard(step, stage=stage, donate=donate), world_size=2)
    state = run.init(PARAMS, fzero.optim.adamw(0.1, weight_decay=0.1))
    with pytest.warns(UserWarning, match="weights of all calls since the last update are 0"):
        state, _ = run(state, torch.full((2, 1, 3), NAN))
    assert state.step.tolist() == [0, 0] and state.optimizer.count.tolist() == [0, 0]
    after = fzero.simulate(fzero.full_params, world_size=2)(state)
    assert all(torch.equal(after[key][0], value) for key, value in PARAMS.items())
    assert state.progress == fzero.state.Progress() and not state.setup.reduction.weighted


def test_a_step_is_differentiable_in_its_weights_also_at_0() -> None:
    x = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]])

    def after(weights: Tensor) -> Tensor:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=0)
        for w, row in zip(weights, x, strict=True):
            state, _ = fzero.grad_and_reduce(squares, state, weight=w)(row[None], row[:1])
        return fzero.full_params(fzero.apply_gradients(state))["w"].sum()

    own = {k: v.detach().clone().requires_grad_() for k, v in PARAMS.items()}
    terms = [torch.autograd.grad(squares(own, row[None], row[:1]), own["w"])[0] for row in x]

    def plainly(weights: Tensor) -> Tensor:
        mean = sum(w * g for w, g in zip(weights, terms, strict=True)) / weights.sum()
        return (PARAMS["w"] - 0.1 * mean).sum()

    for weights in (torch.tensor([1.0, 3.0]), torch.tensor([2.0, 0.0])):
        want = torch.func.grad(plainly)(weights)
        torch.testing.assert_close(torch.func.grad(after)(weights), want)
        seen = weights.clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(after(seen), seen)[0], want)


def test_micro_batches_of_accumulate_and_a_bound_of_the_norm_count_by_weight() -> None:
    x, y = integers((6, 3), 1).float(), integers((6,), 2).float()
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])

    def masked(params: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        errors = (x @ params["w"] + params["b"] * params["frozen"] - y) ** 2
        return (errors * mask).sum() / mask.sum()

    def step(state: Any, x: Tensor, y: Tensor, mask: Tensor) -> Any:
        grad = fzero.grad_and_reduce(masked, state, weight=mask.sum())
        state, _ = grad(x, y, mask)
        return fzero.apply_gradients(state), torch.zeros(())

    accumulated = fzero.accumulate(fzero.clip(step, max_norm=0.25), micro_batches=3)
    run = fzero.shard(accumulated, stage=0)
    state, _ = run(run.init(PARAMS, fzero.optim.sgd(1.0)), x, y, mask)
    want = mean_over_rows(x[:3], y[:3])
    norm = torch.cat([g.reshape(-1) for g in want.values()]).norm()
    for key, gradient in want.items():
        clipped = PARAMS[key] - gradient * 0.25 / norm
        torch.testing.assert_close(fzero.full_params(state)[key], clipped)


def test_weights_multiply_in_fp32_where_parameters_have_16_bits() -> None:
    params = {"w": torch.tensor([1.0], dtype=torch.bfloat16)}
    state = fzero.init(params, fzero.optim.sgd(1.0), stage=0)
    for weight, slope in ((257, 1.0), (1, 3.0)):
        loss = lambda p, s=slope: (p["w"] * s).sum()  # noqa: E731
        state, _ = fzero.grad_and_reduce(loss, state, weight=weight)()
    # 257 and 260 are no numbers of bf16.
    assert torch.equal(fzero.gradients(state)["w"], torch.tensor([260.0]) / 258)


@pytest.mark.parametrize(
    "weight", [-1, NAN, float("inf"), True, "3", torch.ones(2), torch.tensor(True)]
)
def test_what_is_no_weight_is_refused(weight: Any) -> None:
    state = fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=0)
    with pytest.raises(LayoutError, match=r"grad_and_reduce: weight=[\s\S]*a finite number"):
        fzero.grad_and_reduce(squares, state, weight=weight)


BAD = {
    "opposite": [[1.0], [-1.0]],  # their sum is 0
    "negative": [[3.0, -1.0], [4.0, 1.0]],
    "nan": [[1.0], [NAN]],
    "inf": [[0.0], [float("inf")]],
    "-inf": [[float("-inf"), 1.0], [2.0, 2.0]],
    "cancelled": [[2.0, -2.0], [1.0, 1.0]],
}


@covered(
    name=[*BAD],
    stage=[0, 1, 2, 3],
    wrap=["as it is", "in a window", "with a loss scale"],
    donate=[False, True],
)
def test_tensors_that_are_no_weights_raise_in_the_update_on_every_rank(
    name: str, stage: int, wrap: str, donate: bool
) -> None:
    def step(state: Any, x: Tensor, bad: Any) -> Any:
        for weight in BAD[name][fzero.axis_index()]:
            given = torch.tensor(weight if bad else abs(weight) if weight == weight else 1.0)
            given = given.clamp(max=2.0) if not bad else given
            state, _ = fzero.grad_and_reduce(squares, state, weight=given)(x, x[:, 0])
        return fzero.apply_gradients(state), None

    def body(x: Tensor) -> Any:
        run = fzero.shard(WRAPS[wrap](step), stage=stage, donate=donate)
        state = run.init(PARAMS, fzero.optim.adamw(0.5))
        with pytest.raises(LayoutError, match=r"negative, infinite or NaN.*[\s\S]*multiplies the"):
            run(state, x, True)
        fresh = run.init(PARAMS, fzero.optim.adamw(0.5))
        pairs = [fzero.full_params(run(one, x, False)[0]) for one in (state, fresh)]
        return [torch.equal(pairs[0][key], pairs[1][key]) for key in PARAMS]

    found = fzero.simulate(body, world_size=2)(integers((2, 2, 3), 1).float())
    assert all(bool(one.all()) for one in found)


def test_they_raise_under_transforms_and_are_seen_in_a_trace() -> None:
    x = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]])

    def after(weights: Tensor) -> Tensor:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=0)
        for w, row in zip(weights, x, strict=True):
            state, _ = fzero.grad_and_reduce(squares, state, weight=w)(row[None], row[:1])
        return fzero.full_params(fzero.apply_gradients(state))["w"].sum()

    good, bad = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    for fn, some in (
        (after, bad),
        (torch.func.grad(after), bad),
        (torch.func.vmap(after), torch.stack([good, bad])),
        (lambda w: torch.autograd.grad(after(w), w), bad.clone().requires_grad_()),
    ):
        with pytest.raises(LayoutError, match="negative, infinite or NaN"):
            fn(some)
    graph = make_fx(after)(good)
    torch.testing.assert_close(graph(good), after(good))
    assert graph(bad).isnan()


def test_a_mean_of_weights_that_are_none_is_nan_until_the_update_says_so() -> None:
    state = fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=0)
    x = torch.ones(1, 3)
    state, _ = fzero.grad_and_reduce(squares, state, weight=torch.tensor(-2.0))(x, x[:, 0])
    assert fzero.gradients(state)["w"].isnan().all() and fzero.global_norm(state).isnan()


def test_calls_with_and_without_a_weight_do_not_mix() -> None:
    x, y = torch.ones(1, 3), torch.ones(1)
    state = fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=2)
    plain, _ = fzero.grad_and_reduce(squares, state)(x, y)
    weighted, _ = fzero.grad_and_reduce(squares, state, weight=2)(x, y)
    with pytest.raises(PhaseError, match="a weight, and the state holds gradients of 1 calls"):
        fzero.grad_and_reduce(squares, plain, weight=2)(x, y)
    with pytest.raises(PhaseError, match="no weight, and the state holds"):
        fzero.grad_and_reduce(squares, weighted)(x, y)
    with pytest.raises(PhaseError, match="add_gradients: no weight"):
        fzero.add_gradients(weighted, {**PARAMS, "frozen": None})
    after = fzero.apply_gradients(weighted)
    fzero.apply_gradients(fzero.grad_and_reduce(squares, after)(x, y)[0])


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_which_some_give_no_weight_all_raise(stage: int, waits: bool) -> None:
    def step(state: Any, x: Tensor) -> Any:
        weight = 2.0 if fzero.axis_index() else None
        state, _ = fzero.grad_and_reduce(squares, state, weight=weight)(x, x[:, 0])
        return fzero.apply_gradients(state), None

    run = fzero.simulate(
        fzero.shard(fzero.coalesce(step) if waits else step, stage=stage), world_size=2
    )
    state = run.init(PARAMS, fzero.optim.sgd(0.1))
    with pytest.raises(MismatchError, match="weight"):
        run(state, torch.ones(2, 1, 3))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reduce_op": "sum"}, "reduce_op"),
        ({"codec": fzero.codecs.cast(torch.float16)}, "fp16"),
        ({"codec": fzero.codecs.int8()}, "int8"),
    ],
)
def test_options_that_do_not_go_with_weights_are_refused(
    options: dict[str, Any], named: str
) -> None:
    options = {**options}

    def step(state: Any, x: Tensor) -> Any:
        return fzero.grad_and_reduce(squares, state, weight=1)(x, x[:, 0])

    encoded = fzero.compress(step, gradients=options.pop("codec", None))
    run = fzero.simulate(fzero.shard(encoded, stage=2, **options), world_size=2)
    with pytest.raises(LayoutError, match=f"a weight beside .*{named}"):
        run(run.init(PARAMS, fzero.optim.sgd(0.1)), torch.ones(2, 1, 3))


def test_a_large_weight_makes_no_loss_and_no_gradient_of_16_bits_infinite_for_a_check() -> None:
    params = {"w": torch.tensor([3.0], dtype=torch.float16)}

    def step(state: Any) -> Any:
        grad = fzero.grad_and_reduce(lambda p: (p["w"] * 4).sum(), state, weight=2.0**17)
        return fzero.apply_gradients(grad()[0]), None

    run = fzero.shard(fzero.check_finite(step), stage=0)
    state, _ = run(run.init(params, fzero.optim.sgd(0.5)))
    assert fzero.full_params(state)["w"].tolist() == [1.0]
