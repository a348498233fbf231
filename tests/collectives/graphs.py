"""Random loss graphs: a few collectives, whose inputs and uses are others on each rank.

A graph runs on one rank by fzero's collectives, and for all ranks at once in one process, by plain
formulas on the tensors of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fzero

LEAVES = ("a", "b", "c")


class Term(NamedTuple):
    """coefficient * value, or of its square; `cut`: without a graph."""

    value: int
    coefficient: float
    squared: bool
    cut: bool


class Step(NamedTuple):
    """A collective: what each rank gives, a sum of terms; of none a constant. `sizes`: of rows.

    A "grad" is no collective: the derivative of what each rank gives by some values, its `by`.
    """

    op: str
    given: tuple[tuple[Term, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    by: tuple[tuple[int, ...], ...] = ()
    create: bool = True  # whether it has a graph


class Graph(NamedTuple):
    """Leaves, then the results of the steps; and the loss of each rank, a sum of terms."""

    ranks: int
    steps: tuple[Step, ...]
    losses: tuple[tuple[Term, ...], ...]

    @property
    def length(self) -> int:
        """The length of every value."""
        return 2 * self.ranks


OPS = ("psum", "pmean", "all_gather", "psum_scatter", "all_to_all", "sizes", "ppermute")


def graph_of(
    random: Random,
    *,
    ranks: int | None = None,
    most: int = 5,
    inner: bool = False,
    ops: Sequence[str] = OPS,
) -> Graph:
    """Draw a graph. inner: with derivatives of the user's in the loss. ops: its collectives."""
    size = ranks or random.randint(2, 4)
    steps = list[Step]()
    for number in range(random.randint(2, most)):
        known = len(LEAVES) + number
        given = tuple(_terms(random, known, few=True) for _ in range(size))
        cuts = [sorted(random.randint(0, 2 * size) for _ in range(size - 1)) for _ in range(size)]
        sizes = tuple(
            tuple(b - a for a, b in zip([0, *cut], [*cut, 2 * size], strict=True)) for cut in cuts
        )
        steps.append(Step(random.choice(ops), given, sizes))
        if inner and random.random() < 0.6:
            steps[-1] = _derivative(random, size, known)
    losses = tuple(_terms(random, len(LEAVES) + len(steps), few=False) for _ in range(size))
    return Graph(size, tuple(steps), losses)


def _derivative(random: Random, size: int, known: int) -> Step:
    """By the same values on all ranks, or by others on each."""
    given = tuple(_terms(random, known, few=False) for _ in range(size))
    same = random.random() < 0.7
    drawn = [(random.randrange(len(LEAVES)), random.randrange(known)) for _ in range(size)]
    by = tuple(drawn[0 if same else r] for r in range(size))
    return Step("grad", given, (), by, random.random() < 0.7)


def _terms(random: Random, known: int, *, few: bool) -> tuple[Term, ...]:
    count = random.choice((0, 1, 1, 2) if few else (0, 1, 2, 3, 4))
    return tuple(
        Term(
            random.randrange(known),
            random.choice((-1.0, 0.5, 1.0, 2.0)),
            random.random() < 0.4,
            random.random() < 0.2,
        )
        for _ in range(count)
    )


def _sum(terms: Sequence[Term], values: Sequence[Tensor], x: Tensor) -> Tensor:
    total = x * 0.5
    for term in terms:
        value = values[term.value].detach() if term.cut else values[term.value]
        total = total + term.coefficient * (value * value / 4 if term.squared else value) * x
    return total


def _same_length(op: str, y: Tensor, ranks: int) -> Tensor:
    """Bring what a collective gives to the length of every value."""
    if op == "all_gather":
        return (y.view(ranks, -1) * torch.arange(1, ranks + 1).view(-1, 1)).sum(0) / ranks
    if op == "psum_scatter":
        return y.repeat(ranks)
    if op == "sizes":
        rows = torch.arange(len(y)) % (2 * ranks)
        return torch.zeros(2 * ranks, dtype=y.dtype).index_add(0, rows, y)
    return y


def _call(step: Step, x: Tensor, rank: int, ranks: int) -> Tensor:
    ring: Callable[[Tensor], Tensor] = lambda x: fzero.ppermute(  # noqa: E731
        x, [(r, (r + 1) % ranks) for r in range(ranks - 1)]
    )
    if step.op == "sizes":
        return fzero.all_to_all(x, sizes=list(step.sizes[rank]))[0]
    return (ring if step.op == "ppermute" else getattr(fzero, step.op))(x)


