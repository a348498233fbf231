"""The transforms of docs/write_a_transform.md, and the same in plain PyTorch on whole tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.transforms.points.context import normal

PAGE = Path(__file__).parent.parent.parent / "docs" / "write_a_transform.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

names: dict[str, Any] = {"__name__": "write_a_transform"}
for _number, _block in enumerate(BLOCK.findall(PAGE.read_text(encoding="utf-8")), 1):
    exec(compile(_block, f"{PAGE.name}, block {_number}", "exec"), names)

Tensors = dict[str, Tensor]
Rule = Callable[[Mapping[str, Tensor]], Tensors]


class Plain:
    """What one of them does on whole tensors: `kept` is what it keeps, by slot."""

    kept: Any = None

    def begin(self, params: Tensors) -> None:
        """See the parameters before the first update."""

    def reduced(self, step: int, grads: Tensors, params: Tensors) -> Tensors | None:
        """Return the gradients that are stepped; None for no update."""
        return grads

    def update(self, grads: Tensors, params: Tensors, rule: Rule) -> Tensors:
        """Return the parameters after the rule."""
        return rule(grads)

    def updated(self, step: int, params: Tensors) -> Tensors:
        """Return the parameters that stay."""
        return params


class PlainEma(Plain):
    def begin(self, params: Tensors) -> None:
        self.kept = {"mean": {k: p.clone() for k, p in params.items()}}

    def updated(self, step: int, params: Tensors) -> Tensors:
        for k, m in self.kept["mean"].items():
            m.mul_(0.99).add_(params[k], alpha=0.01)
        return params


class PlainLookahead(Plain):
    def __init__(self, every: int) -> None:
        self.every = every

    def begin(self, params: Tensors) -> None:
        self.kept = {"slow": {k: p.clone() for k, p in params.items()}}

    def updated(self, step: int, params: Tensors) -> Tensors:
        if (step + 1) % self.every:
            return params
        for k, slow in self.kept["slow"].items():
            slow.add_(0.5 * (params[k] - slow))
        return {k: slow.clone() for k, slow in self.kept["slow"].items()}


class PlainNoise(Plain):
    def reduced(self, step: int, grads: Tensors, params: Tensors) -> Tensors | None:
        std = (0.1 / (1 + step) ** 0.55) ** 0.5
        return {k: g + std * self.drawn(step, k, g) for k, g in grads.items()}

    def drawn(self, step: int, path: str, like: Tensor) -> Tensor:
        """What one rank draws for a whole leaf."""
        many = 2 * like.numel() if like.is_complex() else like.numel()
        x = normal(0, torch.tensor(step), path, 0, torch.empty(many))
        x = torch.view_as_complex(x.view(-1, 2)) if like.is_complex() else x
        return x.view(like.shape).to(like.dtype)


class PlainClipRows(Plain):
    def reduced(self, step: int, grads: Tensors, params: Tensors) -> Tensors | None:
        return {k: self.of(g, params[k]) for k, g in grads.items()}

    def of(self, g: Tensor, p: Tensor) -> Tensor:
        """One leaf, row by row."""
        if g.ndim < 2:
            return g * self.factor(g, p)
        rows = [x * self.factor(x, y) for x, y in zip(g.unbind(), p.unbind(), strict=True)]
        return torch.stack(rows) if rows else g

    def factor(self, g: Tensor, p: Tensor) -> float:
        """What a row is multiplied by."""
        size, most = g.norm().item(), 0.01 * max(p.norm().item(), 1e-3)
        return min(1.0, most / max(size, 1e-6))


class PlainOutliers(Plain):
    def begin(self, params: Tensors) -> None:
        self.kept = {"mean": 0.0, "seen": 0}

    def reduced(self, step: int, grads: Tensors, params: Tensors) -> Tensors | None:
        norm = sum(g.abs().square().sum().item() for g in grads.values()) ** 0.5
        mean, seen = self.kept["mean"], self.kept["seen"]
        self.kept["seen"] = seen + 1
        if seen >= 3 and not norm <= 4 * mean:
            return None
        self.kept["mean"] = norm if seen == 0 else mean + 0.1 * (norm - mean)
        return grads


class PlainScheduleFree(Plain):
    def begin(self, params: Tensors) -> None:
        self.kept = {name: {k: p.clone() for k, p in params.items()} for name in "xz"}
        self.count = 0

    def update(self, grads: Tensors, params: Tensors, rule: Rule) -> Tensors:
        before = {k: p.clone() for k, p in params.items()}
        after, new = rule(grads), {}
        self.count += 1
        for k, z in self.kept["z"].items():
            z += after[k] - before[k]
            x = self.kept["x"][k]
            x += (z - x) / self.count
            new[k] = 0.1 * z + 0.9 * x
        return new


MADE: dict[str, tuple[Callable[[], Any], Callable[[], Plain]]] = {
    "ema": (lambda: names["ema"], PlainEma),
    "lookahead": (lambda: names["lookahead"](every=2), lambda: PlainLookahead(2)),
    "noise": (lambda: names["noise"](), PlainNoise),
    "clip_rows": (lambda: names["clip_rows"](), PlainClipRows),
    "outliers": (lambda: names["outliers"](), PlainOutliers),
    "schedule_free": (lambda: names["schedule_free"](), PlainScheduleFree),
}
"""Name -> (the transform of the page, the same in plain PyTorch)."""


def trained(
    plains: list[Plain],
    params: Tensors,
    loss: Callable[[Tensors, Tensor], Tensor],
    batches: list[Tensor],
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> Tensors:
    """Train whole tensors on whole batches: the first of `plains` is the innermost."""
    values = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
    optimizer, step = make([*values.values()]), 0

    def now() -> Tensors:
        return {k: p.detach().clone() for k, p in values.items()}

    def stepped(grads: Mapping[str, Tensor]) -> Tensors:
        for k, p in values.items():
            p.grad = grads[k].clone()
        optimizer.step()
        return now()

    for one in plains:
        one.begin(now())
    for batch in batches:
        found = torch.autograd.grad(
            loss(values, batch), [*values.values()], allow_unused=True, materialize_grads=True
        )
        grads: Tensors | None = dict(zip(values, found, strict=True))
        for one in plains:
            grads = grads and one.reduced(step, grads, now())
        if grads is None:
            continue
        rule: Rule = stepped
        for one in plains:
            rule = _around(one, rule, now)
        new = rule(grads)
        for one in plains:
            new = one.updated(step, new)
        with torch.no_grad():
            for k, p in values.items():
                p.copy_(new[k])
        step += 1
    return now()


def _around(one: Plain, rule: Rule, now: Callable[[], Tensors]) -> Rule:
    return lambda grads: one.update(dict(grads), now(), rule)
