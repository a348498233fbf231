"""What is reduced is the mean over ranks of what each rank's loss says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.behaviours.networks import (
    Place,
    at_every_place,
    gradient_on,
    total,
)

X = torch.tensor([12.0, 24.0, 60.0], dtype=torch.float64)
RANKS = len(X)
PARAMS = {"w": torch.arange(4.0, dtype=torch.float64), "b": torch.ones((), dtype=torch.float64)}


def loss(params: Any, x: Tensor) -> Tensor:
    return x * (params["w"] ** 2).sum() / 2 + x * params["b"]


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


@pytest.mark.parametrize("ordered", [False, True])
@at_every_place
@pytest.mark.parametrize("name", SAME)
def test_sums_means_and_scales_agree_at_every_stage(name: str, place: Place, ordered: bool) -> None:
    fn, factor = SAME[name]
    got = gradient_on(fn, PARAMS, X, ranks=RANKS, ordered=ordered, **place)
    for leaf, want in WANT.items():
        assert all(torch.equal(row / factor, want) for row in got[leaf]), leaf


@at_every_place
def test_contrastive_losses_differentiate_through_the_gather(place: Place) -> None:
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

    got = gradient_on(contrast, PARAMS, x, ranks=RANKS, **place)["w"]
    want = torch.func.grad(whole)(PARAMS)["w"]
    torch.testing.assert_close(got, want.expand(RANKS, -1))
