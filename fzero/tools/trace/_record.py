"""The records of a trace: values, ops, and what is alive while an op runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch

Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of the program: an input, or what an op gives.

    parameter: whose values it has, and no others. holds: the parameters that a buffer of the state
    is made of, or a shard of.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: str = ""  # where an input or an output is in the arguments or the result
    parameter: str = ""
    holds: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{short(self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Bytes that are alive at one moment, by what they are. Each storage is of one kind.

    parameters, optimizer (with masters): of the state, and what becomes those of the new state.
    gradients: of parameters; whole on the rank, reduced, or waiting in a window.
    gathered: full parameters that collectives give, and what is made of parameters alone, in the
    forward and the backward: a cast, a dequantized one.
    activations: all else that the forward and the backward make.
    other: the batch, counters, what an update makes on its way.
    """

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel or collective.

    name: of the ATen op, "addmm", or of the collective, "all_gather". reads, gives: names of
    values. A view is an op that computes nothing. detail: of a collective, the axis and the
    parameters that it is about; of a view, which part of what it reads it is; of another op, the
    module in whose forward it is, or whose backward.
    """

    name: str
    phase: Phase
    reads: tuple[str, ...]
    gives: tuple[Value, ...]
    detail: str = ""
    wire_bytes: int = 0  # that this rank sends
    flops: int = 0
    kind: Literal["compute", "pointwise", "view", "collective"] = "compute"
    alive: Alive = Alive()  # all tensors, while it runs

    @property
    def is_collective(self) -> bool:
        """Whether ranks do it together."""
        return self.kind == "collective"

    @property
    def live_bytes(self) -> int:
        """Bytes of all tensors that are alive while it runs."""
        return self.alive.total


def short(dtype: torch.dtype) -> str:
    """Return "f32" for torch.float32: as in a jaxpr."""
    name = str(dtype).removeprefix("torch.")
    for long, brief in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return brief + name[len(long) :]
    return name
