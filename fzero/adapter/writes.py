"""Writes to a module's parameters: ranks compare them, and masters follow (stages 0 to 2).

    a root forward wrote        refused: each rank writes as its own data say, and replicas part
    anybody else wrote          compared at the next update: equal writes on all ranks are right

torch's version counters tell. A write through `p.data`, NumPy or a collective is counted nowhere:
some elements of each parameter are kept from one update to the next, and compared. That sees noise,
decay and loads, and may miss a single element. At stage 3 a placeholder refuses every write.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.adapter.module import ModuleParameters
from fzero.collectives import Performer
from fzero.context.current_rank import is_abstract
from fzero.errors import PhaseError
from fzero.machine.offload import to_device, write_back
from fzero.machine.packing import cut, digest
from fzero.optim.precision import masters_of
from fzero.state import Layout, TrainState
from fzero.transforms.state_entries import unequal

SAMPLED = 32
"""How many elements of each parameter are kept from one update to the next."""

EVERY = 32
"""After every so many updates a sample is taken where a look waits for a device, else each."""

_version = attrgetter("_version")


class Writes:
    """What was written to the parameters of an engine, frozen ones too, since its last update.

    alone: whether there is one rank.
    """

    def __init__(self, params: ModuleParameters, state: TrainState, *, alone: bool) -> None:
        setup, layout = state.setup, state.setup.layout
        watched = [] if setup.gathers_by_unit else range(len(layout.groups))
        rows = [
            (params.paths[leaf][0], index, p)
            for index in watched
            for leaf in layout.groups[index].leaves
            for p in params.objects(leaf)
        ]
        self._paths, self._watched = [path for path, *_ in rows], [p for *_, p in rows]
        self._groups = {path: index for path, index, _ in rows}
        self._samples = [
            _sample(layout, index, params, state.device)
            for index in watched
            if not (setup.is_read_lazily(index) or is_abstract())
            and (not alone or index in _with_masters(state))
        ]
        self._by_forward: dict[int, str] = {}  # parameters that a forward wrote, by id
        self._begun: list[int] = []
        self._alone, self._updates = alone, 0
        self.published(state)

    def published(self, state: TrainState) -> None:
        """An update has written all parameters, and their masters."""
        self._compared = set[str]()  # what ranks have compared since, and masters do not have yet
        looks = state.device.type == "cpu" or self._updates % EVERY == 0
        self._settled = self._counted()
        self._kept = [one.of(state) for one in self._samples] if looks else []
        self._updates += 1

    def _since(self, state: TrainState) -> set[str]:
        """Return the paths of the parameters that were written since they were settled."""
        now = self._counted()
        rows = zip(self._paths, self._settled, now, strict=True) if now != self._settled else ()
        found = {path for path, before, after in rows if after != before}
        for sample, before in zip(self._samples if self._kept else (), self._kept, strict=True):
            now_held = sample.of(state)
            if not torch.equal(now_held, before):
                differs = (now_held != before).tolist()
                found |= {path for path, one in zip(sample.paths, differs, strict=True) if one}
        return found

    # Masters follow.

    def follow(self, state: TrainState) -> None:
        """Let the masters of 16-bit parameters that were written take their values."""
        if groups := _with_masters(state):
            written = self._compared | self._since(state)
            masters_follow(state, groups.intersection(self._groups[path] for path in written))

    # Ranks compare.

    def since(self, state: TrainState) -> list[str]:
        """Return the paths of what was written since all ranks had it equal."""
        return [] if self._alone else sorted(self._since(state))

    def compare(self, state: TrainState, performer: Performer) -> None:
        """Raise on every rank if ranks differ in a parameter that any of them has written.

        A collective, which every rank makes if one of them has written. Masters then follow on all
        ranks.
        """
        written = {path for some in performer.tell(self.since(state)) for path in some}
        pairs = zip(self._paths, self._watched, strict=True)
        mine = [(f"parameter {path}", digest(p)) for path, p in pairs if path in written]
        if (error := unequal(performer.tell(mine))) is not None:
            raise error
        self._compared |= written
        self._settled = self._counted()
        self._kept = [one.of(state) for one in self._samples] if self._kept else []

    # Forwards write nothing.

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
        if not self._by_forward:
            return None
        first, *others = self._by_forward.values()
        more = f" and {len(others)} more" * bool(others)
        return PhaseError(
            f"the forward wrote to {first}{more}; what it wrote is there.",
            cause="F.embedding(max_norm=), weight clipping, a codebook or a cache that is updated "
            "in the forward. Each rank writes as its own data say, and optimizers hold copies and "
            "shards: ranks would train other parameters.",
            fix="write between steps, the same on every rank, under no_grad, or in `with "
            "fzero.adapter.gathered(module, modify=True):`, which also makes ranks equal again "
            "after this error; make a codebook that is no parameter a buffer (register_buffer), "
            "which each rank has for itself.",
        )

    def agree(self, params: list[Tensor]) -> None:
        """These parameters have equal values on all ranks again."""
        for p in params:
            self._by_forward.pop(id(p), None)

    def _counted(self) -> list[int]:
        return list(map(_version, self._watched))


class _Sample(NamedTuple):
    """Which elements of a group are looked at, and of which parameter each of them is."""

    index: int
    positions: Tensor
    paths: list[str]

    def of(self, state: TrainState) -> Tensor:
        """Return their values, a copy."""
        flat = state.params.flats[self.index]
        return flat.index_select(0, self.positions)


def _sample(layout: Layout, index: int, params: ModuleParameters, device: torch.device) -> _Sample:
    """Spread `SAMPLED` elements over each leaf of a group."""
    group, positions, paths = layout.groups[index], list[Tensor](), list[str]()
    for leaf, offset in zip(group.leaves, group.offsets, strict=True):
        numel = layout.leaves[leaf].numel
        count = min(numel, SAMPLED)
        positions.append(offset + torch.arange(count) * (numel - 1) // max(count - 1, 1))
        paths += [params.paths[leaf][0]] * len(positions[-1])
    return _Sample(index, torch.cat(positions).to(device), paths)


def _with_masters(state: TrainState) -> set[int]:
    """Return the groups whose parameters a state has in fp32, too."""
    groups = zip(state.setup.layout.trainable, masters_of(state), strict=False)
    return {index for index, master in groups if master.numel()}  # there may be none


def masters_follow(state: TrainState, groups: Iterable[int]) -> None:
    """Let the masters of these groups take their parameters' values, where they have any."""
    masters = dict(zip(state.setup.layout.trainable, masters_of(state), strict=False))
    for index in groups:
        if index in masters and masters[index].numel():
            take_values(masters[index], own_part(state, state.params.flats[index]))


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
