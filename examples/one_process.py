"""What the examples of axes are checked against: the same loss of one process, in float64."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fzero

TOLERANCE = 1e-11
Params = dict[str, Tensor]
Loss = Callable[..., Tensor]  # (params, *tensors) -> scalar


def times(loss: Loss, v: Params) -> Loss:
    """Return the loss of which the gradient is H v, H the Hessian of `loss`: grad(loss) . v."""

    def along_v(p: Any, *batch: Tensor) -> Tensor:
        gradient = torch.func.grad(loss)(p, *batch)
        return torch.stack([(gradient[name] * v[name]).sum() for name in v]).sum()

    return along_v


def results(loss: Loss, v: Params) -> Any:
    """Return the step that gives the mean loss, its gradient and H v, each whole."""

    def step_fn(state: Any, *batch: Tensor) -> Any:
        found, value = fzero.grad_and_reduce(loss, state)(*batch)
        curved, _ = fzero.grad_and_reduce(times(loss, v), state)(*batch)
        return state, [fzero.pmean(value), *map(fzero.full_gradients, (found, curved))]

    return step_fn


def exact(plain: Loss, params: Params, v: Params, whole: Sequence[Tensor]) -> list[Any]:
    """Return the same of one process."""
    grads = [torch.func.grad(fn)(params, *whole) for fn in (plain, times(plain, v))]
    return [plain(params, *whole), *grads]


def compare(
    loss: Loss,
    plain: Loss,
    params: Params,
    whole: Sequence[Tensor],
    *,
    axis: str,
    piece: Callable[[Tensor, int, int], Tensor],
) -> None:
    """Compare `loss` on the ranks of the program, each with its piece, to `plain` of the whole."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    stage, ranks = parser.parse_args().stage, fzero.world()
    v = {name: torch.randn_like(x) for name, x in params.items()}
    step = fzero.shard(results(loss, v), stage=stage, mesh={axis: ranks.size})
    state = step.init(params, fzero.optim.sgd(0.1))
    _, found = step(state, *(piece(x, ranks.rank, ranks.size) for x in whole))
    value, *wanted = exact(plain, params, v, whole)
    worst = max(
        abs(float(found[0] - value)),
        *(
            float((got[name] - x).abs().max())
            for got, want in zip(found[1:], wanted, strict=True)
            for name, x in want.items()
        ),
    )
    if ranks.rank == 0:
        print(f"along {axis!r}, on {ranks.size} rank(s) at stage {stage}")
        print(f"check: value, gradient and H v equal those of one process to {worst:.1e}")
    if worst > TOLERANCE:
        raise SystemExit("not the same")
