"""The records of a trace: values and ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of the program: an input, or what an op gives."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: str = ""  # where an input or an output is in the arguments or the result

    def __str__(self) -> str:
        return f"{short(self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel or collective.

    name: of the ATen op, "addmm", or of the collective, "all_gather". reads, gives: names of
    values. A view is an op that computes nothing.
    """

    name: str
    phase: Phase
    reads: tuple[str, ...]
    gives: tuple[Value, ...]
    detail: str = ""  # of a collective: the axis, and the parameters that it is about
    wire_bytes: int = 0  # that this rank sends
    flops: int = 0
    kind: Literal["compute", "pointwise", "view", "collective"] = "compute"
    live_bytes: int = 0  # of all tensors, while it runs

    @property
    def is_collective(self) -> bool:
        """Whether ranks do it together."""
        return self.kind == "collective"


def short(dtype: torch.dtype) -> str:
    """Return "f32" for torch.float32: as in a jaxpr."""
    name = str(dtype).removeprefix("torch.")
    for long, brief in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return brief + name[len(long) :]
    return name
