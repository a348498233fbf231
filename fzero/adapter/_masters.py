"""fp32 masters follow what somebody writes to the module's 16-bit parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.adapter._module import ModuleParameters
from fzero.machine.offload import to_device, write_back
from fzero.machine.packing import cut
from fzero.optim.precision import masters_of
from fzero.state import Setup, TrainState
from fzero.state.buffers import SIXTEEN_BIT


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
