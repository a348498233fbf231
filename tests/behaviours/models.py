"""Trees of parameters, losses over them, and a model of training that keeps every gradient.

All numbers are small dyadic fractions, and every gradient is a multiple of 12: sums and means
over 1 to 4 ranks are exact in whatever order, so that comparisons can be bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

import fzero

LR, MOMENTUM = 2.0**-10, 0.5
RANKS = (1, 2, 3, 4)
MAX_RANKS = 4
SAMPLES = 4  # rows of a batch on each rank: what accumulate splits


@dataclass(frozen=True)
class Spec:
    """One leaf position of a tree: in which layer, of which shape and kind, tied to which."""

    layer: int
    shape: tuple[int, ...]
    kind: str = "float64"  # or float32, frozen, int64
    tied: int | None = None  # an earlier position that holds the same tensor

    @property
    def learns(self) -> bool:
        return self.kind in ("float64", "float32")


Tree = tuple[Spec, ...]
Uses = tuple[tuple[int, ...], ...]  # [loss][rank] -> bit j says that position j is used

RICH: Tree = (
    Spec(0, (3, 5)),
    Spec(0, ()),
    Spec(0, (2,), "frozen"),
    Spec(1, (7,), "float32"),
    Spec(1, (0, 4)),
    Spec(1, (3,)),
    Spec(2, (2, 2), "int64"),
    Spec(2, (3, 5), tied=0),
    Spec(3, (1,)),
)


def optimizer() -> fzero.optim.Optimizer:
    """Plain momentum with dyadic numbers: exact."""
    return fzero.optim.sgd(LR, momentum=MOMENTUM)


def owner(tree: Tree, position: int) -> int:
    """The position that stores the tensor of `position`."""
    tied = tree[position].tied
    return position if tied is None else tied


def tensors_of(tree: Tree) -> list[Tensor]:
    """The initial value of each position; tied ones are one object."""
    generator = torch.Generator().manual_seed(len(tree))
    made: list[Tensor] = []
    for spec in tree:
        value = torch.randint(-4, 5, spec.shape, generator=generator)
        if spec.tied is not None:
            value = made[spec.tied]
        elif spec.kind == "frozen":
            value = Parameter(value.double(), requires_grad=False)
        elif spec.learns:
            value = value.to(getattr(torch, spec.kind))
        made.append(value)
    return made


def as_params(tree: Tree, values: Sequence[Any]) -> dict[str, Any]:
    """The values in a nested pytree, a list of layers as a module list would give."""
    layers: list[dict[str, Any]] = [{} for _ in range(max(spec.layer for spec in tree) + 1)]
    for position, (spec, value) in enumerate(zip(tree, values, strict=True)):
        layers[spec.layer][f"p{position}"] = value
    return {"layers": layers}


def as_values(tree: Tree, params: dict[str, Any]) -> list[Any]:
    """Undo `as_params`."""
    return [params["layers"][spec.layer][f"p{i}"] for i, spec in enumerate(tree)]


def loss_of(tree: Tree, uses: Uses, number: int) -> Callable[[Any, Tensor], Tensor]:
    """Loss `number`: (params, batch [n, positions]) -> scalar, a mean over the n samples.

    What it uses depends on the rank that runs it; it may be nothing. dL/dp_j is an integer
    times 12 for n in (1, 2, 4) and 12-fold smaller parameters, different for each element.
    """

    def loss(params: Any, batch: Tensor) -> Tensor:
        return naive_loss(tree, uses, number, as_values(tree, params), batch, fzero.axis_index())

    return loss


def naive_loss(
    tree: Tree, uses: Uses, number: int, values: Sequence[Tensor], batch: Tensor, rank: int
) -> Tensor:
    """The same as a function of values and rank."""
    total = batch.new_zeros(())
    for j, spec in enumerate(tree):
        if not uses[number][rank] >> j & 1:
            continue
        c = batch[:, j].mean()
        ramp = torch.arange(1.0, prod(spec.shape) + 1, dtype=torch.float64)
        x = values[j].double()
        total = total + c * (x.reshape(-1).flip(0) * ramp).sum()
        if spec.kind == "float64":  # of fp32 a square would soon have more digits than it holds
            total = total + (number + 1) * (x * x).sum() / 2
    return 48 * total


def batches_for(tree: Tree, seed: int) -> Tensor:
    """[ranks, samples, positions]: other data for each rank, small integers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (MAX_RANKS, SAMPLES, len(tree))
    return torch.randint(-3, 4, shape, generator=generator).double()


