"""Faults in clipping, in the optimizer, and in what a step makes of the state afterwards."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero.optim import Optimizer
from tests.tools.diff.fault import Fault, on_rank
from tests.tools.diff.runs import FIRST, loss, patched, updated

norm = sys.modules["fzero.transforms.norm"]
prepare = sys.modules["fzero.transforms.prepare"]


# Clipping.


def clipped(body: Any = updated) -> Any:
    return fzero.clip(body, max_norm=0.01)


def stays_on_the_rank(totals: list[Tensor], axis: Any, **options: Any) -> list[Tensor]:
    return totals


def no_factor_on_rank_1(norm: Tensor, max_norm: float) -> Any:
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return on_rank(1, torch.ones_like(factor), factor)


# The optimizer.


def advancing(change: Callable[..., Any], body: Any = updated) -> Any:
    """The step with an optimizer that changes (params, grads, state), or the result of it."""
    real = Optimizer.advance

    def advance(self: Any, params: Any, grads: Any, state: Any, pieces: Any, **options: Any) -> Any:
        def go_on(params: Any = params, grads: Any = grads, state: Any = state) -> Any:
            return real(self, params, grads, state, pieces, **options)

        return change(go_on, params, grads, state)

    return patched(Optimizer, "advance", advance, body)


def skips_on_rank_1(go_on: Any, params: Any, grads: Any, state: Any) -> Any:
    return on_rank(1, lambda: ([p.clone() for p in params], state), go_on)()


def keeps_masters(go_on: Any, params: Any, grads: Any, state: Any) -> Any:
    new, after = go_on()
    return new, dataclasses.replace(after, masters=tuple(m.clone() for m in state.masters))


def counts_twice(go_on: Any, params: Any, grads: Any, state: Any) -> Any:
    return go_on(state=dataclasses.replace(state, count=state.count + 1))


def forgets_moments(go_on: Any, params: Any, grads: Any, state: Any) -> Any:
    new, after = go_on()
    return new, dataclasses.replace(after, moments=state.moments)


def drifts_on_rank_1(go_on: Any, params: Any, grads: Any, state: Any) -> Any:
    new, after = go_on()
    return on_rank(1, [p * (1 + 2.0**-51) for p in new], new), after


# What a step returns.


def returns_old_parameters(state: Any, batch: Any) -> Any:
    return updated(state, batch)[0].replace(params=state.params), None


def returns_an_old_optimizer_state(state: Any, batch: Any) -> Any:
    return updated(state, batch)[0].replace(optimizer=state.optimizer), None


def returns_an_old_count(state: Any, batch: Any) -> Any:
    return updated(state, batch)[0].replace(step=state.step), None


def updates_twice(state: Any, batch: Any) -> Any:
    state, _ = updated(state, batch)
    return updated(state, [0 * x for x in batch], lambda p, x: 0 * loss(p, x))


def never_updates(state: Any, batch: Any) -> Any:
    for one in zip(*batch, strict=True):
        state, _ = fzero.grad_and_reduce(loss, state)(one)
    return state, None


def with_optimizer(right: Any, wrong: Any) -> dict[str, Any]:
    return {"both": {"optimizer": right}, "options": {"optimizer": wrong}}


adamw, sgd = fzero.optim.adamw, fzero.optim.sgd
HALF: dict[str, Any] = {"both": {"dtype": torch.bfloat16}}

FAULTS = {
    # clipping
    "the norm of one shard": Fault(
        good=clipped(),
        body=clipped(patched(norm, "reduce_many", stays_on_the_rank)),
        named="norm",
        ranks=(0, 1, 2),
        at=(2, 3),
    ),
    "no clipping": Fault(good=clipped(), named="clip", path=FIRST, at=(3, 2)),
    "no clipping on rank 1": Fault(
        good=clipped(),
        body=clipped(patched(prepare, "clip_factor", no_factor_on_rank_1)),
        named="clip",
        path=FIRST,
        ranks=(1,),
        at=(0, 2),
    ),
    # the optimizer
    "a doubled learning rate": Fault(
        named="update", path=FIRST, **with_optimizer(adamw(0.01), adamw(0.02))
    ),
    "a schedule one step late": Fault(
        body=lambda: updated,
        named="update",
        step=2,
        at=(3, 2),
        **with_optimizer(adamw(lambda n: 0.01 / (1 + n)), adamw(lambda n: 0.01 / max(n, 1))),
    ),
    "swapped betas": Fault(
        named="optimizer state exp_avg",
        path=FIRST,
        **with_optimizer(adamw(0.01), adamw(0.01, betas=(0.999, 0.9))),
    ),
    "another eps": Fault(
        named="update",
        path=FIRST,
        at=(3, 2),
        **with_optimizer(adamw(0.01), adamw(0.01, eps=1.01e-8)),
    ),
    "weight decay on an unused parameter": Fault(
        named="update",
        path="unused",
        at=(3, 2),
        **with_optimizer(adamw(0.01, decay_mask=lambda leaf: leaf.path != "unused"), adamw(0.01)),
    ),
    "another momentum": Fault(
        body=lambda: updated,
        named="optimizer state momentum_buffer",
        step=2,
        **with_optimizer(sgd(0.1, momentum=0.9), sgd(0.1, momentum=0.8)),
    ),
    "no update on rank 1": Fault(
        body=advancing(skips_on_rank_1),
        named="optimizer state exp_avg",
        ranks=(1,),
        path=FIRST,
        at=(2, 3),
    ),
    "no update on rank 1, by SGD": Fault(
        body=advancing(skips_on_rank_1),
        named="update",
        ranks=(1,),
        at=(0, 2),
        both={"optimizer": sgd(0.1)},
    ),
    "moments that stay": Fault(
        body=advancing(forgets_moments), named="optimizer state exp_avg", at=(3, 2)
    ),
    "a count that is one ahead": Fault(body=advancing(counts_twice), named="update", at=(1, 2)),
    "masters that stay": Fault(
        body=advancing(keeps_masters), named="optimizer state masters", at=(3, 2), **HALF
    ),
    "a replica that drifts": Fault(
        body=advancing(drifts_on_rank_1), named="replica update", ranks=(1,), at=(0, 3)
    ),
    # what is returned
    "old parameters": Fault(body=returns_old_parameters, named="state", path=FIRST, at=(3, 2)),
    "an old optimizer state": Fault(
        body=returns_an_old_optimizer_state, named="state exp_avg", path=FIRST, at=(2, 3)
    ),
    "an old count": Fault(body=returns_an_old_count, named="state updates", path="", at=(0, 2)),
    "two updates": Fault(body=updates_twice, named="update", path="", ranks=(0, 1)),
    "no update": Fault(body=never_updates, named="update", path="", ranks=(0, 1)),
}
