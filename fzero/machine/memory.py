"""Find tensors that share memory: tied parameters are kept tied, overlaps are refused.

A state stores each parameter apart from all else. So a parameter whose memory has a second handle
(a transposed view, a slice, a buffer that is a view of it) would part from it in silence. Memory is
compared by address: only tensors whose ranges of bytes meet are looked at closely, and exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from fzero.errors import LayoutError
from fzero.machine.placeholder import LazyParam, Memoryless

_TORCHS = frozenset(vars(nn.Module()))  # attributes that every module has: tables, and hooks
_FIRST = 4096  # where the memory of a placeholder begins, which has no address


class Holder(Enum):
    """How a module holds a tensor."""

    PARAMETER = auto()
    BUFFER = auto()
    ATTRIBUTE = auto()


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A tensor of a module, its path, and how the module holds it."""

    path: str
    tensor: Tensor
    kind: Holder = Holder.PARAMETER


class _Region(NamedTuple):
    """Where the elements of a tensor are: addresses first <= x < end, in one address space."""

    space: Any
    first: int
    end: int
    held: HeldTensor


def identity(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors that are one parameter: one object, or one memory.

    An int for those that can be known as an object only.

    Example:
        >>> x = torch.ones(2, 3)
        >>> identity(x) == identity(x.detach()), identity(x) == identity(x[:1])
        (True, False)
    """
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel() or tensor.is_meta:
        return id(tensor)
    if is_functorch_wrapped_tensor(tensor):  # it has no memory of its own to compare
        return id(tensor)
    shape = tuple(tensor.shape)
    # The stride of a dim of one element says nothing about where the elements are.
    strides = tuple(s if n > 1 else 0 for n, s in zip(shape, tensor.stride(), strict=True))
    bits = tensor.is_conj(), tensor.is_neg()
    return (tensor.data_ptr(), shape, strides, tensor.dtype, tensor.device, *bits)


def require_apart(
    held: Sequence[HeldTensor], *, buffers: bool = False, attributes: bool = False
) -> None:
    """Raise `LayoutError` if two of these tensors have an element in common.

    The same object, and parameters that are the same view, are one tensor. Pairs of which none is
    a parameter are looked at only if asked for: two `buffers`, a buffer and one of `attributes`.

    Example:
        >>> x = torch.ones(4, 2)
        >>> left, right = HeldTensor("left", x[:, 0]), HeldTensor("right", x[:, 1])
        >>> require_apart([left, right])  # no common element
        >>> require_apart([left, HeldTensor("all", x)])
        Traceback (most recent call last):
        ...
        fzero.errors.LayoutError: left and all have elements in common.
        Usual cause: ...
        Fix: ...
    """
    for one in held:
        if one.tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise LayoutError(
                f"{one.path} was made under torch.inference_mode(): it cannot be trained.",
                cause="a model that was built, loaded or converted inside of such a block.",
                fix="build it outside, or under torch.no_grad().",
            )
    compared = {(Holder.BUFFER, Holder.BUFFER)} if buffers else set()
    if attributes:
        compared |= {(Holder.BUFFER, Holder.ATTRIBUTE), (Holder.ATTRIBUTE, Holder.BUFFER)}
    found = []
    for one, other in _meeting(held):
        if (
            Holder.PARAMETER not in (one.kind, other.kind)
            and (one.kind, other.kind) not in compared
        ):
            continue
        tied = one.kind is other.kind is Holder.PARAMETER
        if tied and identity(one.tensor) == identity(other.tensor):
            continue
        if _overlap(one.tensor, other.tensor):
            found.append(sorted((held.index(one), held.index(other))))
    if found:  # the first in the module's order: addresses differ by rank
        raise _in_common(*(held[i] for i in min(found)))


def require_own_memory(
    module: nn.Module, *, buffers: bool = False, attributes: bool = False
) -> None:
    """Raise `LayoutError` if two tensors of a module have an element in common.

    `buffers`, `attributes`: as in `require_apart`. Attributes are tensors that modules hold
    themselves, or in lists, tuples, sets and dicts.
    """
    held = list(_held(module))
    for one in held:
        if one.kind is Holder.PARAMETER and one.tensor.requires_grad:
            _require_several(one)
    require_apart(held, buffers=buffers, attributes=attributes)


def _meeting(held: Sequence[HeldTensor]) -> Iterator[tuple[HeldTensor, HeldTensor]]:
    """Yield the pairs of different objects whose ranges of addresses meet."""
    seen: dict[int, _Region] = {}
    for one in held:
        if id(one.tensor) not in seen and (found := _region(one)) is not None:
            seen[id(one.tensor)] = found
    spaces: dict[Any, list[_Region]] = {}
    for region in seen.values():
        spaces.setdefault(region.space, []).append(region)
    for regions in spaces.values():
        regions.sort(key=lambda region: region.first)
        reaching: list[_Region] = []  # those before that end after this one begins
        for region in regions:
            reaching = [one for one in reaching if one.end > region.first]
            yield from ((one.held, region.held) for one in reaching)
            reaching.append(region)


def _region(held: HeldTensor) -> _Region | None:
    """Return the addresses of a tensor; None if it has no elements or no address."""
    x = held.tensor
    if isinstance(x, LazyParam):
        place, first = (id(x.reader), x.where), _FIRST + x.storage_offset() * x.element_size()
    elif not _has_memory(x):
        return None
    else:
        place, first = x.device, Tensor.data_ptr(x)
    if not x.numel() or not first:
        return None
    first, last = int(first), sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return _Region(place, first, first + int(last + 1) * x.element_size(), held)


def _has_memory(x: Tensor) -> bool:
    """Whether a tensor has an address; a fake tensor has its storage on meta."""
    if is_lazy(x) or x.is_nested or x.layout is not torch.strided or is_functorch_wrapped_tensor(x):
        return False
    if isinstance(x, Memoryless):  # the stand-in of a gradient that a module has kept
        return False
    return not x.is_meta and Tensor.untyped_storage(x).device.type != "meta"


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, whose ranges meet, have a byte in common."""
    return bool(np.shares_memory(_as_array(one), _as_array(other)))


def _as_array(x: Tensor) -> Any:
    """Return a NumPy array of the shape, strides and address of `x`; it is never read."""
    size = x.element_size()
    lazy = isinstance(x, LazyParam)
    first = _FIRST + x.storage_offset() * size if lazy else Tensor.data_ptr(x)

    class View:
        __array_interface__ = {  # noqa: RUF012
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
            "data": (first, True),
        }

    return np.asarray(View())


def _held(module: nn.Module) -> Iterator[HeldTensor]:
    """Yield the parameters, buffers and tensor attributes of a module; parameters come first."""
    for path, p in module.named_parameters(remove_duplicate=False):
        yield HeldTensor(path, p, Holder.PARAMETER)
    for path, buffer in module.named_buffers(remove_duplicate=False):
        yield HeldTensor(path, buffer, Holder.BUFFER)
    for path, part in module.named_modules():
        # Until its first forward this is a view of the parameter; each forward makes it anew.
        hooks = part._forward_pre_hooks.values()
        made = {hook.name for hook in hooks if isinstance(hook, SpectralNorm)}
        for name, value in vars(part).items():
            if name not in _TORCHS and name not in made:
                for where, x in _tensors_in(value, f"{path}.{name}".lstrip("."), set()):
                    yield HeldTensor(where, x, Holder.ATTRIBUTE)


def _tensors_in(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an attribute, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, list | tuple | set | frozenset | dict) and id(value) not in seen:
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from _tensors_in(part, f"{path}[{key!r}]", seen)


def _require_several(one: HeldTensor) -> None:
    """Raise if two elements of a trainable parameter are the same memory."""
    x = one.tensor
    if any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)):
        raise LayoutError(
            f"{one.path}, of shape {tuple(x.shape)} and strides {x.stride()}, has fewer elements "
            "in memory than it shows.",
            cause="a parameter that was made by expand(). torch.optim cannot step it, either.",
            fix="clone it, nn.Parameter(x.expand(...).clone()); or keep the small parameter, and "
            "expand it in the forward.",
        )


def _in_common(one: HeldTensor, other: HeldTensor) -> LayoutError:
    kind = "" if other.kind is Holder.PARAMETER else f" (a{_NAMES[other.kind]})"
    return LayoutError(
        f"{one.path} and {other.path}{kind} have elements in common.",
        cause="p.data = q.data.t() or another view of a parameter's memory; a buffer or an "
        "attribute made by p.detach(), p.data or a slice. In fzero each parameter has memory of "
        "its own: the two would part at the first update.",
        fix="assign the parameter itself (`b.weight = a.weight`) to tie them, and transpose or "
        "slice it in the forward; or take a copy: .detach().clone().",
    )


_NAMES = {Holder.BUFFER: " buffer", Holder.ATTRIBUTE: "n attribute"}
