"""The records of a recording: its form, the states that are kept, each call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
from torch import Tensor

from fzero.state import NAMESPACE, TrainState
from fzero.tools.record._digest import DigestedLeaf, digested_leaves

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of a step on one rank, after the state or the engine."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A state before a call, as a checkpoint that any number of ranks loads at any stage."""

    call: int
    updates: int
    path: Path
    places: Tensor | None  # [R, n]: its second digests


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """One call of a step, on the ranks that a recording has."""

    number: int
    updates: int  # of the state before it
    inputs: tuple[Inputs, ...]  # of each rank
    generators: tuple[Any, ...]  # of each rank: its random states, as given or as a text
    words: Tensor | None  # [R, n]: digests of the state before it

    @property
    def nbytes(self) -> int:
        """Bytes of its inputs and digests."""
        tree: Any = (self.inputs, self.words)
        leaves = optree.tree_leaves(tree, namespace=NAMESPACE)
        return sum(x.nbytes for x in leaves if isinstance(x, Tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedForm:
    """What the state of a recording is, the same in all of its calls."""

    stage: int
    world_size: int
    shards: int  # ranks of a replica
    leaves: tuple[DigestedLeaf, ...]
    driver: str  # "step" or "engine"

    @property
    def names(self) -> list[str]:
        """What has a digest, in order."""
        return [leaf.name for leaf in self.leaves]


def form_of(state: TrainState, driver: str) -> RecordedForm:
    """Return the form of the state of a rank."""
    setup = state.setup
    return RecordedForm(
        stage=setup.stage,
        world_size=setup.axis.size,
        shards=setup.layout.ranks,
        leaves=digested_leaves(state),
        driver=driver,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedPart:
    """What a recording holds, and a folder has: see `Recording`."""

    form: RecordedForm
    kept: tuple[Snapshot, ...]
    calls: tuple[RecordedCall, ...]
    updates: int
    last: Tensor | None
