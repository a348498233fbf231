"""Behaviours 22 and 25: what is reduced is a mean, and all ranks must do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.behaviours.networks import PLACES, STAGES, total, virtual

X = torch.tensor([12.0, 24.0, 60.0], dtype=torch.float64)
RANKS = len(X)
PARAMS = {"w": torch.arange(4.0, dtype=torch.float64), "b": torch.ones((), dtype=torch.float64)}


def loss(params: Any, x: Tensor) -> Tensor:
    return x * (params["w"] ** 2).sum() / 2 + x * params["b"]


def gradient(fn: Callable[..., Tensor], *, stage: int, reshard: Any, **options: Any) -> Any:
    def run(x: Tensor) -> Any:
        state = fzero.init(
            PARAMS, fzero.optim.sgd(1.0), stage=stage, reshard_after_forward=reshard, **options
        )
        state, value = fzero.grad_and_reduce(fn, state)(x)
        return fzero.gradients(state), value

    return virtual(run, RANKS, X)


WANT = {"w": X.mean() * PARAMS["w"], "b": X.mean()}
SAME: dict[str, tuple[Callable[..., Tensor], float]] = {
    "the loss itself": (loss, 1.0),
    "a sum over ranks is W times the mean": (lambda p, x: RANKS * loss(p, x), RANKS),
    "scaled before, divided after": (lambda p, x: 2.0**10 * loss(p, x), 2.0**10),
    "the mean over ranks of the loss, inside it": (lambda p, x: fzero.pmean(loss(p, x)), 1.0),
    "the sum over ranks of the loss, inside it": (lambda p, x: fzero.psum(loss(p, x)), RANKS),
    "global data, gathered inside": (
        lambda p, x: loss(p, fzero.all_gather(x.reshape(1)).mean()),
        1.0,
    ),
    "a part of the data, scattered inside": (
        lambda p, x: loss(p, fzero.reduce_scatter(x.expand(RANKS))[0] / RANKS),
        1.0,
    ),
}


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
@pytest.mark.parametrize("name", SAME)
def test_25_sums_means_and_scales_agree_at_every_stage(name: str, stage: int, reshard: Any) -> None:
    fn, factor = SAME[name]
    for ordered in (False, True):
        got, _ = gradient(fn, stage=stage, reshard=reshard, ordered=ordered)
        for leaf, want in WANT.items():
            assert all(torch.equal(row / factor, want) for row in got[leaf]), leaf


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
def test_25_the_value_is_this_ranks_own(stage: int, reshard: Any) -> None:
    _, value = gradient(loss, stage=stage, reshard=reshard)
    assert torch.equal(value, X * (14 / 2 + 1))


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
def test_25_contrastive_losses_differentiate_through_the_gather(stage: int, reshard: Any) -> None:
    """The objective is the mean over ranks of losses that see every rank's embeddings."""
    x = torch.randn(RANKS, 2, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def contrast(params: Any, x: Tensor) -> Tensor:
        mine = torch.tanh(x * params["w"])
        everyone = fzero.all_gather(mine)
        first = 2 * fzero.axis_index()
        return -(mine @ everyone.T).log_softmax(-1)[:, first : first + 2].sum()

    def whole(params: Any) -> Tensor:
        each = torch.tanh(x * params["w"])
        logits = torch.einsum("rid,sjd->risj", each, each).flatten(2).log_softmax(-1)
        own = logits.unflatten(2, (RANKS, 2))
        return -total(own[r, :, r].sum() for r in range(RANKS)) / RANKS

    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(1.0), stage=stage, reshard_after_forward=reshard)
        return fzero.gradients(fzero.grad_and_reduce(contrast, state)(x)[0])["w"]

    got, want = virtual(run, RANKS, x), torch.func.grad(whole)(PARAMS)["w"]
    torch.testing.assert_close(got, want.expand(RANKS, -1))


def test_22_ranks_that_call_other_collectives_are_named() -> None:
    def differs(x: Tensor) -> Tensor:
        return fzero.psum(x) if fzero.axis_index() else fzero.all_gather(x.reshape(1))

    with pytest.raises(fzero.AxisError) as caught:
        virtual(differs, RANKS, X)
    for part in ("rank 0: all_gather", "rank 1: all_reduce", "rank 2: all_reduce", "Fix:"):
        assert part in str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_22_a_rank_that_makes_one_pass_less_is_named(stage: int) -> None:
    def uneven(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(1.0), stage=stage)
        for _ in range(2 if fzero.axis_index() else 1):
            state, _ = fzero.grad_and_reduce(loss, state)(x)
        return fzero.gradients(state)

    with pytest.raises(fzero.AxisError, match="rank 0 gradients, rank 1 grad_and_reduce"):
        virtual(uneven, RANKS, X)


@pytest.mark.parametrize("stage", STAGES)
def test_22_ranks_that_disagree_about_the_layout_are_named_at_init(stage: int) -> None:
    def shape_differs() -> Any:
        width = 4 + (fzero.axis_index() == 2)
        tree = {"same": torch.ones(2), "layers": [{"w": torch.ones(width)}]}
        return fzero.init(tree, fzero.optim.sgd(1.0), stage=stage)

    with pytest.raises(fzero.AxisError) as caught:
        virtual(shape_differs, RANKS)
    for part in ("rank 0 has layers.0.w (4,)", "rank 2 has layers.0.w (5,)", "Fix:"):
        assert part in str(caught.value)


DISAGREE: dict[str, Callable[[bool], Any]] = {
    "names": lambda odd: {"params": {"u" if odd else "w": torch.ones(3)}},
    "an extra leaf": lambda odd: {"params": [torch.ones(3)] * (1 + odd) + [torch.ones(1)] * odd},
    "dtypes": lambda odd: {"params": {"w": torch.ones(3, dtype=torch.float64 if odd else None)}},
    "frozen leaves": lambda odd: {"trainable": lambda path: odd},
    "buckets": lambda odd: {
        "params": [torch.ones(3), torch.ones(2)],
        "bucket_bytes": 8 if odd else 1024,
    },
    "order": lambda odd: {"ordered": odd},
    "stage": lambda odd: {"stage": 2 if odd else 1},
}


@pytest.mark.parametrize("what", DISAGREE)
def test_22_ranks_that_disagree_about_anything_stop_at_init(what: str) -> None:
    def init() -> Any:
        options = {"params": {"w": torch.ones(3)}, "stage": 2}
        options |= DISAGREE[what](fzero.axis_index() == 1)
        return fzero.init(optimizer=fzero.optim.sgd(1.0), **options)

    with pytest.raises(fzero.AxisError, match="disagree"):
        virtual(init, RANKS)
