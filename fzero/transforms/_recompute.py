"""The forward and the backward of `remat` by ordinary autograd, which the function may use itself.

A function that calls torch.autograd.grad(..., create_graph=True) needs a graph of its own: in the
forward one that goes when the call is over, in the backward the one of the recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd

from fzero.collectives import run_of, without_hooks


class _Same(torch.autograd.Function):
    """y = x, on the same memory, and no view of x for autograd: a function may write to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        return dys[0]


def own(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Detach values, and make those that required grad leaves of a new graph."""
    return [_Same.apply(_leaf(x)) if x.requires_grad else x for x in tensors]


@contextmanager
def recording() -> Iterator[None]:
    """Record a graph that goes with the call: no larger than the one that backward makes.

    Hooks that move what is kept for backward, to host memory for one, are not to see it.
    """
    with without_hooks(), torch.enable_grad():
        yield


def recomputed_gradients(ctx: Any, dys: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients by the saved tensors of a call that is run again.

    They can be differentiated again where the backward itself is recorded (create_graph).
    """
    tensors, graph = ctx.saved_tensors, torch.is_grad_enabled()
    given = list(tensors)
    sources: dict[int, Any] = {}
    with torch.enable_grad():
        for i, x in enumerate(tensors):
            if x.requires_grad:
                sources[i] = _Same.apply(x) if graph else _leaf(x)
                given[i] = _Same.apply(sources[i])
        anchor = torch.zeros(0, requires_grad=True)
        with run_of(ctx.call.block, anchor) as run:
            ys = ctx.call.again(*given)
    roots = [(y, dy) for y, dy in zip(ys, dys, strict=False) if y.requires_grad and dy is not None]
    tokens = (run.tokens or {}).values()
    roots += [(token, torch.zeros(0)) for token in tokens if token.requires_grad]
    asked = {i: x for i, x in sources.items() if ctx.needs_input_grad[i + 1]}
    if not (roots and asked):
        return [None] * len(tensors)
    outputs, by = [list(one) for one in zip(*roots, strict=True)]
    keep = graph or _autograd._get_current_graph_task_keep_graph()
    options: Any = {"create_graph": graph, "retain_graph": keep, "allow_unused": True}
    found = torch.autograd.grad(outputs, [*asked.values(), anchor], by, **options)
    of = dict(zip(asked, found, strict=False))
    return [of.get(i) for i in range(len(tensors))]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()
