"""Stage 3 on one rank: the shard of a group, and the gathered values of a unit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.machine.offload import to_device
from fzero.state.codec import Codec
from fzero.state.layout import Layout
from fzero.state.offload import Home


class GroupShard(NamedTuple):
    """One group of a layout, this rank's shard of it, where to gather it, and where it lives."""

    layout: Layout
    index: int
    shard: Tensor
    device: torch.device
    home: Home = None

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """The paths of its leaves; none for an empty group."""
        return self.layout.paths([self.index])

    @property
    def codec(self) -> Codec | None:
        """What encodes its values where they cross ranks in a forward or backward."""
        return self.layout.groups[self.index].codec

    def sent(self, *, exact: bool) -> Tensor:
        """Return the shard as it crosses ranks: under autocast rounded, unless it must be exact."""
        lower = self.layout.groups[self.index].communication_dtype
        if self.home is not None:
            return to_device(self.shard, self.device, None if exact else lower)
        return self.shard if exact or lower is None else self.shard.to(lower)


class FullUnit(NamedTuple):
    """The full values of a unit, for each of its groups."""

    flats: list[Tensor]
    leaves: list[list[Tensor]]  # views of the flats; of encoded ones [n], of their bytes
