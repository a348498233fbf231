"""Collectives of the user inside of a loss: the ranks are then not those of a mean gradient."""

# ruff: noqa: E501
# A table has a program a line.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from tests.tools.prove.adversary.places import Fn, on_many, own_gradients, stepped
from tests.tools.prove.adversary.programs import Program, hidden, of_loss, of_step, usual_loss

KIND = "collectives"


def _synced(x: Tensor) -> Tensor:
    """Batch norm with statistics of all ranks."""
    mean = fzero.pmean(x.mean(0))
    return (x - mean) / (fzero.pmean(x.square().mean(0)) - mean.square() + 1e-5).sqrt()


def _every(x: Tensor) -> Tensor:
    return fzero.all_gather(x)


# (p, x) -> loss
LOSSES: dict[str, Fn] = {
    "the mean of losses": lambda p, x: fzero.psum(usual_loss(p, x)),
    "a loss of summed outputs": lambda p, x: fzero.psum(hidden(p, x)).pow(2).mean(),
    "a loss of mean outputs": lambda p, x: fzero.pmean(hidden(p, x)).pow(2).mean(),
    "a loss of the mean batch": lambda p, x: usual_loss(p, fzero.pmean(x)),
    "norm of statistics of all ranks": lambda p, x: _synced(hidden(p, x)).pow(3).mean(),
    "centred by the mean of all ranks": lambda p, x: (hidden(p, x) - fzero.pmean(hidden(p, x).mean(0))).pow(2).mean(),
    "centred by the mean batch": lambda p, x: usual_loss(p, x - fzero.pmean(x.mean(0))),
    "scaled by the largest of all ranks": lambda p, x: usual_loss(p, x / _every(x.abs().amax().view(1)).amax()),
    "contrastive over all ranks": lambda p, x: F.cross_entropy(hidden(p, x) @ _every(hidden(p, x)).T, torch.arange(8) + 8 * fzero.axis_index()),
    "contrastive, negatives detached": lambda p, x: F.cross_entropy(hidden(p, x) @ _every(hidden(p, x)).T.detach(), torch.arange(8)),
    "a gathered batch, summed": lambda p, x: hidden(p, _every(x)).pow(2).sum(),
    "weighted by counts of all ranks": lambda p, x: (hidden(p, x) * (x[:, :1] > 0)).pow(2).sum() / fzero.psum((x[:, 0] > 0).float().sum()),
    "gradient of a mean, squared": lambda p, x: fzero.pmean(usual_loss(p, x)) ** 2,
    "logarithm of the mean loss": lambda p, x: fzero.pmean(usual_loss(p, x)).log(),
    "the rank's excess": lambda p, x: (usual_loss(p, x) - fzero.pmean(usual_loss(p, x)).detach()).square(),
    "times the mean loss": lambda p, x: usual_loss(p, x) * fzero.pmean(usual_loss(p, x)).detach(),
    "psum of a parameter": lambda p, x: usual_loss({**p, "w": fzero.psum(p["w"])}, x),
    "psum of a square of a parameter": lambda p, x: usual_loss(p, x) + fzero.psum(p["w"].square().sum()),
    "psum of the own slice": lambda p, x: usual_loss(p, x) + fzero.psum(p["w"].view(2, -1)[fzero.axis_index()].square().sum()),
    "psum of slices of the batch": lambda p, x: usual_loss(p, x) * fzero.psum(x.view(2, -1)[fzero.axis_index()].sum()),
    "psum of a psum": lambda p, x: usual_loss(p, x) * fzero.psum(fzero.psum(x.view(2, -1)[fzero.axis_index()].sum())) / fzero.axis_size(),
    "psum_scatter of the batch": lambda p, x: usual_loss(p, fzero.psum_scatter(x)),
    "psum_scatter of the outputs": lambda p, x: fzero.psum_scatter(hidden(p, x)).pow(2).mean(),
    "other rank's rows": lambda p, x: usual_loss(p, _every(x)[8 * ((fzero.axis_index() + 1) % fzero.axis_size()) :][:8] if fzero.axis_size() > 1 else x * 0.5),
    "rows of the first rank": lambda p, x: usual_loss(p, x) + hidden(p, _every(x)[:8]).mean() ** 2,
    "pmean of an integer": lambda p, x: usual_loss(p, x) * fzero.psum((x > 0).sum()),
    "psum of a bool": lambda p, x: usual_loss(p, x) * (fzero.psum((x > 0).int()) > 0).float().mean(),
    "largest of all": lambda p, x: _every(usual_loss(p, x).view(1)).amax(),
    "softmax over ranks": lambda p, x: (_every(usual_loss(p, x).view(1)).softmax(0) * _every(usual_loss(p, x).view(1))).sum(),
    "variance over ranks": lambda p, x: usual_loss(p, x) + _every(usual_loss(p, x).view(1)).var(correction=0),
    "distance to rank 0": lambda p, x: (hidden(p, x) - _every(hidden(p, x))[:8]).square().mean() + usual_loss(p, x),
    "total of its norm": lambda p, x: usual_loss(p, x) * fzero.psum(p["w"].view(2, -1)[fzero.axis_index()].norm()),
    "total of an overlap": lambda p, x: usual_loss(p, x) * fzero.psum(p["b"][fzero.axis_index() : fzero.axis_index() + 2].sum()),
}  # fmt: skip


def _totals(fn: Fn) -> Fn:
    """A gradient that is made by hand, times a number that ranks make of it."""

    def step(state: Any, x: Tensor) -> Any:
        g = fzero.full_gradients(fzero.grad_and_reduce(usual_loss, state)(x)[0])
        return stepped(state, {**g, "w": g["w"] * fn(g["w"].reshape(-1), x)}, reduced=True), x.sum()

    return step


