"""What an operator writes to: by the marks of its schema; by name, where those are missing.

aten, prims, ...     the marks, which are right: Tensor(a!)
c10d                 none of its operators has marks: by name
anybody's            the marks; where an operator has none at all, its values before and after
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fzero.context.here import is_abstract

_OF_TORCH = re.compile(
    "aten|prims?|_?quantized|quantization|mkl|mkldnn|mkldnn_prepacked|onednn|sparse|profiler|"
    "inductor|inductor_prims|rngprims|debugprims|_native|export|_dtensor|symm_mem|"
    "c10d|_c10d_functional|_c10d_functional_autograd|torchvision|torchaudio"
)
"""Namespaces whose schemas tell what is written, but for the names below."""

_ONLY_READ = frozenset({"send", "barrier", "monitored_barrier_", "check_for_nan"})
_UNMARKED = {"_c10d_functional::irecv": (0,), "_c10d_functional::batch_p2p_ops": (3,)}


@functools.cache
def positions_written(func: Any) -> tuple[int, ...]:
    """Return which arguments an operator writes to, as far as one knows without running it.

    Example:
        >>> positions_written(torch.ops.aten.add_.Tensor), positions_written(torch.ops.aten.add.out)
        ((0,), (3,))
    """
    schema = func._schema
    space, _, name = schema.name.partition("::")
    if space == "c10d":  # outputs come first, whatever is reduced or received
        return () if name in _ONLY_READ else (0,)
    if schema.name in _UNMARKED:
        return _UNMARKED[schema.name]
    marks = [argument.alias_info for argument in schema.arguments]
    return tuple(i for i, mark in enumerate(marks) if mark is not None and mark.is_write)


@functools.cache
def is_elementwise(func: Any) -> bool:
    """Return whether each element of what an operator gives is computed of those at its place.

    By torch's tag, of the operator or of the functional one of its name: abs_, where.self_out and
    the operators on lists have none of their own.

    Example:
        >>> is_elementwise(torch.ops.aten._foreach_abs_.default)
        True
        >>> is_elementwise(torch.ops.aten.cumsum_.default)
        False
    """
    space, _, name = func._schema.name.partition("::")
    name = name.removeprefix("_foreach_").removesuffix("_")
    if torch.Tag.pointwise in func.tags or space != "aten" or name in ("max", "min"):
        return torch.Tag.pointwise in func.tags
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    return name in _UNTAGGED or any(torch.Tag.pointwise in one.tags for one in overloads)


_UNTAGGED = frozenset({"copy", "_to_copy", "fill", "zero", "floor_divide", "hardswish"})


@functools.cache
def tells_nothing(func: Any) -> bool:
    """Return whether an operator may write to what it is given without a word of it.

    That is one of somebody else's without any mark. One with marks has them where it writes.
    """
    space = func._schema.name.partition("::")[0]
    return not _OF_TORCH.fullmatch(space) and not positions_written(func)


def written_by(func: Any, args: Sequence[Any], kwargs: Any) -> list[Any]:
    """Return what an operator is known to write to, of what it is given: lists are flattened."""
    found: list[Any] = []
    for i in positions_written(func):
        value = args[i] if i < len(args) else kwargs.get(func._schema.arguments[i].name)
        found += flat([value])
    return found


def flat(given: Any) -> list[Any]:
    """Return what is in lists of lists."""
    return [x for one in given for x in (flat(one) if isinstance(one, list | tuple) else [one])]


def run_watched(call: Callable[[], Any], values: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
    """Call; return its result, and what was in those of the `values` that it has written.

    A copy and a comparison of each, for which the host waits.
    """
    if is_abstract() or get_proxy_mode() is not None:  # there are no values
        return call(), {}
    watched = [i for i, x in enumerate(values) if type(x) is Tensor and not x.is_meta]
    before = {i: values[i].clone() for i in watched}
    result = call()
    return result, {i: x for i, x in before.items() if not same_bits(values[i], x)}


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape have equal bits, NaNs too."""
    return torch.equal(*(one.contiguous().reshape(-1).view(torch.uint8) for one in (x, y)))
