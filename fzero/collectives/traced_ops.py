"""The raw collectives as `torch.library` ops with shape rules, for make_fx and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.collectives import lowering
from fzero.context.current_rank import is_abstract
from fzero.errors import AxisError
from fzero.ranks.mesh import Axis, Runtime

Ints = list[int]


def _op(
    name: str,
    begin: Callable[[list[Tensor], Axis, bool], lowering.InFlight],
    shape: Callable[[Tensor, int, bool], Tensor],
) -> Any:
    """Make an op that is given whether sums are made in rank order."""

    def run(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
        return begin(xs, _axis(name, group, size), ordered).wait()

    return _with_shapes(name, run, shape)


def _op_between(
    name: str,
    begin: Callable[[list[Tensor], Axis, Ints, Ints], lowering.InFlight],
    shape: Callable[[Tensor, int, Ints, Ints], Tensor],
) -> Any:
    """Make an op that is given a number for each rank, of two kinds: of rows, or of ranks."""

    def run(
        xs: list[Tensor], name: str, group: str, size: int, sent: list[int], received: list[int]
    ) -> list[Tensor]:
        return begin(xs, _axis(name, group, size), sent, received).wait()

    return _with_shapes(name, run, shape)


def _with_shapes(name: str, run: Callable[..., list[Tensor]], shape: Callable[..., Tensor]) -> Any:
    """shape: of one tensor without values, and what else an op is given, what it returns."""
    made: Any = torch.library.custom_op(f"fzero::{name}", run, mutates_args=())

    def fake(xs: list[Tensor], name: str, group: str, size: int, *rest: Any) -> list[Tensor]:
        return [shape(x, size, *rest) for x in xs]

    made.register_fake(fake)
    return made


def _alike(x: Tensor, size: int, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _axis(name: str, group: str, size: int) -> Axis:
    if is_abstract():
        raise AxisError(
            f"a collective over axis {name!r} of {size} abstract ranks was given real values.",
            cause="a tensor with values inside of a step that is planned or traced.",
            fix="make tensors from the arguments of the step: x.new_zeros(...), zeros_like(x).",
        )
    return Axis(name=name, size=size, runtime=Runtime.PROCESSES, group_name=group)


RUN: dict[str, Any] = {
    "gather": _op(
        "all_gather",
        lambda xs, axis, _: lowering.begin_all_gather(xs, axis),
        lambda x, size, _: x.new_empty(size * x.shape[0], *x.shape[1:]),
    ),
    "scatter": _op(
        "reduce_scatter",
        lowering.begin_reduce_scatter,
        lambda x, size, _: x.new_empty(x.shape[0] // size, *x.shape[1:]),
    ),
    "reduce": _op("all_reduce", lowering.begin_all_reduce, _alike),
    "exchange": _op(
        "all_to_all",
        lambda xs, axis, _: lowering.begin_all_to_all(xs, axis),
        lambda x, size, _: torch.empty_like(x),
    ),
    "ragged": _op_between(
        "uneven_all_to_all",
        lowering.begin_uneven_all_to_all,
        lambda x, _, sent, received: x.new_empty(sum(received), *x.shape[1:]),
    ),
    "permute": _op_between("ppermute", lowering.begin_permute, _alike),
    "pmax": _op("pmax", lambda xs, axis, _: lowering.begin_extremum(xs, axis, "pmax"), _alike),
    "pmin": _op("pmin", lambda xs, axis, _: lowering.begin_extremum(xs, axis, "pmin"), _alike),
}
"""By the kind of a map, or the name of an extremum."""
