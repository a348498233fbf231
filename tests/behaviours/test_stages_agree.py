"""Sums that round are the same bits at every stage, for every dtype and bucket.

That updates are those of the unsharded step is in test_interleavings.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.behaviours.networks import Gpt, next_token_loss, tokens, virtual


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [(2, torch.float32), (3, torch.float32), (4, torch.float32)]
    + [(3, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)],
)
def test_neither_stages_nor_buckets_change_a_bit_of_a_gradient(
    ranks: int, dtype: torch.dtype, coalesced: bool
) -> None:
    """On virtual ranks, which add in rank order; 16 bits are added up in fp32.

    (On gloo the default sum is its own; there `ordered=True` gives this.) The update is torch's
    kernel, whose last bit depends on where in a vector register a number lies.
    """
    apply, params = fzero.functionalize(Gpt(depth=2))
    params = {name: p.to(dtype) for name, p in params.items()}
    loss, batch = next_token_loss(apply), tokens(ranks)

    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(loss, state)(batch)
        return fzero.apply_gradients(state), fzero.gradients(state)

    def run(batch: Tensor, stage: int, bucket_bytes: int, units: Any) -> Any:
        state = fzero.init(
            params, fzero.optim.sgd(0.5), stage=stage, bucket_bytes=bucket_bytes, units=units
        )
        state, gradients = (fzero.coalesce(step) if coalesced else step)(state, batch)
        return gradients, fzero.full_params(state)

    gradients, after = virtual(run, ranks, batch, 0, 2**20, apply.units)
    worlds = [(stage, size, str) for stage in (0, 1, 2) for size in (1, 2**10, 2**20)]
    worlds += [(3, 1, units) for units in (apply.units, str, lambda path: "all")]
    for stage, size, units in worlds:
        got = virtual(run, ranks, batch, stage, size, units)
        for name in params:
            held = torch.promote_types(dtype, torch.float32)
            assert got[0][name].dtype == held and got[1][name].dtype == dtype
            assert torch.equal(got[0][name], gradients[name]), (stage, size, name)
            torch.testing.assert_close(got[1][name], after[name])
