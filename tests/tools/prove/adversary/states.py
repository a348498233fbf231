"""Several states, other leaves, transforms and ways to write an update: each with a usual fault."""

# ruff: noqa: E501
# A table has a program a line.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fzero
from tests.descends import descends
from tests.tools.prove.adversary.places import Fn, mean_gradients, on_many, own_gradients, stepped
from tests.tools.prove.adversary.programs import (
    SGD,
    Program,
    hidden,
    of_loss,
    of_step,
    usual_loss,
    weights,
)
from tests.tools.prove.adversary.truth import by_hand

KIND = "states"


def _many() -> bool:
    return fzero.axis_size() > 1


def _step(state: Any, x: Tensor) -> Any:
    return descends(usual_loss)(state, x)


def _grad(state: Any, x: Tensor, loss: Fn = usual_loss) -> Any:
    return fzero.grad_and_reduce(loss, state)(x)[0]


# One state; what is wrong shows on several ranks only, or is of own gradients.
STEPS: dict[str, Fn] = {
    "two updates on several ranks": lambda s, x: (fzero.apply_gradients(_grad(fzero.apply_gradients(_grad(s, x)), x)) if _many() else fzero.apply_gradients(_grad(s, x)), 0),
    "no update on several ranks": lambda s, x: (s if _many() else fzero.apply_gradients(_grad(s, x)), 0),
    "the gradient counted twice": lambda s, x: (fzero.apply_gradients(_grad(_grad(s, x), x) if _many() else _grad(s, x)), 0),
    "gradients of as many passes as ranks": lambda s, x: (_passes(s, x, fzero.axis_size()), 0),
    "half of the batch on several ranks": lambda s, x: (fzero.apply_gradients(_grad(s, x[:4] if _many() else x)), 0),
    "a second batch at the new parameters": lambda s, x: (_second(s, x), 0),
    "the own gradient as the mean": lambda s, x: (stepped(s, own_gradients(s, x), reduced=True), 0),
    "the mean as the own gradient, and summed": lambda s, x: (stepped(s, {k: v * fzero.axis_size() for k, v in mean_gradients(s, x).items()}, reduced=False), 0),
    "own and mean gradient added": lambda s, x: (fzero.apply_gradients(fzero.add_gradients(_grad(s, x), own_gradients(s, x), reduced=True)), 0),
    "no gradient of the bias on several ranks": lambda s, x: (stepped(s, {**mean_gradients(s, x), **({"b": 0 * mean_gradients(s, x)["b"]} if _many() else {})}, reduced=True), 0),
    "ascent on several ranks": lambda s, x: (fzero.apply_gradients(_grad(s, x, lambda p, x: usual_loss(p, x) * (-1 if _many() else 1))), 0),
    "SAM by a step that grows with ranks": lambda s, x: (_sam(s, x, mean_gradients(s, x), 0.1 * fzero.axis_size()), 0),
    "weights of an average of ranks": lambda s, x: (fzero.apply_gradients(_grad(s, x, lambda p, x: usual_loss({**p, "w": p["w"] + 0.1 * x[:4]}, x) ** (2 if _many() else 1))), 0),
    "a stop by the own loss": lambda s, x: (_stopped(s, x, lambda v: v), 0),
    "a rate by the own loss": lambda s, x: (_rated(s, x, lambda v: v), 0),
    "gradient noise of the rank": lambda s, x: (_noised(s, x, 0.1 * fzero.axis_index()), 0),
    "gradient noise by ranks": lambda s, x: (_noised(s, x, 0.1 / fzero.axis_size()), 0),
}  # fmt: skip


def _passes(s: Any, x: Tensor, times: int) -> Any:
    for _ in range(times):
        s = _grad(s, x)
    return fzero.apply_gradients(s)


def _second(s: Any, x: Tensor) -> Any:
    new = fzero.apply_gradients(_grad(s, x))
    at = fzero.full_params(new if _many() else s)
    return stepped(new, own_gradients_at(at, x), reduced=False)


def own_gradients_at(params: Any, x: Tensor) -> Any:
    """Of a loss that reads parameters as numbers."""
    p = {k: v.detach().clone().requires_grad_() for k, v in params.items()}
    return dict(zip(p, by_hand(usual_loss(p, x), list(p.values())), strict=True))


def _sam(s: Any, x: Tensor, g: Any, rho: float = 0.1) -> Any:
    def loss(p: Any, x: Tensor) -> Tensor:
        size = sum(v.square().sum() for v in g.values()) ** 0.5
        return usual_loss({k: p[k] + rho * g[k] / size for k in p}, x)

    return fzero.apply_gradients(_grad(s, x, loss))


