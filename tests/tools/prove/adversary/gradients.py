"""What ranks do to their own gradients before these are summed, and how they sum them."""

# ruff: noqa: E501
# A table has a program a line.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fzero
from tests.tools.prove.adversary.places import (
    Fn,
    as_own,
    mean_gradients,
    on_many,
    own_gradients,
    stepped,
)
from tests.tools.prove.adversary.programs import Program, of_step, usual_loss
from tests.tools.prove.adversary.truth import by_hand

KIND = "gradients"


def _clipped(g: Tensor) -> Tensor:
    return g * (0.3 / g.norm()).clamp(max=1.0)


def _top(g: Tensor) -> Tensor:
    kept = g.flatten().abs().topk(5)[1]
    return torch.zeros(g.numel()).scatter(0, kept, g.flatten()[kept]).view_as(g)


def _in_place(g: Tensor) -> Tensor:
    g = g.clone()
    g.clamp_(-0.2, 0.2)
    return g


def _rows_in_place(g: Tensor) -> Tensor:
    g = g.clone()
    g[1:3].div_(g.norm())
    return g


def _column_in_place(g: Tensor) -> Tensor:
    g = g.clone()
    g[:, 0].abs_()
    return g


def _through_a_view(g: Tensor) -> Tensor:
    g = g.clone()
    g.view(-1)[::2].mul_(g.abs().max())
    return g


def _by_copy(g: Tensor) -> Tensor:
    kept = torch.empty_like(g)
    kept.copy_(g.abs())
    return kept


def _by_out(g: Tensor) -> Tensor:
    return torch.clamp(g, -0.1, 0.1, out=torch.empty_like(g))


# Functions of the own gradient that are not linear.
LOCAL: dict[str, Fn] = {
    "clipped by norm": _clipped,
    "clipped by value": lambda g: g.clamp(-0.2, 0.2),
    "clipped below": lambda g: g.clamp(min=-0.1),
    "normalized": lambda g: g / g.norm(),
    "normalized by the largest": lambda g: g / g.abs().max(),
    "normalized by rms": lambda g: g / g.square().mean().sqrt(),
    "normalized by rows": lambda g: g / g.norm(dim=1, keepdim=True),
    "standardized": lambda g: (g - g.mean()) / g.std(),
    "its sign": torch.sign,
    "its absolute value": torch.abs,
    "its square": torch.square,
    "root of its square": lambda g: g.square().sqrt(),
    "signed root": lambda g: g.sign() * g.abs().sqrt(),
    "softmax": lambda g: g.softmax(1),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "rounded": torch.round,
    "largest only": _top,
    "small ones dropped": lambda g: g * (g.abs() > 0.3),
    "small ones masked": lambda g: g.masked_fill(g.abs() < 0.3, 0.0),
    "where": lambda g: torch.where(g.abs() > 0.3, g, 0.0),
    "skipped if its first element is large": lambda g: torch.where(
        g[0, 0] > 0.05, torch.zeros_like(g), g
    ),
    "sorted": lambda g: g.flatten().sort()[0].view_as(g),
    "cumulative largest": lambda g: g.cummax(0)[0],
    "clamped in place": _in_place,
    "rows divided in place": _rows_in_place,
    "a column in place": _column_in_place,
    "through a view": _through_a_view,
    "copied into": _by_copy,
    "out=": _by_out,
    "orthogonalized": lambda g: torch.linalg.qr(g.t())[0].t(),
    "maximum with zero": lambda g: torch.maximum(g, torch.zeros(())),
    "lerp by itself": lambda g: torch.lerp(g, g * 0, g),
    "times its largest": lambda g: g * g.amax(),
    "times itself": lambda g: g * g,
    "over itself and one": lambda g: g / (1 + g.abs()),
    "power": lambda g: g.pow(3),
    "exp": lambda g: g.exp(),
    "one added": lambda g: g + g.count_nonzero() * g.amin(),
    "matmul with itself": lambda g: g @ g.t() @ g,
    "gathered by its order": lambda g: g.gather(0, g.argsort(0)),
    "softplus": torch.nn.functional.softplus,
    "dropped out by size": lambda g: g * (g > g.median()),
    "addcmul": lambda g: torch.addcmul(g, g, g),
    "hypot": lambda g: torch.hypot(g, g + 1),
    "logical": lambda g: torch.logical_and(g > 0, g > 0.1).float(),
    "centred by its median": lambda g: g - g.median(),
}


