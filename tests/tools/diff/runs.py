"""Small runs to compare: a model of every kind of parameter, its step, its data over any ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fzero
from tests.transforms.wired import encoding

IN, HIDDEN, OUT, EXAMPLES = 4, 5, 3, 12
FIRST, BIAS, SECOND = "first.weight", "first.bias", "second.weight"
Body = Callable[[Any, Any], Any]


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Two layers, a scalar between them, a frozen vector, and a parameter that nothing uses."""
    source = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(dtype)

    return {
        "first": {"weight": made(HIDDEN, IN), "bias": made(HIDDEN)},
        "scale": made(),
        "second": {"weight": made(OUT, HIDDEN), "bias": made(OUT)},
        "fixed": nn.Parameter(made(OUT), requires_grad=False),
        "unused": made(2),
    }


def output(p: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ p["first"]["weight"].t() + p["first"]["bias"])
    return p["scale"] * hidden @ p["second"]["weight"].t() + p["second"]["bias"] + p["fixed"]


def loss(p: Any, batch: Any) -> Tensor:
    x, y = batch
    return (output(p, x) - y).square().mean()


def updated(state: Any, batch: Any, loss_fn: Any = loss) -> Any:
    """A gradient of each micro-batch, [N, ...], and an update."""
    for micro_batch in zip(*batch, strict=True):
        state, _ = fzero.grad_and_reduce(loss_fn, state)(micro_batch)
    return fzero.apply_gradients(state), None


def step_with(loss_fn: Any) -> Body:
    return lambda state, batch: updated(state, batch, loss_fn)


def batches(
    world_size: int, calls: int = 1, micro_batches: int = 2, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """The same examples for any number of ranks: [W, N, EXAMPLES / W, ...]."""
    source = torch.Generator().manual_seed(1)

    def made(width: int) -> Tensor:
        x = torch.randn(micro_batches, EXAMPLES, width, generator=source).to(dtype)
        by_rank = x.view(micro_batches, world_size, EXAMPLES // world_size, width)
        return by_rank.transpose(0, 1).contiguous()

    return [(made(IN), made(OUT)) for _ in range(calls)]


def run(
    body: Body = updated,
    stage: int = 0,
    world_size: int = 1,
    *,
    calls: int = 1,
    optimizer: Any = None,
    dtype: torch.dtype = torch.float32,
    micro_batches: int = 2,
    params: Any = None,
    compress: fzero.Compress | None = None,
    **options: Any,
) -> fzero.tools.Run:
    return fzero.tools.Run(
        step=fzero.shard(encoding(body, compress), stage=stage, **options),
        params=parameters(dtype) if params is None else params,
        optimizer=optimizer or fzero.optim.adamw(0.01),
        batches=batches(world_size, calls, micro_batches, dtype),
        world_size=world_size,
    )


def patched(target: Any, name: str, new: Any, body: Body = updated) -> Body:
    """The step while a part of fzero is another one. Virtual ranks take turns: it is so for all."""
    inside: list[Any] = []

    def step(state: Any, batch: Any) -> Any:
        if not inside:
            patch = mock.patch.object(target, name, new)
            patch.start()
            inside.append(patch)
        inside.append(None)
        try:
            return body(state, batch)
        finally:
            inside.pop()
            if len(inside) == 1:
                inside.pop().stop()

    return step


class Landed:
    """A reduction or a gather that is over, with other values."""

    as_blocks = False

    def __init__(self, values: Sequence[Tensor]) -> None:
        self.values = list(values)

    def wait(self) -> list[Tensor]:
        return self.values


def run_of_loss(
    loss_fn: Any,
    stage: int,
    world_size: int,
    *,
    params: Any = None,
    width: int = 3,
    dtype: torch.dtype = torch.float32,
) -> fzero.tools.Run:
    """One update by the gradient of loss_fn(params, x), x of 8 rows in all; w is [3, 5]."""
    source = torch.Generator().manual_seed(2)
    params = {"w": torch.randn(3, 5, generator=source).to(dtype)} if params is None else params

    def body(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(loss_fn, state)(x)
        return fzero.apply_gradients(state), None

    x = torch.randn(8, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    return fzero.tools.Run(
        step=fzero.shard(body, stage=stage),
        params=params,
        optimizer=fzero.optim.adamw(0.01),
        batches=[x.view(world_size, -1, width)],
        world_size=world_size,
    )
