"""The records of a recording: its form, the states that are kept, each call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.checkpoint.collective import from_first
from fzero.checkpoint.elements import Draft, write_draft
from fzero.checkpoint.in_memory import REPLAY, new_folder, remove_folder
from fzero.state import NAMESPACE, TrainState
from fzero.tools.record._digest import DigestedLeaf, digested_leaves
from fzero.transforms.kept import trains_apart

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of a step on one rank, after the state or the engine."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A state before a call, which any number of ranks loads at any stage."""

    call: int
    updates: int
    held: Draft | Path  # copies in host memory, or the folder of a checkpoint
    places: Tensor | None  # [R, n]: its second digests

    @staticmethod
    def name_of(call: int) -> str:
        """Return the name of the folder of a state that was kept before a call."""
        return f"state-{call:08d}"

    @property
    def name(self) -> str:
        """Of its folder in a recording that is saved."""
        return self.name_of(self.call)

    @property
    def nbytes(self) -> int:
        """Bytes that this process holds in host memory."""
        return self.held.nbytes if isinstance(self.held, Draft) else 0

    @contextmanager
    def as_checkpoint(self) -> Iterator[Path]:
        """The folder of a checkpoint of it, inside of the block. A collective of those who keep it.

        Copies are written to the memory of the host, /dev/shm. A program that is killed meanwhile
        leaves them to the next one of its user, which sweeps them.
        """
        if isinstance(self.held, Path):
            yield self.held
            return
        ranks = self.held.ranks
        folder = from_first(ranks, lambda: new_folder(REPLAY), what="make a folder")
        try:
            write_draft(self.held, folder / self.name)
            yield folder / self.name
        finally:
            if ranks.axis.rank == 0:
                remove_folder(folder)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """One call of a step, on the ranks that a recording has."""

    number: int
    updates: int  # of the state before it
    inputs: tuple[Inputs, ...]  # of each rank, in host memory
    devices: tuple[torch.device, ...]  # where their tensors were
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
    apart: bool = False  # local updates: replicas have parameters of their own

    @property
    def names(self) -> list[str]:
        """What has a digest, in order."""
        return [leaf.name for leaf in self.leaves]


def form_of(state: TrainState, driver: str) -> RecordedForm:
    """Return the form of the state of a rank."""
    setup = state.setup
    return RecordedForm(
        stage=setup.stage,
        world_size=state.mesh.size,
        shards=setup.layout.ranks,
        leaves=digested_leaves(state),
        driver=driver,
        apart=trains_apart(state),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedPart:
    """What a recording holds, and a folder has: see `Recording`."""

    form: RecordedForm
    kept: tuple[Snapshot, ...]
    calls: tuple[RecordedCall, ...]
    updates: int
    last: Tensor | None
