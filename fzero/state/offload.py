"""Where the buffers of a state live between their uses: on the device, in host memory, on disk."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.errors.check import require

Home = Literal["cpu", "disk"] | None
"""None: on the device, where computations are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What of a state lives in host memory ("cpu"), or in files ("disk"), instead of the device.

    Values are copied to the device for as long as a computation needs them, unit by unit.

    Attributes:
        optimizer: the optimizer's states and fp32 masters.
        gradients: reduced gradients, and what waits in a window.
        params: the shards of parameters; stage 3 only.
        device: where to compute, if parameters live elsewhere; set when a state is made.
        folder: for "disk", where the files are made. They have no name there once they are open,
            so that nothing is left behind when the process ends, however it ends. It may differ by
            rank.

    Raises `LayoutError` for another place, and for "disk" without a folder that exists.
    """

    optimizer: Home = None
    gradients: Home = None
    params: Home = None
    folder: str | Path | None = field(default=None, compare=False, repr=False)
    device: torch.device | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check it."""
        for name, home in self.homes.items():
            require(
                f"offload: {name}",
                home,
                lambda x: x in (None, "cpu", "disk"),
                '"cpu", "disk", or None for the device',
                cause="another word for a place (DeepSpeed's are none, cpu and nvme).",
            )
        is_there = self.folder is not None and Path(self.folder).is_dir()
        if "disk" in self.homes.values() and not is_there:
            raise LayoutError(
                f"offload to disk with folder={self.folder!r}, which is no folder here.",
                cause="the folder was left out, or is not there yet on this machine.",
                fix="make a folder on a fast disk of each machine, and give its path: "
                'folder="/local/scratch".',
            )

    @property
    def homes(self) -> dict[str, Home]:
        """The home of each kind of buffer."""
        return {"optimizer": self.optimizer, "gradients": self.gradients, "params": self.params}

    @property
    def neutral(self) -> bool:
        """Whether everything is on the device."""
        return not any(self.homes.values())


def is_on_disk(x: Tensor) -> bool:
    """Return whether the memory of a tensor is a file that is mapped."""
    return x.device.type == "cpu" and x.untyped_storage().filename is not None


def as_offload(given: Any, stage: int, device: torch.device) -> Offload:
    """Return the record of `Engine(offload=...)` for a model; None is everything on the device.

    device: where the model computes, if its parameters are to live elsewhere.

    Raises `LayoutError` for what is no such record, and for parameters below stage 3.
    """
    if given is None:
        return Offload()
    require(
        "offload",
        given,
        lambda x: isinstance(x, Offload),
        'fzero.Offload(optimizer="cpu"), or other fields of it',
        cause="a place without saying what is to live there.",
    )
    if given.params is not None and stage != 3:
        raise LayoutError(
            f"offload: params={given.params!r} at stage {stage}.",
            cause="below stage 3 every rank computes with whole parameters of its own.",
            fix="use stage=3, or leave params out.",
        )
    return given if given.params is None else replace(given, device=device)