def _stopped(s: Any, x: Tensor, of: Fn) -> Any:
    new, loss = fzero.grad_and_reduce(usual_loss, s)(x)
    g = fzero.full_gradients(new)
    keep = (of(loss) - 2.0).sigmoid()
    return stepped(s, {k: v * keep for k, v in g.items()}, reduced=True)


def _rated(s: Any, x: Tensor, of: Fn) -> Any:
    new, loss = fzero.grad_and_reduce(usual_loss, s)(x)
    return stepped(s, {k: v * of(loss) for k, v in fzero.full_gradients(new).items()}, reduced=True)


def _noised(s: Any, x: Tensor, size: float) -> Any:
    g = mean_gradients(s, x)
    return stepped(s, {k: v + size * torch.rand(v.shape) for k, v in g.items()}, reduced=True)


def _games(wrong: str) -> Fn:
    """Two states: a generator and a critic."""

    def loss(p: Any, x: Tensor) -> Tensor:
        return (hidden(p["g"], x) @ p["d"]["w"][:, :4].T + p["d"]["b"]).square().mean()

    def step(states: Any, x: Tensor) -> Any:
        first, _ = fzero.grad_and_reduce(loss, states, wrt="d")(x)
        new = {**states, "d": fzero.apply_gradients(first["d"])}
        if wrong == "stale":
            second, _ = fzero.grad_and_reduce(loss, states if _many() else new, wrt="g")(x)
        elif wrong == "sign":
            second, _ = fzero.grad_and_reduce(
                lambda p, x: -loss(p, x) if _many() else loss(p, x), new, wrt="g"
            )(x)
        elif wrong == "wrt":
            second, _ = fzero.grad_and_reduce(loss, new, wrt="g")(x)
            if _many():
                return {**new, "g": states["g"]}, x.sum()
        elif wrong == "one state by ranks":
            by = fzero.axis_size()
            second, _ = fzero.grad_and_reduce(lambda p, x: loss(p, x) * by, new, wrt="g")(x)
        else:
            second, _ = fzero.grad_and_reduce(loss, new, wrt="g")(x)
            return {"g": fzero.apply_gradients(second["g"]), "d": states["d"] if _many() else new["d"]}, x.sum()  # fmt: skip
        return {**new, "g": fzero.apply_gradients(second["g"])}, x.sum()

    return step


def _leaves(**leaves: Tensor) -> Callable[[], Any]:
    return lambda: {**weights(), **leaves}


def _tied() -> Any:
    p = weights()
    return {**p, "again": p["w"]}


def _frozen() -> Any:
    p = weights()
    return {**p, "fixed": nn.Parameter(torch.ones(4), requires_grad=False)}


# Leaves of other kinds; on several ranks they are used in another way.
LEAVES: dict[str, tuple[Callable[[], Any], Fn]] = {
    "a tied leaf": (_tied, lambda p, x, many: usual_loss(p, x) + (p["again"].square().sum() if many else 0)),
    "a tied leaf, detached": (_tied, lambda p, x, many: usual_loss(p, x) + ((p["again"].detach() if many else p["again"]) * p["w"]).sum()),
    "a frozen leaf": (_frozen, lambda p, x, many: usual_loss(p, x) * (p["fixed"].sum() * (2 if many else 1))),
    "a scalar": (_leaves(s=torch.tensor(0.5)), lambda p, x, many: usual_loss(p, x) * p["s"] ** (3 if many else 2)),
    "a scalar that is not used": (_leaves(s=torch.tensor(0.5)), lambda p, x, many: usual_loss(p, x) * (1 if many else p["s"])),
    "an empty leaf": (_leaves(s=torch.zeros(0)), lambda p, x, many: usual_loss(p, x) + (p["s"].sum() + 1) * (p["b"].sum() if many else 0)),
    "a complex leaf": (_leaves(s=torch.tensor([1 + 2j, 0.5j])), lambda p, x, many: usual_loss(p, x) + ((p["s"].conj() if many else p["s"]) * (1 + 1j)).real.sum()),
    "a complex leaf, its real part": (_leaves(s=torch.tensor([1 + 2j, 0.5j])), lambda p, x, many: usual_loss(p, x) + (p["s"].real.square().sum() if many else p["s"].abs().square().sum())),
    "a long leaf": (_leaves(s=torch.linspace(0, 1, 101)), lambda p, x, many: usual_loss(p, x) + (p["s"][1:] * p["s"][:-1] if many else p["s"] * p["s"]).sum()),
    "a leaf of bf16": (_leaves(s=torch.ones(3).bfloat16()), lambda p, x, many: usual_loss(p, x) * (p["s"].float().sum() if many else p["s"].float()[:2].sum())),
    "leaves that are swapped": (_leaves(s=torch.rand(4, 6, generator=torch.Generator().manual_seed(3))), lambda p, x, many: usual_loss({**p, "w": p["s"] if many else p["w"]}, x)),
    "a leaf in the place of a constant": (_leaves(s=torch.ones(4)), lambda p, x, many: usual_loss(p, x) + ((p["s"] if many else torch.ones(4)) * p["b"]).sum()),
}  # fmt: skip


