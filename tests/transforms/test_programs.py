"""Any transforms in any order around a step: the training of plain torch on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from tests.oracle import train
from tests.strategies import integers, on_rank, same, seeds, stages, tensors, trees, worlds
from tests.transforms.steps import mean_loss, one_backward, run, sgd, torch_sgd

Wrap = Callable[[Any], Any]
WRAPS: dict[str, Wrap] = {
    "coalesce": fzero.coalesce,
    "one part": fzero.accumulate(steps=1),
    "two parts": fzero.accumulate(steps=2),
    "two parts of each": fzero.accumulate(steps=2),
    "no bound": fzero.clip(max_norm=None),
    "an infinite bound": fzero.clip(max_norm=float("inf")),
    "check": fzero.check_finite,
}
options = st.fixed_dictionaries(
    {"stage": stages, "donate": st.booleans(), "bucket_bytes": st.sampled_from([1, 64, 300, 2**20])}
)
orders = st.lists(st.sampled_from([*WRAPS]), unique=True)


@settings(max_examples=settings().max_examples * 3)
@given(
    tree=trees((torch.float64,), learning=True),
    ranks=worlds,
    inner=orders,
    power=st.none() | st.integers(-20, 40),
    max_norm=st.sampled_from([None, None, 0.5, 20.0, 1e9]),
    outer=orders,
    options=options,
    seed=seeds,
)
def test_a_training_is_that_of_torch(
    tree: Any,
    ranks: int,
    inner: list[str],
    power: int | None,
    max_norm: float | None,
    outer: list[str],
    options: Any,
    seed: int,
) -> None:
    """Bit for bit where no bound divides; what is around the step leaves no trace in the state."""
    wraps = [WRAPS[name] for name in inner]
    wraps += [] if power is None else [fzero.scale_loss(scale=2.0**power)]
    wraps += [] if max_norm is None else [fzero.clip(max_norm=max_norm)]
    wraps += [WRAPS[name] for name in outer if name not in inner]

    def wrap(fn: Any) -> Any:
        for one in wraps:
            fn = one(fn)
        return fn

    xs = integers((2, ranks, 4), seed, bound=1)  # 4 examples: means of 1, 2 or 4 are exact
    got, state, losses = run(wrap, one_backward, tree, xs, ranks, **options)
    want = train(mean_loss, tree, [list(x) for x in xs], torch_sgd, max_norm)
    rounds = max_norm in (0.5, 20.0)
    for rank in range(ranks):
        for a, b in zip(tensors(on_rank(got, rank)), tensors(want), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-12 * rounds, atol=1e-12 * rounds)
    plain = fzero.init(tree, sgd(), stage=options["stage"])
    assert state.step.tolist() == [2] * ranks
    assert state.setup.policy == plain.setup.policy
    assert (state.scale is None) == (power in (None, 0))
    if not rounds:
        _, _, alone = run(lambda fn: fn, one_backward, tree, xs, ranks, **options)
        same(losses, alone)
