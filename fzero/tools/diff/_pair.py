"""Two runs up to one update, and the bounds of their differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fzero.machine.by_path import leaf_paths
from fzero.tools.compare import TERMS, Spread, first_apart, largest, of_terms, replicas_apart
from fzero.tools.diff._difference import REPLICA
from fzero.tools.diff._side import Apart, Side, summed


class Spacing(NamedTuple):
    """The relative spacing of numbers in the coarsest dtype."""

    passes: float  # of forwards, backwards and reductions
    updates: float  # of the optimizer


@dataclass(frozen=True, slots=True, eq=False)
class SidePair:
    """Two runs up to one update of one state; `twin` is run a, perturbed."""

    a: Side
    b: Side
    twin: Side
    units: Spacing

    @property
    def sides(self) -> tuple[Side, Side, Side]:
        """The three, in this order."""
        return self.a, self.b, self.twin

    def learning(self) -> Mapping[str, tuple[int, ...]]:
        """The leaves that are trainable in either run, with their shapes."""
        found: dict[str, tuple[int, ...]] = {}
        for side in (self.a, self.b):
            layout = side.setup.layout
            for path, leaf in zip(leaf_paths(layout), layout.leaves, strict=True):
                if leaf.trainable and leaf.numel:
                    found[path] = leaf.stored_shape
        return found

    def in_backward(self) -> dict[str, tuple[int, ...]]:
        """The same leaves in the order in which the backwards of a made their gradients."""
        names, learning = leaf_paths(self.a.setup.layout), self.learning()
        backwards = (one for seen in self.a.seen for one in seen.backwards)
        made = dict.fromkeys(names[leaf] for one in backwards for leaf in one.gradients)
        return {path: learning[path] for path in [*made, *learning] if path in learning}

    def of_terms(self, terms: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Return (n + 4) u sum(|terms|), the bound for another order of a sum."""
        sizes = summed([term.abs() for term in terms], shape)
        return of_terms(sizes, len(terms), self.units.passes)

    def of_sum(self, path: str, shape: Sequence[int]) -> Tensor:
        """Return this bound for the gradient of a leaf, flat, in both runs."""
        terms = [x for side in (self.a, self.b) for x in side.gradient_terms.get(path, [])]
        bound = self.of_terms(terms, shape).reshape(-1)
        encoded = any(side.setup.encodes_gradients for side in (self.a, self.b))
        if encoded:  # of the largest element of a block, which may be of another leaf
            sides = (self.a, self.b)
            every = [x for side in sides for some in side.gradient_terms.values() for x in some]
            bound = bound + TERMS * self.units.passes * largest(every)
        return bound


def of_leaf(
    operation: str, path: str, a: Spread, b: Spread, bound: Tensor | float
) -> Iterator[Apart]:
    """Return where a leaf differs between the runs, or else between replicas of one run."""
    found = first_apart(a, b, bound)
    if found is not None:
        yield Apart(operation, path, found)
    for side in (a, b):
        drifted = replicas_apart(side)
        if drifted is not None:
            yield Apart(f"{REPLICA} {operation}", path, drifted)
