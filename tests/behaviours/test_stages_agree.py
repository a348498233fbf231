"""Law 3: for every stage and world size the update is that of the unsharded step, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.behaviours.exact import (
    WORLDS,
    exact_data,
    exact_loss,
    exact_optimizer,
    exact_params,
    smooth,
    train,
    train_unsharded,
    updates,
)
from tests.behaviours.models import RANKS
from tests.behaviours.networks import virtual


def run_virtually(body: Any, ranks: int) -> list[Any]:
    """Samples split over the ranks; what each rank has at the end, by leaf."""
    x, y = exact_data()
    rows = [torch.stack(t.chunk(ranks, dim=2)) for t in (x, y)]
    return torch.utils._pytree.tree_leaves(virtual(body, ranks, *rows))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_exact_training_gives_the_same_bits_everywhere(ranks: int, donate: bool) -> None:
    before = exact_params()
    after = train_unsharded(
        exact_loss, before, lambda p: torch.optim.SGD(p, 2.0**-8, momentum=0.5), *exact_data()
    )
    want = updates(before, after)
    assert sum(bool(u.any()) for u in want) == 5  # two weights, the bias twice, the scale
    for world in WORLDS:

        def body(x: Tensor, y: Tensor, world: Any = world) -> Any:
            return train(exact_loss, before, exact_optimizer(), x, y, world, donate=donate)

        found = run_virtually(body, ranks)
        for row in range(ranks):
            got = updates(before, [leaf[row] for leaf in found])
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), (world, row)


@pytest.mark.parametrize("ranks", RANKS)
def test_adamw_agrees_within_rounding(ranks: int) -> None:
    loss, before = smooth()
    after = train_unsharded(
        loss, before, lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1), *exact_data()
    )
    want = updates(before, after)
    optimizer = fzero.optim.adamw(1e-2, weight_decay=0.1)
    for world in WORLDS:

        def body(x: Tensor, y: Tensor, world: Any = world) -> Any:
            return train(loss, before, optimizer, x, y, world)

        found = run_virtually(body, ranks)
        for row in range(ranks):
            got = updates(before, [leaf[row] for leaf in found])
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-13, msg=str(world))
