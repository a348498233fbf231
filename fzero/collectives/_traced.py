"""The raw collectives as `torch.library` ops with shape rules, for make_fx and fake tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.collectives import _lowering as lowering
from fzero.context.here import is_abstract
from fzero.errors import AxisError
from fzero.ranks.mesh import Axis, Runtime


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


@all_gather.register_fake
def _(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    return [x.new_empty(size * x.shape[0], *x.shape[1:]) for x in xs]


@reduce_scatter.register_fake
def _(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    return [x.new_empty(x.shape[0] // size, *x.shape[1:]) for x in xs]


@all_reduce.register_fake
def _(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]


@all_to_all.register_fake
def _(xs: list[Tensor], name: str, group: str, size: int, ordered: bool) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


RUN = {"gather": all_gather, "scatter": reduce_scatter, "reduce": all_reduce}


def _axis(name: str, group: str, size: int) -> Axis:
    if is_abstract():
        raise AxisError(
            f"a collective over axis {name!r} of {size} abstract ranks was given real values.",
            cause="a tensor with values inside of a step that is planned or traced.",
            fix="make tensors from the arguments of the step: x.new_zeros(...), zeros_like(x).",
        )
    return Axis(name=name, size=size, runtime=Runtime.PROCESSES, group_name=group)
