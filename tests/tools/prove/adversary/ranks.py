"""One rank that does something else than the others, and what counts ranks."""

# ruff: noqa: E501
# A table has a program a line.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fzero
from tests.tools.prove.adversary.places import Fn, mean_gradients, stepped
from tests.tools.prove.adversary.programs import (
    Program,
    hidden,
    of_loss,
    of_step,
    usual_loss,
)

KIND = "ranks"


def _on(rank: int) -> bool:
    return fzero.axis_size() > 1 and fzero.axis_index() == rank


# A loss in which `odd` is true on one rank of several.
LOSSES: dict[str, Callable[[Any, Tensor, bool], Tensor]] = {
    "a loss that is doubled": lambda p, x, odd: usual_loss(p, x) * (2 if odd else 1),
    "a loss that is dropped": lambda p, x, odd: usual_loss(p, x) * (0 if odd else 1),
    "an example that is dropped": lambda p, x, odd: usual_loss(p, x[:-1] if odd else x),
    "an example twice": lambda p, x, odd: usual_loss(p, torch.cat([x, x[:1]]) if odd else x),
    "an example in the place of another": lambda p, x, odd: usual_loss(
        p, torch.cat([x[1:2], x[1:]]) if odd else x
    ),
    "a detached leaf": lambda p, x, odd: usual_loss({**p, "w": p["w"].detach()} if odd else p, x),
    "a leaf that is left out": lambda p, x, odd: (x @ p["w"].T).square().mean() if odd else usual_loss(p, x),
    "another sign": lambda p, x, odd: -usual_loss(p, x) if odd else usual_loss(p, x),
    "a sum for a mean": lambda p, x, odd: usual_loss(p, x) * (hidden(p, x).numel() if odd else 1),
    "another norm": lambda p, x, odd: hidden(p, x).abs().mean() if odd else usual_loss(p, x),
    "a constant": lambda p, x, odd: usual_loss(p, x * torch.tensor(1.01 if odd else 1.0)),
    "a term more": lambda p, x, odd: usual_loss(p, x) + (p["w"].sum() if odd else 0),
    "a bit of noise": lambda p, x, odd: usual_loss(p, x + 0.05 if odd else x),
    "a mask": lambda p, x, odd: usual_loss(p, x * (x > 0) if odd else x),
    "a dtype": lambda p, x, odd: usual_loss(p, x.int().float() if odd else x),
    "other rows of a parameter": lambda p, x, odd: usual_loss({**p, "w": p["w"][[1, 0, 2, 3]] if odd else p["w"]}, x),
    "a view": lambda p, x, odd: usual_loss(p, x.reshape(6, 8).t() if odd else x),
    "smoothed": lambda p, x, odd: usual_loss(p, x) + (1e-2 * p["b"].square().sum() if odd else 0.0),
}  # fmt: skip


def _of_rank(loss: Any, rank: int) -> Fn:
    return lambda p, x: loss(p, x, _on(rank))


def _skips(state: Any, x: Tensor) -> Any:
    g = mean_gradients(state, x)
    factor = 0.0 if _on(3) else 1.0
    return stepped(state, {k: v * factor for k, v in g.items()}, reduced=True), x.sum()


def _twice(state: Any, x: Tensor) -> Any:
    for _ in range(2 if _on(1) else 1):
        state, loss = fzero.grad_and_reduce(usual_loss, state)(x)
    return fzero.apply_gradients(state), loss


