"""Writes to the module's parameters, noticed by torch's version counters (stages 0 to 2).

    a root forward wrote        refused: each rank writes as its own data say, and replicas part
    anybody else wrote          compared at the next update: equal writes on all ranks are right

At stage 3 a placeholder refuses every write. A write through `p.data` or NumPy is counted nowhere:
`fzero.check_replicas` compares values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fzero.adapter.module import ModuleParameters
from fzero.collectives import Performer
from fzero.errors import PhaseError
from fzero.machine.offload import to_device, write_back
from fzero.machine.packing import cut, digest
from fzero.optim.precision import masters_of
from fzero.state import Setup, TrainState
from fzero.state.buffers import SIXTEEN_BIT
from fzero.transforms.state_entries import unequal

# fp32 masters follow what somebody writes to the module's 16-bit parameters.


class Masters:
    """Notices writes to parameters (weight clipping, load_state_dict) by torch's version counters.

    A write through `p.data`, or from NumPy, is not counted, and is lost at the next update. Without
    masters, below stage 3, nothing can be lost: the parameters are views of the state's buffers.
    """

    def __init__(self, params: ModuleParameters, setup: Setup) -> None:
        groups = setup.layout.groups
        self._watched = [
            (index, [p for leaf in groups[index].leaves for p in params.objects(leaf)])
            for index in setup.layout.trainable
            if groups[index].dtype in SIXTEEN_BIT and not setup.gathers_by_unit
        ]
        self._paths = {
            index: {params.paths[leaf][0] for leaf in groups[index].leaves}
            for index, _ in self._watched
        }
        self.published()

    def published(self) -> None:
        """Parameters and masters agree now."""
        self._versions = [_versions(params) for _, params in self._watched]
        self._noted = set[str]()

    def note(self, paths: Iterable[str]) -> None:
        """Another rank has written these parameters, which this one has the values of."""
        self._noted |= {*paths}

    def take(self, state: TrainState, groups: Sequence[int]) -> None:
        """Let the masters of these groups take their parameters' values."""
        pairs = zip(state.setup.layout.trainable, masters_of(state), strict=False)
        for index, master in pairs:  # there may be none
            if index in groups and master.numel():
                take_values(master, own_part(state, state.params.flats[index]))

    def follow(self, state: TrainState) -> None:
        """Let the masters of parameters that were written to take their values."""
        pairs = zip(self._watched, self._versions, strict=True)
        written = [
            index
            for (index, params), before in pairs
            if _versions(params) != before or self._noted & self._paths[index]
        ]
        if written:
            self.take(state, written)


def take_values(master: Tensor, values: Tensor) -> None:
    """Write 16-bit values into a master; elements that are equal keep their low bits."""
    with torch.no_grad():
        held = to_device(master, values.device)
        changed = values != held.to(values.dtype)
        write_back(master, torch.where(changed, values.to(held.dtype), held))


def own_part(state: TrainState, flat: Tensor) -> Tensor:
    """This rank's part of a group's parameters, as the optimizer steps it."""
    setup = state.setup
    return cut(setup, flat, setup.params, setup.optimizer_state)


def _versions(params: Sequence[Any]) -> int:
    return sum(p._version for p in params)


_version = attrgetter("_version")


class Writes:
    """What was written to the parameters of an engine, frozen ones too.

    alone: whether there is one rank. masters: of the parameters, which follow what was written.
    """

    def __init__(self, params: ModuleParameters, setup: Setup, *, alone: bool) -> None:
        pairs = [
            (params.paths[leaf][0], p)
            for leaf in (() if setup.gathers_by_unit else params.paths)
            for p in params.objects(leaf)
        ]
        self.masters = Masters(params, setup)
        self._paths, self._watched = [path for path, _ in pairs], [p for _, p in pairs]
        self._by_forward: dict[int, str] = {}  # parameters that a forward wrote, by id
        self._begun: list[int] = []
        self._alone = alone
        self.settle()

    def follow(self, state: TrainState) -> None:
        """Let the masters of a state follow what was written to its parameters."""
        self.masters.follow(state)

    def published(self) -> None:
        """An update has written all parameters, and their masters."""
        self.masters.published()
        self.settle()

    def settle(self) -> None:
        """All ranks have equal parameters now."""
        self._settled = [] if self._alone else self._counted()

    def agree(self, params: list[Tensor]) -> None:
        """These parameters have equal values on all ranks again."""
        for p in params:
            self._by_forward.pop(id(p), None)

    def begin_forward(self) -> None:
        """A root forward begins."""
        self._begun = self._counted()

    def end_forward(self) -> PhaseError | None:
        """A root forward is over: return an error if it wrote to a parameter."""
        now = self._counted()
        if now == self._begun:
            return None
        rows = zip(self._watched, self._paths, self._begun, now, strict=True)
        self._by_forward |= {id(p): path for p, path, before, after in rows if after != before}
        return self.error()

    def error(self) -> PhaseError | None:
        """Return an error if a forward has written to parameters that are not equal since."""
        return written_by_forward([*self._by_forward.values()]) if self._by_forward else None

    def since(self) -> list[str]:
        """Return the paths of the parameters that were written since all ranks had them equal."""
        now = [] if self._alone else self._counted()
        if now == self._settled:
            return []
        rows = zip(self._paths, self._settled, now, strict=True)
        return [path for path, before, after in rows if after != before]

    def compare(self, performer: Performer) -> None:
        """Raise on every rank if ranks differ in a parameter that any of them has written.

        A collective, which every rank makes if one of them has written. Masters then follow on all
        ranks: a rank that got the values by dist.broadcast(p.data) has counted no write.
        """
        written = {path for some in performer.tell(self.since()) for path in some}
        pairs = zip(self._paths, self._watched, strict=True)
        mine = [(f"parameter {path}", digest(p)) for path, p in pairs if path in written]
        if (error := unequal(performer.tell(mine))) is not None:
            raise error
        self.masters.note(written)
        self.settle()

    def _counted(self) -> list[int]:
        return list(map(_version, self._watched))


def written_by_forward(paths: list[str]) -> PhaseError:
    """Return the error for parameters that a forward has written."""
    more = f" and {len(paths) - 1} more" * (len(paths) > 1)
    return PhaseError(
        f"the forward wrote to {paths[0]}{more}; what it wrote is there.",
        cause="F.embedding(max_norm=), weight clipping, a codebook or a cache that is updated in "
        "the forward. Each rank writes as its own data say, and optimizers hold copies and shards: "
        "ranks would train other parameters.",
        fix="write between steps, the same on every rank, under no_grad, or in `with "
        "fzero.adapter.gathered(module, modify=True):`, which also makes ranks equal again after "
        "this error; make a codebook that is no parameter a buffer (register_buffer), which each "
        "rank has for itself.",
    )