def _on_leaf(loss: Fn) -> Fn:
    return lambda p, x: loss(p, x, fzero.axis_size() > 1)


# Transforms whose meaning, around a sound step, is no mean over ranks, or not that of this step.
def _weighted(state: Any, x: Tensor) -> Any:
    grad = fzero.grad_and_reduce(usual_loss, state, weight=x.square().sum())
    state, loss = grad(x)
    return fzero.apply_gradients(state), loss


def _by_rank(state: Any, x: Tensor) -> Any:
    state, loss = fzero.grad_and_reduce(usual_loss, state, weight=1.0 + fzero.axis_index())(x)
    return fzero.apply_gradients(state), loss


def _halves(state: Any, x: Tensor) -> Any:
    for part in x.chunk(fzero.axis_size() * 2):
        state, loss = fzero.grad_and_reduce(usual_loss, state)(part)
    return fzero.apply_gradients(state), loss


TRANSFORMS: dict[str, Fn] = {
    "weights": lambda: _weighted,
    "weights of ranks": lambda: _by_rank,
    "weights in a window": lambda: fzero.coalesce(_weighted),
    "micro-batches by ranks": lambda: fzero.coalesce(_halves),
    "int8 on the way": lambda: fzero.compress(_step, gradients=fzero.codecs.int8(block=64)),
    "a clip of a loss that grows with ranks": lambda: fzero.clip(
        descends(lambda p, x: usual_loss(p, x) * fzero.axis_size()), max_norm=20.0
    ),
    "accumulated, by ranks": lambda: fzero.accumulate(
        descends(lambda p, x: usual_loss(p, x) * (1 + fzero.axis_index())), micro_batches=2
    ),
    "a loss scale, by ranks": lambda: fzero.scale_loss(
        descends(lambda p, x: usual_loss(p, x) / fzero.axis_size()), 8
    ),
    "autocast, by ranks": lambda: fzero.autocast(
        descends(lambda p, x: usual_loss(p, x) / fzero.axis_size()), dtype=torch.bfloat16
    ),
    "checked, by ranks": lambda: fzero.check_finite(
        descends(lambda p, x: usual_loss(p, x) / fzero.axis_size())
    ),
}  # fmt: skip


class _Norm(nn.Module):
    """Batch norm, over the rows of a rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.first(x)))


def _of_module() -> Iterator[Program]:
    def of(name: str, fn: Fn) -> Program:
        apply, params = fzero.functionalize(_Norm())
        return of_loss(KIND, name, lambda p, x: fn(apply, p, x).pow(3).mean(), params=lambda: params)  # fmt: skip

    yield of("batch norm of a gathered batch, its first rows", lambda apply, p, x: apply(p, fzero.all_gather(x))[:8])  # fmt: skip
    yield of("a draw more on several ranks", lambda apply, p, x: apply(p, x + (torch.rand(1) if _many() else 0)))  # fmt: skip
    yield of("dropout in another order", on_many(lambda apply, p, x: apply(p, x) + torch.rand(8, 4), lambda apply, p, x: torch.rand(8, 4) + apply(p, x)))  # fmt: skip


def programs() -> Iterator[Program]:
    for i, (name, step) in enumerate(STEPS.items()):
        own = name in ("a stop by the own loss", "a rate by the own loss")
        yield of_step(KIND, name, step, options={"stage": 0 if own else i % 4})
    for wrong in ("stale", "sign", "wrt", "one state by ranks", "the first update is lost"):
        yield of_step(
            KIND,
            f"two states, {wrong}",
            _games(wrong),
            params=lambda: {"d": weights(), "g": weights()},
            optimizer=lambda: {"d": SGD, "g": SGD},
            options={"stage": {"d": 1, "g": 3}},
        )
    for i, (name, (leaves, loss)) in enumerate(LEAVES.items()):
        yield of_loss(KIND, name, _on_leaf(loss), params=leaves, options={"stage": i % 4})
    for name, make in TRANSFORMS.items():
        yield Program(kind=KIND, name=name, make=make, options={"stage": 1})
    yield Program(
        kind=KIND, name="a sum", make=lambda: _step, options={"stage": 2, "reduce_op": "sum"}
    )
    yield from _of_module()
