"""What `grad_cache.py` claims, measured: its gradient is exact, its reductions are few."""

from __future__ import annotations

from typing import Any

import optree
import torch

import fzero
from pairs import Pairs, my_chunks

VIRTUAL_RANKS = 4  # that collectives are counted on when there is one process


def gradient_error(grad_cache: Any, whole_loss: Any, params: Any, batch: Pairs, args: Any) -> float:
    """Return max |g - g*| / max |g*|: g cached and sharded, g* plain torch on the whole batch.

    `whole_loss(params)` is the loss of `batch` on one process, without chunks or ranks. In float64.
    """
    params = {path: value.double() for path, value in params.items()}
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=args.stage)
    state, _ = fzero.coalesce(grad_cache)(state, my_chunks(batch, args.chunks))
    found, exact = fzero.gradients(state), torch.func.grad(whole_loss)(params)
    worst = max((found[path] - exact[path]).abs().max().item() for path in exact)
    return worst / max(g.abs().max().item() for g in exact.values())


def count(grad_cache: Any, step_fn: Any, params: Any, batch: Pairs, args: Any) -> str:
    """Return, in words, what one rank sends in one step; alone, on virtual ranks.

    The short rounds in which ranks agree on what comes next are left out.

    `step_fn` is `grad_cache` and an update, which uses the state's own counters up.
    """

    def one_step() -> Any:
        state = fzero.init(params, fzero.optim.adamw(0.01), stage=args.stage)
        chunks = my_chunks(batch, args.chunks)
        reductions = grad_cache(state, chunks)[0].progress.reductions
        with fzero.count_collectives() as log:
            step_fn(state, chunks)
        ops = {op: number for op, number in log.counts().items() if op != "agree"}
        return reductions, log.wire_bytes(ops=tuple(ops)), ops

    alone = fzero.world().size == 1
    seen: Any = fzero.simulate(one_step, world_size=VIRTUAL_RANKS)() if alone else one_step()
    reductions, sent, ops = optree.tree_map(lambda n: int(n[0]) if alone else n, seen)
    listed = ", ".join(f"{number} {op}" for op, number in sorted(ops.items()))
    return f"gradient reduced {reductions} x, {sent:,} bytes ({listed})"
