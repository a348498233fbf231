"""The collectives to examine, each with the formula of its result over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import fzero

FLOATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
INTEGERS = {"int64": torch.int64, "int32": torch.int32, "int8": torch.int8}
DTYPES = FLOATS | INTEGERS

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda xs: xs.sum(0),
    "avg": lambda xs: xs.mean(0),
}
"""The reductions over ranks: [W, ..] -> [..]."""


def formula(kind: str, op: str) -> Callable[[Tensor], Tensor]:
    """Return the map of all ranks' tensors, stacked, that a collective stands for.

    Args:
        kind: "gather", [W, l] -> [W, W l]; "scatter", [W, W l] -> [W, l]; "reduce", [W, n] ->
            [W, n]; "exchange" of chunks and "shift" to the next rank, which put nothing together.
        op: how "scatter" and "reduce" put ranks together: a key of `OPS`.

    Example:
        >>> formula("scatter", "sum")(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
        tensor([[4.],
                [2.]])
    """
    if kind == "gather":
        return lambda xs: torch.stack([xs.reshape(-1, *xs.shape[2:])] * len(xs))
    if kind == "exchange":
        return lambda xs: xs.unflatten(1, (len(xs), -1)).transpose(0, 1).flatten(1, 2)
    if kind == "shift":
        return lambda xs: xs.roll(1, 0)
    if kind == "scatter":
        return lambda xs: OPS[op](xs).reshape(len(xs), -1, *xs.shape[2:])
    return lambda xs: torch.stack([OPS[op](xs)] * len(xs))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSubject:
    """A collective: `run` on rank r must return row r of `formula(kind, op)` of all inputs.

    `run` is found by name in the process of each rank, so it is a function of a module.
    """

    name: str
    run: Callable[[Tensor], Tensor]
    kind: str
    op: str = "sum"


def _shift(x: Tensor) -> Tensor:
    size = fzero.axis_size()
    return fzero.ppermute(x, [(rank, (rank + 1) % size) for rank in range(size)])


SUBJECTS = (
    CollectiveSubject(name="all_gather", run=fzero.all_gather, kind="gather"),
    CollectiveSubject(
        name="reduce_scatter (psum_scatter)", run=fzero.reduce_scatter, kind="scatter"
    ),
    CollectiveSubject(name="all_reduce (psum)", run=fzero.all_reduce, kind="reduce"),
    CollectiveSubject(name="pmean", run=fzero.pmean, kind="reduce", op="avg"),
    CollectiveSubject(name="all_to_all", run=fzero.all_to_all, kind="exchange"),
    CollectiveSubject(name="ppermute", run=_shift, kind="shift"),
)