def _mine(v: Tensor) -> Tensor:
    return v.view(fzero.axis_size(), -1)[fzero.axis_index()]


# (mean gradient of w [24], batch) -> a number; on one rank it is another one than on several.
TOTALS: dict[str, Fn] = {
    "sum of the norms of parts": lambda v, x: fzero.psum(_mine(v).norm()),
    "mean of the norms of parts": lambda v, x: fzero.pmean(_mine(v).norm()),
    "root of the mean of squares": lambda v, x: fzero.pmean(_mine(v).square().sum()).sqrt(),
    "square of the sum": lambda v, x: fzero.psum(_mine(v).sum().square()),
    "largest of parts, summed": lambda v, x: fzero.psum(_mine(v).abs().amax()),
    "sum over ranks of the whole": lambda v, x: fzero.psum(v.sum()),
    "sum over ranks of the whole norm": lambda v, x: fzero.psum(v.square().sum()).sqrt(),
    "sum of a psum": lambda v, x: fzero.psum(fzero.psum(_mine(v).sum())),
    "psum of parts of the parts": lambda v, x: fzero.psum(_mine(v)[: len(_mine(v)) // 2].sum()),
    "psum of parts without the first": lambda v, x: fzero.psum(_mine(v)[1:].sum()),
    "psum of a shifted part": lambda v, x: fzero.psum((_mine(v) * torch.arange(len(_mine(v)))).sum()),
    "product over ranks": lambda v, x: fzero.all_gather(_mine(v).sum().view(1)).prod(),
    "mean of means": lambda v, x: fzero.pmean(_mine(v).softmax(0).square().sum()),
    "variance of parts": lambda v, x: fzero.pmean(9 * _mine(v).var()),
    "any of parts": lambda v, x: fzero.psum((_mine(v) > 0.2).any().float()),
    "two of several parts": lambda v, x: fzero.psum(v.view(fzero.axis_size(), -1)[0].sum()) if fzero.axis_size() > 1 else v.sum(),
    "parts of another split": lambda v, x: fzero.psum(v.view(-1, fzero.axis_size())[fzero.axis_index()].sum()),
    "tests of parts": lambda v, x: 2 - (fzero.psum((~_mine(v).isfinite()).any().float() + 0.5)),
    "tests, not bounded": lambda v, x: fzero.psum(1 - _mine(v).isfinite().all().float() * 0.5),
    "dot of own parts": lambda v, x: fzero.psum(_mine(v) @ _mine(v)) * fzero.psum(_mine(v) @ _mine(v)) / fzero.psum((_mine(v) @ _mine(v)).square()),
}  # fmt: skip


def _part(x: Tensor) -> Tensor:
    return x.reshape(fzero.axis_size(), -1)[fzero.axis_index()]


# The sum of all elements of x, or what several ranks take for it: x is not the same on all.
PARTS: dict[str, Fn] = {
    "a sum of parts": lambda x: fzero.psum(_part(x).sum()),
    "a sum of a sum of parts": lambda x: fzero.psum(fzero.psum(_part(x).sum())) / fzero.axis_size(),
    "parts joined": lambda x: fzero.all_gather(_part(x)).sum(),
    "parts summed, and their parts joined": lambda x: fzero.all_gather(_part(fzero.psum(x))).sum() / fzero.axis_size() * 1.5,
    "parts of a sum": lambda x: fzero.psum(_part(fzero.psum(x)).sum()),
    "a scattered sum": lambda x: fzero.psum_scatter(x.reshape(-1)).sum(),
    "a scattered sum, summed": lambda x: fzero.psum(fzero.psum_scatter(x.reshape(-1)).sum()),
    "a scattered mean, of one rank": lambda x: fzero.psum_scatter(x.reshape(-1)).sum() / fzero.axis_size(),
    "a sum of the part, times": lambda x: _part(x).sum() * fzero.axis_size(),
    "the sum of all": lambda x: fzero.psum(x.sum()),
    "the first half of parts": lambda x: fzero.psum(_part(x)[: _part(x).numel() // 2].sum()) * 2,
    "root of the sum of squares of parts": lambda x: fzero.psum(_part(x).square().sum()).sqrt(),
}  # fmt: skip


def _by_parts(name: str, fn: Fn, i: int) -> Iterator[Program]:
    many = on_many(lambda x: x.sum(), fn)
    world = (2, 4, 8)[i % 3]

    def loss(p: Any, x: Tensor) -> Tensor:
        return usual_loss(p, x) * (3 + many(x.sigmoid())) ** 2

    def step(state: Any, x: Tensor) -> Any:
        g = own_gradients(state, x)
        return stepped(state, {**g, "w": g["w"] * many(g["w"])}, reduced=False), x.sum()

    yield of_loss(KIND, f"{name}, of the batch", loss, world=world)
    yield of_step(KIND, f"{name}, of the own gradient", step, world=world)


def programs() -> Iterator[Program]:
    for i, (name, fn) in enumerate(PARTS.items()):
        yield from _by_parts(name, fn, i)
    for i, (name, loss) in enumerate(LOSSES.items()):
        world = 2 if i % 3 or "slice" in name or "psum" in name else 4
        yield of_loss(KIND, name, loss, world=world, options={"stage": i % 4})
    for i, (name, fn) in enumerate(TOTALS.items()):
        yield of_step(KIND, name, _totals(fn), world=(2, 3, 4)[i % 3])