class Refused(Exception):
    """What the model raises where fzero raises PhaseError."""


class Naive:
    """Unsharded training that keeps the list of gradients, one process for all ranks."""

    def __init__(self, tree: Tree, uses: Uses, ranks: int) -> None:
        self.tree, self.uses, self.ranks = tree, uses, ranks
        self.values: list[Any] = [t.detach().clone() for t in tensors_of(tree)]
        self.momentum = {j: torch.zeros_like(self.values[j]) for j in self.stored()}
        self.gradients: list[dict[int, Tensor]] = []
        self.step = 0

    def stored(self) -> list[int]:
        """The positions that have a gradient of their own."""
        return [j for j, s in enumerate(self.tree) if s.learns and owner(self.tree, j) == j]

    def grad(self, number: int, batch: Tensor, scale: float = 1.0) -> None:
        """Append the mean over ranks of dL/dp; `batch` is [ranks, n, positions]."""
        mean = {j: torch.zeros_like(self.values[j]) for j in self.stored()}
        for rank in range(self.ranks):
            own = {j: self.values[j].clone().requires_grad_() for j in self.stored()}
            values = [
                own.get(owner(self.tree, j), self.values[owner(self.tree, j)])
                for j in range(len(self.tree))
            ]
            loss = naive_loss(self.tree, self.uses, number, values, batch[rank], rank)
            if not loss.requires_grad:
                continue
            found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
            for j, g in zip(own, found, strict=True):
                mean[j] += torch.zeros_like(own[j]) if g is None else g * scale / self.ranks
        self.gradients.append(mean)

    def summed(self) -> dict[int, Tensor]:
        """The sum of all gradients since the last update."""
        if not self.gradients:
            raise Refused
        zero = {j: torch.zeros_like(self.values[j]) for j in self.stored()}
        return {j: sum((g[j] for g in self.gradients), zero[j]) for j in zero}

    def update(self) -> None:
        """Momentum on the sum; start a new list."""
        for j, g in self.summed().items():
            self.momentum[j] = MOMENTUM * self.momentum[j] + g
            self.values[j] = self.values[j] - LR * self.momentum[j]
        self.gradients, self.step = [], self.step + 1

    def copy(self) -> Naive:
        """The state as a value."""
        new = Naive(self.tree, self.uses, self.ranks)
        new.values, new.momentum = list(self.values), dict(self.momentum)
        new.gradients, new.step = list(self.gradients), self.step
        return new

    def params_by_position(self) -> list[Tensor]:
        return [self.values[owner(self.tree, j)] for j in range(len(self.tree))]

    def gradients_by_position(self) -> list[Tensor | None] | None:
        """Summed gradients, None for frozen leaves; None if there is nothing."""
        if not self.gradients:
            return None
        summed = self.summed()
        return [summed.get(owner(self.tree, j)) for j in range(len(self.tree))]


@st.composite
def trees(draw: st.DrawFn, max_leaves: int = 6) -> Tree:
    """Leaves of any size (empty, scalar, uneven), dtype and role, some tied, in up to 3 layers."""
    shapes = st.lists(st.integers(0, 4), max_size=2).map(tuple)
    kinds = st.sampled_from(["float64", "float64", "float64", "float32", "frozen", "int64"])
    layers = st.integers(0, 2)
    specs = [
        Spec(draw(layers), draw(shapes), draw(kinds))
        for _ in range(draw(st.integers(1, max_leaves)))
    ]
    learning = [j for j, spec in enumerate(specs) if spec.learns]
    for j in draw(st.lists(st.sampled_from(learning), max_size=2)) if learning else ():
        specs.append(Spec(draw(layers), specs[j].shape, specs[j].kind, tied=j))
    return tuple(specs)


def uses_of(tree: Tree) -> st.SearchStrategy[Uses]:
    """Three losses: one over everything, one over a part, one over another part on each rank."""
    everything = 2 ** len(tree) - 1
    mask = st.integers(0, everything)
    return st.tuples(
        st.just((everything,) * MAX_RANKS),
        mask.map(lambda m: (m,) * MAX_RANKS),
        st.tuples(*[mask] * MAX_RANKS),
    )
