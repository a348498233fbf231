"""The raw collectives as `torch.library` ops with shape rules, for make_fx and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.collectives import _lowering as lowering
from fzero.context.here import is_abstract
from fzero.errors import AxisError
from fzero.ranks.mesh import Axis, Runtime

Fake = Callable[..., list[Tensor]]
"""A rule of shapes: what an op returns of tensors without values."""


@torch.library.custom_op("fzero::all_gather", mutates_args=())
def all_gather(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    """Each [l] -> [size l]."""
    return lowering.begin_all_gather(xs, _axis(name, group, size)).wait()


@torch.library.custom_op("fzero::reduce_scatter", mutates_args=())
def reduce_scatter(
    xs: list[Tensor], name: str, group: str, size: int, ordered: bool
) -> list[Tensor]:
    """Each [size l] -> [l]."""
    return lowering.begin_reduce_scatter(xs, _axis(name, group, size), ordered=ordered).wait()


@torch.library.custom_op("fzero::all_reduce", mutates_args=())
def all_reduce(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    """Each [n] -> [n]."""
    return lowering.begin_all_reduce(xs, _axis(name, group, size), ordered=ordered).wait()


@torch.library.custom_op("fzero::all_to_all", mutates_args=())
def all_to_all(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    """Each [size l] -> [size l]."""
    return lowering.begin_all_to_all(xs, _axis(name, group, size)).wait()


@torch.library.custom_op("fzero::uneven_all_to_all", mutates_args=())
def uneven_all_to_all(
    xs: list[Tensor], name: str, group: str, size: int, sent: list[int], received: list[int]
) -> list[Tensor]:
    """Each [sum(sent)] -> [sum(received)]: rows for and from each rank, in rank order."""
    axis = _axis(name, group, size)
    return lowering.begin_uneven_all_to_all(xs, axis, sent, received).wait()


@torch.library.custom_op("fzero::ppermute", mutates_args=())
def ppermute(
    xs: list[Tensor], name: str, group: str, size: int, sources: list[int], destinations: list[int]
) -> list[Tensor]:
    """Each [n] -> [n]: what the source of this rank has; zeros where there is none."""
    return lowering.begin_permute(xs, _axis(name, group, size), sources, destinations).wait()


@torch.library.custom_op("fzero::pmax", mutates_args=())
def pmax(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    """Each [n] -> [n]."""
    return lowering.begin_extremum(xs, _axis(name, group, size), "pmax").wait()


@torch.library.custom_op("fzero::pmin", mutates_args=())
def pmin(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    """Each [n] -> [n]."""
    return lowering.begin_extremum(xs, _axis(name, group, size), "pmin").wait()


def _shapes_of(op: Any) -> Callable[[Fake], Fake]:
    """`op.register_fake`, with types."""
    return op.register_fake


@_shapes_of(all_gather)
def _(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    return [x.new_empty(size * x.shape[0], *x.shape[1:]) for x in xs]


@_shapes_of(reduce_scatter)
def _(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    return [x.new_empty(x.shape[0] // size, *x.shape[1:]) for x in xs]


@_shapes_of(all_reduce)
@_shapes_of(pmax)
@_shapes_of(pmin)
def _(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]


@_shapes_of(all_to_all)
def _(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


@_shapes_of(uneven_all_to_all)
def _(
    xs: list[Tensor], name: str, group: str, size: int, sent: list[int], received: list[int]
) -> list[Tensor]:
    return [x.new_empty(sum(received), *x.shape[1:]) for x in xs]


@_shapes_of(ppermute)
def _(
    xs: list[Tensor], name: str, group: str, size: int, sources: list[int], destinations: list[int]
) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]


RUN: dict[str, Callable[..., Any]] = {
    "gather": all_gather,
    "scatter": reduce_scatter,
    "reduce": all_reduce,
    "exchange": all_to_all,
    "ragged": uneven_all_to_all,
    "permute": ppermute,
    "pmax": pmax,
    "pmin": pmin,
}


def _axis(name: str, group: str, size: int) -> Axis:
    if is_abstract():
        raise AxisError(
            f"a collective over axis {name!r} of {size} abstract ranks was given real values.",
            cause="a tensor with values inside of a step that is planned or traced.",
            fix="make tensors from the arguments of the step: x.new_zeros(...), zeros_like(x).",
        )
    return Axis(name=name, size=size, runtime=Runtime.PROCESSES, group_name=group)