def on_rank(graph: Graph, *, remat: bool = False) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """The loss of one rank, of (params, x)."""

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        rank, values = fzero.axis_index(), [params[name] for name in LEAVES]
        for step in graph.steps:
            if step.op == "grad":
                root = (_sum(step.given[rank], values, x) * x).sum()
                values.append(_by([root], [values], [step.by[rank]], create=step.create)[0])
                continue

            def one(*values: Tensor, step: Step = step) -> Tensor:
                given = _sum(step.given[rank], values, x)
                return _same_length(step.op, _call(step, given, rank, graph.ranks), graph.ranks)

            values.append(fzero.remat(one)(*values) if remat else one(*values))
        return (_sum(graph.losses[rank], values, x) * x).sum()

    return loss


def _by(
    roots: list[Tensor],
    values: Sequence[Sequence[Tensor]],
    by: Sequence[tuple[int, ...]],
    *,
    create: bool,
) -> list[Tensor]:
    """The derivative of the sum of these roots by some values of each rank, added up for it."""
    inputs = [some[i] for some, own in zip(values, by, strict=True) for i in own]
    wanted = [x for x in inputs if x.requires_grad]
    root: Any = sum(roots) + sum(some[0].sum() * 0 for some in values)
    found = iter(
        torch.autograd.grad(root, wanted, create_graph=create, retain_graph=True, allow_unused=True)
    )
    grads = [next(found) if x.requires_grad else None for x in inputs]
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]
    pairs = iter(grads)
    return [torch.stack([next(pairs) / 4 for _ in own]).sum(0) for own in by]


def _formula(step: Step, xs: list[Tensor]) -> list[Tensor]:
    size = len(xs)
    total = sum(xs[1:], xs[0])
    if step.op in ("psum", "pmean"):
        return [total / (size if step.op == "pmean" else 1) for _ in xs]  # each rank has its own
    if step.op == "all_gather":
        return [torch.cat(xs)] * size
    if step.op == "psum_scatter":
        return list(total.chunk(size))
    if step.op == "all_to_all":
        return [torch.cat([x.chunk(size)[r] for x in xs]) for r in range(size)]
    if step.op == "ppermute":
        return [torch.zeros_like(xs[0]), *xs[:-1]]
    pieces = [x.split(list(step.sizes[s])) for s, x in enumerate(xs)]
    return [torch.cat([some[r] for some in pieces]) for r in range(size)]


def in_one_process(graph: Graph) -> Callable[[Sequence[dict[str, Tensor]], Tensor], list[Tensor]]:
    """The losses of all ranks, of (params of each, xs)."""

    def losses(params: Sequence[dict[str, Tensor]], xs: Tensor) -> list[Tensor]:
        every = [[some[name].clone() for name in LEAVES] for some in params]
        for step in graph.steps:
            if step.op == "grad":
                pairs = enumerate(step.given)
                roots = [(_sum(given, every[r], xs[r]) * xs[r]).sum() for r, given in pairs]
                found = _by(roots, every, step.by, create=step.create)
                for mine, y in zip(every, found, strict=True):
                    mine.append(y)
                continue
            given = [_sum(step.given[r], every[r], xs[r]) for r in range(graph.ranks)]
            for mine, y in zip(every, _formula(step, given), strict=True):
                mine.append(_same_length(step.op, y, graph.ranks))
        return [(_sum(graph.losses[r], every[r], xs[r]) * xs[r]).sum() for r in range(graph.ranks)]

    return losses


def params_of(graph: Graph, random: Random) -> tuple[dict[str, Tensor], Tensor]:
    """Leaves, and the x of each rank."""

    def drawn(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        values = [random.choice((-1.0, -0.5, 0.5, 1.0, 1.5)) for _ in range(count)]
        return torch.tensor(values, dtype=torch.float64).view(shape)

    return {name: drawn(graph.length) for name in LEAVES}, drawn(graph.ranks, graph.length)


def right(graph: Graph, params: dict[str, Tensor], xs: Tensor) -> dict[str, Tensor]:
    """The gradient of the mean over ranks, in one process."""
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    total: Any = sum(in_one_process(graph)([leaves] * graph.ranks, xs)) / graph.ranks
    if not total.requires_grad:
        return {name: torch.zeros_like(p) for name, p in params.items()}
    total.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in leaves.items()}