# What depends on the number of ranks, or on the own number, in usual ways. (p, x) -> loss
BY_SIZE: dict[str, Fn] = {
    "times the number of ranks": lambda p, x: usual_loss(p, x) * fzero.axis_size(),
    "over the number of ranks": lambda p, x: usual_loss(p, x) / fzero.axis_size(),
    "a sum over the size of the batch of all ranks": lambda p, x: hidden(p, x).pow(2).sum() / (32 * fzero.axis_size()),
    "decay by the number of ranks": lambda p, x: usual_loss(p, x) + 0.1 * fzero.axis_size() * p["w"].square().sum(),
    "decay over the number of ranks": lambda p, x: usual_loss(p, x) + 0.5 / fzero.axis_size() * p["w"].square().sum(),
    "the own part of a batch": lambda p, x: usual_loss(p, x.chunk(fzero.axis_size())[fzero.axis_index()]),
    "rows of the rank": lambda p, x: usual_loss(p, x[fzero.axis_index() :: fzero.axis_size()]),
    "the first part on all ranks": lambda p, x: usual_loss(p, x[: len(x) // fzero.axis_size()]),
    "parameters of the rank": lambda p, x: usual_loss({**p, "w": p["w"] * (torch.arange(4)[:, None] % fzero.axis_size() == fzero.axis_index())}, x),
    "temperature": lambda p, x: (hidden(p, x) / fzero.axis_size()).softmax(1).square().mean(),
    "eps": lambda p, x: (hidden(p, x).square() + 0.1 * fzero.axis_size()).sqrt().mean(),
    "as many passes as ranks": lambda p, x: sum((usual_loss(p, x * 0.5**i) for i in range(fzero.axis_size())), torch.zeros(())),
    "margin": lambda p, x: (hidden(p, x) - fzero.axis_index()).relu().mean(),
    "seed of the rank": lambda p, x: usual_loss(p, x * torch.rand(x.shape, generator=torch.Generator().manual_seed(fzero.axis_index()))),
    "position of the rank": lambda p, x: usual_loss(p, x + torch.arange(8)[:, None] * fzero.axis_index()),
    "label of the rank": lambda p, x: torch.nn.functional.cross_entropy(hidden(p, x), torch.full((8,), fzero.axis_index())),
    "parity of the rank": lambda p, x: usual_loss(p, x) * (1 + fzero.axis_index() % 2),
    "a power of the rank": lambda p, x: usual_loss(p, x) * 0.5 ** fzero.axis_index(),
    "a part that is all on one rank": lambda p, x: usual_loss(p, x) * p["b"].view(-1)[fzero.axis_index()],
    "rows of a parameter": lambda p, x: usual_loss(p, x) + p["w"].view(2, -1)[fzero.axis_index()].square().sum(),
    "rows of the batch": lambda p, x: usual_loss(p, x) * x.view(2, -1)[fzero.axis_index()].sum(),
    "a constant of the rank": lambda p, x: usual_loss(p, x) * torch.tensor([1.0, 2.0])[fzero.axis_index()],
    "a one-element constant": lambda p, x: usual_loss(p, x) * torch.full((), 1.0 + fzero.axis_index()),
    "a one-hot of the rank": lambda p, x: (hidden(p, x) * torch.nn.functional.one_hot(torch.tensor(fzero.axis_index()), 4)).square().mean(),
    "an empty slice": lambda p, x: usual_loss(p, x) + p["w"][: fzero.axis_size() - 1].square().sum(),
}  # fmt: skip


def programs() -> Iterator[Program]:
    places = [(2, 8), (3, 8), (5, 8), (6, 8), (1, 5), (2, 6), (3, 7), (4, 8), (1, 3), (0, 2)]
    for i, (name, loss) in enumerate(LOSSES.items()):
        rank, world = places[i % len(places)]
        yield of_loss(
            KIND,
            f"{name}, on rank {rank} of {world}",
            _of_rank(loss, rank),
            world=world,
            options={"stage": i % 4},
        )
    for rank, world in ((21, 33), (40, 64)):
        name = f"a loss that is doubled, on rank {rank} of {world}"
        loss = LOSSES["a loss that is doubled"]
        yield of_loss(KIND, name, _of_rank(loss, rank), world=world, calls=1)
    yield of_step(KIND, "an update that is skipped on rank 3 of 8", _skips, world=8)
    yield of_step(KIND, "a gradient twice on rank 1 of 2", _twice)
    for i, (name, fn) in enumerate(BY_SIZE.items()):
        yield of_loss(KIND, name, fn, options={"stage": i % 4})