def _logged(how: str, fn: Fn) -> Fn:
    """The own gradient through `fn`, where autograd reads the result afterwards, too."""

    def step(state: Any, x: Tensor) -> Any:
        p = {k: v.detach().clone().requires_grad_() for k, v in fzero.full_params(state).items()}
        g = dict(zip(p, by_hand(usual_loss(p, x), list(p.values())), strict=True))
        done = fn(g["w"])
        if how == "autograd.grad":
            (logged,) = torch.autograd.grad((p["w"] * done).square().sum(), p["w"])
        elif how == "backward":
            (p["w"] * done).square().sum().backward()
            logged = p["w"].grad
        elif how == "a graph":
            seen = done.detach().requires_grad_()
            (logged,) = torch.autograd.grad(seen.pow(3).sum(), seen)
        elif how == "func.grad":
            logged = torch.func.grad(lambda w: (w * done).square().sum())(p["w"].detach())
        else:
            logged = torch.func.jvp(lambda w: w * done, (done,), (done,))[1]
        assert logged is not None
        return stepped(state, {**g, "w": done}, reduced=False), logged.sum()

    return step


def _surrogate(how: str) -> Fn:
    """Two states of a gradient call: what the first one has made is read by the second's loss."""

    def step(state: Any, x: Tensor) -> Any:
        g = own_gradients(state, x)
        done = _clipped(g["w"])
        logged = fzero.grad_and_reduce(lambda p: (p["w"] * done).square().sum(), state)()[1]
        if how == "value":
            done = done * logged.detach()
        return stepped(state, {**g, "w": done}, reduced=False), logged

    return step


# How own gradients of ranks become one: (own gradient of w) -> what is taken for the mean.
SUMS: dict[str, Fn] = {
    "summed, not divided": fzero.psum,
    "divided twice": lambda g: fzero.pmean(g) / fzero.axis_size(),
    "summed twice": lambda g: fzero.pmean(fzero.psum(g)),
    "divided by two": lambda g: fzero.psum(g) / 2,
    "divided by a number too many": lambda g: fzero.psum(g) / (fzero.axis_size() + 1) * 2,
    "divided by ranks minus one": lambda g: fzero.psum(g) / max(fzero.axis_size() - 1, 1),
    "by the root of the ranks": lambda g: fzero.psum(g) / fzero.axis_size() ** 0.5,
    "root of the mean square": lambda g: fzero.pmean(g.square()).sqrt(),
    "mean of absolute values": lambda g: fzero.pmean(g.abs()),
    "majority of signs": lambda g: fzero.psum(g.sign()).sign(),
    "median": lambda g: fzero.all_gather(g.flatten()).view(-1, *g.shape).median(0)[0],
    "largest": lambda g: fzero.all_gather(g.flatten()).view(-1, *g.shape).amax(0),
    "the first rank's": lambda g: fzero.all_gather(g.flatten()).view(-1, *g.shape)[0],
    "the last rank's": lambda g: fzero.all_gather(g.flatten()).view(-1, *g.shape)[-1],
    "the first two ranks'": lambda g: fzero.all_gather(g.flatten()).view(-1, *g.shape)[:2].mean(0),
    "every other rank's": lambda g: fzero.all_gather(g.flatten()).view(-1, *g.shape)[::2].mean(0),
    "first minus the rest": lambda g: 2 * fzero.all_gather(g.flatten()).view(-1, *g.shape)[0] - fzero.pmean(g),
    "not summed at all": lambda g: g,
    "one half of it summed": lambda g: torch.cat([fzero.pmean(g[:2]), g[2:]]),
    "parts of the sum, undivided": lambda g: fzero.all_gather(fzero.psum_scatter(g.flatten())).view_as(g),
    "a part that is shifted": lambda g: fzero.all_gather(fzero.psum_scatter(g.flatten()).roll(1)).view_as(g) / fzero.axis_size(),
    "parts that are normalized": lambda g: fzero.all_gather(torch.nn.functional.normalize(fzero.psum_scatter(g.flatten()), dim=0)).view_as(g),
    "parts, each clipped by its own norm": lambda g: fzero.all_gather(_clipped(fzero.psum_scatter(g.flatten()) / fzero.axis_size())).view_as(g),
    "parts, each through a softmax": lambda g: fzero.all_gather(fzero.psum_scatter(g.flatten()).softmax(0)).view_as(g),
    "parts, each cumulated": lambda g: fzero.all_gather(fzero.psum_scatter(g.flatten()).cumsum(0)).view_as(g) / fzero.axis_size(),
    "parts, each sorted": lambda g: fzero.all_gather(fzero.psum_scatter(g.flatten()).sort()[0]).view_as(g) / fzero.axis_size(),
    "parts, each flipped": lambda g: fzero.all_gather(fzero.psum_scatter(g.flatten()).flip(0)).view_as(g) / fzero.axis_size(),
    "parts, each centred": lambda g: fzero.all_gather((lambda s: s - s.mean())(fzero.psum_scatter(g.flatten()))).view_as(g),
    "weighted by the own norm": lambda g: fzero.psum(g * g.norm()) / fzero.psum(g.norm()),
    "weighted by rank": lambda g: fzero.psum(g * (1 + fzero.axis_index())) / fzero.axis_size(),
    "noise of the rank": lambda g: fzero.pmean(g) + 0.1 * fzero.axis_index(),
    "mean of the clipped": lambda g: fzero.pmean(_clipped(g)),
    "clipped by the mean of norms": lambda g: fzero.pmean(g) * (0.3 / fzero.pmean(g.norm())).clamp(max=1.0),
    "clipped by the sum of norms": lambda g: fzero.pmean(g) / fzero.psum(g.square().sum()).sqrt(),
    "clipped by the own norm": lambda g: fzero.pmean(g) * (0.3 / g.norm()).clamp(max=1.0),
    "into an integer": lambda g: fzero.psum((g * 64).int()).float() / 64 / fzero.axis_size(),
    "a mean of exponentials": lambda g: fzero.pmean(g.exp()).log(),
    "a product of means": lambda g: fzero.pmean(g) * fzero.pmean(g.abs()).mean() / fzero.pmean(g).abs().mean(),
}  # fmt: skip


def _summed(fn: Fn) -> Fn:
    def step(state: Any, x: Tensor) -> Any:
        g = own_gradients(state, x)
        mean = {"b": fzero.pmean(g["b"]), "w": fn(g["w"])}
        return stepped(state, mean, reduced=True), x.sum()

    return step


def _update_of(how: Callable[[Any, Any, Tensor], Any]) -> Fn:
    """The mean gradient, and something of the own batch beside it."""

    def step(state: Any, x: Tensor) -> Any:
        g = mean_gradients(state, x)
        return stepped(state, how(state, g, x), reduced=True), x.sum()

    return step


UPDATES: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "the own gradient added": lambda s, g, x: {**g, "w": g["w"] + own_gradients(s, x)["w"]},
    "the own gradient's sign": lambda s, g, x: {**g, "w": g["w"].abs() * own_gradients(s, x)["w"].sign()},
    "masked by the own gradient": lambda s, g, x: {**g, "w": g["w"] * (own_gradients(s, x)["w"] > 0)},
    "times the number of ranks": lambda s, g, x: {k: v * fzero.axis_size() for k, v in g.items()},
    "summed again": lambda s, g, x: {k: fzero.psum(v) for k, v in g.items()},
    "one leaf of the own gradient": lambda s, g, x: {**g, "b": own_gradients(s, x)["b"]},
    "normalized by the own norm": lambda s, g, x: {**g, "w": g["w"] / own_gradients(s, x)["w"].norm()},
    "clipped on several ranks": lambda s, g, x: {**g, "w": on_many(lambda v: v, _clipped)(g["w"])},
    "another leaf's shape": lambda s, g, x: {**g, "w": on_many(lambda v: v, lambda v: v.reshape(6, 4).t())(g["w"])},
    "rows in another order": lambda s, g, x: {**g, "w": on_many(lambda v: v, lambda v: v[[1, 0, 2, 3]])(g["w"])},
    "decay by hand": lambda s, g, x: {**g, "w": g["w"] + 0.1 * fzero.axis_size() * fzero.full_params(s)["w"]},
    "noise of several ranks": lambda s, g, x: {**g, "w": g["w"] + on_many(torch.zeros_like, torch.ones_like)(g["w"])},
    "a part for each rank": lambda s, g, x: {**g, "w": g["w"] * (torch.arange(4) % fzero.axis_size() == fzero.axis_index())[:, None]},
    "rows of the own part": lambda s, g, x: {**g, "w": g["w"] * g["w"].view(4, 6)[fzero.axis_index()]},
    "added twice on several": lambda s, g, x: {k: v * on_many(lambda: 1, lambda: 2)() for k, v in g.items()},
    "zero on several": lambda s, g, x: {**g, "w": on_many(lambda v: v, torch.zeros_like)(g["w"])},
}  # fmt: skip


def programs() -> Iterator[Program]:
    for i, (name, fn) in enumerate(LOCAL.items()):
        yield as_own(KIND, name, fn, world=2 + i % 3, options={"stage": i % 4})
    ways = ("autograd.grad", "backward", "a graph", "func.grad", "func.jvp")
    for i, name in enumerate(list(LOCAL)[:20]):
        how = ways[i % 5]
        yield of_step(KIND, f"{name}, logged by {how}", _logged(how, LOCAL[name]))
    for how in ("", "value"):
        yield of_step(KIND, f"clipped, and in another loss {how}", _surrogate(how))
    for i, (name, fn) in enumerate(SUMS.items()):
        yield of_step(KIND, name, _summed(fn), world=3 if "parts" in name or i % 2 else 4)
    for name, how in UPDATES.items():
        yield of_step(KIND, name, _update_of(how))
